"""The page of the states is what the tables say today, and the tables are whole."""

from __future__ import annotations

from hegmd.migration.machine.effects import CUT, FINISH, UNDO, Effect
from hegmd.migration.machine.events import Ending, Event
from hegmd.migration.machine.machine import EVENTS, IGNORE, MOVE, PHASES, REFUSE, TABLE
from hegmd.migration.machine.stages import STAGES
from tests.cells import in_one_test
from tools.docs import states


def test_the_page_is_fresh() -> None:
    assert states.PAGE.read_text() == states.page(), "STATES.md is stale: run `make docs`"


@in_one_test("phase", PHASES)
def test_every_event_has_one_row_in_the_phase(phase: str) -> None:
    for event in EVENTS:
        row = TABLE[phase, event]
        assert row.verdict in {MOVE, IGNORE, REFUSE}
        assert len(row.why.split()) >= 2
        assert (row.action is not None) == (row.verdict == MOVE)
        assert bool(row.hint) == (row.verdict == REFUSE)


def test_the_table_has_no_row_for_unknown_events() -> None:
    assert TABLE.keys() == {(phase, event) for phase in PHASES for event in EVENTS}


@in_one_test("name", sorted(Effect.register))
def test_an_effect_names_its_results_and_its_cancellation(name: str) -> None:
    effect = Effect.register[name]
    assert effect.ends[-1] == "failed"
    assert len(effect.ends) > 1
    assert all(issubclass(Event.register[end], Ending) for end in effect.ends)
    assert effect.on_cancel in {CUT, FINISH, UNDO}
    assert any(name in stage.asks for stage in STAGES)


def test_every_ending_ends_some_effect() -> None:
    ended = {end for effect in Effect.register.values() for end in effect.ends}
    assert ended == {name for name, event in Event.register.items() if issubclass(event, Ending)}
