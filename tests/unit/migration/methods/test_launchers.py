"""Launchers and their ranks are ended, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hegmd.memory.pool import Key, MemoryKeeping, Pool
from hegmd.migration.contracts import Rank
from hegmd.migration.methods.launchers import end_all_below
from hegmd.migration.methods.restore_lock import claimed
from hegmd.node.processes.process_tree import pids_below
from tests.unit.migration.methods.test_restart import method, subject

# A supervisor below which a launcher starts one rank after the other.
STARTING = """
import os, signal, subprocess, sys
print("ready", flush=True)
if os.fork() == 0:
    for _ in range(400):
        if os.fork() == 0:
            signal.pause()
    signal.pause()
os.wait()
sys.stdin.read()
"""


def rank_of(run: str, *fds: int) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "HEGM_RUN": run, "RANK": "0"}
    return subprocess.Popen(["sleep", "600"], env=environ, pass_fds=fds)


async def test_ranks_of_a_killed_launcher_kept_their_lock_and_the_job_was_held_after_three_starts(
    tmp_path: Path,
) -> None:
    """They are ended before the next start: only processes of that run, which have the lock."""
    orders: list[str] = []

    async def order(do: str, *_: object, **__: object) -> None:
        orders.append(do)

    supervisor: Any = SimpleNamespace(run="run-1", failure="", order=order)
    restart = method(tmp_path, pool=(pool := Pool(64 << 20, keep=MemoryKeeping(), huge_free_bytes=lambda: 0)))
    await pool.take(Key("4", "a"), 4096)
    lock = claimed(tmp_path, "4")
    with ExitStack() as stack:
        started = [rank_of("run-1", lock), rank_of("run-1"), rank_of("run-2")]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        os.close(lock)
        await restart._start(supervisor, replace(subject(), rank=0, ranks=(Rank("a", 0, "gpu1"),)), "gpu1")
        assert [process.poll() for process in started] == [-9, None, None]
    assert orders == ["start"]
    pool.close()


def test_a_rank_that_its_launcher_started_while_it_was_ended_trained_on() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        while len(pids_below(supervisor.pid)) < 20:
            pass
        end_all_below(supervisor.pid)
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_alive(pid, supervisor.pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == [supervisor.pid]


def is_alive(pid: int, session: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return int(fields[3]) == session and fields[0] != b"Z"
