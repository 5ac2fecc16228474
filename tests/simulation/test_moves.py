"""Thousands of lives of the migration machine and its journal, on a model of a node where everything may go wrong.

Each life comes from its seed alone, and one that breaks a promise prints its story. To see one again:
`python -m tests.simulation.seeds SEED`. Many more of them: `make bench-chaos`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from hegmd.migration.journal import records
from hegmd.migration.machine import events, machine
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import Operation
from tests.simulation.daemon import Daemon, Parts
from tests.simulation.mutants import MUTANTS
from tests.simulation.seeds import live
from tests.simulation.weather import draw_odds
from tests.wide import quick_first

# `make bench-chaos` has 100,000 of them.
SEEDS = 1500
# The number of them in the quick part.
QUICK_LIVES = 60
# Restarts have lives of their own, as many as these lack of 2,000: test_restarts.py.
OF_RESTARTS = {"came-on", "drop-requested", "successor-awaited", "training-ended"}
# Ranks with communicators too: test_ranks.py.
OF_RANKS = {"disconnected", "locked", "unlocked", "reconnected"}
RANK_PHASES = {"disconnecting", "locking", "unlocking", "reconnecting"}
RANK_EFFECTS = {"disconnect", "lock", "unlock", "reconnect"}
CHUNK = 250
LIVES = [range(QUICK_LIVES), *(range(max(first, QUICK_LIVES), first + CHUNK) for first in range(0, SEEDS, CHUNK))]
# The quick part has the first few of the lives that differ by their seeds alone.
QUICK_SEEDS = 2
# Lives in which what is rare happens come before all others, which are lived only where these do not have it any more.
RARE_EVENTS = (386, 127, 10, 5, 31, 165, 495)
RARE_LUCK = (216, 248, 194, 30, 17, 9, 12)
# A bug has to be found among so many seeds; most are in the first hundred.
ENOUGH = 600
# No bad luck at all, and nothing asked for after the first.
QUIET = dict.fromkeys(draw_odds(live(0).daemon.random), 0.0)


@pytest.mark.parametrize("seeds", quick_first(LIVES, 1, most=2), ids=str)
def test_every_promise_is_kept_whatever_happens(seeds: range) -> None:
    for seed in seeds:
        life = live(seed)
        assert life.violation is None, str(life)


@pytest.mark.parametrize("name", quick_first(MUTANTS, 6))
def test_an_injected_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    seeds = dict.fromkeys((mutant.found_by, *range(ENOUGH)))
    assert any(live(seed, mutant.parts, odds=mutant.odds).violation is not None for seed in seeds)


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 25), marks=pytest.mark.wide)], ids=str)
@pytest.mark.parametrize("odds", {str(mutant.odds): mutant.odds for mutant in MUTANTS.values()}.values(), ids=str)
def test_without_the_bug_the_same_odds_break_no_promise(odds: dict[str, float], seeds: range) -> None:
    for seed in seeds:
        life = live(seed, odds=odds)
        assert life.violation is None, str(life)


@pytest.mark.thorough
def test_the_seeds_see_every_phase_and_every_handled_event() -> None:
    """Otherwise the seeds above prove less than they seem to."""
    phases: set[str] = set()
    taken: set[str] = set()

    def noting(op: machine.Operation, event: Event, now: float) -> machine.Result:
        phases.add(op.phase)
        after, wanted = machine.handle(op, event, now)
        phases.add(after.phase)
        if after is not op:
            taken.add(event.tag)
        return after, wanted

    wanted = set(machine.PHASES) - {machine.READYING} - RANK_PHASES, set(machine.EVENTS) - OF_RESTARTS - OF_RANKS
    for seed in (*RARE_EVENTS, *range(500)):
        live(seed, Parts(handle=noting))
        if wanted == (phases, taken):
            break
    assert (phases, taken) == wanted


@pytest.mark.thorough
def test_every_kind_of_bad_luck_strikes() -> None:
    """A kind whose odds are never drawn, or that is misspelt where it strikes, would be no luck at all."""
    struck: set[str] = set()
    # Some kinds are rare: most lives keep their journals, and have nothing to adopt.
    oddly: dict[str, float] = {"amnesia": 0.02, "busy": 0.1, "ruin": 0.1}
    for seed, odds in product((*RARE_LUCK, *range(250)), ({}, oddly)):
        struck |= live(seed, odds=odds).daemon.struck
        if struck == QUIET.keys():
            break
    assert struck == QUIET.keys()


def test_a_seed_lives_the_same_life_again() -> None:
    assert live(41).daemon.story == live(41).daemon.story


@pytest.mark.thorough
def test_the_events_in_a_journal_lead_to_the_same_operations_again() -> None:
    """The journal keeps what changed; computed again from its events, it is the same."""
    replayed = 0
    calm = dict.fromkeys(("crash", "power", "amnesia", "full", "break", "read-only"), 0.0)
    for seed in range(60):
        daemon = live(seed, Parts(compact_bytes=10**9), odds=calm).daemon
        ops: dict[str, Operation] = {}
        for entry in records.entries(daemon.disk.read(daemon.file.path)):
            if entry.whole:
                ops[entry.op] = Operation.from_plain(entry.values, "journal")
                continue
            event = Event.untagged(entry.event, "journal")
            ops[entry.op], wanted = machine.handle(ops[entry.op], event, entry.now)
            assert [effect.to_plain() for effect in wanted] == list(entry.effects)
            replayed += 1
        assert ops == daemon.ops
    assert replayed > 500


QUIET_SEEDS = range(2, 14)


class Point:
    """One point of a quiet life, counted from its beginning, at which a disturbance happens; without a number, none."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.calls: list[str] = []
        self.phases: set[str] = set()

    def count(self, daemon: Daemon, point: str) -> bool:
        self.calls.append(point)
        self.phases.update(op.phase for op in daemon.live_ops())
        return len(self.calls) - 1 == self.at

    def cancel(self, daemon: Daemon, point: str) -> bool:
        if self.count(daemon, point):
            for op in daemon.live_ops():
                daemon.queue.insert(0, (op.id, events.CancelRequested(by="somebody")))
        return False


def _quiet(seed: int) -> Point:
    """The points of that life, to which nothing is done."""
    point = Point()
    assert live(seed, odds=QUIET, points=point.count).violation is None
    return point


@pytest.mark.thorough
def test_the_quiet_lives_have_every_phase_and_come_to_every_point_at_which_a_daemon_can_be_killed() -> None:
    lives = [_quiet(seed) for seed in QUIET_SEEDS]
    # An inspection follows a crash, which the next tests have; a withdrawal and the end of an image a cancel, which the
    # last one has. No quiet life is one of a job that is only made to stand; those of the seeds are.
    tags = Effect.register.keys() - {"await-successor", "inspect", "withdraw", "hold", "scrap"} - RANK_EFFECTS
    points = {f"{when} {tag}" for tag in tags for when in ("before", "after")} | {"begun", "unwritten", "written"}
    assert {point for life in lives for point in life.calls} >= points
    assert {phase for life in lives for phase in life.phases} >= set(machine.PHASES) - {
        "readying",
        "settling",
        "holding",
        *RANK_PHASES,
        *machine.TERMINAL,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("seed", quick_first(QUIET_SEEDS, QUICK_SEEDS, most=3))
def test_a_daemon_killed_at_any_point_of_a_quiet_life_breaks_no_promise(seed: int) -> None:
    """Before and after every record and every effect, one after the other; nothing is left to chance."""
    for at, what in enumerate(_quiet(seed).calls):
        life = live(seed, odds=QUIET, points=Point(at).count)
        assert life.daemon.crashes == 1
        assert life.violation is None, f"killed at {what}, point {at}\n{life}"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [4, 11])
def test_a_daemon_killed_again_during_recovery_breaks_no_promise(seed: int) -> None:
    for at in range(0, len(_quiet(seed).calls), 4):
        for later in (1, 2, 3, 5, 8):
            first, second = Point(at), Point(at + later)

            def twice(daemon: Daemon, point: str, first: Point = first, second: Point = second) -> bool:
                return first.count(daemon, point) | second.count(daemon, point)

            life = live(seed, odds=QUIET, points=twice)
            assert life.violation is None, f"killed at point {at} and {later} after it\n{life}"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", quick_first(QUIET_SEEDS, QUICK_SEEDS, most=3))
def test_an_operation_cancelled_at_any_point_breaks_no_promise(seed: int) -> None:
    for at, what in enumerate(_quiet(seed).calls):
        life = live(seed, odds=QUIET, points=Point(at).cancel)
        assert life.violation is None, f"cancelled at {what}, point {at}\n{life}"


@pytest.mark.thorough
def test_a_journal_that_was_written_with_a_full_disk_can_be_read(tmp_path: Path) -> None:
    """The bytes are always those of the real journal file."""
    found = 0
    for seed in range(40):
        daemon = live(seed, odds={"full": 0.1, "break": 0.1}).daemon
        for name, file in daemon.disk.names.items():
            (tmp_path / name).write_bytes(bytes(file.data))
        if daemon.ops:
            found += len(records.read((tmp_path / daemon.file.path.name).read_bytes()).histories)
    assert found > 20
