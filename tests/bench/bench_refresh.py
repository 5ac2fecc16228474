"""The cost of a snapshot of 8 GPUs and 2,000 processes in a whole running daemon, and of a reply that lists them.

The processes are real children that sleep. Requests come so far apart that each makes the daemon look again, and the
daemon's own count of looks says how many there were. A request for all processes right after one for the GPUs shares
its look, so that it costs the answer alone: the choice of what to tell, the encoding and the sending. At the end, what
others wait for a ping meanwhile.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hegmctl.connection import Connection, connect
from tests.bench.bench_inventory import GPUS, PROCESSES, sleeping
from tests.bench.bench_roundtrip import OTHERS, OTHERS_ASK_PER_S, ping_rows
from tests.bench.crowd import crowd
from tests.bench.gauges import MIB, Memory, cpu_s, let_run
from tests.bench.nvml_daemon import stubbed
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon
from tests.patience import HANG_S

WARM_UP = 5
ROUNDS = 40
APART_S = 0.3  # more than the age up to which an answer is given again
BUDGET_MS = 50.0

_LOOKS = re.compile(r"(?m)^hegmd_inventory_refresh_duration_seconds_count (\d+)$")


def run() -> list[Row]:
    rows: list[Row] = []
    with sleeping(PROCESSES) as pids:
        with tempfile.TemporaryDirectory(prefix="hegm-") as folder:
            topology = _topology(Path(folder), pids)
            rows += _measure("simulated GPUs", RunningDaemon(Path(folder), "--simulate", str(topology)))
        with tempfile.TemporaryDirectory(prefix="hegm-") as folder:
            rows += _measure("stub of NVML", stubbed(Path(folder), pids))
    return rows


def _topology(folder: Path, pids: list[int]) -> Path:
    lines: list[str] = []
    for index in range(GPUS):
        lines += ["[[gpu]]", 'memory = "141GiB"']
        for pid in pids[index::GPUS]:
            lines += ["[[gpu.process]]", f"pid = {pid}", 'memory = "256MiB"']
    path = folder / "node.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _measure(what: str, daemon: RunningDaemon) -> list[Row]:
    with daemon, connect(str(daemon.socket_path), timeout_s=HANG_S) as hegmd:
        _check(hegmd)
        for _ in range(WARM_UP):
            _round_ms(daemon, hegmd)
        refreshes = _looks(hegmd)
        rounds = [_round_ms(daemon, hegmd) for _ in range(ROUNDS)]
        refreshed = _looks(hegmd) - refreshes
        if refreshed < ROUNDS:
            raise RuntimeError(f"{ROUNDS} requests made the daemon look {refreshed} times")
        resident_bytes = Memory.of(daemon.process.pid).resident_bytes
        ps_ms = statistics.median(_hegmctl_ps_ms(daemon) for _ in range(5))
        with crowd(daemon.socket_path, OTHERS, OTHERS_ASK_PER_S):
            pings = ping_rows(f"{what}: ping, {OTHERS} others asking for GPUs", daemon)
    looking, telling, waiting = zip(*rounds, strict=True)
    return [
        Row(f"{what}: daemon's CPU for `gpus` with a look, p50", statistics.median(looking), "ms", BUDGET_MS),
        Row(f"{what}: daemon's CPU for `gpus` with a look, max", max(looking), "ms", BUDGET_MS),
        Row(f"{what}: wall time of that, p50", statistics.median(waiting), "ms"),
        Row(f"{what}: daemon's CPU to tell of all processes, p50", statistics.median(telling), "ms"),
        Row(f"{what}: hegmctl ps, whole process, p50", ps_ms, "ms"),
        Row(f"{what}: RSS", resident_bytes / MIB, "MiB"),
        *pings,
    ]


def _check(hegmd: Connection) -> None:
    known = sum(process.start_ticks is not None for process in hegmd.processes().processes)
    gpus = len(hegmd.gpus().gpus)
    if (gpus, known) != (GPUS, PROCESSES):
        raise RuntimeError(f"{gpus} GPUs and {known} processes were found")


def _looks(hegmd: Connection) -> int:
    found = _LOOKS.search(hegmd.metrics().text)
    if found is None:
        raise RuntimeError("the daemon does not tell how often it looked at the node")
    return int(found[1])


def _round_ms(daemon: RunningDaemon, hegmd: Connection) -> tuple[float, float, float]:
    """CPU of a look, CPU of telling about all processes, and the time that the first of both took."""
    pid = daemon.process.pid
    let_run(daemon, APART_S)
    start, began = cpu_s(pid), time.perf_counter()
    hegmd.gpus()
    wall_s, refreshed = time.perf_counter() - began, cpu_s(pid)
    hegmd.processes()
    used_s = cpu_s(pid)
    return 1000 * (refreshed - start), 1000 * (used_s - refreshed), 1000 * wall_s


def _hegmctl_ps_ms(daemon: RunningDaemon) -> float:
    argv = [str(Path(sys.executable).with_name("hegmctl")), "ps"]
    environ = {**os.environ, "HEGM_SOCKET": str(daemon.socket_path)}
    began = time.perf_counter()
    subprocess.run(argv, env=environ, stdout=subprocess.DEVNULL, check=True)
    return 1000 * (time.perf_counter() - began)
