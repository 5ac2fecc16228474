"""Jobs on their way into an image: what is against that, and what becomes of them where it is not waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest

from hegmd.errors import REFUSED, TIMEOUT, UNAVAILABLE, HegmError, Refused
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, pack_mark
from hegmd.images.dump_files import require_unmarked
from hegmd.images.dump_job import JobDumper
from hegmd.images.dump_records import DumpRecords
from hegmd.images.hegm_lock_files import LockFiles
from hegmd.images.rendezvous import Rendezvous
from hegmd.memory.pool import Key, Pool
from hegmd.memory.pool_memory import Memory
from hegmd.migration.machine.operation import CHECKPOINT
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.node.processes.process_set import population_of
from hegmd.protocol.images import Manifest
from hegmd.protocol.messages import Order
from hegmd.system.programs import Rights
from hegmd.workers.agent_orders import AgentAway
from hegmd.workers.workers import Workers
from tests.unit.handed import (
    DisconnectingAgents,
    ImageBeingWritten,
    ImageCatalogue,
    attended,
    handoff_with,
    none,
    some_criu,
    state,
    wished,
)
from tests.unit.migration.operations import operation
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import start_ticks


class SlowDisk:
    """Images on a disk that does not answer before the caller gives up."""

    def __init__(self) -> None:
        self.requested = anyio.Event()

    async def open(self, _path: str, _rights: Rights) -> NoReturn:
        self.requested.set()
        await anyio.sleep_forever()
        raise AssertionError

    async def sweep(self, _path: str, _rights: Rights) -> list[str]:
        return []


@pytest.mark.parametrize("is_stopping", [True, False], ids=["the daemon ends", "somebody cancels"])
async def test_a_job_ran_on_beyond_its_whole_image_when_the_daemon_was_stopped_again(
    is_stopping: bool, stopped: int, tmp_path: Path
) -> None:
    """The next daemon found a whole image and ended the job, although its files had grown since the dump."""
    disk: Any = SlowDisk()
    parts = (lambda: disk, Rendezvous(tmp_path / "hegmd.sock"), Workers(), Pool(1 << 20))
    handoff = JobDumper(
        *parts, criu=none, take_snapshot=none, in_unit=False, locks=LockFiles(None), notes=DumpRecords(tmp_path)
    )
    ticks = population_of([stopped]).start_ticks[stopped]
    wish = Wish(path="/images/one", uid=os.geteuid(), gid=os.getegid(), root_pid=stopped, root_ticks=ticks)
    op = operation(kind=CHECKPOINT, image=wish)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(handoff.find, op)
        await disk.requested.wait()
        if is_stopping:
            handoff.stop()
        tasks.cancel_scope.cancel()
    assert (state(stopped) == "T") is is_stopping


# ---- refusals --------------------------------------------------------------------------------------------------------


async def _no_criu() -> NoReturn:
    raise HegmError(UNAVAILABLE, "there is no CRIU", "install one")


async def test_a_missing_criu_and_missing_disk_space_are_reported_before_a_job_stops(
    tmp_path: Path, paused: int
) -> None:
    full = HegmError(REFUSED, "/images has 1 MiB free", "free some")
    handoff = handoff_with(ImageCatalogue(why=full), tmp_path, _no_criu)
    looked = await handoff.against([paused], "/images/one", 1 << 30, Rights(os.geteuid(), os.getegid(), ()))
    assert [reason.message for reason in looked.reasons] == ["there is no CRIU", "/images has 1 MiB free"]
    assert looked.root_pid == paused


async def test_a_job_that_has_ended_is_in_no_image(tmp_path: Path, paused: int) -> None:
    handoff = handoff_with(ImageCatalogue(), tmp_path, some_criu)
    for gone in (wished(1 << 22), wished(paused, root_ticks=1)):  # it is no more, or its number is another's
        with pytest.raises(HegmError, match=r"process \d+ has ended"):
            await handoff.dump(gone, lambda _: None)
    with pytest.raises(HegmError, match="a process of the job has ended"):
        await handoff.against([1 << 22], "/images/one", 0, Rights(0, 0, ()))
    stranger = os.getppid()
    with pytest.raises(Refused, match="have no common parent that can be dumped with them"):
        await handoff.against([1, stranger], "/images/one", 0, Rights(0, 0, ()))


def test_bytes_that_are_elsewhere_by_their_mark_are_put_in_no_image() -> None:
    memory = Memory(os.memfd_create("piece"), 1 << 20, huge=False)
    try:
        os.pwrite(memory.fd, bytes(memory.size_bytes), 0)
        require_unmarked(memory, 4321)
        os.pwrite(memory.fd, pack_mark(Mark("1.4321.passing", 9)), memory.size_bytes - MARK_BYTES)
        with pytest.raises(Refused, match="the pool segment of process 4321 says"):
            require_unmarked(memory, 4321)
    finally:
        memory.close()


async def test_a_missing_agent_cannot_disconnect(tmp_path: Path, paused: int) -> None:
    lent = ImageBeingWritten()
    with pytest.raises(AgentAway, match="it cannot get the order to disconnect"):
        await handoff_with(lent, tmp_path, some_criu).dump(wished(paused), lambda _: None)
    assert lent.ends == ["discarded"]


async def test_an_agent_that_does_not_disconnect_is_reported_and_the_job_continues(tmp_path: Path, paused: int) -> None:
    lent, workers = ImageBeingWritten(), Workers(start_ticks)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = ModelAgent(workers, paused)
        await agent.attend(tasks)
        handoff = handoff_with(lent, tmp_path, some_criu, workers=workers)
        with pytest.raises(HegmError, match=f"the agent of process {paused} did not disconnect") as refused:
            await handoff.dump(attended(paused), lambda _: None)
        assert refused.value.code is TIMEOUT
        assert (agent.orders, lent.ends) == (["aside"], ["discarded"])
        assert os.listdir(tmp_path / "aside") == [], "it would wait there"
        tasks.cancel_scope.cancel()


async def test_bytes_that_would_be_lost_with_the_daemon_are_no_agents_to_step_aside_from(
    tmp_path: Path, paused: int
) -> None:
    """A disconnected agent has closed its own descriptor of them."""
    lent, workers, pool = ImageBeingWritten(), Workers(start_ticks), Pool(64 << 20)
    op = attended(paused, offloaded=True)
    await pool.take(Key(op.id, "a"), 1 << 10)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(workers.run)
            agent = ModelAgent(workers, paused)
            await agent.attend(tasks)
            handoff = handoff_with(lent, tmp_path, some_criu, workers=workers, pool=pool)
            with pytest.raises(Refused, match=f"only hegmd holds the bytes of process {paused}"):
                await handoff.dump(op, lambda _: None)
            assert (agent.orders, lent.ends) == ([], ["discarded"])
            tasks.cancel_scope.cancel()
    finally:
        await pool.release(Key(op.id, "a"))


class Guarding(DisconnectingAgents):
    """The process has made its memory unreadable for its own user."""

    def __init__(self, workers: Workers, job: subprocess.Popen[str]) -> None:
        super().__init__(workers, job.pid)
        self.job = job

    async def take(self, order: Order, fds: Sequence[int]) -> None:
        await super().take(order, fds)
        assert self.job.stdin is not None
        assert self.job.stdout is not None
        self.job.stdin.write("hide\n")
        self.job.stdin.flush()
        assert self.job.stdout.readline() == "hidden\n"


HIDES = "import ctypes, sys\nprint('ready', flush=True)\nsys.stdin.readline()\nctypes.CDLL(None).prctl(4, 0)\n"
HIDES += "print('hidden', flush=True)\nsys.stdin.read()"


@pytest.fixture
def hiding() -> Iterator[subprocess.Popen[str]]:
    """A process of another user. After an order, that user can no longer read its memory."""
    argv, pipe = [sys.executable, "-c", HIDES], subprocess.PIPE
    own: dict[str, Any] = {"user": 4242, "group": 4242, "extra_groups": [], "cwd": "/", "start_new_session": True}
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, **own) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            yield job
        finally:
            job.kill()


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
async def test_a_job_that_gets_other_rights_while_it_steps_aside_is_in_no_image(
    tmp_path: Path, hiding: subprocess.Popen[str]
) -> None:
    """CRIU was to run with its user's rights, which no longer suffice."""
    lent, workers = ImageBeingWritten(), Workers(start_ticks)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = Guarding(workers, hiding)
        await agent.attend(tasks)

        async def come_back() -> None:
            await lent.discarded.wait()
            await agent.attend(tasks)

        tasks.start_soon(come_back)
        handoff = handoff_with(lent, tmp_path, some_criu, workers=workers)
        with pytest.raises(Refused, match="the job changed its rights during the dump"):
            await handoff.dump(attended(hiding.pid), lambda _: None)
        assert lent.ends == ["discarded"]
        tasks.cancel_scope.cancel()


async def test_an_unfinished_image_of_an_earlier_daemon_is_no_image(tmp_path: Path, paused: int) -> None:
    """No daemon has read the image back. An image of another operation at that path stays unchanged."""
    op = wished(paused, leave_running=True, begun=True, written=True)
    for shelf, why in (
        (ImageCatalogue(), "is no image"),
        (ImageCatalogue(Manifest(more={"operation": "another"})), "is the image of another operation"),
    ):
        with pytest.raises(Refused, match=f"hegmd was stopped before the image in /images/one was complete: .*{why}"):
            await handoff_with(shelf, tmp_path).seal(op, lambda _: None)
        assert shelf.swept == ["/images/one"]
    whole = ImageCatalogue(Manifest(more={"operation": op.id, "asked_utc": op.created_utc}))
    await handoff_with(whole, tmp_path).seal(op, lambda _: None)
    assert whole.swept == []


async def test_a_discarded_image_of_an_earlier_daemon_is_removed(tmp_path: Path, paused: int) -> None:
    shelf = ImageCatalogue()
    await handoff_with(shelf, tmp_path).scrap(wished(paused, leave_running=True, begun=True, written=True))
    assert shelf.swept == ["/images/one"]


@pytest.mark.thorough
async def test_a_child_of_a_job_killed_together_with_the_daemon_does_not_stay_stopped(
    tmp_path: Path, paused: int
) -> None:
    """The next daemon knew that the image was whole, and did not check which processes it contains."""
    ticks = population_of([paused]).start_ticks[paused]
    op = wished(1 << 22, root_ticks=1, begun=True, whole=True)
    more = {"operation": op.id, "asked_utc": op.created_utc, "start_ticks": [[1 << 22, 1], [paused, ticks]]}
    handoff = handoff_with(ImageCatalogue(Manifest(more=more)), tmp_path)
    await handoff.end(op, op.workers[0])
    assert population_of([paused]).start_ticks == {}
    await handoff.end(op, op.workers[0])
    await handoff_with(ImageCatalogue(), tmp_path).end(op, op.workers[0])  # the content of a removed image is unknown


async def test_the_next_daemon_resumes_a_job_whose_dump_was_abandoned(tmp_path: Path, stopped: int) -> None:
    """The daemon did not remove its files either. A process that stops later does so for another reason."""
    shelf, op = ImageCatalogue(), wished(stopped, begun=True)
    op = op.replace(workers=(op.workers[0].replace(token="a" * 32),))
    handoff = handoff_with(shelf, tmp_path)
    place = Rendezvous(tmp_path / "hegmd.sock").hold("a" * 32)
    await handoff.abandon(op)
    assert (state(stopped) == "T", shelf.swept) == (False, ["/images/one"])
    assert not await anyio.Path(place).exists()
    os.kill(stopped, signal.SIGSTOP)
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, stopped, os.WSTOPPED)
    await handoff.abandon(op)
    assert (state(stopped), shelf.swept) == ("T", ["/images/one"])
