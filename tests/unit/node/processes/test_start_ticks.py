"""Whether a process is there, asked while there is no descriptor to look with: a real limit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration.methods.progress_probe import is_ending
from hegmd.node.processes.procfs import how_ended, start_ticks_of
from hegmd.system.process_ends import ended
from tests.unit.node.processes.pretended_proc import Start


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_daemon_without_descriptors_counted_a_live_process_as_gone() -> None:
    known = start_ticks_of(os.getpid())
    assert known is not None
    with no_descriptors(), pytest.raises(HegmError) as hidden:
        start_ticks_of(os.getpid())
    assert hidden.value.code is UNAVAILABLE
    assert start_ticks_of(os.getpid()) == known
    assert start_ticks_of(2**22 + 1) is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "it ended with exit status 3"),
        ("pass", "it ended with exit status 0"),
        ("import os; os.kill(os.getpid(), 9)", "it was ended by signal 9 (SIGKILL)"),
        ("import os; os.kill(os.getpid(), 40)", "it was ended by signal 40"),
    ],
)
def test_an_exit_status_is_read_before_the_parent_reaps_it(code: str, message: str) -> None:
    """Issue 14, row 11: no message showed how a job had ended."""
    with subprocess.Popen([sys.executable, "-Ic", f"input(); {code}"], stdin=subprocess.PIPE) as child:
        ticks = start_ticks_of(child.pid)
        assert ticks is not None
        assert how_ended(child.pid, ticks) is None, "it lives"
        assert not is_ending(child.pid)
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert how_ended(child.pid, ticks) == message
        assert how_ended(child.pid, ticks + 1) is None, "another process"
        assert is_ending(child.pid)
    assert how_ended(child.pid, ticks) is None
    assert is_ending(child.pid)


@pytest.mark.thorough
async def test_an_operation_lost_its_process_when_descriptors_were_short(start: Start) -> None:
    """The daemon waits for the end of a process; it checks again if the process is invisible for a moment."""
    calls: list[bool] = []
    process = start()
    ticks = start_ticks_of(process.pid)
    again, over = anyio.Event(), anyio.Event()

    def lives() -> bool:
        calls.append(True)
        if len(calls) == 1:
            with no_descriptors():
                return start_ticks_of(process.pid) == ticks
        again.set()
        return start_ticks_of(process.pid) == ticks

    async def wait() -> None:
        await ended(process.pid, lives)
        over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await again.wait()
        assert not over.is_set()
        process.kill()
    assert over.is_set()
