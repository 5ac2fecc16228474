"""A pool of threads: every item once, every failure raised, and no thread left running."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from hegmd.system.thread_pool import share_out
from tests.patience import HANG_S


def test_every_item_is_worked_on_once_and_each_thread_has_its_own_worker() -> None:
    done: list[int] = []
    workers: list[int] = []

    def start() -> Callable[[int], None]:
        workers.append(threading.get_ident())
        return done.append

    share_out(range(100), start, threads=3, name="crew")
    assert sorted(done) == list(range(100))
    assert len(workers) == 3


def test_a_failure_of_one_cancels_all_and_is_raised() -> None:
    def work(item: int) -> None:
        if item == 3:
            raise ValueError(item)

    with pytest.raises(ValueError, match="3"):
        share_out(range(10**9), lambda: work, threads=3, name="crew")
    assert not [thread for thread in threading.enumerate() if thread.name == "crew"]


@pytest.mark.parametrize("stacks", [0, 2])
def test_a_node_without_threads_left_some_running_on_a_descriptor_that_was_closed(stacks: int) -> None:
    """Started threads continued while the caller closed their descriptor, whose number was then reused."""
    code = (
        "import os, pathlib, resource, sys, threading, traceback\n"
        "from hegmd.system.thread_pool import share_out\n"
        "stack_bytes = 1 << 30\n"
        "threading.stack_size(stack_bytes)\n"
        "now_bytes = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "limit_bytes = now_bytes + int(sys.argv[1]) * stack_bytes + stack_bytes // 2\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))\n"
        "done, there = [], []\n"
        "main = threading.main_thread()\n"
        "def waits():\n"
        "    return any(f.name == 'join' for f in traceback.extract_stack(sys._current_frames()[main.ident]))\n"
        "def start():\n"
        "    while threading.current_thread() is not main and not waits():\n"
        "        os.sched_yield()\n"  # a stack that is free again would do for one more
        "    there.append(threading.current_thread())\n"
        "    return done.append\n"
        "share_out(range(1000), start, threads=4, name='crew')\n"
        "assert sorted(done) == list(range(1000)), len(done)\n"
        "assert threading.active_count() == 1\n"
        "print(len([one for one in there if one is not threading.main_thread()]))\n"
    )
    argv = [sys.executable, "-c", code, str(stacks)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (ran.returncode, ran.stdout.strip()) == (0, str(stacks)), ran.stderr
