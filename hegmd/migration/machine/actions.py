"""The changes that requests and other events make to an operation: one function per event, named in the machine's
table.

Records facts and never requests an effect: next_effects.py derives the effects from the facts. A function that refuses
raises and has changed nothing. results.py has the results of effects; reversal.py and worker_exit.py have what several
events share.
"""

from __future__ import annotations

from hegmd.errors import CANCELLED, TIMEOUT, Refused
from hegmd.migration.machine import communicators, effects, events, next_effects, reversal, worker_exit
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.operation import (
    CHECKPOINT,
    FOR_AGENT,
    FORWARD,
    RESTORE,
    RESUME,
    Failure,
    JobProcess,
    Limits,
    Operation,
    Pending,
)
from hegmd.migration.machine.stages import is_quicker_to_finish, limit_s
from hegmd.migration.machine.wording import listed

# Phases in which a missed deadline rolls a forward operation back, if no bytes are offloaded.
_TURN_WHEN_LATE = frozenset(
    (
        "settling reserving counting quiescing measuring disconnecting offloading locking checkpointing handing "
        "restoring reloading"
    ).split()
)


def begin(op: Operation, event: events.Begin, now: float) -> Operation:
    """Start the operation; every effect follows from the facts."""
    return op.replace()


def cancel(op: Operation, event: events.CancelRequested, now: float) -> Operation:
    """Roll back, unless the operation is already rolling back, or finishing takes less time."""
    if op.direction != FORWARD:
        raise Refused(f"operation {op.id} is already being rolled back", f"watch it with: hegmctl op {op.id}")
    if is_quicker_to_finish(op):
        raise Refused(
            f"operation {op.id} can no longer be rolled back: finishing it takes less time",
            "let it finish, then migrate the job back",
        )
    return reversal.back(
        op, CANCELLED.name, f"cancelled by {event.by or 'its caller'}", "run the command again to retry"
    )


def drop_image(op: Operation, event: events.CancelRequested, now: float) -> Operation:
    """Cancel the image of a job that trains again, and remove the files that were written."""
    if op.image is None or op.image.unwanted:
        raise Refused(f"the image of operation {op.id} is being removed", f"watch it with: hegmctl op {op.id}")
    message = f"cancelled by {event.by or 'its caller'}"
    return reversal.image_dropped(op, CANCELLED.name, message, "run the command again to retry")


def drop_state(op: Operation, event: events.DropRequested, now: float) -> Operation:
    """Discard the saved state of a restart. Raises Refused while a process of the operation is alive."""
    here = next((worker for worker in op.live if not worker.is_absent), None)
    if here is not None:
        raise Refused(
            f"operation {op.id} cannot be dropped: process {here.pid} is running and owns its saved state",
            f"run: hegmctl resume {here.pid}; the state is freed when that process exits",
        )
    for worker in op.live:
        departed = worker_exit.departed(worker, lost=False).replace(gpu=None, offloaded=False)
        op = worker_exit.without_orders(op, worker.name).with_worker(departed)
    message = f"{event.by or 'its owner'} dropped its saved state"
    hint = "start the training again, or resume it from a checkpoint file of its own"
    return op.replace(failure=Failure(code=CANCELLED.name, message=message, hint=hint), waiting_for=None)


def resume(op: Operation, event: events.ResumeRequested, now: float) -> Operation:
    """Head for the GPUs that are named; where that fails, or takes too long, it is suspended again."""
    missing = [worker.name for worker in op.live if worker.name not in event.to]
    if missing:
        raise Refused(
            f"no target GPU is given for {', '.join(missing)}", "name a target GPU for every process of the job"
        )
    workers = tuple([_resuming(worker, event.to.get(worker.name)) for worker in op.workers])
    kind = RESTORE if op.kind == RESTORE else RESUME
    # The changes of a restart were meant for the former target. The resume request says what applies now.
    op = op.replace(kind=kind, direction=FORWARD, workers=workers, failure=None, attempts=0, respawn=None)
    op = op.replace(
        reconnects=op.reconnects + 1,
        failed_reconnects=0,
        failed_returns=0,
        swaps_to=None,
        swaps_with=(),
        reserves_late=any(one.communicators for one in workers),
    )
    due = None if event.limit_s is None else now + event.limit_s
    op = op.replace(limits=op.limits.replace(resume_s=event.limit_s), due=due)
    if op.restarts_together and any(worker.is_absent for worker in op.live):
        # The rollback of a job without a process is to stay suspended.
        op = op.replace(workers=tuple([worker.replace(origin_gpu=None) for worker in op.workers]))
    return next_effects.together(op)


def _resuming(worker: JobProcess, gpu: str | None) -> JobProcess:
    if worker.has_exited:
        return worker
    runs = worker.gpu is not None and not worker.is_parked and not worker.offloaded
    gpu = worker.gpu if runs else gpu  # it waits for the others: it could not be stopped to be moved
    return worker.replace(origin_gpu=worker.gpu, target_gpu=gpu, kept_gpu=None, waits=None, verified=False)


def resume_early(op: Operation, event: events.ResumeRequested, now: float) -> Operation:
    """Resume a quiesced job where it is."""
    return reversal.resume_early(op)


def take_up(op: Operation, event: events.Repurposed, now: float) -> Operation:
    """Become the operation that was requested now, and keep what is known about the parked workers."""
    planned = {worker.name: worker for worker in event.into.workers}
    if planned.keys() != {worker.name for worker in op.workers}:
        raise Refused(
            f"operation {op.id} holds other processes than the job has now",
            f"run: hegmctl cancel {op.id}; then run the command again",
        )
    workers = [
        planned[held.name].replace(is_parked=held.is_parked, park_requested=held.park_requested, boundary=held.boundary)
        for held in op.workers
    ]
    return event.into.replace(
        id=op.id,
        phase=op.phase,
        workers=tuple(workers),
        created_utc=op.created_utc,
        seq=op.seq,
        next_effect=op.next_effect,
        at=op.at,
        rounds=op.rounds,
        deadline=op.deadline,
        parked_since=op.parked_since,
    )


def hand_over(op: Operation, event: events.ImageRequested, now: float) -> Operation:
    """Write an image of a suspended job. If that fails, the job stays suspended."""
    here = next((worker for worker in op.live if worker.gpu is not None or not worker.is_parked), None)
    if here is not None:
        raise Refused(
            f"process {here.pid} of operation {op.id} is not suspended, but other processes of its job may be",
            f"run: hegmctl resume {here.pid}; then: hegmctl checkpoint {here.pid} DIR",
        )
    if (against := communicators.against_image(op)) is not None:
        raise Refused(*against)
    workers = tuple([worker.replace(origin_gpu=None, target_gpu=None, waits=None) for worker in op.workers])
    op = op.replace(
        kind=CHECKPOINT, direction=FORWARD, image=event.handoff, workers=workers, failure=None, waiting_for=None
    )
    return op.replace(limits=op.limits.replace(hand_s=event.limit_s or Limits().hand_s), attempts=0)


def worker_exited(op: Operation, event: events.WorkerExited, now: float) -> Operation:
    """Record that a process has exited: its reservations can be released, and its job is rolled back without it."""
    if event.stateless:
        return worker_exit.without_state(op, event.worker)
    return worker_exit.gone(op, event.worker, event.why, finished=event.finished)


def record_progress(op: Operation, event: events.SuccessorProgress, now: float) -> Operation:
    """Record the progress of a restart, for clients and the story. No decision depends on it."""
    worker = worker_exit.living(op, event.worker)
    if worker is None or not worker.is_absent or worker.successor_activity == event.doing:
        return op
    return op.with_worker(worker.replace(successor_activity=event.doing))


def training_ended(op: Operation, event: events.TrainingEnded, now: float) -> Operation:
    """Record that the successor finished its training: the restart succeeded, even if no boundary was seen."""
    worker = worker_exit.living(op, event.worker)
    if worker is None or not worker.restarts or not worker.state_saved:
        return op
    op = worker_exit.without_orders(op.replace(direction=FORWARD, failure=None, waiting_for=None), worker.name)
    # A worker that was not inspected yet may hold any of these reservations.
    places = filter(None, (worker.gpu, worker.previous_gpu, worker.target_gpu, worker.origin_gpu))
    reservations = {**dict.fromkeys(places, 0), **worker.reservations}
    return op.with_worker(
        worker_exit.departed(worker, lost=False).replace(gpu=None, finished=True, reservations=reservations)
    )


def agent_lost(op: Operation, event: events.AgentLost, now: float) -> Operation:
    """Record that the agent disconnected. Whether it obeys running orders is unknown until it reconnects."""
    worker = worker_exit.living(op, event.worker)
    if worker is None or (op.needs_image and any(pending.effect == effects.Dump.tag for pending in op.pending)):
        return op  # agents disconnect while an image is written
    return op.with_worker(worker.replace(needs_inspection=True, waits=FOR_AGENT))


def agent_back(op: Operation, event: events.AgentBack, now: float) -> Operation:
    """Inspect a worker whose agent has reconnected. With a different token it runs another program now."""
    worker = worker_exit.living(op, event.worker)
    if worker is None:
        return op
    if event.token != worker.token:
        return worker_exit.gone(op, worker.name, "it runs another program")
    return worker_exit.without_orders(op, worker.name).with_worker(worker.replace(needs_inspection=True, waits=None))


def deadline_passed(op: Operation, event: events.DeadlinePassed, now: float) -> Operation:
    """Roll back if that is still possible; otherwise inspect and try again."""
    if op.deadline is None or now < op.deadline:
        return op  # an alarm that was set for an earlier phase
    if op.phase == "sealing" and op.image is not None and not op.image.unwanted:
        message = f"hegmd did not write and verify the image within {limit_s(op.limits, op.phase):g} s"
        return next_effects.later(
            reversal.image_dropped(op, TIMEOUT.name, message, "check the disk that holds it: dmesg"), now
        )
    if op.direction == FORWARD and op.phase in _TURN_WHEN_LATE and not _waits_for_moved(op):
        is_due = op.due is not None and now >= op.due
        within = f"within {op.limits.resume_s if is_due else limit_s(op.limits, op.phase):g} s"
        # A late agent and an agent that reports no boundary get the same message.
        late = f"operation {op.id} did not finish {op.phase} {within}"
        message = f"no batch boundary {within}" if op.phase == "quiescing" else late
        return reversal.back(op, TIMEOUT.name, *_with_silent_ranks(op, message))
    is_reconnecting = any(pending.effect == effects.Reconnect.tag for pending in op.pending)
    for pending in op.pending:
        if pending.effect != effects.Seal.tag:  # sealing has its own limit and always ends
            op = _forgotten(op, pending)
    workers = [worker.replace(waits=None) for worker in op.workers]
    op = op.replace(workers=tuple(workers))
    if is_reconnecting:
        late = f"operation {op.id} did not complete {op.phase} within {limit_s(op.limits, op.phase):g} s"
        op = communicators.another_round(op, TIMEOUT.name, late)
    return next_effects.later(op, now)


def _with_silent_ranks(op: Operation, message: str) -> tuple[str, str]:
    """Return the message and its next step. If only some ranks did not answer, name these."""
    silent = {pending.worker for pending in op.pending}
    pids = [worker.pid for worker in op.live if worker.name in silent]
    if not pids or len(pids) == len(list(op.live)):
        return message, "retry with a longer --timeout, or check what the job is doing"
    who = f"process{'es' * (len(pids) > 1)} {listed([str(pid) for pid in pids])}"
    hint = f"check what it is doing: hegmctl inspect {pids[0]}; or retry with a longer --timeout"
    return f"{message}: {who} did not answer", hint


def _waits_for_moved(op: Operation) -> bool:
    """True if the operation waits in `settling` for workers whose bytes may be offloaded, or that it keeps parked.

    Rolling back would not help the former, and would resume the latter only because the daemon was restarted.
    """
    return op.phase == "settling" and any(worker.was_offloaded or (op.holds and worker.is_parked) for worker in op.live)


def recovered(op: Operation, event: events.Recovered, now: float) -> Operation:
    """Forget all running effects and reservations after a start of the daemon, and have every worker inspected.

    An operation that had not begun is rolled back: its client got no answer, or was refused because the journal could
    not be written. The deadline is set again, since the clock differs after a reboot.
    """
    if op.phase == next_effects.PLANNED:
        message = f"hegmd was stopped before operation {op.id} began"
        return reversal.back(op, CANCELLED.name, message, "run the command again; nothing was changed")
    for pending in op.pending:
        op = _forgotten(op, pending)
    workers = [
        w if w.has_exited else w.replace(needs_inspection=True, recount_memory=True, waits=None) for w in op.workers
    ]
    return next_effects.on_time(op.replace(workers=tuple(workers), pending=()), now)


def _forgotten(op: Operation, pending: Pending) -> Operation:
    """Return the operation without a running effect that may or may not have been done.

    Everything that the effect reserves or releases counts as uncertain: it is reserved again before use, and released
    at the end.
    """
    op = op.replace(pending=tuple([other for other in op.pending if other.number != pending.number]))
    worker = op.worker(pending.worker)
    if worker is None:
        return op
    if pending.effect == effects.AwaitSuccessor.tag:
        return op.with_worker(worker.replace(successor_ready=True))
    if Effect.register[pending.effect].in_worker:
        return op if worker.has_exited else op.with_worker(worker.replace(needs_inspection=True))
    if pending.effect in _ON_WHOLE:
        return op
    if pending.effect == effects.ReservePool.tag:
        return op.with_worker(worker.replace(pool_bytes=max(worker.pool_bytes, 1)))
    if pending.effect == effects.ReleasePool.tag:
        return op.with_worker(worker.replace(pool_bytes=min(worker.pool_bytes, 1)))
    gpu = str(pending.gpu)
    known = worker.reservations.get(gpu, 0) if pending.effect == effects.Reserve.tag else 0
    return op.with_worker(worker.replace(reservations={**worker.reservations, gpu: known}))


# Requesting these again shows whether they were done.
_ON_WHOLE = frozenset(
    (effects.Hold.tag, effects.Dump.tag, effects.Seal.tag, effects.RemoveImageFiles.tag, effects.End.tag)
)
