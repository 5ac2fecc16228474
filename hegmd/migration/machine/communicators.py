"""The communicators of a job's ranks in an operation: taken down, connected again, and what to do where that fails.

Owns what the ends of these effects, and of the driver's lock that stands between them, change in an operation. The
order of the steps is not here: it is in stages.py. Pure, as the actions are.
"""

from __future__ import annotations

from hegmd.migration.machine import events, next_effects, reversal
from hegmd.migration.machine.operation import JobProcess, Operation, Pending

# The first attempt, and one with communicators that are made anew.
MAX_RECONNECTS = 2
SUSPEND = "suspend"


def against_image(op: Operation) -> tuple[str, str] | None:
    """Why no image can be made of this suspended job, and what to do; None if it can.

    A suspended communicator keeps connections that CRIU cannot dump. One that was aborted has none, and the agent makes
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
    """One that belongs to an earlier generation than the other ranks are to have counts for nothing."""
    if pending.generation != op.generation:
        return op
    return op.with_worker(worker.replace(is_connected=True))


def not_reconnected(op: Operation, worker: JobProcess, pending: Pending, event: events.Failed) -> Operation:
    """One rank has failed, so all connect again, with new communicators; a failure of an earlier round is known."""
    op = op.with_worker(worker.replace(needs_inspection=True))
    return op if pending.generation != op.generation else another_round(op, event.code, event.message)


def another_round(op: Operation, code: str, message: str) -> Operation:
    """All ranks connect again in a new generation; after the last attempt the job is held, with all its bytes."""
    workers = [worker.replace(is_connected=None) if worker.communicators else worker for worker in op.workers]
    op = op.replace(workers=tuple(workers), reconnects=op.reconnects + 1, failed_reconnects=op.failed_reconnects + 1)
    if op.failed_reconnects < MAX_RECONNECTS or any(worker.has_exited for worker in op.workers):
        return op
    hint = f"run: hegmctl resume; its ranks are parked with all their bytes, see hegmctl op {op.id}"
    return next_effects.held(reversal.because(op, code, message, hint))
