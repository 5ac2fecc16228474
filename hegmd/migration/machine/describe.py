"""An operation as people and programs are told of it, from the one that the machine keeps. Pure.

HAPPENINGS are the events of the node that operations cause, each a kind that is counted (`hegmd_events_total`) and that
docs/operations.md explains.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hegmd.errors import HegmError
from hegmd.migration.machine import events
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.machine import HOLDING, READYING
from hegmd.migration.machine.next_effects import LOST, ROLLED_BACK, SETTLING, SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import BACK, CHECKPOINT, FOR_AGENT, FORWARD, HOLD, RESTART, Operation
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.wording import resuming
from hegmd.protocol import operations as told


def description(
    op: Operation,
    *,
    moved_bytes: int = 0,
    last_utc: float | None = None,
    trouble: HegmError | None = None,
    stopped: Sequence[int] = (),
    ending: Sequence[int] = (),
    awaits: str | None = None,
) -> told.Operation:
    """How it stands; the figures are the runner's, who has the clock and the reports, and the journal's trouble too.

    `last_utc`: when it came to where it is. `stopped` are those of its processes that stand still because of a signal
    or a debugger, `ending` those that are about to be gone; `awaits` is what it waits for in its present phase, as
    whoever waits says it.
    """
    failure = op.failure or op.waiting_for
    size_bytes = sum(member.carried_bytes for member in op.workers)
    return told.Operation(
        id=op.id,
        kind=op.kind,
        phase=op.phase,
        processes=tuple(process_of(member) for member in op.workers),
        owner_uid=op.owner_uid,
        created_utc=op.created_utc,
        size_bytes=size_bytes,
        moved_bytes=min(moved_bytes, size_bytes),  # pieces of the pool have whole pages
        downtime_s=op.downtime_s,
        took_s=max(0.0, last_utc - op.created_utc) if last_utc is not None and op.phase in TERMINAL else None,
        failure=None if failure is None else told.Reason(code=failure.code, message=failure.message, hint=failure.hint),
        waits=waiting(op, trouble, stopped, ending),
        way=way_of(op),
        doing=awaits if op.phase == READYING and awaits else doing(op),
        note=_note(op),
    )


def _note(op: Operation) -> str | None:
    """What is to be known of it at its end beside that."""
    if op.phase == LOST and op.image is not None and op.image.whole:
        return f"its image is whole, and brings it back: hegmctl restore {shlex.quote(op.image.path)}"
    member = next((member for member in op.workers if member.finished and not member.state_saved), None)
    if member is None or op.phase not in TERMINAL:
        return None
    return f"process {member.pid} came to the end of its training before it was moved"


def way_of(op: Operation) -> str:
    """By what its processes are moved."""
    if any(member.restarts for member in op.workers):
        return RESTART
    return "agent" if any(member.has_agent for member in op.workers) else "driver"


def doing(op: Operation) -> str | None:
    """What a restart does now; None where its phase says that."""
    member = next((member for member in op.live if member.restarts), None)
    if member is None or op.phase in TERMINAL or op.phase == SUSPENDED:
        return None
    if member.is_absent:
        return member.successor_activity or told.KEPT
    if member.start_count:
        return None if member.verified else told.FIRST_BATCH
    if op.phase == "offloading":
        return told.SAVING
    return told.LEAVING if member.state_saved and op.direction == FORWARD else None


def waiting(
    op: Operation, trouble: HegmError | None = None, stopped: Sequence[int] = (), ending: Sequence[int] = ()
) -> told.Wait | None:
    """What it waits for, the most pressing first; None for one that is over, or comes on, as when a process ends."""
    if op.phase in TERMINAL:
        return None
    if trouble is not None:
        return told.Wait(why=f"it stands still: {trouble.message}", next=trouble.hint)
    if stopped and not _stands_for_image(op):
        pids = " ".join(str(pid) for pid in stopped)
        are = f"processes {pids} are" if len(stopped) > 1 else f"process {pids} is"
        return told.Wait(why=f"{are} stopped by a signal or a debugger", next=f"kill -CONT {pids}")
    for member in op.live:
        if member.waits == FOR_AGENT and (member.state_saved or member.pid not in ending):
            return _waiting_for(op, member)
    if op.waiting_for is not None and op.direction == BACK:
        return told.Wait(why=op.waiting_for.message, next=op.waiting_for.hint)
    if op.phase == HOLDING:
        pid = next((member.pid for member in op.live), None)
        within = f"within {op.limits.hold_s:g} s"
        return told.Wait(
            why=f"its job stands at a boundary, and goes on by itself {within}", next=f"hegmctl resume {pid}"
        )
    if op.phase == SUSPENDED:
        why = "it is suspended" if op.failure is None else f"its job stands: {op.failure.message}"
        return told.Wait(why=why, next=resuming(op))
    if op.attempts > 1:
        return told.Wait(
            why=f"{op.phase} has not come to its end in {op.attempts} attempts; the next is made by itself",
            next=f"see what it meets with: hegmctl op {op.id} --story",
        )
    return None


def _waiting_for(op: Operation, member: Member) -> told.Wait:
    """An agent that is not connected; of a restart that may be as it is to be."""
    see = f"see the log of the job and: hegmctl op {op.id}"
    if member.restarts and member.start_count and not member.verified:
        return told.Wait(
            why=f"process {member.pid}, which goes on from the saved state, has not said yet how far it is",
            next=f"its agent connects by itself; if it does not, {see}",
        )
    if member.restarts and member.state_saved and not member.start_count:
        return told.Wait(
            why=f"process {member.pid} has saved its state and leaves; its end is waited for",
            next=f"it is started again by itself once it has ended; if it does not end, {see}",
        )
    return told.Wait(
        why=f"the agent of process {member.pid} is not connected",
        next=f"it comes back by itself; if it does not, {see}",
    )


def _stands_for_image(op: Operation) -> bool:
    """Whether CRIU has its processes stand, which are not to go on beyond what is in their image."""
    return op.image is not None and op.image.begun and op.phase in (SETTLING.phase, "handing", "ending")


def in_hand(op: Operation, pid: int, kind: str | None = None) -> tuple[str, str]:
    """What is said to whoever wants that process of it for something else, such as that kind, and the next step."""
    if op.phase == "sealing":
        message = f"the image of process {pid} is being written while it trains, which is operation {op.id}'s"
        return message, f"wait for its end: hegmctl op {op.id} --follow; or give the image up: hegmctl cancel {op.id}"
    message = f"operation {op.id} ({op.kind}, {op.phase}) has process {pid} already"
    if op.phase != SUSPENDED:
        return message, f"see: hegmctl op {op.id}"
    if any(member.is_absent for member in op.live):
        return message, f"see: {resuming(op)}"
    if kind == CHECKPOINT:
        return message, f"have it in an image as it stands: hegmctl handoff {pid} DIR; or first: hegmctl resume {pid}"
    return message, f"see: hegmctl resume {pid}"


def process_of(member: Member) -> told.OperationProcess:
    if member.lost:
        state = "lost"
    elif member.has_exited:
        state = "gone"
    else:
        standing = "parked" if member.is_parked else "running" if member.gpu is not None else "off"
        state = "out" if member.offloaded else standing
    return told.OperationProcess(
        pid=member.pid,
        rank=member.rank,
        began_on=member.first_gpu,
        gpu=member.gpu,
        to=member.target_gpu,
        size_bytes=member.carried_bytes,
        state=state,
    )


HAPPENINGS = {
    "operation.journal-failed": "the journal cannot be written: operations stand still, and none begins",
    "operation.journal-mended": "it can be written again, and they go on",
    "operation.began": "it was asked for, and is in the journal",
    "operation.rolling-back": "it will not get to what was asked; the job is brought back to how it was",
    "operation.held": "neither way is open; the job stands with its bytes held until it is resumed",
    "operation.recovered": "a daemon that was started has found it in the journal, and asks how its processes stand",
    "operation.found": "how a process of it stood after that, or after a step of the driver's that was cut off",
    "operation.holding": "its job stands at a boundary with all that it has, and goes on by itself after a while",
    "operation.suspended": "its job is off the GPUs, its bytes held",
    "operation.done": "what was asked has been done, and a batch was seen after it",
    "operation.rolled-back": "it ended with the job as it was",
    "operation.image-missed": "an image that is taken every so often was not; the job goes on, and the next is tried",
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
    member = before.worker(event.worker) if isinstance(event, events.Inspected | events.WorkerExited) else None
    if member is not None and member.recount_memory:
        yield Happening("operation.found", "info", f"{who}: process {member.pid} {_found(event)}")
    why = "" if after.failure is None else f": {after.failure.message}"
    if after.direction != before.direction:
        if after.direction == BACK and after.phase not in (ROLLED_BACK, LOST):
            yield Happening("operation.rolling-back", "warning", f"{who} turns back{why}")
        elif after.direction == HOLD:
            yield Happening("operation.held", "error", f"{who} is held, its job stands{why}; hegmctl resume")
    if after.phase == SUSPENDED and before.phase != SUSPENDED and not why:
        yield Happening("operation.suspended", "info", f"{who}: suspended")
    if after.phase == HOLDING and before.phase != HOLDING and isinstance(event, events.Parked):
        yield Happening("operation.holding", "info", f"{who}: its job stands for at most {after.limits.hold_s:g} s")


def _found(event: Event) -> str:
    if not isinstance(event, events.Inspected):
        return "has ended"
    where = "no GPU" if event.gpu is None else event.gpu
    out = f", {event.out_bytes} bytes of it out" if event.out_bytes else ""
    return f"{'stands' if event.parked else 'trains'} on {where}{out}"
