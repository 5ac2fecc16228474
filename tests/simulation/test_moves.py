"""Thousands of lives of the migration machine, with its journal, on a model of a node where everything may go wrong.

Each life comes from its seed alone, and one that breaks a promise prints its story. To see one again:
`python -m tests.simulation.seeds SEED`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hegmd.migration import journal, machine
from hegmd.migration.events import Event
from tests.simulation.daemon import Handle
from tests.simulation.mutants import MUTANTS
from tests.simulation.seeds import Life, live

SEEDS = 2000
CHUNK = 200
# A bug has to be found among so many seeds.
ENOUGH = 500


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_promise_is_kept_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        life = live(seed)
        assert life.violation is None, str(life)


def test_the_seeds_see_every_phase_and_every_event_that_is_not_ignored() -> None:
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

    for seed in range(400):
        live(seed, noting)
    assert phases == set(machine.PHASES)
    assert taken == set(machine.EVENTS)


def _first_violation(lives: Iterator[Life]) -> Life | None:
    return next((life for life in lives if life.violation is not None), None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_bug_that_is_put_in_is_found(mutant: Handle) -> None:
    assert _first_violation(live(seed, mutant) for seed in range(ENOUGH)) is not None


def test_acting_before_the_journal_is_on_disk_is_found() -> None:
    crashing = {"crash": 0.15, "die": 0.02}
    hasty = (live(seed, acts_before_sync=True, odds=crashing) for seed in range(ENOUGH))
    assert _first_violation(hasty) is not None
    careful = (live(seed, odds=crashing) for seed in range(100))
    assert _first_violation(careful) is None


def test_a_seed_lives_the_same_life_again() -> None:
    assert live(41).daemon.story == live(41).daemon.story


def test_the_events_in_a_journal_lead_to_the_same_operation_again() -> None:
    """The journal keeps what changed; computed anew from its events, it is the same."""
    replayed = 0
    for seed in range(60):
        daemon = live(seed, odds={"crash": 0.0}).daemon
        begun, *steps = journal.entries(daemon.disk)
        op = machine.Operation.from_plain(begun.values, "journal")
        for entry in steps:
            event = Event.untagged(entry.event, "journal")
            op, wanted = machine.handle(op, event, entry.now)
            assert [effect.to_plain() for effect in wanted] == list(entry.effects)
            replayed += 1
        assert op == daemon.op
    assert replayed > 500
