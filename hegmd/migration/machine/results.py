"""The changes that the result of an effect makes to an operation: one function per event, named in the machine's table.

Owns what is known about a worker after something was done to it, failed, or was inspected. Records facts and never
requests an effect: next_effects.py derives the effects from the facts.
"""

from __future__ import annotations

from hegmd.errors import REFUSED
from hegmd.migration.machine import communicators, effects, events, next_effects, reversal, worker_exit
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.operation import (
    BACK,
    FOR_AGENT,
    FOR_RETRY,
    FORWARD,
    HOLD,
    Failure,
    JobProcess,
    Operation,
    Pending,
)
from hegmd.migration.machine.stages import is_away

# After this many attempts in which the ranks did not park at one boundary, the operation gives up.
MAX_ROUNDS = 10


def reserved(op: Operation, worker: JobProcess, pending: Pending, event: events.Reserved) -> Operation:
    reservations = {**worker.reservations, str(pending.gpu): pending.size_bytes or 0}
    return op.replace(waiting_for=None).with_worker(worker.replace(reservations=reservations))


def reservation_released(
    op: Operation, worker: JobProcess, pending: Pending, event: events.ReservationReleased
) -> Operation:
    reservations = {gpu: size for gpu, size in worker.reservations.items() if gpu != pending.gpu}
    return op.with_worker(worker.replace(reservations=reservations))


def pool_reserved(op: Operation, worker: JobProcess, pending: Pending, event: events.PoolReserved) -> Operation:
    return op.with_worker(worker.replace(pool_bytes=pending.size_bytes or 0))


def pool_released(op: Operation, worker: JobProcess, pending: Pending, event: events.PoolReleased) -> Operation:
    return op.with_worker(worker.replace(pool_bytes=0))


def successor_awaited(op: Operation, worker: JobProcess, pending: Pending, event: events.SuccessorAwaited) -> Operation:
    """Record, once, that the successor was awaited. One that is not ready is started without a prestart."""
    return op.with_worker(worker.replace(successor_ready=True))


def surveyed(op: Operation, worker: JobProcess, pending: Pending, event: events.Surveyed) -> Operation:
    """Record the count of a survey. The bytes to move are only certain while the worker is parked."""
    if not worker.is_parked:
        return op.with_worker(worker.replace(boundary=event.boundary))
    if not worker.is_carried:  # the driver carries them all, and measures for itself
        return op.with_worker(worker.replace(measured=True))
    reservations = dict(worker.reservations)
    if worker.gpu is not None:
        reservations[worker.gpu] = max(event.size_bytes, reservations.get(worker.gpu, 0))
    return op.with_worker(worker.replace(measured=True, size_bytes=event.size_bytes, reservations=reservations))


def parked(op: Operation, worker: JobProcess, pending: Pending, event: events.Parked) -> Operation:
    op = op.with_worker(worker.replace(is_parked=True, boundary=event.boundary, measured=False))
    return _park_together(op, event.boundary)


def overran(op: Operation, worker: JobProcess, pending: Pending, event: events.PassedBoundary) -> Operation:
    """Choose a later boundary, each time twice as far, so that an order arrives before very short batches end."""
    op = op.with_worker(worker.replace(boundary=event.boundary, park_requested=False))
    return _park_together(op, event.boundary + (1 << op.rounds), event.why)


def _park_together(op: Operation, boundary: int, why: str = "") -> Operation:
    """Park all ranks at the boundary of the rank that is furthest, so that no collective is left incomplete.

    A rank that was parked earlier is asked again. This counts as a round too, which limits the number of attempts.
    """
    if not op.is_distributed or op.at is None or boundary == op.at:
        return op
    if op.rounds >= MAX_ROUNDS:
        message = f"the ranks did not park at one boundary in {MAX_ROUNDS} attempts" + (f": {why}" if why else "")
        return reversal.back(
            op, REFUSED.name, message, "make all ranks run the same number of batches per loop in the training script"
        )
    return op.replace(at=max(boundary, op.at), rounds=op.rounds + 1)


def withdrawn(op: Operation, worker: JobProcess, pending: Pending, event: events.Withdrawn) -> Operation:
    return op.with_worker(worker.replace(park_requested=False, is_parked=False))


def offloaded(op: Operation, worker: JobProcess, pending: Pending, event: events.Offloaded) -> Operation:
    return op.with_worker(worker.replace(offloaded=True, state_saved=worker.restarts))


def checkpointed(op: Operation, worker: JobProcess, pending: Pending, event: events.Checkpointed) -> Operation:
    """Record a checkpoint: the measured sizes, and the memory that is really reserved for a rollback."""
    if worker.restarts:
        return worker_exit.absent(op, worker, "it left")
    reservations = dict(worker.reservations)
    if event.reserved_bytes is not None and worker.gpu is not None:
        reservations[worker.gpu] = event.reserved_bytes
    driver_bytes = worker.driver_bytes if event.driver_bytes is None else event.driver_bytes
    driver_bytes_by_gpu = event.driver_bytes_by_gpu or worker.driver_bytes_by_gpu
    off = worker.replace(
        gpu=None,
        previous_gpu=worker.gpu,
        reservations=reservations,
        driver_bytes=driver_bytes,
        driver_bytes_by_gpu=driver_bytes_by_gpu,
        stays_bytes=worker.stays_bytes if event.stays_bytes is None else event.stays_bytes,
        is_locked=False,
    )
    return op.replace(waiting_for=None).with_worker(off)


def held(op: Operation, worker: JobProcess, pending: Pending, event: events.Held) -> Operation:
    """Its time is over."""
    return reversal.resume_early(op)


def dumped(op: Operation, worker: JobProcess, pending: Pending, event: events.Dumped) -> Operation:
    """The job ends from here, its image being whole; or goes home, before the bytes are in it."""
    if op.image is None:
        return op
    if not op.image.leave_running:
        return op.replace(image=op.image.replace(whole=True))
    op = op.replace(image=op.image.replace(written=True))
    return op.replace(
        workers=tuple([worker.replace(target_gpu=worker.origin_gpu, kept_gpu=None) for worker in op.workers])
    )


def sealed(op: Operation, worker: JobProcess, pending: Pending, event: events.Sealed) -> Operation:
    return op if op.image is None else op.replace(image=op.image.replace(written=False, whole=True))


def scrapped(op: Operation, worker: JobProcess, pending: Pending, event: events.ImageFilesRemoved) -> Operation:
    return reversal.without_image(op)


def ended(op: Operation, worker: JobProcess, pending: Pending, event: events.Ended) -> Operation:
    return op.with_worker(worker_exit.departed(worker, lost=False))


def outgrown(op: Operation, worker: JobProcess, pending: Pending, event: events.GrewBeyondPlan) -> Operation:
    """Record the larger need; the checkpoint is retried once it is journalled and reserved."""
    return op.with_worker(
        worker.replace(driver_bytes=event.driver_bytes, driver_bytes_by_gpu=event.driver_bytes_by_gpu, is_locked=False)
    )


def restored(op: Operation, worker: JobProcess, pending: Pending, event: events.Restored) -> Operation:
    """Record a restore. A worker that the driver restored on its former GPU has that GPU as its target."""
    if event.landed is not None:
        worker = worker.replace(target_gpu=event.landed, gpu_unknown=False)
    if event.pid is not None:
        worker = _replaced(worker, event)
        op = reversal.on_again(op) if event.is_earlier else op
    return op.replace(waiting_for=None).with_worker(worker.replace(gpu=event.landed or pending.gpu))


def _replaced(worker: JobProcess, event: events.Restored) -> JobProcess:
    """Record the successor. It is inspected first, and its next boundary proves that the restart succeeded."""
    return worker.replace(
        pid=event.pid,
        start_ticks=event.start_ticks,
        token=event.token,
        run=event.run,
        boundary=event.boundary,
        must_exit=False,
        start_count=worker.start_count + 1,
        reservations={},
        was_offloaded=True,
        verified=False,
        needs_inspection=True,
        recount_memory=True,
        waits=None,
    )


def reloaded(op: Operation, worker: JobProcess, pending: Pending, event: events.Reloaded) -> Operation:
    return op.replace(waiting_for=None).with_worker(worker.replace(offloaded=False))


def released(op: Operation, worker: JobProcess, pending: Pending, event: events.Released) -> Operation:
    return op.with_worker(worker.replace(park_requested=False, is_parked=False))


def verified(op: Operation, worker: JobProcess, pending: Pending, event: events.Verified) -> Operation:
    return op.with_worker(worker.replace(verified=True, boundary=event.boundary))


def inspected(op: Operation, worker: JobProcess, pending: Pending, event: events.Inspected) -> Operation:
    """Replace what was known about the worker by its true state."""
    if event.busy:
        return op.with_worker(worker.replace(waits=FOR_RETRY))
    if event.failed:
        return _mark_lost(op, worker, event.failed)
    was_parked = worker.is_parked and (op.direction == HOLD or op.holds or is_away(op))
    whole = event.gpu is not None and not event.out_bytes
    passed = not event.parked and whole and worker.boundary is not None and event.boundary > worker.boundary
    is_following = op.restarts_together and worker.must_exit and worker.state_saved and worker.offloaded
    now_known = worker.replace(
        needs_inspection=False,
        recount_memory=False,
        waits=None,
        is_parked=event.parked,
        is_locked=event.locked,
        # A thread runs when its agent has connected it again.
        is_connected=worker.is_connected if event.parked else True,
        boundary=event.boundary if event.parked or not worker.was_offloaded else worker.boundary,
        offloaded=event.out_bytes > 0 or is_following,
        # Bytes that were offloaded, by any program, must be seen in use before the memory that holds them is released.
        was_offloaded=worker.was_offloaded or event.out_bytes > 0,
        gpu=event.gpu,
        previous_gpu=worker.previous_gpu if event.gpu is not None or worker.gpu is None else worker.gpu,
        verified=not event.out_bytes and (worker.verified or (worker.was_offloaded and passed)),
        reservations=event.reservations if worker.recount_memory else worker.reservations,
        pool_bytes=event.pool_bytes if worker.recount_memory else worker.pool_bytes,
    )
    op = worker_exit.without_orders(op, worker.name)
    if worker.gpu_unknown and event.gpu is not None:  # another program restored it, or an interrupted restore finished
        now_known = now_known.replace(
            gpu_unknown=False, target_gpu=event.gpu if op.direction == FORWARD else worker.target_gpu
        )
    if not event.parked and whole and op.direction != FORWARD and not is_following:
        now_known = now_known.replace(origin_gpu=event.gpu, target_gpu=event.gpu)
    if not was_parked or event.parked:
        return op.with_worker(now_known)
    # Its agent waited for a daemon until its time limit, reloaded its own bytes and resumed the training.
    home = event.gpu or worker.kept_gpu or worker.first_gpu
    op = op.with_worker(now_known.replace(park_requested=False, origin_gpu=home, target_gpu=home))
    message = f"process {worker.pid} resumed on its own because hegmd did not answer in time"
    return reversal.back(op, REFUSED.name, message, "try again")


def failed(op: Operation, worker: JobProcess, pending: Pending, event: events.Failed) -> Operation:
    """Roll back, hold, or inspect and retry, depending on what failed."""
    in_worker = Effect.register[pending.effect].in_worker
    if in_worker and event.fault == events.DISCONNECTED:
        return op.with_worker(worker.replace(needs_inspection=True, waits=FOR_AGENT))
    if pending.effect == effects.AwaitSuccessor.tag:
        return op.with_worker(worker.replace(successor_ready=True))
    if (
        event.fault in (events.OUT_OF_MEMORY, events.DRIVER_OUT_OF_MEMORY)
        and op.direction == BACK
        and (worker.gpu is None or worker.offloaded)
    ):
        return _waiting_for_memory(op, worker, pending, event)
    if pending.effect == effects.Dump.tag:
        return _change_direction(reversal.without_image(op), event)
    if pending.effect == effects.Seal.tag:
        return reversal.image_dropped(op, event.code, event.message, event.hint)
    if pending.effect in _HARMLESS:
        changed = {"park_requested": False} if pending.effect == effects.Park.tag else {}
        return _change_direction(op.with_worker(worker.replace(**changed)), event)
    if pending.effect == effects.Reconnect.tag:
        return communicators.not_reconnected(op, worker, pending, event)
    if pending.effect == effects.Restore.tag and (again := next_effects.returning_again(op)) is not None:
        return again.with_worker(
            worker.replace(reservations=dict.fromkeys(worker.reservations, 0), needs_inspection=True, waits=FOR_RETRY)
        )
    if pending.effect == effects.Checkpoint.tag and op.restarts_together and op.direction == BACK:
        # Its supervisor was connecting, perhaps. No rank may stay: the others cannot train without it.
        op = op.with_worker(worker.replace(needs_inspection=True, waits=FOR_RETRY))
        return next_effects.returning_again(op) or _change_direction(op, event)
    if pending.effect in _UNCERTAIN:
        # A failed restore may have lost its reservation. An interrupted checkpoint has kept none.
        recount = worker.recount_memory or pending.effect in (effects.Checkpoint.tag, effects.Restore.tag)
        op = op.with_worker(worker.replace(needs_inspection=True, recount_memory=recount))
        if pending.effect in _OUTWARD and op.direction == BACK:
            return _split(op, worker.name, event)
        if op.direction == BACK and pending.number < op.reversed_at:
            return op  # the loss of one GPU helper fails the effects of all ranks, and their rollback has not begun
        return _change_direction(op, event)
    return op.with_worker(worker.replace(needs_inspection=worker.needs_inspection or in_worker, waits=FOR_RETRY))


_HARMLESS = frozenset((effects.Reserve.tag, effects.ReservePool.tag, effects.Survey.tag, effects.Park.tag))
_OUTWARD = frozenset((effects.Disconnect.tag, effects.Offload.tag, effects.LockRank.tag, effects.Checkpoint.tag))
_UNCERTAIN = frozenset((*_OUTWARD, effects.Restore.tag, effects.Reload.tag))


def _change_direction(op: Operation, event: events.Failed) -> Operation:
    """Change direction after a failure: from forward to a rollback, and from a rollback to held."""
    if op.direction == FORWARD:
        return reversal.back(op, event.code, event.message, event.hint)
    hint = f"run: hegmctl resume; its state is kept, see hegmctl op {op.id}"
    return next_effects.held(reversal.because(op, event.code, event.message, hint))


def _split(op: Operation, name: str, event: events.Failed) -> Operation:
    """A worker that cannot leave again stays where it has arrived, rather than be put at risk for the others' sake."""
    worker = op.worker(name)
    if worker is None or worker.gpu is None:
        return _change_direction(op, event)
    return reversal.because(
        op.with_worker(worker.replace(target_gpu=worker.gpu)), event.code, event.message, event.hint
    )


def _waiting_for_memory(op: Operation, worker: JobProcess, pending: Pending, event: events.Failed) -> Operation:
    """Keep the worker checkpointed until GPU memory is free.

    Forgets its reservation, unless only the driver's own allocation failed: then the reservation still exists. Without
    a reservation nothing is restored or reloaded, except storages that are allocated in rounds, of which some may
    exist.
    """
    is_lost = event.fault == events.OUT_OF_MEMORY and (pending.effect != effects.Reload.tag or not worker.overlap_bytes)
    reservations = {**worker.reservations, str(pending.gpu or worker.gpu): 0} if is_lost else worker.reservations
    by_itself = f"free GPU memory on {worker.gpu}: hegmd then restores it automatically"
    lacks = Failure(code=event.code, message=event.message, hint=by_itself if worker.gpu else event.hint)
    return op.replace(waiting_for=lacks).with_worker(
        worker.replace(reservations=reservations, needs_inspection=True, waits=FOR_RETRY)
    )


def _mark_lost(op: Operation, worker: JobProcess, why: str) -> Operation:
    """Record that the driver can never restore the worker. Its reservations and bytes are useless."""
    op = worker_exit.without_orders(op, worker.name).with_worker(worker_exit.departed(worker, lost=True))
    op = reversal.because(
        op, REFUSED.name, f"process {worker.pid} cannot be restored: {why}", "kill it and start it again"
    )
    return next_effects.reversed_operation(op) if op.direction == FORWARD and is_away(op) else op
