"""The cost of an idle daemon: processor time over 40 s with four refreshes; memory.

Simulated GPUs first, for which the budget holds on any machine; then NVML by its stub, which adds the binding and its
queries; then, if there is a driver, the real library.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from hegmctl.connection import connect
from tests.bench.gauges import MIB, Memory, cpu_s, let_run, wakeups
from tests.bench.nvml_daemon import NvmlDaemon, has_driver, stubbed
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon
from tests.patience import HANG_S

SETTLE_S = 2.0
WATCHED_S = 40.0
CPU_PERCENT = 0.2
RESIDENT_MIB = 45.0


def run() -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hegm-") as folder:
        rows += _measure("8 simulated GPUs", RunningDaemon(Path(folder), "--simulate", "8x141GiB"), budgets=True)
    with tempfile.TemporaryDirectory(prefix="hegm-") as folder:
        rows += _measure("8 GPUs by the stub of NVML", stubbed(Path(folder)), budgets=True)
    if has_driver():
        with tempfile.TemporaryDirectory(prefix="hegm-") as folder:
            rows += _measure("the GPUs of this machine", NvmlDaemon(Path(folder)), budgets=False)
    return rows


def _measure(what: str, daemon: RunningDaemon, *, budgets: bool) -> list[Row]:
    began = time.perf_counter()
    with daemon:
        ready_ms = 1000 * (time.perf_counter() - began)
        pid = daemon.process.pid
        let_run(daemon, SETTLE_S)
        cpu, woken, wall = cpu_s(pid), wakeups(pid), time.monotonic()
        let_run(daemon, WATCHED_S)
        watched_s = time.monotonic() - wall
        percent = 100 * (cpu_s(pid) - cpu) / watched_s
        per_s = (wakeups(pid) - woken) / watched_s
        fresh = Memory.of(pid)
        _ask_everything(daemon)
        used = Memory.of(pid)
    limit = RESIDENT_MIB if budgets else None
    return [
        Row(f"{what}: processor, of one core", percent, "%", CPU_PERCENT),
        Row(f"{what}: wake-ups of the main thread", per_s, "per s"),
        Row(f"{what}: RSS", fresh.resident_bytes / MIB, "MiB", limit),
        Row(f"{what}: PSS", fresh.proportional_bytes / MIB, "MiB"),
        Row(f"{what}: anonymous, nobody else's", fresh.anonymous_bytes / MIB, "MiB", limit),
        Row(f"{what}: RSS once everything was asked for", used.resident_bytes / MIB, "MiB", limit),
        Row(f"{what}: from start to ready", ready_ms, "ms"),
    ]


def _ask_everything(daemon: RunningDaemon) -> None:
    """Make one request of each kind, so that the daemon loads what its replies need."""
    with connect(str(daemon.socket_path), timeout_s=HANG_S) as hegmd:
        hegmd.ping()
        hegmd.gpus()
        hegmd.processes()
        hegmd.metrics()
        hegmd.config()
        hegmd.doctor()
        for _ in hegmd.events():
            pass
