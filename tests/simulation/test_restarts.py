"""Lives of jobs that leave by ending, while everything goes wrong: never two processes, never none, the state held.

`python -m tests.simulation.seeds restart SEED` tells one again.
"""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from hegmd.migration.machine import machine
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import Operation
from tests.simulation import restarted, weather
from tests.simulation.daemon import Daemon, Parts
from tests.simulation.restarted import RestartNodeActions
from tests.simulation.restarted_mutants import RESTARTED_MUTANTS
from tests.simulation.seeds import live_restarts
from tests.wide import quick_first

SEEDS, CHUNK = 500, 125
# A bug has to be found among so many.
ENOUGH = 300
QUIET = dict.fromkeys((*weather.draw_odds(Random(0)), *restarted.draw_odds(Random(0))), 0.0)
QUIET_SEEDS = range(6)


@pytest.mark.thorough
@pytest.mark.parametrize("first", quick_first(range(0, SEEDS, CHUNK), 1, most=1))
def test_every_promise_is_kept_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        life = live_restarts(seed)
        assert life.violation is None, str(life)


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick_first(RESTARTED_MUTANTS, 2))
def test_an_injected_bug_is_found(name: str) -> None:
    mutant = RESTARTED_MUTANTS[name]
    seeds = dict.fromkeys((mutant.found_by, *range(ENOUGH)))
    assert any(live_restarts(seed, mutant.parts, odds=mutant.odds).violation is not None for seed in seeds)


@pytest.mark.thorough
def test_the_lives_see_every_course_and_end_of_a_restart() -> None:
    phases: set[str] = set()
    taken: set[str] = set()
    ends: set[str] = set()
    struck: set[str] = set()

    def noting(op: Operation, event: Event, now: float) -> machine.Result:
        after, wanted = machine.handle(op, event, now)
        if after is not op:
            phases.add(after.phase)
            taken.add(event.tag)
            ends.update({"absent"} if any(worker.is_absent for worker in after.workers) else ())
            ends.update({"twice"} if any(worker.start_count > 1 for worker in after.workers) else ())
        return after, wanted

    parts = Parts(hands=RestartNodeActions, handle=noting)
    for seed in range(120):
        struck |= live_restarts(seed, parts).daemon.struck
    for seed in range(40):
        struck |= live_restarts(seed, parts, odds={"power": 0.01, "die": 0.02}).daemon.struck
    assert {"training-ended", "worker-exited", "restored", "checkpointed", "offloaded", "resume-requested"} <= taken
    assert {"suspended", "done", "rolled-back", "lost", "restoring", "verifying"} <= phases
    assert ends == {"absent", "twice"}
    assert {"fall", "finish", "orphan", "die", "crash", "power"} <= struck


class _Point:
    """Counts the points of a quiet life, and has its daemon killed at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.calls = at, 0

    def count(self, _daemon: Daemon, _point: str) -> bool:
        self.calls += 1
        return self.calls - 1 == self.at


def _either(one: _Point, other: _Point, daemon: Daemon, point: str) -> bool:
    return one.count(daemon, point) | other.count(daemon, point)


@pytest.mark.parametrize("seed", quick_first(QUIET_SEEDS, 1, most=3))
def test_a_daemon_killed_at_any_point_of_a_quiet_restart_breaks_no_promise(seed: int) -> None:
    """Before and after every record and every effect, one after the other; and again a few points later."""
    quiet = _Point()
    life = live_restarts(seed, odds=QUIET, points=quiet.count)
    assert life.violation is None, str(life)
    assert [op.phase for op in life.daemon.ops.values()] == ["done"]
    for at in range(quiet.calls):
        for later in (0, 3):
            first, second = _Point(at), _Point(at + later)
            life = live_restarts(seed, odds=QUIET, points=partial(_either, first, second))
            assert life.daemon.crashes >= 1
            assert life.violation is None, f"killed at point {at} and {later} after it\n{life}"
