"""The cost of watching: `hegmctl top` in a terminal of 80 by 24, on a node of 16 GPUs and 200 jobs, client and daemon
together; and the same without anybody watching.

Each job is a process of its own with a connection of an agent, which answers orders and counts its batches. They are
forked from one process, so that 200 of them fit beside what is measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import secrets
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from hegmctl.connection import connect
from hegmd.errors import HegmError
from hegmd.protocol.messages import AgentAttend, AgentDismissed, AgentReport, Noted, Order
from tests.bench.gauges import cpu_s, let_run
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon
from tests.looks import pause
from tests.patience import HANG_S

ROOT = Path(__file__).parents[2]
GPUS, JOBS = 16, 200
SETTLE_S, WATCHED_S = 15.0, 40.0
BUDGET_PERCENT = 2.0
STEPS_PER_S = 4.0


def run() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="hegm-") as folder:
        daemon = RunningDaemon(Path(folder), "--simulate", f"{GPUS}x141GiB")
        with daemon, jobs(daemon.socket_path):
            let_run(daemon, SETTLE_S)
            idle_percent = _spent(daemon)
            with top(daemon.socket_path) as client:
                _drained(client[1], SETTLE_S)
                watched_s, drawn_bytes, (daemon_percent, client_percent) = _watched(daemon.process.pid, *client)
    cost_percent = daemon_percent - idle_percent + client_percent
    what = f"{GPUS} GPUs, {JOBS} jobs"
    return [
        Row(f"{what}: daemon, nobody watches (it asks its simulated jobs)", idle_percent, "%"),
        Row(f"{what}: daemon, top watches", daemon_percent, "%"),
        Row(f"{what}: hegmctl top", client_percent, "%"),
        Row(f"{what}: what watching costs both, of one core", cost_percent, "%", BUDGET_PERCENT),
        Row(f"{what}: written to the terminal", drawn_bytes / watched_s / 1024, "KiB per s"),
    ]


def _spent(daemon: RunningDaemon) -> float:
    """Processor time of the daemon alone, in per cent of a core."""
    pid = daemon.process.pid
    before, wall = cpu_s(pid), time.monotonic()
    let_run(daemon, WATCHED_S)
    return 100 * (cpu_s(pid) - before) / (time.monotonic() - wall)


def _watched(daemon: int, client: int, terminal: int) -> tuple[float, int, tuple[float, float]]:
    before, wall = (cpu_s(daemon), cpu_s(client)), time.monotonic()
    drawn_bytes = _drained(terminal, WATCHED_S)
    watched_s = time.monotonic() - wall
    percent = (100 * (cpu_s(daemon) - before[0]) / watched_s, 100 * (cpu_s(client) - before[1]) / watched_s)
    return watched_s, drawn_bytes, percent


def _drained(terminal: int, seconds: float) -> int:
    """Read what is drawn, for so long; bytes. Raises RuntimeError when the program has ended."""
    read_bytes, until = 0, time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        if not select.select([terminal], [], [], left_s)[0]:
            break
        try:
            data = os.read(terminal, 1 << 16)
        except OSError as error:
            raise RuntimeError("hegmctl top ended while it was measured") from error
        read_bytes += len(data)
    return read_bytes


@contextlib.contextmanager
def top(socket_path: Path) -> Iterator[tuple[int, int]]:
    """`hegmctl top` in a terminal of its own: its pid, and the other side of the terminal."""
    other, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    argv = [sys.executable, "-m", "hegmctl", "top", "--no-color", "--socket", str(socket_path)]
    process = subprocess.Popen(argv, env=environ, stdin=own, stdout=own, stderr=own, start_new_session=True)
    os.close(own)
    try:
        yield process.pid, other
    finally:
        process.terminate()
        process.wait()
        os.close(other)


@contextlib.contextmanager
def jobs(socket_path: Path) -> Iterator[None]:
    """Start that many jobs, which train as long as the context lasts."""
    children = [_fork(socket_path, number) for number in range(JOBS)]
    try:
        with connect(str(socket_path), timeout_s=HANG_S) as hegmd:
            until = time.monotonic() + HANG_S
            while sum(process.agent is not None for process in hegmd.processes().processes) < JOBS:
                if time.monotonic() > until:
                    raise RuntimeError("the jobs do not attend")
                pause()
        yield
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(socket_path: Path, number: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _attend(str(socket_path), number)
        finally:
            os._exit(0)
    return pid


def _attend(socket_path: str, number: int) -> None:
    """The life of a job: answer the daemon's orders, until killed."""
    began = time.monotonic()
    about = AgentAttend(
        token=secrets.token_hex(16),
        framework="torch",
        python_version="3.11",
        run=secrets.token_hex(8),
        job=f"train-{number}",
        gpu=f"gpu{number % GPUS}",
        boundary=1,
        size_bytes=1 << 28,
    )
    with contextlib.suppress(HegmError), connect(socket_path, timeout_s=HANG_S) as connection:
        for order in connection.stream(about, Order, AgentDismissed, patient=True):
            boundary = 1 + int((time.monotonic() - began) * STEPS_PER_S)
            report = AgentReport(order=order.order, result="done", boundary=boundary, size_bytes=1 << 28)
            connection.call(report, Noted)
