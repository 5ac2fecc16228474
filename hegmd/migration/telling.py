"""An operation as people and programs are told of it, from the one that the machine keeps. Pure.

HAPPENINGS are the events of the node that operations cause, each a kind that is counted (`hegmd_events_total`) and that
docs/operations.md explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hegmd.migration import events
from hegmd.migration.course import LOST, SUSPENDED, UNDONE
from hegmd.migration.events import Event
from hegmd.migration.operation import BACK, HOLD, Operation
from hegmd.migration.operation import Worker as Member
from hegmd.protocol import operations as told


def description(op: Operation, *, moved_bytes: int = 0, blackout_s: float | None = None) -> told.Operation:
    """How it stands; the two figures are the runner's, who has the clock and the reports."""
    failure = op.failure
    return told.Operation(
        id=op.id,
        kind=op.kind,
        phase=op.phase,
        processes=tuple(process_of(member) for member in op.workers),
        owner_uid=op.owner_uid,
        created_utc=op.created_utc,
        size_bytes=sum(member.size_bytes for member in op.workers),
        moved_bytes=moved_bytes,
        blackout_s=blackout_s,
        failure=None if failure is None else told.Reason(code=failure.code, message=failure.message, hint=failure.hint),
    )


def process_of(member: Member) -> told.OperationProcess:
    if member.lost:
        state = "lost"
    elif member.gone:
        state = "gone"
    else:
        state = "out" if member.out else "parked" if member.parked else "running"
    return told.OperationProcess(
        pid=member.pid,
        rank=member.rank,
        gpu=member.at,
        to=member.goal,
        size_bytes=member.size_bytes,
        state=state,
    )


HAPPENINGS = {
    "operation.began": "it was asked for, and is in the journal",
    "operation.turned-back": "it will not get to what was asked; the job is brought back to how it was",
    "operation.held": "neither way is open; the job stands with its bytes held until it is resumed",
    "operation.recovered": "a daemon that was started has found it in the journal, and asks how its processes stand",
    "operation.found": "how a process of it stood after that",
    "operation.suspended": "its job is off the GPUs, its bytes held",
    "operation.done": "what was asked has been done, and a batch was seen after it",
    "operation.undone": "it ended with the job as it was",
    "operation.lost": "a process ended while its bytes were out of it",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """One event of the node."""

    kind: str
    severity: str
    message: str


def happenings(before: Operation, event: Event, after: Operation) -> Iterator[Happening]:
    """What a step of an operation is worth telling of, besides its phases."""
    who = f"operation {after.id}"
    if isinstance(event, events.Recovered):
        yield Happening("operation.recovered", "warning", f"{who} was {before.phase} when hegmd was stopped")
    member = before.worker(event.worker) if isinstance(event, events.Inspected | events.WorkerGone) else None
    if member is not None and member.recount:
        yield Happening("operation.found", "info", f"{who}: process {member.pid} {_found(event)}")
    why = "" if after.failure is None else f": {after.failure.message}"
    if after.heading != before.heading:
        if after.heading == BACK and after.phase not in (UNDONE, LOST):
            yield Happening("operation.turned-back", "warning", f"{who} turns back{why}")
        elif after.heading == HOLD:
            yield Happening("operation.held", "error", f"{who} is held, its job stands{why}; hegmctl resume")
    if after.phase == SUSPENDED and before.phase != SUSPENDED and not why:
        yield Happening("operation.suspended", "info", f"{who}: suspended")


def _found(event: Event) -> str:
    if not isinstance(event, events.Inspected):
        return "has ended"
    where = "no GPU" if event.gpu is None else event.gpu
    out = f", {event.out_bytes} bytes of it out" if event.out_bytes else ""
    return f"{'stands' if event.parked else 'trains'} on {where}{out}"
