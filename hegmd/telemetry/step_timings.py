"""Collects how long the steps of one effect took: who did what, from when to when, and how many bytes.

Owns the list that an effect collects into. The doors to agents and to the GPU helper note each of their calls, wherever
an effect makes them; a call outside an effect notes nothing. The list is in a context variable, so that the tasks and
threads of the effect find it, and no signature between has to carry it. Decides nothing and does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

AGENT, HELPER, DRIVER, COPIES = "agent", "helper", "driver", "copies"

# One effect keeps this many timings of one lane and name; later ones are added to the last.
MOST_ALIKE = 8


class StepTiming(NamedTuple):
    """A step. `began` and `ended` are monotonic instants."""

    lane: str
    name: str
    began: float
    ended: float
    size_bytes: int = 0


class StepTimings:
    """The timings of one effect, in the order in which its steps ended."""

    def __init__(self) -> None:
        self._alike: dict[tuple[str, str], list[StepTiming]] = {}

    def add(self, step: StepTiming) -> None:
        """Take a step in. Beyond the bound, the last one of its name becomes longer."""
        alike = self._alike.setdefault((step.lane, step.name), [])
        if len(alike) < MOST_ALIKE:
            alike.append(step)
        else:
            last = alike[-1]
            alike[-1] = last._replace(ended=step.ended, size_bytes=last.size_bytes + step.size_bytes)

    @property
    def steps(self) -> list[StepTiming]:
        """All of them, by their begin."""
        return sorted((step for alike in self._alike.values() for step in alike), key=lambda step: step.began)


_collecting: ContextVar[StepTimings | None] = ContextVar("step_timings", default=None)


@contextmanager
def collected() -> Generator[StepTimings]:
    """Collect the steps of the block, and of the tasks that are started in it."""
    found = StepTimings()
    token = _collecting.set(found)
    try:
        yield found
    finally:
        _collecting.reset(token)


def note_step(lane: str, name: str, began: float, ended: float | None = None, size_bytes: int = 0) -> None:
    """Note a step that began at that monotonic instant and ends now, unless told otherwise."""
    found = _collecting.get()
    if found is not None:
        found.add(StepTiming(lane, name, began, time.monotonic() if ended is None else ended, size_bytes))
