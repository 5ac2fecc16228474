"""How long a request takes while 200 others are connected: from before it is encoded to its decoded reply.

Measured with the library face of hegmctl, as a Python program that asks would see it; so the caller's own share is in
the figure. `ping` does nothing in the daemon, which leaves the way there and back. The bare echo before it is what two
processes that do nothing else need on the same machine in the same minute.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hegmctl.connection import connect
from tests.bench.crowd import crowd
from tests.bench.echo import echoes_ms
from tests.bench.gauges import cpu_s, machine_busy_s, percentile
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon

OTHERS = 200
# As if each of the others listed the GPUs every two seconds.
OTHERS_ASK_PER_S = 100.0
WARM_UP = 500
RUNS = 5
PINGS = 3000
P50_MS = 0.3
P99_MS = 2.0


def run() -> list[Row]:
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-"))
        daemon = held.enter_context(RunningDaemon(Path(folder), "--simulate", "8x141GiB"))
        rows = _rows("bare echo between two processes", [_echoes_ms() for _ in range(RUNS)], None, None)
        rows += ping_rows("ping, nobody else connected", daemon, judged=False)
        with crowd(daemon.socket_path, OTHERS, 0):
            rows += ping_rows(f"ping, {OTHERS} others connected", daemon)
        with crowd(daemon.socket_path, OTHERS, OTHERS_ASK_PER_S):
            rows += ping_rows(f"ping, {OTHERS} others, asking {OTHERS_ASK_PER_S:.0f}/s", daemon)
    return rows


def ping_rows(what: str, daemon: RunningDaemon, *, judged: bool = True) -> list[Row]:
    """How long pings to that daemon take as things are, judged by their budgets or not.

    The last row says how far to believe them: what everybody but caller and daemon took of the machine's processors
    meanwhile. With all processors taken p99 tells of the others' time slices, which are milliseconds, and not of hegmd.
    """
    began, elsewhere = time.monotonic(), _busy_elsewhere_s(daemon)
    runs = [_pings_ms(daemon.socket_path) for _ in range(RUNS)]
    offered_s = (os.cpu_count() or 1) * (time.monotonic() - began)
    # Processors are counted in ticks, and what sleeps and wakes between them is missed: good to a few percent.
    elsewhere_percent = 100 * max(0.0, _busy_elsewhere_s(daemon) - elsewhere) / offered_s
    rows = _rows(what, runs, P50_MS if judged else None, P99_MS if judged else None)
    return [*rows, Row(f"{what}: processors taken by others", elsewhere_percent, "%")]


def _busy_elsewhere_s(daemon: RunningDaemon) -> float:
    return machine_busy_s() - cpu_s(daemon.process.pid) - cpu_s(os.getpid())


def _rows(what: str, runs: Sequence[Sequence[float]], p50_ms: float | None, p99_ms: float | None) -> list[Row]:
    """Return the median over the runs for each figure, so that one run during a burst of other work does not decide."""
    p50, p99 = (statistics.median(percentile(run, percent) for run in runs) for percent in (50, 99))
    return [
        Row(f"{what}: p50", p50, "ms", p50_ms),
        Row(f"{what}: p99", p99, "ms", p99_ms),
        Row(f"{what}: max", max(max(run) for run in runs), "ms"),
    ]


def _echoes_ms() -> Sequence[float]:
    return echoes_ms(WARM_UP + PINGS)[WARM_UP:]


def _pings_ms(socket_path: Path) -> list[float]:
    took_ms: list[float] = []
    with connect(str(socket_path)) as hegmd:
        for _ in range(WARM_UP):
            hegmd.ping()
        for _ in range(PINGS):
            began = time.perf_counter()
            hegmd.ping()
            took_ms.append(1000 * (time.perf_counter() - began))
    return took_ms
