"""The communicators of a job's ranks in an operation: disconnected, connected again, and what to do if that fails.

Owns what the results of these effects, and of the driver's lock between them, change in an operation. stages.py has the
order of the steps. Pure.
"""

from __future__ import annotations

from hegmd.migration.machine import events, next_effects, reversal
from hegmd.migration.machine.operation import JobProcess, Operation, Pending

# The first attempt, and one with newly created communicators.
MAX_RECONNECTS = 2
SUSPEND = "suspend"


def against_image(op: Operation) -> tuple[str, str] | None:
    """Return why this suspended job cannot go into an image, and what to do; None if it can.

    A suspended communicator keeps connections that CRIU cannot dump. An aborted one has none, and the agent creates
    another after the restore.
    """
    suspended = next((worker for worker in op.live if worker.is_unlinked and worker.communicators == SUSPEND), None)
    if suspended is None:
        return None
    message = f"NCCL has suspended the communicators of process {suspended.pid}, which CRIU cannot dump"
    return message, f"run: hegmctl resume {suspended.pid}; then: hegmctl checkpoint {suspended.pid} DIR"


def disconnected(op: Operation, worker: JobProcess, pending: Pending, event: events.Disconnected) -> Operation:
    return op.with_worker(worker.replace(is_connected=False))


def locked(op: Operation, worker: JobProcess, pending: Pending, event: events.Locked) -> Operation:
    return op.with_worker(worker.replace(is_locked=True))


def unlocked(op: Operation, worker: JobProcess, pending: Pending, event: events.Unlocked) -> Operation:
    return op.with_worker(worker.replace(is_locked=False))


def reconnected(op: Operation, worker: JobProcess, pending: Pending, event: events.Reconnected) -> Operation:
    """Record a reconnection. It does not count if its generation is older than that of the other ranks."""
    if pending.generation != op.generation:
        return op
    return op.with_worker(worker.replace(is_connected=True))


def not_reconnected(op: Operation, worker: JobProcess, pending: Pending, event: events.Failed) -> Operation:
    """One rank has failed, so all connect again, with new communicators; a failure of an earlier round is known."""
    op = op.with_worker(worker.replace(needs_inspection=True))
    return op if pending.generation != op.generation else another_round(op, event.code, event.message, event.hint)


def cannot_meet(op: Operation) -> bool:
    """Return True if it is suspended because its ranks could not connect again, as after the end of their launcher."""
    return op.phase == next_effects.SUSPENDED and op.failed_reconnects >= MAX_RECONNECTS


def another_round(op: Operation, code: str, message: str, agents_hint: str = "") -> Operation:
    """All ranks connect again in a new generation; after the last attempt the job is held, with all its bytes.

    The agent knows what may be wrong if the next attempt fails as well, such as a store that has ended.
    """
    workers = [worker.replace(is_connected=None) if worker.communicators else worker for worker in op.workers]
    op = op.replace(workers=tuple(workers), reconnects=op.reconnects + 1, failed_reconnects=op.failed_reconnects + 1)
    if op.failed_reconnects < MAX_RECONNECTS or any(worker.has_exited for worker in op.workers):
        return op
    otherwise = agents_hint.removeprefix("nothing was changed; ")
    again = f"run: hegmctl resume; if that fails as well, {otherwise}" if otherwise else "run: hegmctl resume"
    hint = f"{again}; its ranks are parked with all their bytes, and hegmctl cancel {op.id} --drop ends them for good"
    return next_effects.held(reversal.because(op, code, message, hint))
