"""The trainings of recovery_run: run by themselves, or protected by snapshots; and the comparison of their losses."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hegmd.protocol.recovery import JobRecovery
from tests.gpu.moves_jobs import Lines
from tests.gpu.restart_node import RestartedJob, RestartNode


class Losses(Lines):
    """A training that prints `step PID NUMBER LOSS`, run by itself."""

    def __init__(self, words: Sequence[str], environ: dict[str, str]) -> None:
        super().__init__([sys.executable, "-u", *words], environ)

    def steps(self) -> list[str]:
        return [line for line in list(self.lines) if line.startswith("step ")]

    def stop(self) -> None:
        """It holds its memory and computes nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class ProtectedJob(RestartedJob):
    """A training under `hegmctl run --recover`."""

    def __init__(self, node: RestartNode, words: Sequence[str], *options: str, **more: str) -> None:
        super().__init__(node, words, "gpu0", options=options, **more)

    def recovery(self) -> JobRecovery | None:
        """Return the daemon's record of it."""
        with self.node.connect() as connection:
            found = [job for job in connection.recovery().jobs if job.state != "kept"]
        return found[-1] if found else None


def gaps_of(times: Sequence[float]) -> list[float]:
    """The time between each two steps."""
    return [later - earlier for earlier, later in pairwise(times)]


def step_times(lines: Lines, since: float) -> list[float]:
    """When each step since that moment was printed."""
    observed = list(zip(list(lines.times), list(lines.lines), strict=False))
    return [at for at, line in observed if at >= since and line.startswith("step ")]


def compared(job: Sequence[str], alone: Sequence[str]) -> dict[str, Any]:
    """Whether the steps of each process are a run of the undisturbed ones; the later ones begin within those before.

    A line of a process that was cut short by its end is left out, and so is what the undisturbed run has not come to.
    """
    wanted = [line.split()[2:] for line in alone]
    places: dict[tuple[str, ...], list[int]] = {}
    for place, one in enumerate(wanted):
        places.setdefault(tuple(one), []).append(place)
    by_process: dict[str, list[list[str]]] = {}
    for line in job:
        words = line.split()
        if len(words) == 4 and line.endswith("\n"):
            by_process.setdefault(words[1], []).append(words[2:])
    checked, repeated, end = 0, 0, 0
    for lines in by_process.values():
        if end >= len(wanted) and tuple(lines[0]) not in places:
            break
        begins = [
            at
            for at in places.get(tuple(lines[0]), [])
            if at <= end and wanted[at : at + len(lines)] == lines[: len(wanted) - at]
        ]
        if not begins:
            return {"exact": False, "checked": checked, "why": f"{lines[0]} and on, after {end} steps"}
        at = begins[-1]
        checked, repeated, end = checked + min(len(lines), len(wanted) - at), repeated + end - at, at + len(lines)
    printed_lines = sum(map(len, by_process.values()))
    return {
        "exact": checked > 0,
        "checked": checked,
        "told": printed_lines,
        "repeated": repeated,
        "processes": len(by_process),
    }
