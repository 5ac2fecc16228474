"""How long a request takes while 200 others are connected: from before it is encoded to its decoded reply.

Measured with the library face of hegmctl, as a Python program that asks would see it; so the caller's own share is in
the figure. `ping` does nothing in the daemon, which leaves the way there and back. The bare echo before it is what two
processes that do nothing else need on the same machine in the same minute.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hegmctl.connection import connect
from tests.bench.crowd import crowd
from tests.bench.echo import echoes_ms
from tests.bench.gauges import percentile
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon

OTHERS = 200
# As if each of the others looked at the GPUs every two seconds.
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
        rows = _rows("bare echo between two processes", _echoes)
        rows += _rows("ping, nobody else connected", lambda: _pings_ms(daemon.socket_path))
        with crowd(daemon.socket_path, OTHERS, 0):
            rows += ping_rows(f"ping, {OTHERS} others connected", daemon.socket_path, judged=True)
        with crowd(daemon.socket_path, OTHERS, OTHERS_ASK_PER_S):
            what = f"ping, {OTHERS} others, asking {OTHERS_ASK_PER_S:.0f}/s"
            rows += ping_rows(what, daemon.socket_path, judged=True)
    return rows


def ping_rows(what: str, socket_path: Path, *, judged: bool) -> list[Row]:
    """How long pings take at that socket as things are, judged by their budgets or not."""
    budgets = (P50_MS, P99_MS) if judged else (None, None)
    return _rows(what, lambda: _pings_ms(socket_path), budgets)


def _rows(
    what: str, one_run: Callable[[], Sequence[float]], budgets: tuple[float | None, float | None] = (None, None)
) -> list[Row]:
    """The median over the runs for each figure, so that one run beside somebody else's burst does not decide."""
    runs = [one_run() for _ in range(RUNS)]
    p50, p99 = (statistics.median(percentile(run, percent) for run in runs) for percent in (50, 99))
    return [
        Row(f"{what}: p50", p50, "ms", budgets[0]),
        Row(f"{what}: p99", p99, "ms", budgets[1]),
        Row(f"{what}: max", max(max(run) for run in runs), "ms"),
    ]


def _echoes() -> Sequence[float]:
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
