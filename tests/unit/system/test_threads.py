"""Work in a thread that can be left behind."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.system.threads import BoundedReads, run_detached
from tests.patience import HANG_S


async def test_the_result_is_returned() -> None:
    assert await run_detached(lambda _: 42, name="answer") == 42


async def test_an_error_of_the_work_is_raised_where_it_is_awaited() -> None:
    def work(_: socket.socket) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        await run_detached(work, name="failing")


async def test_a_lack_of_threads_is_reported_with_a_remedy() -> None:
    """It was a bare RuntimeError, at which the writer of the metrics took the daemon along."""
    before = threading.stack_size(1 << 46)  # more than there are addresses, so that no thread can start
    try:
        with pytest.raises(HegmError, match="thread") as caught:
            await run_detached(lambda _: 42, name="never")
    finally:
        threading.stack_size(before)
    assert "TasksMax=" in caught.value.hint


async def test_a_lack_of_descriptors_is_reported_with_a_remedy() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(HegmError, match="thread") as caught:
            await run_detached(lambda _: 42, name="never")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "LimitNOFILE=" in caught.value.hint


async def test_the_loop_continues_while_the_work_blocks() -> None:
    release = threading.Event()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: run_detached(lambda _: release.wait(), name="blocked"))
        await anyio.lowlevel.checkpoint()
        release.set()  # not reached if the loop were blocked


async def test_work_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    ended = threading.Event()

    def work(_: socket.socket) -> None:
        release.wait()
        ended.set()

    with anyio.move_on_after(0.01) as scope:
        await run_detached(work, name="hanging")
    assert scope.cancelled_caught
    assert not ended.is_set()
    release.set()
    assert ended.wait(HANG_S), "the thread should have gone on alone"


async def test_work_learns_of_its_cancellation_and_may_end_in_order() -> None:
    done: list[str] = []

    def work(unwanted: socket.socket) -> None:
        assert unwanted.recv(1) == b""
        done.append("tidied up")

    with anyio.move_on_after(0.01):
        await run_detached(work, name="orderly", linger_s=5)
    assert done == ["tidied up"]


@pytest.mark.thorough
def test_the_process_exits_although_a_thread_hangs() -> None:
    program = """
import anyio, threading
from hegmd.system.threads import run_detached
from hegmd.errors import HegmError

async def main():
    with anyio.move_on_after(0.01):
        await run_detached(lambda _: threading.Event().wait(), name="hanging")

anyio.run(main)
print("left")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("left\n", "", 0)


@pytest.mark.thorough
async def test_a_file_on_a_dead_disk_blocked_the_caller_for_ever() -> None:
    """Each repeated request left one more thread behind."""
    answers = threading.Event()

    def read_blocked(tell: Callable[[str], object]) -> None:
        tell("/mnt/dead/file")
        answers.wait()

    reads = BoundedReads(limit_s=0.01, most=2)
    try:
        for _ in range(2):
            with pytest.raises(HegmError, match="/mnt/dead/file does not answer within"):
                await reads.at(read_blocked, name="look")
        with pytest.raises(HegmError, match="2 reads of files have not ended, at /mnt/dead/file"):
            await reads.at(read_blocked, name="look")
    finally:
        answers.set()


async def test_a_finished_read_does_not_count() -> None:
    reads = BoundedReads(most=1)
    assert await reads.at(lambda _: 1, name="look") == 1
    with pytest.raises(LookupError):
        await reads.at(lambda _: dict[int, int]()[1], name="look")
    assert await reads.at(lambda _: 2, name="look") == 2
