"""The stages of the machine, and what the protocol says of their order."""

from __future__ import annotations

from hegmd.migration.machine.next_effects import PLANNED, later
from hegmd.migration.machine.stages import SEALING, STAGES
from hegmd.protocol.operations import PHASES_IN_ORDER
from tests.unit.migration.operations import operation

# Phases without a stage: an image is read before there is an operation, and a suspended job's bytes go to disk after.
OF_NO_STAGE = ("reading", PLANNED, "spilling")


def test_the_protocol_names_the_stages_in_the_order_of_the_machine() -> None:
    """Issue 15, layout: the client's bar had a copy of this order that nothing compared with the machine."""
    # While an image is sealed its job continues: the bar has ended.
    assert [phase for phase in PHASES_IN_ORDER if phase not in OF_NO_STAGE] == [
        stage.phase for stage in STAGES if stage.phase != SEALING
    ]
    assert set(OF_NO_STAGE) <= set(PHASES_IN_ORDER)


def test_a_parked_job_waited_up_to_five_minutes_for_the_next_attempt() -> None:
    """Its helper had been killed at six attempts, and not again."""
    op = operation()
    for _ in range(9):
        op = later(op, now=100.0)
    assert op.deadline == 160.0
