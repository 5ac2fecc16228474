"""Lives of jobs whose ranks have communicators, while everything goes wrong: disconnected and locked before any leaves.

`python -m tests.simulation.seeds ranks SEED` tells one again.
"""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from hegmd.migration.machine import machine
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import Operation
from tests.simulation import weather
from tests.simulation.daemon import Daemon, Parts
from tests.simulation.rank_mutants import RANK_MUTANTS
from tests.simulation.ranks import RankNodeActions
from tests.simulation.seeds import live_ranks
from tests.wide import quick_first

SEEDS, CHUNK = 500, 125
# The quick part has the first few of the lives that differ by their seeds alone.
QUICK = 40
# A bug has to be found among so many.
ENOUGH = 300
QUIET = dict.fromkeys(weather.draw_odds(Random(0)), 0.0)
# Quiet lives in which ranks change places by the driver and without, are suspended and resumed, and are three.
QUIET_SEEDS = (3, 7, 1, 6, 10, 12)
# Lives in which what is rare happens come before all others, which are lived only where these do not have it any more.
RARE = (0, 1, 4, 7, 29, 171, 285)
OF_RANKS = {"disconnecting", "locking", "unlocking", "reconnecting"}


def test_every_promise_is_kept_in_a_few_lives() -> None:
    for seed in range(QUICK):
        life = live_ranks(seed)
        assert life.violation is None, str(life)


@pytest.mark.thorough
@pytest.mark.parametrize("first", quick_first(range(QUICK, SEEDS, CHUNK), 1, most=1))
def test_every_promise_is_kept_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        life = live_ranks(seed)
        assert life.violation is None, str(life)


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick_first(RANK_MUTANTS, 3))
def test_an_injected_bug_is_found(name: str) -> None:
    mutant = RANK_MUTANTS[name]
    seeds = dict.fromkeys((mutant.found_by, *range(ENOUGH)))
    assert any(live_ranks(seed, mutant.parts, odds=mutant.odds).violation is not None for seed in seeds)


@pytest.mark.thorough
@pytest.mark.parametrize("odds", {str(mutant.odds): mutant.odds for mutant in RANK_MUTANTS.values()}.values(), ids=str)
def test_without_the_bug_the_same_odds_break_no_promise(odds: dict[str, float]) -> None:
    for seed in range(40):
        life = live_ranks(seed, odds=odds)
        assert life.violation is None, str(life)


@pytest.mark.thorough
def test_the_lives_see_every_step_of_ranks_and_every_end() -> None:
    """Otherwise the seeds above prove less than they seem to."""
    phases: set[str] = set()
    observed: set[str] = set()

    def noting(op: Operation, event: Event, now: float) -> machine.Result:
        after, wanted = machine.handle(op, event, now)
        phases.add(after.phase)
        observed.update({after.direction, f"{after.direction} {after.phase}"})
        observed.update({"again"} if after.failed_reconnects else ())
        observed.update({"late"} if after.reserves_late and after.phase == "reserving" else ())
        return after, wanted

    wanted = {"hold", "again", "late", "back unlocking", "back reconnecting", "forward reconnecting"}
    for seed in (*RARE, *range(400)):
        live_ranks(seed, Parts(hands=RankNodeActions, handle=noting))
        if wanted <= observed and phases >= OF_RANKS:
            break
    assert wanted <= observed
    assert phases.issuperset({*OF_RANKS, "suspended", "done", "rolled-back", "lost"})


class _Point:
    """Counts the points of a quiet life, and has its daemon killed at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.calls = at, 0

    def count(self, _daemon: Daemon, _point: str) -> bool:
        self.calls += 1
        return self.calls - 1 == self.at


def _either(one: _Point, other: _Point, daemon: Daemon, point: str) -> bool:
    return one.count(daemon, point) | other.count(daemon, point)


# Every fourth point of these lives, of each another fourth, and all points of the first life.
SOME_POINTS = [(seed, range(seed % 4, 10_000, 4)) for seed in QUIET_SEEDS[1:]]
ALL_POINTS = [pytest.param(seed, range(10_000), marks=pytest.mark.wide) for seed in QUIET_SEEDS[1:]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "points"), [*quick_first([*SOME_POINTS, (QUIET_SEEDS[0], range(10_000))], 1), *ALL_POINTS], ids=str
)
def test_a_daemon_killed_at_any_point_of_a_quiet_move_of_ranks_breaks_no_promise(seed: int, points: range) -> None:
    """Before and after every record and every effect, one after the other; and again a few points later."""
    quiet = _Point()
    life = live_ranks(seed, odds=QUIET, points=quiet.count)
    assert life.violation is None, str(life)
    assert [op.phase for op in life.daemon.ops.values()] == ["done"]
    for at in points[: len(range(points.start, quiet.calls, points.step))]:
        for later in (0, 3) if at % 3 == 0 else (0,):
            first, second = _Point(at), _Point(at + later)
            life = live_ranks(seed, odds=QUIET, points=partial(_either, first, second))
            assert life.daemon.crashes >= 1
            assert life.violation is None, f"killed at point {at} and {later} after it\n{life}"
