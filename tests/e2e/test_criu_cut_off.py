"""Dumps whose caller goes away: CRIU finishes all the same, and the job continues."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil
import pytest

from hegmd.errors import HegmError
from hegmd.images.criu import run
from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_set import continue_all, dumpers_of, end_all, population_of
from tests.e2e.agented import environment
from tests.e2e.real_criu import criu_or_skip, directory, ended_after, ends, job, pipe, python, tell

pytestmark = [pytest.mark.e2e]
ROOT = Path(__file__).parents[2]

# Threads that compute, a child that does too, and memory that takes a while to write.
BUSY = """
import hashlib, os, signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

def compute():
    digest = b""
    while True:
        digest = hashlib.sha256(digest).digest()

memory = os.urandom(30 << 20)
if os.fork() == 0:
    compute()
threading.Thread(target=compute, daemon=True).start()
print("ready", flush=True)
while True:
    signal.sigwait([signal.SIGUSR1])
    print("goes on", flush=True)
"""

# The daemon's calls, in a process that can be killed.
DUMP = """
import anyio, json, os, sys
from hegmd.images.criu import run as runs
from hegmd.images.criu.needs import Needs
from hegmd.node.criu_program import Criu

images = os.open(sys.argv[4], os.O_RDONLY | os.O_DIRECTORY)
needs = Needs.from_plain(json.loads(sys.argv[3]))
dump = lambda: runs.dump(Criu(*sys.argv[1:3]), needs.pids[0], images, needs, leave_stopped=True, in_unit=False)
print("begins", flush=True)
anyio.run(dump)
"""


@pytest.mark.parametrize("lines", [1, 20, 60])
def test_a_job_continues_when_the_daemon_is_killed_during_its_dump(lines: int, tmp_path: Path) -> None:
    """Killed when CRIU has logged so many lines: before, in the middle of, and after its work in the first process.

    CRIU ends then without being killed: it takes its hands off the job by itself.
    """
    criu = criu_or_skip()
    with job(python(BUSY)) as busy:
        assert busy.line() == "ready"
        needs = busy.needs()
        before = population_of(needs.pids)
        image = tmp_path / "image"
        image.mkdir()
        argv = [*python(DUMP), criu.path, criu.version, json.dumps(needs.plain()), str(image)]
        with job(argv, env=environment(None, PYTHONPATH=str(ROOT))) as daemon:
            assert daemon.line() == "begins"
            while _lines(image / "dump.log") < lines and daemon.process.poll() is None:
                pass
            daemon.process.kill()
            daemon.gone()
        continue_all(before)  # what the next daemon does
        assert dumpers_of(needs.pids) == ()
        assert population_of(needs.pids).start_ticks == before.start_ticks
        tell(busy.pid)
        assert busy.line() == "goes on"


async def test_a_cancelled_dump_is_finished_first(tmp_path: Path) -> None:
    criu = criu_or_skip()
    with job(python(BUSY)) as busy, directory(tmp_path / "image") as images:
        assert busy.line() == "ready"
        needs = busy.needs()
        before = population_of(needs.pids)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when, tasks.cancel_scope, tmp_path / "image" / "dump.log")
            await run.dump(criu, busy.pid, images, needs, leave_stopped=True, in_unit=False)
        assert tasks.cancel_scope.cancel_called
        assert "Dumping finished successfully" in _text(tmp_path / "image" / "dump.log")
        continue_all(before)
        tell(busy.pid)
        assert busy.line() == "goes on"


async def test_a_cancelled_restore_leaves_nothing_of_the_job(tmp_path: Path) -> None:
    """CRIU, killed at once, left a file in place of a deleted one, and no later restore succeeded."""
    criu = criu_or_skip()
    with job(python(BUSY)) as busy, directory(tmp_path / "image") as images:
        assert busy.line() == "ready"
        needs = busy.needs()
        await run.dump(criu, busy.pid, images, needs, leave_stopped=True, in_unit=False)
        os.kill(busy.pid, signal.SIGKILL)
        for pid in needs.pids[1:]:
            os.kill(pid, signal.SIGKILL)
        busy.gone()
        assert all(ends(pid) for pid in needs.pids[1:])
        with ended_after(needs.pids), directory(tmp_path / "logs") as logs:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when, tasks.cancel_scope, Path(f"/proc/{busy.pid}"))
                await run.restore(criu, images, needs, log_dir_fd=logs, unit_name=None)
            assert tasks.cancel_scope.cancel_called
            assert population_of(needs.pids).start_ticks == {}
        with ended_after(needs.pids), directory(tmp_path / "logs") as logs, pipe() as (reader, output):
            outlets = {outlet.key: output for outlet in needs.outlets}
            await run.restore(criu, images, needs, log_dir_fd=logs, unit_name=None, outlets=outlets)
            tell(busy.pid)
            assert reader.readline() == "goes on\n"


async def test_criu_killed_in_a_restore_leaves_no_process_and_an_image_that_restores(tmp_path: Path) -> None:
    """It left a file in place of a deleted one, which made the next restore fail."""
    criu = criu_or_skip()
    with job(python(BUSY)) as busy, directory(tmp_path / "image") as images:
        assert busy.line() == "ready"
        needs = busy.needs()
        await run.dump(criu, busy.pid, images, needs, leave_stopped=True, in_unit=False)
        end_all(population_of(needs.pids))
        busy.gone()
        with ended_after(needs.pids), directory(tmp_path / "logs") as logs:
            failures: list[HegmError] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_kill_criu_when, Path(f"/proc/{busy.pid}"))
                try:
                    await run.restore(criu, images, needs, log_dir_fd=logs, unit_name=None)
                except HegmError as error:
                    failures.append(error)
                tasks.cancel_scope.cancel()
            assert "CRIU's restore" in failures[0].message
            assert population_of(needs.pids).start_ticks == {}
        with ended_after(needs.pids), directory(tmp_path / "logs") as logs, pipe() as (reader, output):
            outlets = {outlet.key: output for outlet in needs.outlets}
            await run.restore(criu, images, needs, log_dir_fd=logs, unit_name=None, outlets=outlets)
            tell(busy.pid)
            assert reader.readline() == "goes on\n"


async def _kill_criu_when(is_there: Path) -> None:
    """As soon as it has made the job's first process, which has the number that the job had."""
    while not is_there.exists():  # noqa: ASYNC240 - in memory
        await anyio.lowlevel.checkpoint()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "tend" in words and is_there.name in words:
            for child in process.children():
                child.kill()


async def test_a_job_continues_when_criu_is_killed_before_the_dump(tmp_path: Path) -> None:
    stand_in = tmp_path / "criu"
    stand_in.write_text("#!/bin/sh\nkill -9 $$\n")
    stand_in.chmod(0o755)
    with job(python(BUSY)) as busy, directory(tmp_path / "image") as images:
        assert busy.line() == "ready"
        with pytest.raises(HegmError, match="CRIU's dump"):
            await run.dump(
                Criu(str(stand_in), "4.2.1"), busy.pid, images, busy.needs(), leave_stopped=True, in_unit=False
            )
        tell(busy.pid)
        assert busy.line() == "goes on"


async def _cancel_when(scope: anyio.CancelScope, is_there: Path) -> None:
    while not is_there.exists():  # noqa: ASYNC240 - in memory
        await anyio.lowlevel.checkpoint()
    scope.cancel()


def _text(path: Path) -> str:
    return path.read_text()


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


async def test_a_dump_that_took_longer_than_its_deadline_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One time in twelve, that also killed a process of the job. Now the daemon reports the delay, and waits."""
    stand_in, goes_on = tmp_path / "criu", tmp_path / "goes-on"
    os.mkfifo(goes_on)
    stand_in.write_text(f"#!/bin/sh\ncat {goes_on} > {tmp_path}/dumped\n")
    stand_in.chmod(0o755)
    with job(python(BUSY)) as busy, directory(tmp_path / "image") as images:
        assert busy.line() == "ready"
        needs = busy.needs()
        async with anyio.create_task_group() as tasks:
            criu = Criu(str(stand_in), "4.2.1")
            tasks.start_soon(
                lambda: run.dump(criu, busy.pid, images, needs, leave_stopped=False, in_unit=False, is_long_s=0.01)
            )
            while (
                len(
                    [
                        message
                        for message in caplog.messages
                        if "it is not stopped, because that could end the job" in message
                    ]
                )
                < 2
            ):
                await anyio.lowlevel.checkpoint()
            fd = os.open(goes_on, os.O_WRONLY)
            os.write(fd, b"done")
            os.close(fd)
    assert _text(tmp_path / "dumped") == "done"


async def test_criu_is_spared_by_the_kernel_while_it_dumps(tmp_path: Path) -> None:
    """CRIU that is killed for its memory in the middle of a process can take that process with it."""
    stand_in = tmp_path / "criu"
    stand_in.write_text(f"#!/bin/sh\ncat /proc/self/oom_score_adj > {tmp_path}/spared\nnice > {tmp_path}/nice\n")
    stand_in.chmod(0o755)
    refused = await anyio.run_process(["sh", "-c", "echo -1000 > /proc/self/oom_score_adj"], check=False)
    with job(python(BUSY)) as busy, directory(tmp_path / "image") as images:
        assert busy.line() == "ready"
        criu = Criu(str(stand_in), "4.2.1")
        await run.dump(criu, busy.pid, images, busy.needs(), leave_stopped=False, in_unit=False)
    if refused.returncode != 0:
        pytest.skip("this machine does not let root spare anybody")
    assert (tmp_path / "spared").read_text() == "-1000\n"
