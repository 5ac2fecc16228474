"""How long hegmctl takes as a whole process, from its start to its end, beside an interpreter that does nothing.

Everything is warm: the files are in the page cache and compiled. A ratio is the median of ratios of neighbours: both
runs happen within the same tenths of a second, so that a burst of other work on the machine affects both.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from hegmctl.connection import connect
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon

ROUNDS = 80
WARM_UP = 10
BUDGET_MS = 60.0
BUDGET_TIMES = 2.5

_PYTHON = sys.executable
_HEGMCTL = str(Path(sys.executable).with_name("hegmctl"))
FLOOR = "python -c pass"
COMMANDS: dict[str, list[str]] = {
    FLOOR: [_PYTHON, "-c", "pass"],
    "hegmctl gpus": [_HEGMCTL, "gpus"],
    "python -m hegmctl gpus": [_PYTHON, "-m", "hegmctl", "gpus"],
    "hegmctl gpus --json": [_HEGMCTL, "gpus", "--json"],
    "hegmctl ps": [_HEGMCTL, "ps"],
    "hegmctl version": [_HEGMCTL, "version"],
}
JUDGED = ("hegmctl gpus", "python -m hegmctl gpus")


def run() -> list[Row]:
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-"))
        daemon = held.enter_context(RunningDaemon(Path(folder), "--simulate", "8x141GiB"))
        for number in range(8):  # so that there is something to list
            client = held.enter_context(connect(str(daemon.socket_path)))
            client.simulate_hold(f"gpu{number}", 1 << 30)
        took_ms = _measure(daemon.socket_path)
    rows = [Row(f"{FLOOR}: p50", statistics.median(took_ms[FLOOR]), "ms")]
    for name in COMMANDS:
        if name != FLOOR:
            rows += _rows(name, took_ms[name], took_ms[FLOOR])
    return rows


def _rows(name: str, took_ms: list[float], floor_ms: list[float]) -> list[Row]:
    judged = name in JUDGED
    ratio = statistics.median(mine / floor for mine, floor in zip(took_ms, floor_ms, strict=True))
    return [
        Row(f"{name}: p50", statistics.median(took_ms), "ms", BUDGET_MS if judged else None),
        Row(f"{name}: against {FLOOR}", ratio, "times", BUDGET_TIMES if judged else None),
    ]


def _measure(socket_path: Path) -> dict[str, list[float]]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ["HEGM_SOCKET"] = str(socket_path)
    took_ms: dict[str, list[float]] = {name: [] for name in COMMANDS}
    names = list(COMMANDS)
    for number in range(WARM_UP + ROUNDS):
        first = number % len(names)  # no client always follows the same one
        for name in names[first:] + names[:first]:
            took_ms[name].append(_run_ms(COMMANDS[name], environ))
    return {name: took[WARM_UP:] for name, took in took_ms.items()}


def _run_ms(argv: list[str], environ: dict[str, str]) -> float:
    """Time from the start of a program to its end. Raises RuntimeError when it fails."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    began = time.perf_counter()
    pid = os.posix_spawn(argv[0], argv, environ, file_actions=quiet)
    _, status = os.waitpid(pid, 0)
    took_ms = 1000 * (time.perf_counter() - began)
    if status:
        raise RuntimeError(f"{' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}")
    return took_ms
