"""The stages of a move in their order: what each wants done, and of which worker.

Owns STAGES, the one table of them. A stage looks at the facts and at where each worker is to be, and names the effects
that are still wanting; the operation is in the first stage that wants any. So a way back, a second attempt and a start
after a crash need no paths of their own: the facts differ, the table is the same.

That order keeps the promises. Room and pool come before anything is asked of a worker; nothing is freed (`leaving`,
`tidying`) before what it was kept for has happened; no thread is let go before every worker has its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hegmd.migration.machine import effects
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.operation import CHECKPOINT, FORWARD, HOLD, QUIESCE, Limits, Operation, Worker

Want = tuple[type[Effect], dict[str, Any]]
Wants = Callable[[Operation, Worker], Iterator[Want]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its name as a phase, what it wants and by which effects, the limit that it runs under, its purpose."""

    phase: str
    wants: Wants
    asks: tuple[str, ...]
    limit: str
    purpose: str


def is_arrived(worker: Worker) -> bool:
    """Whether the worker is where it is to be, with all its bytes."""
    return worker.at is not None and worker.at == worker.goal and not worker.out and not worker.leaves


def is_away(op: Operation) -> bool:
    """Whether any worker still has a way to go, so that all have to stand."""
    return op.heading != HOLD and any(not is_arrived(worker) for worker in op.live)


def _settling(op: Operation, worker: Worker) -> Iterator[Want]:
    # While an image is made nobody can be asked: the agents have stepped aside, and the processes may be held still.
    begun = op.handoff is not None and op.handoff.begun
    if worker.unsure and not worker.gone and not (op.hands_over and begun) and not op.ends_workers:
        yield effects.Inspect, {}


def _arming(op: Operation, worker: Worker) -> Iterator[Want]:
    if worker.gone or is_arrived(worker):
        return
    if worker.goal is not None and worker.rooms.get(worker.goal, -1) < worker.room_bytes:
        yield effects.TakeRoom, {"gpu": worker.goal, "size_bytes": worker.room_bytes}
    # Never for one whose bytes are out: theirs is the pool that it was evacuated to, or none.
    short = worker.is_carried and worker.pool_bytes < worker.size_bytes
    if _is_to_leave(op, worker) and short and not worker.out:
        yield effects.TakePool, {"size_bytes": worker.size_bytes}


def _readying(op: Operation, worker: Worker) -> Iterator[Want]:
    # Nobody stands yet, and whoever is asked to has been waited for already. Of ranks nobody is made ready.
    stands = worker.parked or worker.asked or worker.out or worker.saved
    is_one = worker.restarts and not op.lockstep and op.heading == FORWARD
    if is_one and not (worker.awaited or stands) and _is_to_leave(op, worker):
        yield effects.AwaitNext, {}


def _counting(op: Operation, worker: Worker) -> Iterator[Want]:
    if op.lockstep and op.at is None and worker.boundary is None and not worker.gone and op.heading == FORWARD:
        yield effects.Survey, {}


def _quiescing(op: Operation, worker: Worker) -> Iterator[Want]:
    # On the way back nobody is stopped any more, whoever runs has what it needs; and who has left cannot be let go on.
    if worker.gone or worker.out or worker.at is None or op.heading != FORWARD or not worker.has_agent:
        return
    if not op.holds and not any(_is_to_leave(op, other) and not other.out for other in op.workers):
        return
    behind = op.at is not None and (worker.boundary is None or worker.boundary < op.at)
    if not worker.parked or (op.lockstep and behind):
        yield effects.Park, {"at": op.at, "limit_s": op.limits.park_s}


def _holding(op: Operation, worker: Worker) -> Iterator[Want]:
    if op.holds and worker is next(op.live, None):
        yield effects.Hold, {}


def _measuring(op: Operation, worker: Worker) -> Iterator[Want]:
    if _is_to_leave(op, worker) and worker.has_agent and not worker.out and not worker.measured:
        yield effects.Survey, {}


def _evacuating(op: Operation, worker: Worker) -> Iterator[Want]:
    if _is_to_leave(op, worker) and worker.is_carried and worker.parked and not worker.out:
        yield effects.Evacuate, {}


def _checkpointing(op: Operation, worker: Worker) -> Iterator[Want]:
    follows = op.restarts_together and worker.saved and any(other.is_absent for other in op.live)
    if _is_to_leave(op, worker) and (worker.parked or not worker.has_agent or follows):
        yield effects.Checkpoint, {}


def _is_to_leave(op: Operation, worker: Worker) -> bool:
    is_elsewhere = worker.at != worker.goal or worker.leaves
    return not worker.gone and op.heading != HOLD and worker.at is not None and is_elsewhere


def _leaving(op: Operation, worker: Worker) -> Iterator[Want]:
    if worker.goal is None and not worker.gone:
        for gpu in worker.rooms:
            if gpu not in (worker.keeps, worker.at):
                yield effects.GiveRoom, {"gpu": gpu}


def _handing(op: Operation, worker: Worker) -> Iterator[Want]:
    if op.handoff is not None and op.hands_over and worker is next(op.live, None):
        yield effects.Dump, {"find": op.handoff.begun}


def _sealing(op: Operation, worker: Worker) -> Iterator[Want]:
    # The image needs nothing of the job any more but what the pool has, whatever has become of it: not even that it is
    # there.
    image = op.handoff
    if image is None or worker is not op.workers[0]:
        return
    # One that was dropped may have been written just then.
    is_dropped = image.leave_running and image.begun and not image.whole and op.heading != FORWARD
    if image.written and not image.unwanted:
        yield effects.Seal, {}
    elif image.written or is_dropped:
        yield effects.Scrap, {}


def _ending(op: Operation, worker: Worker) -> Iterator[Want]:
    if op.ends_workers and not worker.gone:
        yield effects.End, {}


def _restoring(op: Operation, worker: Worker) -> Iterator[Want]:
    if worker.at is None and worker.goal is not None and not worker.gone:
        yield effects.Restore, {"gpu": worker.goal}


def _refilling(op: Operation, worker: Worker) -> Iterator[Want]:
    if worker.out and worker.goal is not None and not worker.gone:
        yield effects.Refill, {}


def _releasing(op: Operation, worker: Worker) -> Iterator[Want]:
    if worker.gone or worker.goal is None or op.heading == HOLD:
        return
    if worker.parked:
        # Ranks go on together or not at all: one that has its bytes while another is suspended goes on standing.
        if not (op.lockstep and any(other.goal is None for other in op.live)):
            yield effects.Release, {}
    elif worker.asked:
        yield effects.Withdraw, {}


def _verifying(op: Operation, worker: Worker) -> Iterator[Want]:
    # A rank that runs while another is suspended comes to no boundary; it has to prove itself when all are back.
    if op.lockstep and any(other.goal is None for other in op.live):
        return
    if (
        is_arrived(worker)
        and _has_to_prove_itself(op, worker)
        and not (worker.parked or worker.verified or worker.gone)
    ):
        yield effects.Verify, {"beyond": worker.boundary or 0}


def _has_to_prove_itself(op: Operation, worker: Worker) -> bool:
    """Whether it is to be seen at one more boundary: its bytes were away, or it stood for somebody who let it go."""
    return worker.touched or (op.kind == QUIESCE and op.let_go)


def _tidying(op: Operation, worker: Worker) -> Iterator[Want]:
    proven = worker.verified or not _has_to_prove_itself(op, worker)
    if not worker.gone and not (is_arrived(worker) and not worker.parked and proven):
        return
    for gpu in worker.rooms:
        if worker.gone or gpu != worker.at:
            yield effects.GiveRoom, {"gpu": gpu}
    # Of a job that goes on, the pool has what its image is still to be written from.
    if worker.pool_bytes and not (op.handoff is not None and op.handoff.written):
        yield effects.GivePool, {}


STAGES: tuple[Stage, ...] = (
    Stage("settling", _settling, ("inspect",), "retry_s", "what is under way ends, and what is not known is found out"),
    Stage("arming", _arming, ("take-room", "take-pool"), "arm_s", "room on the target and pages of the pool are taken"),
    Stage(
        "readying",
        _readying,
        ("await-next",),
        "arm_s",
        "the job trains on until the process that is to go on from its state has imported what takes long",
    ),
    Stage("counting", _counting, ("survey",), "park_s", "ranks say how many boundaries they have passed"),
    Stage(
        "quiescing", _quiescing, ("park",), "park_s", "the training threads stop at a boundary, ranks all at the same"
    ),
    Stage("holding", _holding, ("hold",), "hold_s", "a job that was only to be stopped stands, until it is let go on"),
    Stage(
        "measuring", _measuring, ("survey",), "park_s", "what stands is counted; if it has grown, more is taken first"
    ),
    Stage("evacuating", _evacuating, ("evacuate",), "move_s", "the bytes go to the pool and leave the process"),
    Stage(
        "checkpointing",
        _checkpointing,
        ("checkpoint",),
        "move_s",
        "the driver takes the rest of the process off its GPU",
    ),
    Stage("leaving", _leaving, ("give-room",), "retry_s", "the room of the suspended is given back"),
    Stage(
        "handing",
        _handing,
        ("dump",),
        "hand_s",
        "the processes of a job that is to be in an image are written; all of it, and read back, if the job is to end",
    ),
    Stage("ending", _ending, ("end",), "retry_s", "the processes that are in an image that is whole end"),
    Stage("restoring", _restoring, ("restore",), "move_s", "the driver brings the process back, where it is to be"),
    Stage("refilling", _refilling, ("refill",), "move_s", "the bytes go back into the process, and stay in the pool"),
    Stage("releasing", _releasing, ("release", "withdraw"), "retry_s", "the training threads go on, all of them"),
    Stage("verifying", _verifying, ("verify",), "verify_s", "the next boundary is waited for"),
    Stage("tidying", _tidying, ("give-room", "give-pool"), "retry_s", "what was held for the move is given back"),
    Stage(
        "sealing",
        _sealing,
        ("seal", "scrap"),
        "hand_s",
        "the image of a job that has gone on has its bytes written from the pool, is read back and named",
    ),
)
BY_PHASE = {stage.phase: stage for stage in STAGES}


def limit_s(limits: Limits, phase: str) -> float | None:
    """How long the phase may take; None for one that lasts."""
    stage = BY_PHASE.get(phase)
    return None if stage is None else getattr(limits, stage.limit)


def is_past_return(op: Operation) -> bool:
    """Whether the way on is shorter than the way back.

    With an image, that is when it needs nothing more of the job. Moving or suspending, it is when every worker has left
    or is there already; resuming, when any has arrived.
    """
    if op.heading != FORWARD:
        return False
    if op.kind == CHECKPOINT:
        return op.is_handed
    if op.kind == QUIESCE:  # to turn back is to let it go on
        return False
    if any(worker.origin is not None for worker in op.live):
        return all(worker.at is None or (worker.at == worker.goal and not worker.leaves) for worker in op.live)
    return any(worker.at is not None for worker in op.live)
