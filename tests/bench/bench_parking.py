"""How many batches a training still begins after the order to stop, and how long it takes to park.

The order goes to a real agent over its socket, at moments that are drawn, and the script's own record of when its
batches began says how many came between the order and the answer. None is the best there is: the batch under way is
ended, and the next is not begun. One is allowed, because an order may come while a batch is just being begun. It is
measured with batches that are short and with ordinary ones: the agent's thread has to get the interpreter first, which
a busy training thread gives away every 5 ms. Without PyTorch there is nothing to park.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tests.bench.gauges import percentile
from tests.bench.report import Row
from tests.e2e.agented import environment
from tests.e2e.scripted_daemon import ScriptedDaemon

SCRIPT = Path(__file__).with_name("scripts") / "stamping.py"
BATCHES_MS = (1, 20, 100)
PARKS = 40
BUDGET_BATCHES = 1.0
# For so long a busy thread keeps the interpreter (`sys.getswitchinterval`); shorter batches are not judged.
INTERPRETER_MS = 5
PATIENCE_S = 30.0
# Between two orders as much as some batches take, so that they come at any moment of one.
BATCHES_BETWEEN = 3


def run() -> list[Row]:
    if find_spec("torch") is None:
        print("no PyTorch here: the parking is left out", file=sys.stderr)
        return []
    return [row for batch_ms in BATCHES_MS for row in _rows(batch_ms)]


def _rows(batch_ms: int) -> list[Row]:
    orders, began = _parked(batch_ms)
    counts = [sum(order < begin < stood for begin in began) for order, stood in orders]
    took_ms = [1e3 * (stood - order) for order, stood in orders]
    what = f"batches of {batch_ms} ms: "
    budget = BUDGET_BATCHES if batch_ms > INTERPRETER_MS else None
    return [
        Row(f"{what}begun after the order, mean", statistics.mean(counts), "batches"),
        Row(f"{what}begun after the order, p95", percentile(counts, 95), "batches", budget),
        Row(f"{what}begun after the order, most", max(counts), "batches"),
        Row(f"{what}until it stands, p50", statistics.median(took_ms), "ms"),
    ]


def _parked(batch_ms: int) -> tuple[list[tuple[float, float]], list[float]]:
    """When each order was given and answered, and when the batches began."""
    draw = random.Random(batch_ms)
    calls: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="hegm-") as folder:
        socket_path = Path(folder) / "hegmd.sock"
        with ScriptedDaemon(socket_path) as daemon:
            words = [sys.executable, str(SCRIPT), str(batch_ms)]
            environ = environment(socket_path)
            script = subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            try:
                agent = daemon.attended()
                agent.done("park", limit_s=PATIENCE_S)  # the loop is under way then, and its first steps behind it
                for _ in range(PARKS):
                    agent.done("release", limit_s=PATIENCE_S)
                    _pass(draw.uniform(0, BATCHES_BETWEEN * batch_ms / 1e3))
                    order_at = time.monotonic()
                    agent.done("park", limit_s=PATIENCE_S)
                    calls.append((order_at, time.monotonic()))
                agent.done("release", limit_s=PATIENCE_S)
            finally:
                output = script.communicate(timeout=PATIENCE_S)[0]
    return calls, [float(line) for line in output.split()]


def _pass(seconds: float) -> None:
    """Busy-wait for that time, a few batches at most."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
