"""The objections to a restore on this node: each one provoked by processes and files of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import anyio
import anyio.lowlevel
import pytest

from hegmd.errors import BUSY, DENIED, TIMEOUT, UNAVAILABLE, HegmError
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, pack_mark
from hegmd.images.criu.needs import Needs, needs_of
from hegmd.images.criu.node import describe
from hegmd.images.files.images import Images
from hegmd.images.rendezvous import Rendezvous
from hegmd.images.restore_checks import RestoreProblems
from hegmd.images.restore_job import JobRestorer, forget_mark, guise_in, until_there
from hegmd.images.restore_records import RestoreRecords
from hegmd.memory.pool import Pool
from hegmd.memory.pool_memory import Memory
from hegmd.memory.sizes import whole_size
from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_set import population_of
from hegmd.node.processes.process_tree import read_tree
from hegmd.protocol.images import ImageFile, ImageProcess, ImageWorker, Manifest
from hegmd.system.programs import Rights
from hegmd.workers.workers import Workers
from tests.e2e.real_criu import directory
from tests.patience import HANG_S
from tests.unit.images.criu.test_credentials import ME, core, credentials, whole
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import start_ticks

ROOT = Rights(0, 0, ())
SOMEBODY = Rights(4711, 4711, ())
# Opens the named files for writing, and reports that.
OPENS = """
import os, signal, sys
for name in sys.argv[1:]:
    os.open(name, os.O_WRONLY | (os.O_APPEND if "append" in name else 0))
print(flush=True)
signal.pause()
"""
FREE = Needs(pids=(1 << 22,))  # no process has that number


async def _criu() -> Criu:
    return Criu("/usr/sbin/criu", "4.2")


async def _none() -> NoReturn:
    raise HegmError(UNAVAILABLE, "there is no CRIU", "install one")


def _reviving(folder: Path, *, by_owner: bool = True, criu: Callable[[], Awaitable[Criu]] = _criu) -> JobRestorer:
    images: Any = None  # none of these is called
    places = Rendezvous(folder / "hegmd.sock")
    by: dict[str, Any] = {"criu": criu, "take_snapshot": _none, "in_unit": False, "simulated": True}
    return JobRestorer(images, places, Workers(), Pool(8 << 20), **by, notes=RestoreRecords(folder), by_owner=by_owner)


@pytest.fixture(scope="module")
def node() -> Iterator[dict[str, object]]:
    """Return what this node must share with that of a process here."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        try:
            yield dict(describe(read_tree(process.pid), tell=lambda _: None))
        finally:
            process.kill()


def _manifest(folder: Path, node: Any, needs: Needs = FREE, **changes: Any) -> Manifest:
    worker = ImageWorker(
        pid=needs.pids[0],
        gpus=(),
        carrier="worker",
        size_bytes=1 << 19,
        rest_bytes=0,
        bytes=("1.0",),
        more={"method": "simulated"},
    )
    more = {"needs": needs.plain(), "meeting": str(Rendezvous(folder / "hegmd.sock").folder)}
    file = ImageFile(name="1.0", size_bytes=whole_size(1 << 19), stored_bytes=0, sum="")
    plain = Manifest(root_pid=needs.pids[0], workers=(worker,), node=node, more=more, byte_files=(file,))
    return plain.replace(**changes)


def _needs_of(text: str, *words: str) -> Needs:
    """Return the needs of a script after it has printed a line."""
    with subprocess.Popen([sys.executable, "-c", text, *words], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            return needs_of(read_tree(process.pid))
        finally:
            process.kill()


async def _against(reviving: JobRestorer, manifest: Manifest, rights: Rights = ROOT, **how: bool) -> RestoreProblems:
    return await reviving.against(manifest, rights, as_then=how.get("as_then", False))


def _messages(objections: RestoreProblems) -> str:
    return "\n".join(f"{reason.code}: {reason.message}" for reason in objections.reasons)


@pytest.mark.parametrize("huge", [False, True])
def test_an_image_that_names_another_jobs_video_memory_has_its_mark_forgotten(huge: bool) -> None:
    """The author of an image could write any name there. `huge` is the way of naming it: of pages of any size."""
    memory = Memory(os.memfd_create("piece"), 1 << 20, huge=huge)
    try:
        os.pwrite(memory.fd, b"x" * (memory.size_bytes - MARK_BYTES) + pack_mark(Mark("7.4321.bytes", 9)), 0)
        forget_mark(memory)
        found = os.pread(memory.fd, memory.size_bytes, 0)
        assert found == b"x" * (memory.size_bytes - MARK_BYTES) + bytes(MARK_BYTES)
    finally:
        memory.close()


async def test_an_image_of_this_node_has_no_obstacle(tmp_path: Path, node: dict[str, object]) -> None:
    found = await _against(_reviving(tmp_path), _manifest(tmp_path, node))
    assert (found.reasons, found.grown) == ((), ())


async def test_a_used_pid_a_full_pool_and_a_missing_criu_are_reported_together(
    tmp_path: Path, node: dict[str, object]
) -> None:
    manifest = _manifest(tmp_path, node, FREE._replace(pids=(os.getpid(),)))
    manifest = manifest.replace(workers=(manifest.workers[0].replace(size_bytes=1 << 30),))
    reasons = _messages(await _against(_reviving(tmp_path, criu=_none), manifest))
    assert f"the job needs the number of process {os.getpid()}, which runs" in reasons
    assert f"{BUSY.name}: 1060 MiB of the pool are needed; 8 MiB are free" in reasons
    assert "there is no CRIU" in reasons


async def test_an_image_of_other_gpus_is_not_for_a_daemon_of_simulated_ones(
    tmp_path: Path, node: dict[str, object]
) -> None:
    manifest = _manifest(tmp_path, node)
    manifest = manifest.replace(workers=(manifest.workers[0].replace(more={"method": "driver"}),))
    assert "it was written on other GPUs; those of this daemon are simulated" in _messages(
        await _against(_reviving(tmp_path), manifest)
    )


async def test_a_user_restores_jobs_of_that_user_and_of_this_daemon_only(
    tmp_path: Path, node: dict[str, object]
) -> None:
    processes = (ImageProcess(pid=FREE.pids[0], parent_pid=None, uid=0, command="python train.py"),)
    manifest = _manifest(tmp_path / "another", node, processes=processes)
    found = await _against(_reviving(tmp_path, by_owner=False), manifest, SOMEBODY)
    reasons = _messages(found)
    assert "on this node only root restores images (images.restored_by)" in reasons
    assert f"process {FREE.pids[0]} of the image runs as uid 0; you are uid 4711" in reasons
    assert "which belongs to another daemon" in reasons
    assert {reason.code for reason in found.reasons} >= {DENIED.name}
    assert _messages(await _against(_reviving(tmp_path, by_owner=False), manifest)) == ""


async def test_missing_shortened_and_grown_files_are_reported_by_name(tmp_path: Path, node: dict[str, object]) -> None:
    """A file that has only grown is cut back on request; an append-only file may have any length."""
    names = ("gone", "shorter", "longer", "appended")
    for name in names:
        (tmp_path / name).write_text("four")
    needs = _needs_of(OPENS, *(str(tmp_path / name) for name in names))._replace(pids=FREE.pids)
    (tmp_path / "gone").unlink()
    for name, content in (("shorter", "two"), ("longer", "eleven"), ("appended", "eleven")):
        (tmp_path / name).write_text(content)
    manifest = _manifest(tmp_path, node, needs)
    found = await _against(_reviving(tmp_path), manifest)
    reasons = _messages(found)
    assert f"{tmp_path}/gone, which the job has open, does not exist: No such file or directory" in reasons
    assert f"{tmp_path}/shorter has 3 bytes; it had 4 when the image was written" in reasons
    assert f"{tmp_path}/longer has 6 bytes; it had 4" in reasons
    assert [Path(file.path).name for file in found.grown] == ["longer", "appended"]
    assert [note for note in found.notes if f"{tmp_path}/appended has 6 bytes" in note]
    assert {file.reason.hint for file in found.grown} == {"restore with --truncate-outputs to cut it back"}
    as_then = await _against(_reviving(tmp_path), manifest, as_then=True)
    assert f"{tmp_path}/appended has 6 bytes" in _messages(as_then)
    followed = "solve the other problems first"
    assert all(file.reason.hint.startswith(followed) for file in as_then.grown), "a hint that was followed already"


async def test_an_image_without_a_description_of_its_node_is_of_another_version(tmp_path: Path) -> None:
    for node in ({}, {"architecture": 7}):
        with pytest.raises(HegmError, match="the manifest does not describe its node"):
            await _against(_reviving(tmp_path), _manifest(tmp_path, node))


# ---- as it comes back ------------------------------------------------------------------------------------------------


def _wanted(pid: int, token: str = "a" * 32) -> ImageWorker:
    return ImageWorker(pid=pid, gpus=(), carrier="worker", size_bytes=0, rest_bytes=0, bytes=(), token=token)


async def test_an_agent_that_does_not_come_after_a_restore_is_named(process: subprocess.Popen[bytes]) -> None:
    """An agent of another program, of an earlier process, or whose thread is not parked does not count."""
    workers, ticks = Workers(start_ticks), population_of([process.pid]).start_ticks
    unknown: dict[int, int] = {}
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = ModelAgent(workers, process.pid)
        await agent.attend(tasks)
        others = (
            (_wanted(process.pid), ticks),
            (_wanted(process.pid, "b" * 32), ticks),
            (_wanted(process.pid), unknown),
        )
        for wanted, known in others:
            with pytest.raises(
                HegmError, match=f"the agent of process {process.pid} did not connect within 0.01 s"
            ) as late:
                await until_there(workers, [wanted], known, within_s=0.01)
            assert (late.value.code, late.value.facts["pids"]) == (TIMEOUT, [process.pid])
            agent.parked = wanted.token != agent.token  # no record of it exists yet
        await agent.leave()
        agent.parked = True
        await agent.attend(tasks)
        await until_there(workers, [_wanted(process.pid)], ticks, within_s=10.0)
        tasks.cancel_scope.cancel()


class LateAgent:
    """The agent of a process, which connects once it has been looked for."""

    def __init__(self, start_ticks: int) -> None:
        identity = SimpleNamespace(start_ticks=start_ticks)
        there = SimpleNamespace(connected=True, token="a" * 32, parked=True, identity=identity)
        self.changed, self._found = anyio.Event(), iter((None, there))

    def find(self, _pid: int) -> Any:
        return next(self._found)


async def test_an_agent_that_connected_at_the_deadline_of_a_restore_counted_as_none(
    process: subprocess.Popen[bytes],
) -> None:
    """The error named the first missing agent, although none was missing."""
    ticks = population_of([process.pid]).start_ticks
    await until_there(cast(Any, LateAgent(ticks[process.pid])), [_wanted(process.pid)], ticks, within_s=0.0)


async def test_the_daemon_waited_for_the_agent_of_a_job_killed_during_its_restore() -> None:
    """The restore reported that after a minute."""
    (gone,) = FREE.pids
    with pytest.raises(HegmError, match=f"process {gone} ended before its agent connected"):
        await until_there(Workers(start_ticks), [_wanted(gone)], {gone: 7}, within_s=10.0)


async def test_a_reused_pid_of_a_job_killed_in_its_restore_does_not_count_as_the_job() -> None:
    me = os.getpid()
    with pytest.raises(HegmError, match=f"process {me} ended before its agent connected"):
        await until_there(Workers(start_ticks), [_wanted(me)], {me: 7}, within_s=10.0)


async def test_an_agent_that_connected_during_a_liveness_check_was_noticed_one_check_later(
    process: subprocess.Popen[bytes],
) -> None:
    """A job stayed parked for up to half a second longer after its restore."""
    workers, ticks = Workers(start_ticks), population_of([process.pid]).start_ticks
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = ModelAgent(workers, process.pid)
        agent.parked = True
        wait = partial(until_there, workers, [_wanted(process.pid)], ticks, within_s=10.0, look_again_s=3600.0)
        async with anyio.create_task_group() as waits:
            waits.start_soon(wait)
            await anyio.lowlevel.checkpoint()  # it has begun to wait
            await agent.attend(tasks)
        tasks.cancel_scope.cancel()


def test_criu_has_only_the_rights_of_the_image_and_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "core-1.img").write_bytes(core(credentials(whole(14, 100))))
    with directory(tmp_path) as dir_fd:
        own = guise_in(dir_fd, Rights(ME, 1000, (100,)))
        assert (own.uid, own.gid, own.groups) == (ME, 1000, (100,))
        assert guise_in(dir_fd, ROOT) == own, "an image that was made as a user's comes back as one"
        for rights, why in ((Rights(ME, 1000, ()), "group 100"), (SOMEBODY, f"uid {ME}, group 100, group 1000")):
            with pytest.raises(
                HegmError, match=f"of the image has {why}, which uid {rights.uid} does not have"
            ) as refused:
                guise_in(dir_fd, rights)
            assert refused.value.code is DENIED


def test_an_image_of_root_opened_as_a_users_is_refused(tmp_path: Path) -> None:
    """Any user who can write there could have changed it to run CRIU with fewer rights than needed."""
    names = ("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid")
    (tmp_path / "core-1.img").write_bytes(core(credentials(**dict.fromkeys(names, 0))))
    with (
        directory(tmp_path) as dir_fd,
        pytest.raises(HegmError, match="the image is opened as a user's, and belongs to root"),
    ):
        guise_in(dir_fd, ROOT)


SAYS_WHERE = "#!/bin/sh\nreadlink /proc/self/fd/9 > {said}\nexit 1\n"


async def test_a_killed_daemon_left_the_folder_of_a_restores_log_behind(tmp_path: Path) -> None:
    """It was in /tmp, where the next one did not look for it."""
    program, report = tmp_path / "criu", tmp_path / "said"
    program.write_text(SAYS_WHERE.format(said=report))
    program.chmod(0o755)

    async def criu() -> Criu:
        return Criu(str(program), "4.2")

    state = tmp_path / "state"
    state.mkdir()
    images = Images(state, in_unit=False)
    parts: Any = (lambda: images, Rendezvous(tmp_path / "hegmd.sock"), Workers(), Pool(8 << 20))
    by: dict[str, Any] = {"criu": criu, "take_snapshot": _none, "in_unit": False, "simulated": True, "by_owner": True}
    reviving = JobRestorer(*parts, **by, notes=RestoreRecords(state))
    with directory(tmp_path / "criu-files") as dir_fd:
        image: Any = OpenedImage(dir_fd)
        with pytest.raises(HegmError, match="CRIU's restore failed"):
            await reviving.restore(image, "7", ROOT, lambda _: None, {})
    assert Path(report.read_text().strip()).parent == state / "images"
    assert list((state / "images").iterdir()) == []
    left = images.own_folder()  # by a daemon that is killed now
    os.close(left.fd)
    async with anyio.create_task_group() as tasks:
        await tasks.start(Images(state, in_unit=False).run)
        with anyio.fail_after(HANG_S):
            while left.path.exists():
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


class OpenedImage:
    """An image of one process that cannot be restored."""

    path = "/images/one"
    manifest = Manifest(root_pid=FREE.pids[0], more={"needs": FREE.plain(), "meeting": "/nowhere"})

    def __init__(self, dir_fd: int) -> None:
        self.dir_fd = dir_fd

    async def private_criu_dir(self) -> int:
        return self.dir_fd
