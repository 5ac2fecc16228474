"""The stages of a move in order: what each wants, and of which worker.

Owns STAGES, the only table of them. A stage reads the facts and each worker's target, and names the missing effects;
the operation is in the first stage that wants any. So a rollback, a second attempt and a start after a crash need no
code of their own: the facts differ, the table is the same.

This order keeps the promises. GPU and pool memory are reserved before a worker gets an order. Nothing is freed
(`leaving`, `tidying`) before its purpose is fulfilled. No thread is resumed before every worker has its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hegmd.migration.machine import effects
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.operation import CHECKPOINT, FORWARD, HOLD, QUIESCE, JobProcess, Limits, Operation

# An agent gets this share of the limit, so that it times out first and reports what it waited for.
AGENT_SHARE = 0.9

Want = tuple[type[Effect], dict[str, Any]]
Wants = Callable[[Operation, JobProcess], Iterator[Want]]


class Stage(NamedTuple):
    """A stage: its name as a phase, what it wants and by which effects, the limit that it runs under, its purpose."""

    phase: str
    wants: Wants
    asks: tuple[str, ...]
    limit: str
    purpose: str


def is_arrived(worker: JobProcess) -> bool:
    """Return True if the worker is where it is to be, with all its bytes."""
    return worker.gpu is not None and worker.gpu == worker.target_gpu and not worker.offloaded and not worker.must_exit


def is_away(op: Operation) -> bool:
    """True if any worker is not at its target yet, so that all must stay parked."""
    return op.direction != HOLD and any(not is_arrived(worker) for worker in op.live)


def _settling(op: Operation, worker: JobProcess) -> Iterator[Want]:
    # While an image is written, no worker can be asked: the agents are disconnected, and the processes may be stopped.
    begun = op.image is not None and op.image.begun
    if worker.needs_inspection and not worker.has_exited and not (op.needs_image and begun) and not op.ends_workers:
        yield effects.Inspect, {}


def _arming(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if worker.has_exited or is_arrived(worker):
        return
    if worker.target_gpu is not None and _is_short(worker) and not _is_too_early(op, worker):
        yield effects.Reserve, {"gpu": worker.target_gpu, "size_bytes": worker.reservation_bytes}
    for gpu in worker.reservations:
        if _is_for_another(op, worker, gpu):
            yield effects.ReleaseReservation, {"gpu": gpu}
    # Never for one whose bytes are out: theirs is the pool that it was offloaded to, or none.
    short = worker.is_carried and worker.pool_bytes < worker.size_bytes
    if _is_to_leave(op, worker) and short and not worker.offloaded:
        yield effects.ReservePool, {"size_bytes": worker.size_bytes}


def _is_short(worker: JobProcess) -> bool:
    """Return True if less is held for it on its target than it needs there."""
    return worker.target_gpu is not None and worker.reservations.get(worker.target_gpu, -1) < worker.reservation_bytes


def _is_too_early(op: Operation, worker: JobProcess) -> bool:
    """True if its target memory is still used by another worker of the job."""
    return op.reserves_late and (
        any(_is_to_leave(op, other) for other in op.live)
        or any(_is_for_another(op, other, str(worker.target_gpu)) for other in op.live)
    )


def _is_for_another(op: Operation, worker: JobProcess, gpu: str) -> bool:
    """True if its reservation on that GPU blocks another worker, after all have left.

    From then on the bytes stay in place, and a worker that finds no memory waits for it.
    """
    if not op.reserves_late or worker.gpu is not None or gpu not in worker.reservations or gpu == worker.target_gpu:
        return False
    is_wanted = any(other is not worker and other.target_gpu == gpu and _is_short(other) for other in op.live)
    return is_wanted and not any(_is_to_leave(op, other) for other in op.live)


def _readying(op: Operation, worker: JobProcess) -> Iterator[Want]:
    # Await the successor only before any worker is parked, and never for ranks.
    stands = worker.is_parked or worker.park_requested or worker.offloaded or worker.state_saved
    is_one = worker.restarts and not op.is_distributed and op.direction == FORWARD
    if is_one and not (worker.successor_ready or stands) and _is_to_leave(op, worker):
        yield effects.AwaitSuccessor, {}


def _counting(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if (
        op.is_distributed
        and op.at is None
        and worker.boundary is None
        and not worker.has_exited
        and op.direction == FORWARD
    ):
        yield effects.Survey, {}


def _quiescing(op: Operation, worker: JobProcess) -> Iterator[Want]:
    # A rollback parks no worker: a running worker has what it needs, and one that has exited cannot be resumed.
    if worker.has_exited or worker.offloaded or worker.gpu is None or op.direction != FORWARD or not worker.has_agent:
        return
    if not op.holds and not any(_is_to_leave(op, other) and not other.offloaded for other in op.workers):
        return
    behind = op.at is not None and (worker.boundary is None or worker.boundary < op.at)
    if not worker.is_parked or (op.is_distributed and behind):
        yield effects.Park, {"at": op.at, "limit_s": op.limits.park_s}


def _holding(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if op.holds and worker is next(op.live, None):
        yield effects.Hold, {}


def _measuring(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if _is_to_leave(op, worker) and worker.has_agent and not worker.offloaded and not worker.measured:
        yield effects.Survey, {}


def _disconnecting(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if _is_to_disconnect(op, worker):
        yield effects.Disconnect, {"limit_s": op.limits.connect_s * AGENT_SHARE, "abort": op.kind == CHECKPOINT}
    if any(_is_to_disconnect(op, other) for other in op.live):
        # last: an agent that copies bytes by itself accepts no other order meanwhile
        yield from _offloading(op, worker)


def _is_to_disconnect(op: Operation, worker: JobProcess) -> bool:
    """True for every rank, also one that stays: a communicator is disconnected on all its ranks or on none."""
    is_up = worker.communicators and worker.is_connected is not False and not worker.has_exited
    return bool(is_up and worker.is_parked and any(_is_to_leave(op, other) for other in op.live))


def _locking(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if not worker.communicators or worker.has_exited or worker.is_locked or worker.gpu is None:
        return
    if any(_is_to_leave(op, other) for other in op.live):
        yield effects.LockRank, {}


def _unlocking(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if worker.is_locked and worker.gpu is not None and not worker.has_exited:
        yield effects.UnlockRank, {}


def _reconnecting(op: Operation, worker: JobProcess) -> Iterator[Want]:
    # A group that has lost a rank is not reconnected: the others continue, and fail as they would have without hegmd.
    if op.direction == HOLD or not worker.is_unlinked or any(other.has_exited for other in op.workers):
        return
    if all(other.gpu is not None and other.gpu == other.target_gpu and not other.must_exit for other in op.live):
        yield effects.Reconnect, {"generation": op.generation, "limit_s": op.limits.connect_s * AGENT_SHARE}


def _offloading(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if _is_to_leave(op, worker) and worker.is_carried and worker.is_parked and not worker.offloaded:
        yield effects.Offload, {}


def _checkpointing(op: Operation, worker: JobProcess) -> Iterator[Want]:
    follows = op.restarts_together and worker.state_saved and any(other.is_absent for other in op.live)
    if _is_to_leave(op, worker) and (worker.is_parked or not worker.has_agent or follows):
        yield effects.Checkpoint, {}


def _is_to_leave(op: Operation, worker: JobProcess) -> bool:
    is_elsewhere = worker.gpu != worker.target_gpu or worker.must_exit
    return not worker.has_exited and op.direction != HOLD and worker.gpu is not None and is_elsewhere


def _leaving(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if worker.target_gpu is None and not worker.has_exited:
        for gpu in worker.reservations:
            if gpu not in (worker.kept_gpu, worker.gpu):
                yield effects.ReleaseReservation, {"gpu": gpu}


def _needs_image(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if op.image is not None and op.needs_image and worker is next(op.live, None):
        yield effects.Dump, {"find": op.image.begun}


def _sealing(op: Operation, worker: JobProcess) -> Iterator[Want]:
    # Once the pool has the bytes, the image needs nothing of the job, which may even have ended.
    image = op.image
    if image is None or worker is not op.workers[0]:
        return
    # The dump may have finished just before it was dropped.
    is_dropped = image.leave_running and image.begun and not image.whole and op.direction != FORWARD
    if image.written and not image.unwanted:
        yield effects.Seal, {}
    elif image.written or is_dropped:
        yield effects.RemoveImageFiles, {}


def _ending(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if op.ends_workers and not worker.has_exited:
        yield effects.End, {}


def _restoring(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if worker.gpu is None and worker.target_gpu is not None and not worker.has_exited:
        yield effects.Restore, {"gpu": worker.target_gpu}


def _reloading(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if any(_is_to_reload(other) for other in op.live):
        # first: an agent that copies bytes by itself accepts no other order meanwhile
        yield from _reconnecting(op, worker)
    if _is_to_reload(worker):
        yield effects.Reload, {}


def _is_to_reload(worker: JobProcess) -> bool:
    return worker.offloaded and worker.target_gpu is not None and not worker.has_exited


def _releasing(op: Operation, worker: JobProcess) -> Iterator[Want]:
    if worker.has_exited or worker.target_gpu is None or op.direction == HOLD:
        return
    if worker.is_parked:
        # Ranks resume together or not at all: a rank that has its bytes stays parked while another is suspended.
        if not (op.is_distributed and any(other.target_gpu is None for other in op.live)):
            has_lost_rank = worker.is_unlinked and any(other.has_exited for other in op.workers)
            yield effects.Release, {"abort": has_lost_rank}
    elif worker.park_requested:
        yield effects.Withdraw, {}


def _verifying(op: Operation, worker: JobProcess) -> Iterator[Want]:
    # A rank that runs while another is suspended comes to no boundary; it has to prove itself when all are back.
    if op.is_distributed and any(other.target_gpu is None for other in op.live):
        return
    if (
        is_arrived(worker)
        and _has_to_prove_itself(op, worker)
        and not (worker.is_parked or worker.verified or worker.has_exited)
    ):
        yield effects.Verify, {"beyond": worker.boundary or 0}


def _has_to_prove_itself(op: Operation, worker: JobProcess) -> bool:
    """True if its next boundary must be seen: its bytes were offloaded, or it was quiesced and then resumed."""
    return worker.was_offloaded or (op.kind == QUIESCE and op.hold_expired)


def _tidying(op: Operation, worker: JobProcess) -> Iterator[Want]:
    proven = worker.verified or not _has_to_prove_itself(op, worker)
    if not worker.has_exited and not (is_arrived(worker) and not worker.is_parked and proven):
        return
    for gpu in worker.reservations:
        if worker.has_exited or gpu != worker.gpu:
            yield effects.ReleaseReservation, {"gpu": gpu}
    # The image of a job that trains on is still to be written from the pool.
    if worker.pool_bytes and not (op.image is not None and op.image.written):
        yield effects.ReleasePool, {}


#: The last phase of an image: the job trains, and its agents get no order any more.
SEALING = "sealing"

STAGES: tuple[Stage, ...] = (
    Stage("settling", _settling, ("inspect",), "settle_s", "running effects end, and unknown state is inspected"),
    Stage(
        "reserving",
        _arming,
        ("reserve", "reserve-pool", "release-reservation"),
        "arm_s",
        "memory of the target GPU and of the pool is reserved",
    ),
    Stage(
        "readying",
        _readying,
        ("await-successor",),
        "arm_s",
        "the job trains until the process that continues from its state has imported its modules",
    ),
    Stage("counting", _counting, ("survey",), "park_s", "ranks report how many boundaries they have passed"),
    Stage(
        "quiescing", _quiescing, ("park",), "park_s", "the training threads stop at a boundary, ranks all at the same"
    ),
    Stage("holding", _holding, ("hold",), "hold_s", "a quiesced job stays parked until it is resumed"),
    Stage(
        "measuring",
        _measuring,
        ("survey",),
        "park_s",
        "the parked job is measured; if it has grown, more is reserved first",
    ),
    Stage(
        "disconnecting",
        _disconnecting,
        ("disconnect", "offload"),
        "connect_s",
        "all ranks of a job disconnect their communicators; meanwhile their bytes are offloaded",
    ),
    Stage("offloading", _offloading, ("offload",), "move_s", "the bytes go to the pool and leave the process"),
    Stage(
        "locking",
        _locking,
        ("lock",),
        "move_s",
        "the driver locks every rank of a job with communicators before it checkpoints the first",
    ),
    Stage("checkpointing", _checkpointing, ("checkpoint",), "move_s", "the driver checkpoints the rest of the process"),
    Stage("leaving", _leaving, ("release-reservation",), "retry_s", "the GPU memory of a suspended job is released"),
    Stage(
        "handing",
        _needs_image,
        ("dump",),
        "hand_s",
        "the processes of a job that is to be in an image are written; all of it, and read back, if the job is to end",
    ),
    Stage("ending", _ending, ("end",), "retry_s", "processes whose image is complete end"),
    Stage("restoring", _restoring, ("restore",), "move_s", "the driver restores the process on its target GPU"),
    Stage(
        "unlocking", _unlocking, ("unlock",), "retry_s", "ranks that the driver locked but did not move are unlocked"
    ),
    Stage(
        "reloading",
        _reloading,
        ("reload", "reconnect"),
        "move_s",
        "the bytes are reloaded into the process, and stay in the pool; meanwhile ranks connect their communicators",
    ),
    Stage(
        "reconnecting",
        _reconnecting,
        ("reconnect",),
        "connect_s",
        "the ranks of a job connect their communicators again, all of them",
    ),
    Stage("releasing", _releasing, ("release", "withdraw"), "retry_s", "all training threads continue"),
    Stage("verifying", _verifying, ("verify",), "verify_s", "the operation waits for the next boundary"),
    Stage(
        "tidying",
        _tidying,
        ("release-reservation", "release-pool"),
        "retry_s",
        "memory that was reserved for the move is released",
    ),
    Stage(
        SEALING,
        _sealing,
        ("seal", "scrap"),
        "hand_s",
        "the image of a job that continues gets its bytes from the pool, is read back and named",
    ),
)
BY_PHASE = {stage.phase: stage for stage in STAGES}


def limit_s(limits: Limits, phase: str) -> float | None:
    """Return the time limit of the phase in seconds; None if it has none."""
    stage = BY_PHASE.get(phase)
    return None if stage is None else getattr(limits, stage.limit)


def lets_train(op: Operation) -> bool:
    """Return True if all training threads have been released, so that steps are expected of them."""
    is_released = op.phase in ("verifying", "tidying", SEALING)
    return is_released and all(worker.gpu is not None and not worker.is_parked for worker in op.live)


def is_quicker_to_finish(op: Operation) -> bool:
    """True if finishing takes less time than a rollback.

    With an image, this is when it needs nothing more of the job. For a migration or a suspension, when every worker has
    left or is already there; for a resume, when any has arrived.
    """
    if op.direction != FORWARD:
        return False
    if op.kind == CHECKPOINT:
        return op.is_image_complete
    if op.kind == QUIESCE:  # a quiesce is rolled back by resuming the job
        return False
    if any(worker.origin_gpu is not None for worker in op.live):
        return all(
            worker.gpu is None or (worker.gpu == worker.target_gpu and not worker.must_exit) for worker in op.live
        )
    return any(worker.gpu is not None for worker in op.live)
