"""What each event changes in an operation: one function per event, named in the machine's table.

Owns what is believed after an event, and when an operation is turned round. Writes facts down and never asks for an
effect: that follows from the facts, in course.py. An action that refuses raises and has changed nothing.

Longer than 400 lines because there is one function here for each event, and each is read beside the others.
"""

from __future__ import annotations

from hegmd.errors import CANCELLED, REFUSED, TIMEOUT, Refused
from hegmd.migration import course, effects, events
from hegmd.migration.effects import Effect
from hegmd.migration.operation import (
    BACK,
    CHECKPOINT,
    FOR_AGENT,
    FOR_RETRY,
    FORWARD,
    HOLD,
    RESTORE,
    RESUME,
    Failure,
    Limits,
    Operation,
    Pending,
    Worker,
)
from hegmd.migration.stages import is_away, is_past_return, limit_s

# Ranks that have not met after so many attempts will not.
MOST_ROUNDS = 10

# Phases in which a deadline turns an operation that heads forward, when nobody's bytes are out.
_TURN_WHEN_LATE = frozenset(
    "settling arming counting quiescing measuring evacuating checkpointing handing restoring refilling".split()
)


def begin(op: Operation, event: events.Begin, now: float) -> Operation:
    """Everything else follows from the facts."""
    return op.replace()


def cancel(op: Operation, event: events.CancelAsked, now: float) -> Operation:
    """Turn back, unless it is on its way back or the way on is shorter."""
    if op.heading != FORWARD:
        raise Refused(f"operation {op.id} is on its way back already", f"watch it with: hegmctl op {op.id}")
    if is_past_return(op):
        raise Refused(
            f"operation {op.id} is past the point from which going on is shorter than going back",
            "let it finish, then move the job back if that is wanted",
        )
    return _back(op, CANCELLED.name, f"cancelled by {event.by or 'its caller'}", "ask for it again when it is wanted")


def drop_image(op: Operation, event: events.CancelAsked, now: float) -> Operation:
    """The job has gone on and does so; what is written of it goes."""
    if op.handoff is None or op.handoff.unwanted:
        raise Refused(f"the image of operation {op.id} is being removed", f"watch it with: hegmctl op {op.id}")
    message = f"cancelled by {event.by or 'its caller'}"
    return _image_dropped(op, CANCELLED.name, message, "ask for it again when it is wanted")


def resume(op: Operation, event: events.ResumeAsked, now: float) -> Operation:
    """Head for the GPUs that are named; where that fails, or takes too long, it is suspended again."""
    missing = [worker.name for worker in op.live if worker.name not in event.to]
    if missing:
        raise Refused(f"no GPU is named for {', '.join(missing)}", "name one for every process of the job")
    workers = tuple([_resuming(worker, event.to.get(worker.name)) for worker in op.workers])
    kind = RESTORE if op.kind == RESTORE else RESUME
    # What a restart was to change belongs to where it was headed then; who resumes it says what is to be now.
    op = op.replace(kind=kind, heading=FORWARD, workers=workers, failure=None, tries=0, respawn=None)
    due = None if event.limit_s is None else now + event.limit_s
    op = op.replace(limits=op.limits.replace(resume_s=event.limit_s), due=due)
    if op.restarts_together and any(worker.is_absent for worker in op.live):
        # The way back of all is that of those without a process: to be suspended.
        op = op.replace(workers=tuple([worker.replace(origin=None) for worker in op.workers]))
    return course.together(op)


def _resuming(worker: Worker, gpu: str | None) -> Worker:
    if worker.gone:
        return worker
    runs = worker.at is not None and not worker.parked and not worker.out
    gpu = worker.at if runs else gpu  # it waits for the others: it could not be stopped to be moved
    return worker.replace(origin=worker.at, goal=gpu, keeps=None, waits=None, verified=False)


def let_go(op: Operation, event: events.ResumeAsked, now: float) -> Operation:
    """A job that is only held goes on where it is."""
    return _let_go(op)


def take_up(op: Operation, event: events.TakenUp, now: float) -> Operation:
    """Become what is wanted now. What is believed of the workers stays: where they stand, and that they do."""
    planned = {worker.name: worker for worker in event.into.workers}
    if planned.keys() != {worker.name for worker in op.workers}:
        raise Refused(
            f"operation {op.id} does not hold the processes that the job has now",
            f"let them go on first: hegmctl cancel {op.id}; then ask again",
        )
    workers = [
        planned[held.name].replace(parked=held.parked, asked=held.asked, boundary=held.boundary) for held in op.workers
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
        stood_since=op.stood_since,
    )


def hand_over(op: Operation, event: events.HandAsked, now: float) -> Operation:
    """Have an image made of a suspended job. Where that fails, it is suspended as before."""
    here = next((worker for worker in op.live if worker.at is not None or not worker.parked), None)
    if here is not None:
        raise Refused(
            f"process {here.pid} of operation {op.id} is not off its GPU, as the others of its job may be",
            f"bring the job back first: hegmctl resume {here.pid}; then: hegmctl checkpoint {here.pid} DIR",
        )
    workers = tuple([worker.replace(origin=None, goal=None, waits=None) for worker in op.workers])
    op = op.replace(kind=CHECKPOINT, heading=FORWARD, handoff=event.handoff, workers=workers, failure=None, lacks=None)
    return op.replace(limits=op.limits.replace(hand_s=event.limit_s or Limits().hand_s), tries=0)


def worker_gone(op: Operation, event: events.WorkerGone, now: float) -> Operation:
    """The process has ended: what it held can be given back, and the others do not go on without it."""
    return _gone(op, event.worker, event.why)


def _gone(op: Operation, name: str, why: str) -> Operation:
    worker = op.worker(name)
    if worker is None or worker.gone:
        return op
    if worker.restarts and _is_to_be_gone_on_from(op, worker):
        return _absent(op, worker, why)
    if op.ends_workers or _has_gone_on(op):  # it is in an image, and was to end, or does what it would have done anyway
        return _without_orders(op, name).with_worker(_departed(worker, lost=False))
    away = is_away(op) or op.holds
    lost = worker.touched and not worker.verified and (worker.out or worker.at is None or worker.parked)
    lost = lost and not worker.restarts  # nothing was taken out of it: it ended as it would have by itself
    op = _without_orders(op, name).with_worker(_departed(worker, lost=lost))
    state = " while its state was out of it" if lost else ""
    op = _because(op, REFUSED.name, f"process {worker.pid} is gone{state}: {why}", "see the log of the job")
    return course.turned_back(op) if op.heading == FORWARD and away else op


def _has_gone_on(op: Operation) -> bool:
    """Whether all of a job that has an image were seen to train after it."""
    return op.is_handed and all(worker.verified or worker.gone for worker in op.workers)


def _is_to_be_gone_on_from(op: Operation, worker: Worker) -> bool:
    """Whether another can go on from its state, and has not done so for certain: of ranks, for all or none."""
    crew = [other for other in op.workers if other.restarts] if op.restarts_together else [worker]
    return all(one.saved and not one.gone for one in crew) and not all(one.verified for one in crew)


def _absent(op: Operation, worker: Worker, why: str) -> Operation:
    """The process has ended and its state is in the pool: that is how it leaves. Another goes on from there.

    One that had gone on from it, and ended before it was seen at a boundary, is not replaced for ever: the job goes on
    where it was, and if that ends too it is held.
    """
    if worker.at is None and worker.out and not worker.unsure:
        return op  # that is known
    fell = worker.starts > 0 and worker.at is not None and not worker.leaves
    rooms = {gpu: size_bytes for gpu, size_bytes in worker.rooms.items() if gpu != worker.at}
    left = worker.replace(
        at=None,
        left=worker.at or worker.left,
        rooms=rooms,
        out=True,
        leaves=False,
        parked=False,
        asked=False,
        unsure=False,
        waits=None,
        doing="",
    )
    op = _without_orders(op, worker.name).with_worker(left)
    if not fell:
        return course.together(op)
    message = f"process {worker.pid} went on from the saved state and ended before a boundary was seen: {why}"
    op = _because(op, REFUSED.name, message, f"see what it printed, and: hegmctl op {op.id}")
    return course.turned_back(op) if op.heading == FORWARD else course.held(op)


def came_on(op: Operation, event: events.CameOn, now: float) -> Operation:
    """Told to whoever watches, and remembered for the story; nothing rests on it."""
    worker = _living(op, event.worker)
    if worker is None or not worker.is_absent or worker.doing == event.doing:
        return op
    return op.with_worker(worker.replace(doing=event.doing))


def training_ended(op: Operation, event: events.TrainingEnded, now: float) -> Operation:
    """What it was for has been done. That no boundary was seen, or its end taken for a fall, counts for nothing."""
    worker = _living(op, event.worker)
    if worker is None or not worker.restarts or not worker.saved:
        return op
    op = _without_orders(op.replace(heading=FORWARD, failure=None, lacks=None), worker.name)
    # Of one that was not asked yet how it stands it is not known what is held for it.
    places = filter(None, (worker.at, worker.left, worker.goal, worker.origin))
    rooms = {**dict.fromkeys(places, 0), **worker.rooms}
    return op.with_worker(_departed(worker, lost=False).replace(at=None, finished=True, rooms=rooms))


def _departed(worker: Worker, *, lost: bool) -> Worker:
    return worker.replace(gone=True, lost=lost, unsure=False, waits=None, parked=False, asked=False)


def agent_lost(op: Operation, event: events.AgentLost, now: float) -> Operation:
    """Whether the agent still does what it was asked is not known until it is back."""
    worker = _living(op, event.worker)
    if worker is None or (op.hands_over and any(pending.effect == effects.Dump.tag for pending in op.pending)):
        return op  # while an image is made, agents step aside
    return op.with_worker(worker.replace(unsure=True, waits=FOR_AGENT))


def agent_back(op: Operation, event: events.AgentBack, now: float) -> Operation:
    """The same agent is asked how things stand; another one means that the process runs another program now."""
    worker = _living(op, event.worker)
    if worker is None:
        return op
    if event.token != worker.token:
        return _gone(op, worker.name, "it runs another program now")
    return _without_orders(op, worker.name).with_worker(worker.replace(unsure=True, waits=None))


def deadline_passed(op: Operation, event: events.DeadlinePassed, now: float) -> Operation:
    """Turn back where that is still open; elsewhere look for oneself and try again."""
    if op.deadline is None or now < op.deadline:
        return op  # an alarm that was set for an earlier phase
    if op.phase == "sealing" and op.handoff is not None and not op.handoff.unwanted:
        message = f"the image was not read back within {limit_s(op.limits, op.phase):g} s"
        return course.later(_image_dropped(op, TIMEOUT.name, message, "look at the disk that it is on: dmesg"), now)
    if op.heading == FORWARD and op.phase in _TURN_WHEN_LATE and not _waits_for_moved(op):
        is_due = op.due is not None and now >= op.due
        within = f"within {op.limits.resume_s if is_due else limit_s(op.limits, op.phase):g} s"
        # A late agent is as good as one that says itself that no boundary came, and is told of in the same words.
        late = f"operation {op.id} was not through with {op.phase} {within}"
        message = f"no batch boundary {within}" if op.phase == "quiescing" else late
        return _back(op, TIMEOUT.name, message, "ask again with a longer --timeout, or look at what the job does")
    for pending in op.pending:
        if pending.effect != effects.Seal.tag:  # it has a limit of its own, and comes to an end by itself
            op = _forgotten(op, pending)
    workers = [worker.replace(waits=None) for worker in op.workers]
    return course.later(op.replace(workers=tuple(workers)), now)


def _waits_for_moved(op: Operation) -> bool:
    """Whether it waits in `settling` for workers whose bytes may be out, or that it holds: turning round would not help
    the ones, and let go of the others because a daemon was started anew."""
    return op.phase == "settling" and any(worker.touched or (op.holds and worker.parked) for worker in op.live)


def recovered(op: Operation, event: events.Recovered, now: float) -> Operation:
    """Nothing that was under way is known, nor what the daemon holds; everybody is asked.

    One that had not begun does not begin by itself: whoever asked for it was given no answer, or was refused because
    the journal could not be written. The deadline is set anew, since after a reboot the clock is another one.
    """
    if op.phase == course.PLANNED:
        message = f"hegmd was stopped before operation {op.id} had begun"
        return _back(op, CANCELLED.name, message, "nothing was done; ask for it again")
    for pending in op.pending:
        op = _forgotten(op, pending)
    workers = [w if w.gone else w.replace(unsure=True, recount=True, waits=None) for w in op.workers]
    return course.on_time(op.replace(workers=tuple(workers), pending=()), now)


def _forgotten(op: Operation, pending: Pending) -> Operation:
    """The operation without that effect, which may have been done or not.

    What it takes or gives is then neither counted upon nor forgotten: to be used it has to be taken again, and in the
    end it is given back.
    """
    op = op.replace(pending=tuple([other for other in op.pending if other.number != pending.number]))
    worker = op.worker(pending.worker)
    if worker is None:
        return op
    if Effect.register[pending.effect].in_worker:
        return op if worker.gone else op.with_worker(worker.replace(unsure=True))
    if pending.effect in _ON_WHOLE:
        return op
    if pending.effect == effects.TakePool.tag:
        return op.with_worker(worker.replace(pool_bytes=max(worker.pool_bytes, 1)))
    if pending.effect == effects.GivePool.tag:
        return op.with_worker(worker.replace(pool_bytes=min(worker.pool_bytes, 1)))
    gpu = str(pending.gpu)
    known = worker.rooms.get(gpu, 0) if pending.effect == effects.TakeRoom.tag else 0
    return op.with_worker(worker.replace(rooms={**worker.rooms, gpu: known}))


# What these do is seen by asking for them again.
_ON_WHOLE = frozenset((effects.Hold.tag, effects.Dump.tag, effects.Seal.tag, effects.Scrap.tag, effects.End.tag))


# ---- endings ---------------------------------------------------------------------------------------------------------


def room_taken(op: Operation, worker: Worker, pending: Pending, event: events.RoomTaken) -> Operation:
    rooms = {**worker.rooms, str(pending.gpu): pending.size_bytes or 0}
    return op.replace(lacks=None).with_worker(worker.replace(rooms=rooms))


def room_given(op: Operation, worker: Worker, pending: Pending, event: events.RoomGiven) -> Operation:
    rooms = {gpu: size for gpu, size in worker.rooms.items() if gpu != pending.gpu}
    return op.with_worker(worker.replace(rooms=rooms))


def pool_taken(op: Operation, worker: Worker, pending: Pending, event: events.PoolTaken) -> Operation:
    return op.with_worker(worker.replace(pool_bytes=pending.size_bytes or 0))


def pool_given(op: Operation, worker: Worker, pending: Pending, event: events.PoolGiven) -> Operation:
    return op.with_worker(worker.replace(pool_bytes=0))


def surveyed(op: Operation, worker: Worker, pending: Pending, event: events.Surveyed) -> Operation:
    """While it stands, what is counted is what will be carried; before, it is only a boundary count."""
    if not worker.parked:
        return op.with_worker(worker.replace(boundary=event.boundary))
    if not worker.is_carried:  # the driver carries them all, and measures for itself
        return op.with_worker(worker.replace(measured=True))
    rooms = dict(worker.rooms)
    if worker.at is not None:
        rooms[worker.at] = max(event.size_bytes, rooms.get(worker.at, 0))
    return op.with_worker(worker.replace(measured=True, size_bytes=event.size_bytes, rooms=rooms))


def parked(op: Operation, worker: Worker, pending: Pending, event: events.Parked) -> Operation:
    op = op.with_worker(worker.replace(parked=True, boundary=event.boundary, measured=False))
    return _meeting_at(op, event.boundary)


def overran(op: Operation, worker: Worker, pending: Pending, event: events.Overran) -> Operation:
    """Each round leaves twice the room, so that an order catches up with batches that are shorter than its way."""
    op = op.with_worker(worker.replace(boundary=event.boundary, asked=False))
    return _meeting_at(op, event.boundary + (1 << op.rounds))


def _meeting_at(op: Operation, boundary: int) -> Operation:
    """Ranks stop where the one that is furthest stands, so that no collective is left half way.

    One that stands before it has to be asked again; that counts too, so that nobody is asked for ever.
    """
    if not op.lockstep or op.at is None or boundary == op.at:
        return op
    if op.rounds >= MOST_ROUNDS:
        message = f"the ranks did not stop at one boundary in {MOST_ROUNDS} attempts"
        return _back(op, REFUSED.name, message, "all ranks have to pass boundaries together; see the script's loops")
    return op.replace(at=max(boundary, op.at), rounds=op.rounds + 1)


def withdrawn(op: Operation, worker: Worker, pending: Pending, event: events.Withdrawn) -> Operation:
    return op.with_worker(worker.replace(asked=False, parked=False))


def evacuated(op: Operation, worker: Worker, pending: Pending, event: events.Evacuated) -> Operation:
    return op.with_worker(worker.replace(out=True, saved=worker.restarts))


def checkpointed(op: Operation, worker: Worker, pending: Pending, event: events.Checkpointed) -> Operation:
    """What was measured counts from now on; the way back rests on the room that is really held."""
    if worker.restarts:
        return _absent(op, worker, "it left")
    rooms = dict(worker.rooms)
    if event.room_bytes is not None and worker.at is not None:
        rooms[worker.at] = event.room_bytes
    rest_bytes = worker.rest_bytes if event.rest_bytes is None else event.rest_bytes
    shares_bytes = event.shares_bytes or worker.shares_bytes
    off = worker.replace(at=None, left=worker.at, rooms=rooms, rest_bytes=rest_bytes, shares_bytes=shares_bytes)
    return op.replace(lacks=None).with_worker(off)


def held(op: Operation, worker: Worker, pending: Pending, event: events.Held) -> Operation:
    """Its time is over."""
    return _let_go(op)


def dumped(op: Operation, worker: Worker, pending: Pending, event: events.Dumped) -> Operation:
    """The job ends from here, its image being whole; or goes home, before that is read back."""
    if op.handoff is None:
        return op
    if not op.handoff.leave_running:
        return op.replace(handoff=op.handoff.replace(whole=True))
    op = op.replace(handoff=op.handoff.replace(written=True))
    return op.replace(workers=tuple([worker.replace(goal=worker.origin, keeps=None) for worker in op.workers]))


def sealed(op: Operation, worker: Worker, pending: Pending, event: events.Sealed) -> Operation:
    return op if op.handoff is None else op.replace(handoff=op.handoff.replace(written=False, whole=True))


def scrapped(op: Operation, worker: Worker, pending: Pending, event: events.Scrapped) -> Operation:
    return _without_image(op)


def _without_image(op: Operation) -> Operation:
    return op if op.handoff is None else op.replace(handoff=op.handoff.replace(written=False, begun=False))


def ended(op: Operation, worker: Worker, pending: Pending, event: events.Ended) -> Operation:
    return op.with_worker(_departed(worker, lost=False))


def outgrown(op: Operation, worker: Worker, pending: Pending, event: events.Outgrown) -> Operation:
    """It is tried again once this is on disk and room for it is held."""
    return op.with_worker(worker.replace(rest_bytes=event.rest_bytes, shares_bytes=event.shares_bytes))


def restored(op: Operation, worker: Worker, pending: Pending, event: events.Restored) -> Operation:
    """One that comes back where the driver had it is then where it is to be."""
    if event.landed is not None:
        worker = worker.replace(goal=event.landed, anywhere=False)
    if event.pid is not None:
        worker = _replaced(worker, event)
    return op.replace(lacks=None).with_worker(worker.replace(at=event.landed or pending.gpu))


def _replaced(worker: Worker, event: events.Restored) -> Worker:
    """Another process goes on in its place. How it stands is found out first, and its next boundary is the proof."""
    return worker.replace(
        pid=event.pid,
        start_ticks=event.start_ticks,
        token=event.token,
        run=event.run,
        boundary=event.boundary,
        leaves=False,
        starts=worker.starts + 1,
        rooms={},
        touched=True,
        verified=False,
        unsure=True,
        recount=True,
        waits=None,
    )


def refilled(op: Operation, worker: Worker, pending: Pending, event: events.Refilled) -> Operation:
    return op.replace(lacks=None).with_worker(worker.replace(out=False))


def released(op: Operation, worker: Worker, pending: Pending, event: events.Released) -> Operation:
    return op.with_worker(worker.replace(asked=False, parked=False))


def verified(op: Operation, worker: Worker, pending: Pending, event: events.Verified) -> Operation:
    return op.with_worker(worker.replace(verified=True, boundary=event.boundary))


def inspected(op: Operation, worker: Worker, pending: Pending, event: events.Inspected) -> Operation:
    """What was believed of the worker gives way to what is."""
    if event.busy:
        return op.with_worker(worker.replace(waits=FOR_RETRY))
    if event.failed:
        return _ruined(op, worker, event.failed)
    was_standing = worker.parked and (op.heading == HOLD or op.holds or is_away(op))
    whole = event.gpu is not None and not event.out_bytes
    passed = not event.parked and whole and worker.boundary is not None and event.boundary > worker.boundary
    is_following = op.restarts_together and worker.leaves and worker.saved and worker.out
    now_known = worker.replace(
        unsure=False,
        recount=False,
        waits=None,
        parked=event.parked,
        boundary=event.boundary if event.parked or not worker.touched else worker.boundary,
        out=event.out_bytes > 0 or is_following,
        # Whoever took them, bytes that are out have to be seen in use again before what holds them is given back.
        touched=worker.touched or event.out_bytes > 0,
        at=event.gpu,
        left=worker.left if event.gpu is not None or worker.at is None else worker.at,
        verified=not event.out_bytes and (worker.verified or (worker.touched and passed)),
        rooms=event.rooms if worker.recount else worker.rooms,
        pool_bytes=event.pool_bytes if worker.recount else worker.pool_bytes,
    )
    op = _without_orders(op, worker.name)
    if worker.anywhere and event.gpu is not None:  # somebody was quicker, or a restore that was cut off came to its end
        now_known = now_known.replace(anywhere=False, goal=event.gpu if op.heading == FORWARD else worker.goal)
    if not event.parked and whole and op.heading != FORWARD and not is_following:
        now_known = now_known.replace(origin=event.gpu, goal=event.gpu)
    if not was_standing or event.parked:
        return op.with_worker(now_known)
    # Its agent waited for a daemon as long as it may, took its own bytes back and let the training go on.
    home = event.gpu or worker.keeps or worker.was_on
    op = op.with_worker(now_known.replace(asked=False, origin=home, goal=home))
    message = f"process {worker.pid} went on by itself when it had waited for hegmd for too long"
    return _back(op, REFUSED.name, message, "ask again")


def failed(op: Operation, worker: Worker, pending: Pending, event: events.Failed) -> Operation:
    """By what failed: turn back, hold, or find out how it stands and try again."""
    in_worker = Effect.register[pending.effect].in_worker
    if in_worker and event.fault == events.DISCONNECTED:
        return op.with_worker(worker.replace(unsure=True, waits=FOR_AGENT))
    if event.fault in (events.NO_ROOM, events.CROWDED) and op.heading == BACK and (worker.at is None or worker.out):
        return _waiting_for_room(op, worker, pending, event)
    if pending.effect == effects.Dump.tag:
        return _astray(_without_image(op), event)
    if pending.effect == effects.Seal.tag:
        return _image_dropped(op, event.code, event.message, event.hint)
    if pending.effect in _HARMLESS:
        changed = {"asked": False} if pending.effect == effects.Park.tag else {}
        return _astray(op.with_worker(worker.replace(**changed)), event)
    if pending.effect in _UNCERTAIN:
        # A driver that could not restore may have lost the room for it; one that was cut off before has kept none.
        recount = worker.recount or pending.effect in (effects.Checkpoint.tag, effects.Restore.tag)
        op = op.with_worker(worker.replace(unsure=True, recount=recount))
        if pending.effect in _OUTWARD and op.heading == BACK:
            return _split(op, worker.name, event)
        return _astray(op, event)
    return op.with_worker(worker.replace(unsure=worker.unsure or in_worker, waits=FOR_RETRY))


_HARMLESS = frozenset((effects.TakeRoom.tag, effects.TakePool.tag, effects.Survey.tag, effects.Park.tag))
_OUTWARD = frozenset((effects.Evacuate.tag, effects.Checkpoint.tag))
_UNCERTAIN = frozenset((*_OUTWARD, effects.Restore.tag, effects.Refill.tag))


def _astray(op: Operation, event: events.Failed) -> Operation:
    """The way that it is on is closed: forward there is the way back, and back there is standing still."""
    if op.heading == FORWARD:
        return _back(op, event.code, event.message, event.hint)
    hint = f"its bytes are held; bring it back with: hegmctl resume, see hegmctl op {op.id}"
    return course.held(_because(op, event.code, event.message, hint))


def _split(op: Operation, name: str, event: events.Failed) -> Operation:
    """A worker that cannot leave again stays where it has arrived, rather than be put at risk for the others' sake."""
    worker = op.worker(name)
    if worker is None or worker.at is None:
        return _astray(op, event)
    return _because(op.with_worker(worker.replace(goal=worker.at)), event.code, event.message, event.hint)


def _waiting_for_room(op: Operation, worker: Worker, pending: Pending, event: events.Failed) -> Operation:
    """It stands with all its bytes until there is room. None that was believed in is counted upon, unless the driver
    only lacked some for itself: nobody is restored without any held, nor are storages asked for, but for those that are
    made in rounds, some of which may be there."""
    is_lost = event.fault == events.NO_ROOM and (pending.effect != effects.Refill.tag or not worker.overlap_bytes)
    rooms = {**worker.rooms, str(pending.gpu or worker.at): 0} if is_lost else worker.rooms
    by_itself = f"free video memory on {worker.at}: it comes back by itself when there is room"
    lacks = Failure(code=event.code, message=event.message, hint=by_itself if worker.at else event.hint)
    return op.replace(lacks=lacks).with_worker(worker.replace(rooms=rooms, unsure=True, waits=FOR_RETRY))


def _ruined(op: Operation, worker: Worker, why: str) -> Operation:
    """The driver will never bring it back: nothing that is held for it is of use to anybody any more."""
    op = _without_orders(op, worker.name).with_worker(_departed(worker, lost=True))
    op = _because(op, REFUSED.name, f"process {worker.pid} cannot be brought back: {why}", "end it, and start it anew")
    return course.turned_back(op) if op.heading == FORWARD and is_away(op) else op


# ---- turning round ---------------------------------------------------------------------------------------------------


def _back(op: Operation, code: str, message: str, hint: str) -> Operation:
    op = _because(op, code, message, hint)
    return course.turned_back(op) if op.heading == FORWARD else op


def _image_dropped(op: Operation, code: str, message: str, hint: str) -> Operation:
    """What is written goes; the job stays as it is, which is home."""
    if op.handoff is None:
        return op
    pending = tuple([pending for pending in op.pending if pending.effect != effects.Seal.tag])
    op = op.replace(handoff=op.handoff.replace(unwanted=True), pending=pending)
    return _back(op, code, message, hint)


def _because(op: Operation, code: str, message: str, hint: str) -> Operation:
    """The first reason is the one that counts; what follows from it is in the story."""
    return op if op.failure is not None else op.replace(failure=Failure(code=code, message=message, hint=hint))


def _let_go(op: Operation) -> Operation:
    pending = tuple([pending for pending in op.pending if pending.effect != effects.Hold.tag])
    return op.replace(let_go=True, pending=pending)


def _living(op: Operation, name: str) -> Worker | None:
    worker = op.worker(name)
    return None if worker is None or worker.gone else worker


def _without_orders(op: Operation, name: str) -> Operation:
    """The operation without what is under way in that worker: it was on a connection or in a process that has ended."""
    return op.replace(
        pending=tuple([p for p in op.pending if p.worker != name or not Effect.register[p.effect].in_worker])
    )
