"""A worker whose process has exited, and what that means for its operation.

The process may be lost with its state, or have finished. In a restart, it exits on purpose, and a new process continues
from its state. Owns the decision between these. Pure, like the actions.
"""

from __future__ import annotations

from hegmd.errors import NOT_FOUND, REFUSED
from hegmd.migration.machine import next_effects, reversal
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.operation import FORWARD, Failure, JobProcess, Operation
from hegmd.migration.machine.stages import is_away


def gone(op: Operation, name: str, why: str, *, finished: bool = False) -> Operation:
    """Record that a process has exited; `why` in words. `finished`: it finished its training."""
    worker = op.worker(name)
    if worker is None or worker.has_exited:
        return op
    if worker.restarts and _may_have_successor(op, worker):
        return absent(op, worker, why)
    if worker.restarts and finished and not worker.state_saved and op.direction == FORWARD:
        return without_orders(op, name).with_worker(departed(worker, lost=False).replace(finished=True))
    if op.ends_workers or _has_trained_after_image(
        op
    ):  # it is in an image and was to end, or has trained on and ended by itself
        return without_orders(op, name).with_worker(departed(worker, lost=False))
    # A suspended job stays off its GPUs until it is resumed: others may have its memory.
    away = (is_away(op) or op.holds) and op.phase != next_effects.SUSPENDED
    lost = worker.was_offloaded and not worker.verified and (worker.offloaded or worker.gpu is None or worker.is_parked)
    lost = lost and not worker.restarts  # no bytes had left it: it ended as it would have without hegmd
    op = without_orders(op, name).with_worker(departed(worker, lost=lost))
    state = " while its state was offloaded" if lost else ""
    op = reversal.because(op, NOT_FOUND.name, f"process {worker.pid} exited{state}: {why}", "read the log of the job")
    return next_effects.reversed_operation(op) if op.direction == FORWARD and away else op


def without_state(op: Operation, name: str) -> Operation:
    """Record that a process and the holder of its saved state are gone: neither it nor its ranks can be restarted."""
    worker = op.worker(name)
    if worker is None or worker.has_exited:
        return op
    crew = [one for one in op.live if one is worker or (op.restarts_together and one.is_absent)]
    for one in crew:
        op = without_orders(op, one.name).with_worker(departed(one, lost=True).replace(gpu=None, offloaded=False))
    message = f"process {worker.pid} has exited and no copy of its state is left"
    hint = "start the training again, or resume it from its own checkpoint file: a reboot discards saved states"
    op = op.replace(failure=Failure(code=NOT_FOUND.name, message=message, hint=hint))  # whatever was reported before
    return next_effects.reversed_operation(op) if op.direction == FORWARD else op


def _has_trained_after_image(op: Operation) -> bool:
    """Return True if all workers of a job have trained after its image."""
    return op.is_image_complete and all(worker.verified or worker.has_exited for worker in op.workers)


def _may_have_successor(op: Operation, worker: JobProcess) -> bool:
    """True if a successor may continue from its state and none has certainly done so; for ranks, of all or none."""
    crew = [other for other in op.workers if other.restarts] if op.restarts_together else [worker]
    return all(one.state_saved and not one.has_exited for one in crew) and not all(one.verified for one in crew)


def absent(op: Operation, worker: JobProcess, why: str) -> Operation:
    """Record that the process has exited with its state in the pool, as a restart intends.

    A successor that exits before its first boundary is not replaced endlessly: the job continues where it was, and if
    that fails too, several times, it is held.
    """
    if worker.gpu is None and worker.offloaded and not worker.needs_inspection:
        return op  # already recorded
    fell = worker.start_count > 0 and worker.gpu is not None and not worker.must_exit
    reservations = {gpu: size_bytes for gpu, size_bytes in worker.reservations.items() if gpu != worker.gpu}
    left = worker.replace(
        gpu=None,
        previous_gpu=worker.gpu or worker.previous_gpu,
        reservations=reservations,
        offloaded=True,
        must_exit=False,
        is_parked=False,
        park_requested=False,
        needs_inspection=False,
        waits=None,
        successor_activity="",
    )
    op = without_orders(op, worker.name).with_worker(left)
    if not fell:
        return next_effects.together(op)
    message = f"process {worker.pid} continued from the saved state but exited before its first boundary: {why}"
    op = reversal.because(op, REFUSED.name, message, f"read its output, and run: hegmctl op {op.id}")
    if op.direction == FORWARD:
        return next_effects.reversed_operation(op)
    return next_effects.returning_again(op) or next_effects.held(op)


def departed(worker: JobProcess, *, lost: bool) -> JobProcess:
    """Record that the process has ended, with its state or without. No effect of it remains."""
    return worker.replace(
        has_exited=True, lost=lost, needs_inspection=False, waits=None, is_parked=False, park_requested=False
    )


def living(op: Operation, name: str) -> JobProcess | None:
    """Return that worker, or None if its process has exited."""
    worker = op.worker(name)
    return None if worker is None or worker.has_exited else worker


def without_orders(op: Operation, name: str) -> Operation:
    """Drop the running effects of that worker: its connection or its process has ended."""
    return op.replace(
        pending=tuple([p for p in op.pending if p.worker != name or not Effect.register[p.effect].in_worker])
    )
