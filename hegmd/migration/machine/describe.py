"""Builds the public record of an operation from the machine's record. Pure.

HAPPENINGS are the events of the node that operations cause. Each kind is counted (`hegmd_events_total`) and explained
in docs/operations.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hegmd.errors import HegmError
from hegmd.migration.machine import events
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.machine import HOLDING, READYING
from hegmd.migration.machine.next_effects import LOST, ROLLED_BACK, SETTLING, SUSPENDED, TERMINAL, is_in_block
from hegmd.migration.machine.operation import BACK, CHECKPOINT, FOR_AGENT, FORWARD, HOLD, RESTART, Operation
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.wording import resuming
from hegmd.protocol import operations as protocol
from hegmd.protocol.agents import not_connected


def description(
    op: Operation,
    *,
    moved_bytes: int = 0,
    last_utc: float | None = None,
    trouble: HegmError | None = None,
    stopped: Sequence[int] = (),
    ending: Sequence[int] = (),
    awaits: str | None = None,
) -> protocol.Operation:
    """Return the public record of an operation.

    `last_utc`: when it reached its present phase. `stopped`: its processes that are stopped by a signal or a debugger.
    `ending`: those that are about to exit. `awaits`: what it waits for in its present phase. The runner supplies these,
    and `trouble`, the journal's error.
    """
    failure = op.failure or op.waiting_for
    size_bytes = sum(member.carried_bytes for member in op.workers)
    return protocol.Operation(
        id=op.id,
        kind=op.kind,
        phase=op.phase,
        processes=tuple(process_of(member) for member in op.workers),
        owner_uid=op.owner_uid,
        created_utc=op.created_utc,
        size_bytes=size_bytes,
        moved_bytes=min(moved_bytes, size_bytes),  # segments of the pool have whole pages
        downtime_s=op.downtime_s,
        took_s=max(0.0, last_utc - op.created_utc) if last_utc is not None and op.phase in TERMINAL else None,
        failure=None
        if failure is None
        else protocol.Reason(code=failure.code, message=failure.message, hint=failure.hint),
        waits=waiting(op, trouble, stopped, ending),
        way=way_of(op),
        doing=awaits if op.phase == READYING and awaits else doing(op),
        note=_note(op),
    )


def _note(op: Operation) -> str | None:
    """Return a remark on an ended operation, or None."""
    if op.phase == LOST and op.image is not None and op.image.whole:
        return f"its image is complete; restore it with: hegmctl restore {shlex.quote(op.image.path)}"
    member = next((member for member in op.workers if member.finished and not member.state_saved), None)
    if member is None or op.phase not in TERMINAL:
        return None
    return f"process {member.pid} finished its training before it was moved"


def way_of(op: Operation) -> str:
    """Return how its processes are moved: by restart, by their agent, or by the driver."""
    if any(member.restarts for member in op.workers):
        return RESTART
    return "agent" if any(member.has_agent for member in op.workers) else "driver"


def state_of(described: protocol.Operation) -> str:
    """Return what an operation that is not over does: moving, quiesced, suspended, or waiting for a person.

    A suspended job waits for a person only after a failure. A quiesced job resumes by itself.
    """
    if described.phase == HOLDING:
        return "quiesced"
    if described.phase == SUSPENDED and described.failure is None:
        return "suspended"
    return "moving" if described.waits is None else "waiting"


def doing(op: Operation) -> str | None:
    """Return the present step of a restart; None if its phase already says it."""
    member = next((member for member in op.live if member.restarts), None)
    if member is None or op.phase in TERMINAL or op.phase == SUSPENDED:
        return None
    if member.is_absent:
        return member.successor_activity or protocol.KEPT
    if member.start_count:
        return None if member.verified else protocol.FIRST_BATCH
    if op.phase == "offloading":
        return protocol.SAVING
    return protocol.LEAVING if member.state_saved and op.direction == FORWARD else None


def waiting(
    op: Operation, trouble: HegmError | None = None, stopped: Sequence[int] = (), ending: Sequence[int] = ()
) -> protocol.Wait | None:
    """Return what the operation waits for, the most urgent first. None if it has ended or makes progress."""
    if op.phase in TERMINAL:
        return None
    if trouble is not None:
        return protocol.Wait(why=f"the operation is stopped: {trouble.message}", next=trouble.hint)
    if stopped and not _is_stopped_for_image(op):
        pids = " ".join(str(pid) for pid in stopped)
        are = f"processes {pids} are" if len(stopped) > 1 else f"process {pids} is"
        return protocol.Wait(why=f"{are} stopped by a signal or a debugger", next=f"kill -CONT {pids}")
    for member in op.live:
        if member.waits == FOR_AGENT and (member.state_saved or member.pid not in ending):
            return _waiting_for(op, member)
    if op.waiting_for is not None and op.direction == BACK:
        return protocol.Wait(why=op.waiting_for.message, next=op.waiting_for.hint)
    if op.phase == HOLDING:
        pid = next((member.pid for member in op.live), None)
        within = f"within {op.limits.hold_s:g} s"
        return protocol.Wait(
            why=f"the job is quiesced and resumes automatically {within}", next=f"hegmctl resume {pid}"
        )
    if op.phase == SUSPENDED:
        why = "it is suspended" if op.failure is None else f"the job is parked: {op.failure.message}"
        return protocol.Wait(why=why, next=resuming(op))
    if is_in_block(op, op.phase):
        return protocol.Wait(
            why="its script has not left its hegm.released() block yet", next="wait for the end of the block"
        )
    if op.attempts > 1:
        return protocol.Wait(
            why=f"{op.phase} has failed {op.attempts} times; hegmd retries automatically",
            next=f"see what fails: hegmctl op {op.id} --story",
        )
    return None


def _waiting_for(op: Operation, member: Member) -> protocol.Wait:
    """An agent that is not connected; in a restart that can be intended."""
    see = f"read the log of the job and: hegmctl op {op.id}"
    if member.restarts and member.start_count and not member.verified:
        return protocol.Wait(
            why=f"process {member.pid}, which continues from the saved state, has not reported its progress yet",
            next=f"wait for its agent to connect; if it does not, {see}",
        )
    if member.restarts and member.state_saved and not member.start_count:
        return protocol.Wait(
            why=f"process {member.pid} has saved its state and is exiting",
            next=f"wait: its supervisor restarts it once it has exited; if it does not exit, {see}",
        )
    return protocol.Wait(why=not_connected(member.pid), next=f"wait for it to reconnect; if it does not, {see}")


def _is_stopped_for_image(op: Operation) -> bool:
    """True while CRIU keeps its processes stopped, so that they match their image."""
    return op.image is not None and op.image.begun and op.phase in (SETTLING.phase, "handing", "ending")


def busy_message(op: Operation, pid: int, kind: str | None = None) -> tuple[str, str]:
    """Return the message and the hint for a client that wants `pid`, which this operation has."""
    if op.phase == "sealing":
        message = f"the image of process {pid} is being written by operation {op.id} while it trains"
        return message, f"wait for it: hegmctl op {op.id} --follow; or discard the image: hegmctl cancel {op.id}"
    message = f"operation {op.id} ({op.kind}, {op.phase}) already includes process {pid}"
    if op.phase == HOLDING:
        return message, f"run: hegmctl resume {pid}"
    if op.phase != SUSPENDED:
        return message, f"run: hegmctl op {op.id}"
    if any(member.is_absent for member in op.live):
        return message, f"run: {resuming(op)}"
    if kind == CHECKPOINT:
        return message, f"write it into an image: hegmctl handoff {pid} DIR; or run: hegmctl resume {pid}"
    return message, f"run: hegmctl resume {pid}"


def process_of(member: Member) -> protocol.OperationProcess:
    if member.lost:
        state = "lost"
    elif member.has_exited:
        state = "gone"
    else:
        placement = "parked" if member.is_parked else "running" if member.gpu is not None else "off"
        state = "out" if member.offloaded else placement
    return protocol.OperationProcess(
        pid=member.pid,
        rank=member.rank,
        began_on=member.first_gpu,
        gpu=member.gpu,
        to=member.target_gpu,
        size_bytes=member.carried_bytes,
        state=state,
        stays_bytes=member.stays_bytes if member.gpu is None and not member.has_exited else None,
    )


HAPPENINGS = {
    "operation.journal-failed": "hegmd cannot write the journal: operations are stopped and none can start",
    "operation.journal-mended": "hegmd can write the journal again, and operations continue",
    "operation.began": "a client requested it, and the journal has it",
    "operation.rolling-back": "it cannot finish; the job is rolled back",
    "operation.held": "it can neither finish nor roll back; the job is suspended with its state kept until it is "
    "resumed",
    "operation.recovered": "a restarted daemon found it in the journal and inspects its processes",
    "operation.found": "the state of a process after that, or after an interrupted driver call",
    "operation.holding": "the job is quiesced with all its memory in place, and resumes automatically",
    "operation.suspended": "the job is off the GPUs and its state is kept",
    "operation.done": "it succeeded, and the job trained a batch afterwards",
    "operation.rolled-back": "it ended with the job unchanged",
    "operation.image-missed": "a scheduled image could not be written; the job trains on, and hegmd tries the next one",
    "operation.lost": "a process exited while its tensors were offloaded",
}


class Happening(NamedTuple):
    """An event of the node."""

    kind: str
    severity: str
    message: str


def happenings(before: Operation, event: Event, after: Operation) -> Iterator[Happening]:
    """Yield the node's events that this step of an operation causes, besides its phase."""
    who = f"operation {after.id}"
    if isinstance(event, events.Recovered):
        yield Happening("operation.recovered", "warning", f"{who} was {before.phase} when hegmd was stopped")
    member = before.worker(event.worker) if isinstance(event, events.Inspected | events.WorkerExited) else None
    if member is not None and member.recount_memory:
        yield Happening("operation.found", "info", f"{who}: process {member.pid} {_found(event)}")
    why = "" if after.failure is None else f": {after.failure.message}"
    if after.direction != before.direction:
        if after.direction == BACK and after.phase not in (ROLLED_BACK, LOST):
            yield Happening("operation.rolling-back", "warning", f"{who} rolls back{why}")
        elif after.direction == HOLD:
            yield Happening(
                "operation.held", "error", f"{who} failed and its job is suspended{why}; run: hegmctl resume"
            )
    if after.phase == SUSPENDED and before.phase != SUSPENDED and not why:
        yield Happening("operation.suspended", "info", f"{who}: suspended")
    if after.phase == HOLDING and before.phase != HOLDING and isinstance(event, events.Parked):
        yield Happening(
            "operation.holding", "info", f"{who}: its job is quiesced for at most {after.limits.hold_s:g} s"
        )


def _found(event: Event) -> str:
    if not isinstance(event, events.Inspected):
        return "has ended"
    where = "no GPU" if event.gpu is None else event.gpu
    out = f", {event.out_bytes} bytes of it offloaded" if event.out_bytes else ""
    return f"{'parked' if event.parked else 'training'} on {where}{out}"
