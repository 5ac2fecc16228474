"""The machine's table in use: what is ignored or refused changes nothing, and everything survives being plain data."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.errors import HegmError, Refused
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Ending, Event
from hegmd.migration.machine.machine import EVENTS, IGNORE, MOVE, REFUSE, TABLE, handle
from hegmd.migration.machine.operation import ImageRequest, Operation
from tests.cells import in_one_test
from tests.unit.migration.operations import DrivenOperation, operation


def _some(tag: str) -> Event:
    kind = Event.register[tag]
    known: dict[str, Any] = {
        "worker": "a",
        "effect": 999,
        "boundary": 5,
        "size_bytes": 1,
        "parked": True,
        "out_bytes": 0,
        "gpu": "gpu0",
        "reservations": {"gpu0": 10},
        "pool_bytes": 0,
        "driver_bytes": 1,
        "fault": "broken",
        "message": "it failed",
        "hint": "wait",
        "doing": "it loads",
        "token": "token-a",
        "to": {"a": "gpu1"},
        "into": operation(),
        "handoff": ImageRequest(path="/images/one", uid=0, gid=0),
    }
    made: Event = kind(**{declared.name: known[declared.name] for declared in kind.fields if declared.name in known})
    return made


def _in_phase(phase: str) -> Operation:
    return operation(phase=phase)


@in_one_test("phase", sorted({phase for phase, _ in TABLE}))
def test_ignored_or_refused_events_change_nothing(phase: str) -> None:
    op = _in_phase(phase)
    plain = op.to_plain()
    for tag in EVENTS:
        row = TABLE[phase, tag]
        if row.verdict == REFUSE:
            with pytest.raises(Refused) as refused:
                handle(op, _some(tag), 1.0)
            assert row.why in refused.value.message
        elif row.verdict == IGNORE or issubclass(Event.register[tag], Ending):
            after, wanted = handle(op, _some(tag), 1.0)
            assert after is op
            assert wanted == ()
        else:
            assert row.verdict == MOVE
    assert op.to_plain() == plain


@in_one_test("tag", EVENTS)
def test_an_event_is_the_same_from_plain_data(tag: str) -> None:
    event = _some(tag)
    assert Event.untagged(event.to_plain(), "test") == event


def test_an_effect_is_the_same_from_plain_data_and_carries_its_cause() -> None:
    drive = DrivenOperation(operation()).until("done")
    observed: set[str] = set()
    for before, _, after, wanted in drive.taken:
        for effect in wanted:
            assert Effect.untagged(effect.to_plain(), "test") == effect
            assert effect.cause == after.seq == before.seq + 1
            observed.add(effect.tag)
    assert len(observed) == 12


def test_an_operation_is_the_same_from_plain_data() -> None:
    op = DrivenOperation(operation()).until("reloading").op
    assert Operation.from_plain(op.to_plain(), "test") == op


def test_a_name_from_another_version_is_refused() -> None:
    with pytest.raises(HegmError, match="unknown event 'teleported'"):
        Event.untagged({"is": "teleported"}, "journal")
