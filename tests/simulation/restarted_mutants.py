"""Bugs in restarts, put in on purpose: the lives of restarts have to find each of them."""

from __future__ import annotations

from hegmd.migration.machine import effects, events, machine
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import Operation
from tests.simulation.daemon import Parts
from tests.simulation.mutants import Mutant
from tests.simulation.node import Process
from tests.simulation.restarted import RestartNodeActions

Result = tuple[Operation, tuple[Effect, ...]]


class StartsSecondProcess(RestartNodeActions):
    """Does not ask the lock whether a process continues already, which a killed daemon had started."""

    def sees_who_lives(self, process: Process) -> bool:
        return False


def frees_the_state_when_another_process_is_there(op: Operation, event: Event, now: float) -> Result:
    """Instead of when it has passed a boundary."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Restored) and after is not op:
        wanted = (*wanted, effects.ReleasePool(number=10_000 + after.seq, worker=event.worker, cause=0))
    return after, wanted


def takes_leaving_for_the_end(op: Operation, event: Event, now: float) -> Result:
    """Mistakes a process that exits for one without a successor."""
    if isinstance(event, events.WorkerExited) and (worker := op.worker(event.worker)):
        op = op.with_worker(worker.replace(state_saved=False))
    return machine.handle(op, event, now)


def has_it_leave_before_its_state_is_written(op: Operation, event: Event, now: float) -> Result:
    if isinstance(event, events.Surveyed) and (worker := op.worker(event.worker)):
        op = op.with_worker(worker.replace(offloaded=worker.is_parked, state_saved=worker.is_parked))
    return machine.handle(op, event, now)


def waits_for_a_state_that_is_gone(op: Operation, event: Event, now: float) -> Result:
    """Bug: state that a power cut has destroyed still counts as held."""
    if isinstance(event, events.WorkerExited):
        event = event.replace(stateless=False)
    return machine.handle(op, event, now)


_CRASHING = {"crash": 0.1}
RESTARTED_MUTANTS = {
    "starts_one_beside_one_that_lives": Mutant(Parts(hands=StartsSecondProcess), _CRASHING, found_by=60),
    **{
        handle.__name__: Mutant(Parts(hands=RestartNodeActions, handle=handle))
        for handle in (
            frees_the_state_when_another_process_is_there,
            takes_leaving_for_the_end,
            has_it_leave_before_its_state_is_written,
        )
    },
    "waits_for_a_state_that_is_gone": Mutant(
        Parts(hands=RestartNodeActions, handle=waits_for_a_state_that_is_gone), {"power": 0.01}
    ),
}
