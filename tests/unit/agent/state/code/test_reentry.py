"""Values that no variable has when a restart is to begin: results of a comprehension, operands of an expression."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hegmd.agent.state.code.reentry import ReentryFrame, spots_of


def frames_here() -> list[FrameType]:
    """Return the frames from the test to the function that calls this, outermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.startswith("test_"):
        if frame.f_code.co_filename == __file__:
            frames.insert(0, frame)
        frame = frame.f_back
    assert frame is not None
    return [frame, *frames]


class Watched:
    """The number of unnamed values and of collecting loops at each call of `run`."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.total, self.label = 2.0, "s"
        self.history: list[float] = []

    def run(self, result: float = 1.0) -> float:
        """Look at the frames around this call."""
        spots: list[ReentryFrame] = list(spots_of(frames_here()))
        self.seen.append((sum(len(spot.unnamed()) for spot in spots), sum(spot.is_collecting() for spot in spots)))
        return result

    def add(self) -> None:
        """Change an attribute by a call."""
        self.total += self.run()


def test_a_sum_over_calls_started_from_its_first_value_after_a_restart() -> None:
    """`total += run()` had loaded `total` before it was restored, and the restart was accepted."""
    watched, total, best, losses, by_name = Watched(), 0.0, 9.0, {"loss": 1.0}, [1]
    for _ in range(1):
        total += watched.run()
        best = min(best, watched.run())
        losses["loss"] += watched.run()
        watched.add()
        by_name = [*by_name, int(watched.run())]
        shown = (best, watched.run())
    assert (total, shown) == (1.0, (1.0, 1.0))
    assert [unnamed > 0 for unnamed, _ in watched.seen] == [True] * 6


def test_what_a_restarted_script_computes_alike_prevents_no_restart() -> None:
    watched, count, losses, shown = Watched(), 3, [1.0], print
    for epoch in range(1):
        losses.append(watched.run())
        watched.history.append(watched.run(result=2.0))
        watched.run(watched.run())
        loss = watched.run()
        by_epoch = {epoch: watched.run()}
        shown(f"{epoch} of {count}", "{} {}".format("a", watched.run()))
        with contextlib.suppress(KeyError):
            loss = watched.run() + loss
        try:
            raise KeyError
        except KeyError:
            watched.run()
    assert (loss, by_epoch) == (2.0, {0: 1.0})
    assert watched.seen == [(0, 0)] * len(watched.seen)


def test_what_was_computed_above_the_loops_is_computed_again() -> None:
    watched, total = Watched(), 1.0

    def train() -> float:
        for _ in range(1):
            watched.run()
        return 1.0

    total += train()
    assert (total, watched.seen) == (2.0, [(0, 0)])


def test_the_results_of_a_comprehension_were_lost_in_a_restart() -> None:
    watched = Watched()
    assert [watched.run() for _ in range(2)] == [1.0, 1.0]
    assert {watched.run() for _ in range(1)} == {1.0}
    assert {key: watched.run() for key in range(1)} == {0: 1.0}
    assert sum(watched.run() for _ in range(2)) == 2.0
    assert [collecting for _, collecting in watched.seen] == [1] * 6


def test_a_loop_around_a_comprehension_collects_nothing() -> None:
    watched = Watched()
    for _ in range(2):
        squares = [number * number for number in range(3)]
        watched.run()
        more = [*squares, 1]
    assert (len(more), watched.seen) == (4, [(0, 0)] * 2)


def test_a_generator_that_is_asked_item_by_item_collects_nothing() -> None:
    watched = Watched()

    def steps() -> Iterator[Any]:
        for _ in range(2):
            yield watched.run()

    asked = steps()
    next(asked)
    for _ in asked:
        pass
    assert watched.seen == [(0, 0)] * 2
