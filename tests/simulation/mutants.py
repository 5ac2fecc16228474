"""Machines with a bug put in on purpose: the simulation is worth something only if it finds each of them.

Each stands between the simulation and the real machine, so the product has no switch for it.
"""

from __future__ import annotations

from collections.abc import Callable

from hegmd.migration import course, effects, events, machine
from hegmd.migration.effects import Effect
from hegmd.migration.events import Event
from hegmd.migration.operation import BACK, Operation, Worker
from tests.simulation.daemon import Handle

Result = tuple[Operation, tuple[Effect, ...]]


def _all_workers(op: Operation, change: Callable[[Worker], Worker]) -> Operation:
    return op.replace(workers=tuple([change(worker) for worker in op.workers]))


def _one_worker(op: Operation, name: str, **values: object) -> Operation:
    worker = op.worker(name)
    return op if worker is None else op.with_worker(worker.replace(**values))


def frees_before_the_next_boundary(op: Operation, event: Event, now: float) -> Result:
    after, wanted = machine.handle(op, event, now)
    return (_one_worker(after, event.worker, verified=True) if isinstance(event, events.Refilled) else after), wanted


def believes_in_room(op: Operation, event: Event, now: float) -> Result:
    """The target is taken for held without having been taken."""
    sure = _all_workers(op, lambda w: w.replace(rooms={**w.rooms, w.goal: 1000}) if w.goal and not w.gone else w)
    after, wanted = machine.handle(sure, event, now)
    return (op, ()) if after is sure else (after, wanted)


def takes_late_endings_for_new_ones(op: Operation, event: Event, now: float) -> Result:
    if isinstance(event, events.Ending):
        for pending in op.pending:
            if pending.worker == event.worker and event.tag in Effect.register[pending.effect].ends[:-1]:
                event = event.replace(effect=pending.number)
    return machine.handle(op, event, now)


def trusts_its_memory_after_a_restart(op: Operation, event: Event, now: float) -> Result:
    after, wanted = machine.handle(op, event, now)
    if not isinstance(event, events.Recovered):
        return after, wanted
    certain = _all_workers(after, lambda w: w.replace(unsure=False, recount=False)).replace(pending=())
    return course.advance(certain, now)


def gives_the_way_back_away(op: Operation, event: Event, now: float) -> Result:
    """The room on the old GPU goes as soon as the process has left it."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Checkpointed) and (worker := after.worker(event.worker)) and worker.origin:
        early = effects.GiveRoom(number=10_000 + after.seq, worker=worker.name, cause=0, gpu=worker.origin)
        wanted = (*wanted, early)
    return after, wanted


def stops_each_rank_where_it_is(op: Operation, event: Event, now: float) -> Result:
    alone = op.replace(lockstep=False)
    after, wanted = machine.handle(alone, event, now)
    return (op, ()) if after is alone else (after, wanted)


def is_deaf_to_deadlines(op: Operation, event: Event, now: float) -> Result:
    return (op, ()) if isinstance(event, events.DeadlinePassed) else machine.handle(op, event, now)


def is_deaf_to_deaths(op: Operation, event: Event, now: float) -> Result:
    return (op, ()) if isinstance(event, events.WorkerGone) else machine.handle(op, event, now)


def forgets_what_is_out_when_it_turns(op: Operation, event: Event, now: float) -> Result:
    after, wanted = machine.handle(op, event, now)
    if after.heading == BACK != op.heading:
        after = _all_workers(after, lambda w: w.replace(out=False))
    return after, wanted


def does_not_count_again(op: Operation, event: Event, now: float) -> Result:
    """What grew between the plan and the stop is not seen."""
    after, wanted = machine.handle(op, event, now)
    if not isinstance(event, events.Parked) or after is op:
        return after, wanted
    blind = _all_workers(after, lambda w: w.replace(measured=True)).replace(pending=())
    return course.advance(blind, now)


def lets_go_one_by_one(op: Operation, event: Event, now: float) -> Result:
    """A rank is released as soon as it has its own bytes."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Refilled):
        wanted = (*wanted, effects.Release(number=10_000 + after.seq, worker=event.worker, cause=0))
    return after, wanted


MUTANTS: tuple[Handle, ...] = (
    frees_before_the_next_boundary,
    believes_in_room,
    takes_late_endings_for_new_ones,
    trusts_its_memory_after_a_restart,
    gives_the_way_back_away,
    stops_each_rank_where_it_is,
    is_deaf_to_deadlines,
    is_deaf_to_deaths,
    forgets_what_is_out_when_it_turns,
    does_not_count_again,
    lets_go_one_by_one,
)
