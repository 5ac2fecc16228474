"""Derives the next effects: those of the first stage that wants something.

Owns the numbering of effects, the facts that change when an effect is requested, and the deadline. Knows nothing of
events. An effect that is running but not wanted by the stage, as after a rollback began, is awaited in `settling`: a
worker never has two effects at once.
"""

from __future__ import annotations

from typing import Any

from hegmd.migration.machine import effects
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.operation import BACK, FORWARD, HOLD, JobProcess, Operation, Pending
from hegmd.migration.machine.stages import STAGES, Stage, Want, limit_s

SETTLING = STAGES[0]
PLANNED = "planned"
SUSPENDED, DONE, ROLLED_BACK, LOST = "suspended", "done", "rolled-back", "lost"
TERMINAL = (DONE, ROLLED_BACK, LOST)
# The phases of a resume up to its last byte. Afterwards only the release is left.
_UNTIL_DUE = frozenset(("settling", "reserving", "restoring", "unlocking", "reloading"))
# Waiting for what does not come is done less and less often, up to this: a job may be parked meanwhile.
MAX_RETRY_S = 60.0
# A job that failed elsewhere is started so often where it was: the port of a launcher may be in use, or a supervisor
# about to reconnect, and a job that is held ends its supervisor.
MAX_RETURNS = 3


def advance(op: Operation, now: float) -> tuple[Operation, tuple[Effect, ...]]:
    """The operation in the stage that its facts put it in, and the effects to perform now."""
    op = _with_common_boundary(op)
    stage, wants = _first_stage(op)
    if stage is not SETTLING:
        op = _without_superseded(op, wants)
        if not _is_covered(op, wants):
            stage, wants = SETTLING, []
    if stage is None:
        return _in_phase(op, _resting_phase(op), now), ()
    op = _in_phase(op, stage.phase, now)
    emitted: list[Effect] = []
    for worker, want in wants:
        if worker.waits is None and not _is_pending(op, worker, want) and not _is_too_soon(op, worker, want):
            op, effect = _emit(op, worker.name, want)
            emitted.append(effect)
    return op, tuple(emitted)


def _with_common_boundary(op: Operation) -> Operation:
    """Ranks stop at one past the highest count, as soon as all counts are known."""
    if not op.is_distributed or op.at is not None or op.direction != FORWARD:
        return op
    counts = [worker.boundary for worker in op.live]
    known = [count for count in counts if count is not None]
    return op.replace(at=max(known) + 1) if known and len(known) == len(counts) else op


def _first_stage(op: Operation) -> tuple[Stage | None, list[tuple[JobProcess, Want]]]:
    for stage in STAGES:
        wants = [(worker, want) for worker in op.workers for want in stage.wants(op, worker)]
        if wants:
            return stage, wants
    return None, []


def _matches(pending: Pending, worker: JobProcess, want: Want) -> bool:
    kind, arguments = want
    return (
        pending.effect == kind.tag
        and pending.worker == worker.name
        and pending.gpu == arguments.get("gpu")
        and pending.at == arguments.get("at")
        and pending.generation == arguments.get("generation")
    )


def _is_pending(op: Operation, worker: JobProcess, want: Want) -> bool:
    return any(_matches(pending, worker, want) for pending in op.pending)


def _is_too_soon(op: Operation, worker: JobProcess, want: Want) -> bool:
    """True for the inspection of a worker whose bytes or communicators are still under way.

    A worker can have one effect of each kind. If one fails, the other one has to end before its result can be seen.
    """
    return want[0] is effects.Inspect and any(
        pending.worker == worker.name and pending.effect in _SIDE_BY_SIDE for pending in op.pending
    )


_SIDE_BY_SIDE = frozenset(one.tag for one in (effects.Disconnect, effects.Offload, effects.Reload, effects.Reconnect))


def _is_covered(op: Operation, wants: list[tuple[JobProcess, Want]]) -> bool:
    """True if every running effect is wanted by this stage, or disturbs nothing, as the seal of an image."""
    return all(
        pending.effect == effects.Seal.tag or any(_matches(pending, worker, want) for worker, want in wants)
        for pending in op.pending
    )


def _without_superseded(op: Operation, wants: list[tuple[JobProcess, Want]]) -> Operation:
    """Drop running parks that name another boundary than the present one."""
    parks = {worker.name: want for worker, want in wants if want[0] is effects.Park}
    kept = tuple(
        [
            pending
            for pending in op.pending
            if pending.effect != effects.Park.tag
            or pending.worker not in parks
            or pending.at == parks[pending.worker][1]["at"]
        ]
    )
    return op if len(kept) == len(op.pending) else op.replace(pending=kept)


def _emit(op: Operation, name: str, want: Want) -> tuple[Operation, Effect]:
    kind, arguments = want
    effect = kind(number=op.next_effect, worker=name, cause=op.seq, **arguments)
    pending = Pending(
        number=op.next_effect,
        effect=kind.tag,
        worker=name,
        gpu=arguments.get("gpu"),
        size_bytes=arguments.get("size_bytes"),
        at=arguments.get("at"),
        generation=arguments.get("generation"),
    )
    worker = op.worker(name)
    if worker is not None and kind in _MEANS:
        op = op.with_worker(worker.replace(**_MEANS[kind]))
    if kind is effects.Dump and op.image is not None:
        op = op.replace(image=op.image.replace(begun=True))
    return op.replace(next_effect=op.next_effect + 1, pending=(*op.pending, pending)), effect


# From the moment that it is asked for, whatever it may do is taken for done where that is the careful side.
_MEANS: dict[type[Effect], dict[str, Any]] = {
    effects.Park: {"park_requested": True, "is_parked": False},
    effects.Disconnect: {"is_connected": None},
    effects.Reconnect: {"is_connected": None},
    effects.Offload: {"was_offloaded": True, "verified": False},
    effects.Checkpoint: {"was_offloaded": True, "verified": False},
}


def _resting_phase(op: Operation) -> str:
    """Return the phase of an operation that wants nothing."""
    live = list(op.live)
    if any(worker.target_gpu is None or (op.direction == HOLD and worker.is_parked) for worker in live):
        return SUSPENDED
    if any(worker.lost for worker in op.workers):
        return LOST
    if not live and (op.ends_workers or any(worker.finished for worker in op.workers)):
        return DONE
    if not live and op.is_image_complete and op.direction == FORWARD:
        return DONE
    if not live or op.direction != FORWARD:
        return ROLLED_BACK
    return DONE


def _in_phase(op: Operation, phase: str, now: float) -> Operation:
    if phase == op.phase:
        return op
    return op.replace(phase=phase, attempts=0, deadline=_deadline(op, phase, now))


def on_time(op: Operation, now: float) -> Operation:
    """Return the operation with the deadline of its phase counted from `now`, for a restarted clock."""
    op = op.replace(due=None if op.due is None or op.limits.resume_s is None else now + op.limits.resume_s)
    return op.replace(attempts=0, deadline=_deadline(op, op.phase, now))


def _deadline(op: Operation, phase: str, now: float) -> float | None:
    """When the phase is over at the latest; within a resume that is due, when that is."""
    limit = limit_s(op.limits, phase)
    if limit is None or is_in_block(op, phase):
        return None
    is_bound = op.due is not None and op.direction == FORWARD and phase in _UNTIL_DUE
    return now + limit if op.due is None or not is_bound else min(now + limit, op.due)


def is_in_block(op: Operation, phase: str) -> bool:
    """True if the next step waits for a script to leave its `hegm.released()` block, which may take any time."""
    return op.lent and phase == "reloading"


def later(op: Operation, now: float) -> Operation:
    """The operation with its next deadline, further away each time."""
    tries = op.attempts + 1
    wait_s = min(op.limits.retry_s * 2.0 ** min(tries, 16), MAX_RETRY_S)
    return op.replace(attempts=tries, deadline=now + wait_s)


def reversed_operation(op: Operation) -> Operation:
    """Return the operation on its rollback. Running parks are left to `withdraw`.

    A running dump is dropped, and its executor undoes it. So is the start of ranks.
    """
    workers = tuple([worker.replace(target_gpu=_rollback_target(worker), must_exit=False) for worker in op.workers])
    dropped = [effects.AwaitSuccessor.tag, effects.Park.tag, effects.Survey.tag, effects.Hold.tag, effects.Dump.tag]
    if op.restarts_together:  # another start replaces it, and its processes pass no boundary without the others
        dropped += [effects.Restore.tag, effects.Verify.tag]
    pending = tuple([pending for pending in op.pending if pending.effect not in dropped])
    return together(
        op.replace(direction=BACK, workers=workers, pending=pending, attempts=0, reversed_at=op.next_effect)
    )


def returning_again(op: Operation) -> Operation | None:
    """Return the rollback of a restart with another start, of ranks of all of them; None if there were enough.

    A start releases the reservations of its processes.
    """
    if (
        not any(worker.restarts for worker in op.workers)
        or op.direction != BACK
        or op.failed_returns + 1 >= MAX_RETURNS
    ):
        return None
    replaced = (effects.Restore.tag, effects.Verify.tag)
    pending = tuple([pending for pending in op.pending if pending.effect not in replaced])
    workers = [
        worker.replace(reservations=dict.fromkeys(worker.reservations, 0)) if worker.is_absent else worker
        for worker in op.workers
    ]
    return together(op.replace(workers=tuple(workers), pending=pending, failed_returns=op.failed_returns + 1))


def together(op: Operation) -> Operation:
    """For a restart of ranks: have every rank exit once one of them has no process.

    The state that counts is the one in the pool: all ranks saved it at the same boundary.
    """
    if not op.restarts_together or op.direction == HOLD or not any(worker.is_absent for worker in op.live):
        return op
    return op.replace(workers=tuple([_following(op, worker) for worker in op.workers]))


def _following(op: Operation, worker: JobProcess) -> JobProcess:
    if worker.has_exited or worker.gpu is None or worker.must_exit:
        return worker
    goal = worker.target_gpu if op.direction == FORWARD else worker.origin_gpu
    return worker.replace(target_gpu=goal, must_exit=True, offloaded=True)


def _rollback_target(worker: JobProcess) -> str | None:
    """Return where a rollback takes the worker: its origin or, if it runs with its bytes, its present GPU."""
    runs = not worker.is_parked and not worker.offloaded and worker.gpu is not None
    return worker.gpu if runs else worker.origin_gpu


def held(op: Operation) -> Operation:
    """Return the operation held: every worker stays suspended with its bytes and its reservation."""
    workers: list[JobProcess] = []
    for worker in op.workers:
        stays = worker.gpu is not None and not worker.offloaded
        kept = next((gpu for gpu in (worker.origin_gpu, worker.target_gpu) if gpu in worker.reservations), None)
        workers.append(
            worker.replace(target_gpu=worker.gpu if stays else None, kept_gpu=None if stays else kept, must_exit=False)
        )
    return op.replace(direction=HOLD, workers=tuple(workers), attempts=0)
