"""How long a step of a training takes with the agent, and without it: 1,000 steps each, paired and interleaved.

Three processes run the same script: one plain, one with the agent connected to a daemon, and another plain one. They
take turns, twenty steps at a time, in an order that changes from round to round, so that what the machine does
meanwhile hits all alike. Of each three, a figure is the median over the rounds of a ratio of neighbours; and because
one process is some percent faster than the next for as long as it lives, by where its memory happens to lie, there are
five times three, and the figure shown is the median of theirs.

"Unchanged within noise" is the budget, and the two plain ones say what noise is: by as much as one of them was ever off
the other, and by one percent at least. The model and its batches are small, because what a boundary costs (`agent`) is
the same for all and shows most there. Without PyTorch there is nothing to train, and all of it is left out with a word.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from hegmctl.connection import connect
from hegmctl.running import prepare
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon

SCRIPT = Path(__file__).with_name("scripts") / "stepping.py"
STEPS = 1000
STEPS_AT_A_TIME = 20
ATTENDS_WITHIN_S = 30.0
WARM_UP = 100
THREES = 5
MIN_NOISE, MAX_NOISE = 0.01, 0.05
PLAIN, AGENTED, OTHER_PLAIN = range(3)
WALL, PROCESSOR = range(2)

# For each round, for each process of the three: wall time and processor time in seconds.
Rounds = list[list[tuple[float, float]]]


class SteppingScript:
    """The script as a child process that makes steps on request."""

    def __init__(self, socket_path: Path | None) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEGM_", "PYTHON"))}
        if socket_path is not None:
            prepare(environ, str(socket_path), "bench", "gpu0")
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def take_s(self, steps: int) -> tuple[float, float]:
        """How long so many steps take: wall time and processor time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        wall_s, cpu_s = map(float, self._process.stdout.readline().split())
        return wall_s, cpu_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate()


def run() -> list[Row]:
    if find_spec("torch") is None:
        print("no PyTorch here: the steps are left out", file=sys.stderr)
        return []
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-"))
        daemon = held.enter_context(RunningDaemon(Path(folder)))
        return _rows([_three(daemon, seed) for seed in range(THREES)])


def _three(daemon: RunningDaemon, seed: int) -> Rounds:
    """The times of a plain process, of one with the agent, and of another plain one, round by round."""
    with contextlib.ExitStack() as held:
        processes = [held.enter_context(SteppingScript(path)) for path in (None, daemon.socket_path, None)]
        _await_agent(daemon, processes[1])
        for process in processes:
            process.take_s(WARM_UP)
        draw, rounds = random.Random(seed), []
        for _ in range(STEPS // THREES // STEPS_AT_A_TIME):
            order = list(range(len(processes)))
            draw.shuffle(order)
            took = {index: processes[index].take_s(STEPS_AT_A_TIME) for index in order}
            rounds.append([took[index] for index in range(len(processes))])
    return rounds


def _await_agent(daemon: RunningDaemon, agented: SteppingScript) -> None:
    """Step until the daemon shows the process on its GPU, so that what is measured is an agent that is connected."""
    deadline = time.monotonic() + ATTENDS_WITHIN_S
    with connect(str(daemon.socket_path)) as hegmd:
        while not any(process.pid == agented.pid and process.gpus for process in hegmd.processes().processes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no agent attends within {ATTENDS_WITHIN_S:g} s: {daemon.log_text()}")
            agented.take_s(STEPS_AT_A_TIME)


def _rows(threes: list[Rounds]) -> list[Row]:
    step_us = statistics.median(one[0][WALL] for rounds in threes for one in rounds) / STEPS_AT_A_TIME * 1e6
    more_us = statistics.median(
        (one[AGENTED][PROCESSOR] - one[PLAIN][PROCESSOR]) / STEPS_AT_A_TIME * 1e6 for rounds in threes for one in rounds
    )
    rows = [
        Row("a step without the agent", step_us, "µs"),
        Row("a step with it: more processor time by", more_us, "µs"),
    ]
    for name, clock in (("processor time", PROCESSOR), ("wall time", WALL)):
        noise = max(abs(ratio - 1) for ratio in _ratios(threes, OTHER_PLAIN, clock))
        with_it = statistics.median(_ratios(threes, AGENTED, clock))
        budget = 1 + min(max(noise, MIN_NOISE), MAX_NOISE)
        rows.append(Row(f"a step with it against without, {name}", with_it, "times", budget))
        rows.append(Row(f"noise: without against without, {name}, off by at most", 100 * noise, "%"))
    return rows


def _ratios(threes: list[Rounds], process: int, clock: int) -> list[float]:
    """Return for each three how many times as long as the plain process the other took."""
    return [statistics.median(one[process][clock] / one[PLAIN][clock] for one in rounds) for rounds in threes]
