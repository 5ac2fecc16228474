"""The requests about sharing: make room, release a lease, wait for a GPU, change a priority, show the queue.

Owns what callers may ask and how they are answered, and waits for them. `service` does what is asked. A caller is who
the kernel says that it is; `may` is called with the owner of each job, process or lease.

Longer than 400 lines because each request is checked, waited for and answered here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

import anyio

from hegmd.errors import BAD_REQUEST, CANCELLED, DENIED, NOT_FOUND, TIMEOUT, HegmError, Refused
from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.wording import gigabytes
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.operations.job_requests import JobRequests
from hegmd.operations.request_context import MAX_LIMIT_S
from hegmd.operations.survey import May
from hegmd.protocol import sharing as protocol
from hegmd.protocol.jobs import Job
from hegmd.protocol.names import gpu_named
from hegmd.sharing import model, wording
from hegmd.sharing.records import LeaseRecord, QueuedRecord
from hegmd.sharing.report import job_views, lease_view, steps_for
from hegmd.sharing.room import rooms_of
from hegmd.sharing.service import Sharing
from hegmd.sharing.view import STARTS_WITHIN_S, View
from hegmd.workers.job_file import JobRecord
from hegmd.workers.jobs import Jobs

MAX_SIZE_BYTES = 1 << 50
# How often a waiting client is told how much is free, while nothing else changes.
TELL_INTERVAL_S = 1.0
FRESH_S = 0.25
# In the facts of an error: the daemon has not gone away, and asking again would not help.
FINAL = {"final": True}

EmitRoom = Callable[[protocol.RoomProgress], Awaitable[None]]
EmitPlace = Callable[[protocol.PlaceProgress], Awaitable[None]]


class Caller(NamedTuple):
    """The process that made the request, as the kernel identifies it."""

    pid: int
    uid: int
    is_admin: bool
    may: May


class SharingRequests:
    """`start_ticks` and `owner_of` return the start time and the user of a process, None if it does not exist."""

    def __init__(
        self,
        sharing: Sharing,
        jobs: Jobs,
        job_requests: JobRequests,
        inventory: Inventory,
        *,
        start_ticks: Callable[[int], int | None],
        owner_of: Callable[[int], int | None],
        utc: Callable[[], float] = time.time,
    ) -> None:
        self._sharing = sharing
        self._jobs = jobs
        self._job_requests = job_requests
        self._inventory = inventory
        self._start_ticks = start_ticks
        self._owner_of = owner_of
        self._utc = utc
        #: The numbers of the leases that a request waits for whose end ends them.
        self._awaited: set[int] = set()

    # -- room ----------------------------------------------------------------------------------------------------------

    async def make_room(self, request: protocol.MakeRoom, caller: Caller, emit: EmitRoom) -> protocol.RoomReply:
        """Free memory and keep it as a lease. Raises HegmError; there is no lease then."""
        leases = self._sharing.memory.leases
        lease = await self._leased_request(request, caller)
        if request.dry_run:
            return await self._planned(lease)
        # Its connection ended, and it asks again; what other threads of that process wait for is theirs.
        known = leases.waited_for(lease, self._awaited)
        if known is None:
            leases.check_name(request.name, caller.uid, is_admin=caller.is_admin)
            lease = leases.add(lease)
            self._sharing.note_request(lease)
        else:
            lease = known
        if request.until_free:
            return await self._held_or_dropped(lease, request.limit_s, emit)
        with self._dropping_if_left(lease):
            await self._require_saved(lease)
        lease = leases.find(lease.id) or lease
        return protocol.RoomReply(lease=self._view(lease), gpu=lease.gpu)

    async def wait_for_room(self, request: protocol.WaitForRoom, caller: Caller, emit: EmitRoom) -> protocol.RoomReply:
        """Wait until a lease is held. Raises HegmError; there is no lease then, if it is this caller's to wait for."""
        lease = self._sharing.memory.leases.named(request.lease, caller.may, caller.uid)
        if not caller.may(lease.uid):
            raise _denied(lease)
        if lease.waiter_pid == caller.pid:
            return await self._held_or_dropped(lease, request.limit_s, emit)
        return await self._until_held(lease, request.limit_s, emit)

    async def _held_or_dropped(self, lease: LeaseRecord, limit_s: float | None, emit: EmitRoom) -> protocol.RoomReply:
        """Wait until a lease is held. It ends if that fails or the caller leaves, and not if the daemon stops."""
        with self._dropping_if_left(lease):
            self._awaited.add(lease.number)
            try:
                await self._require_saved(lease)
                reply = await self._until_held(lease, limit_s, emit)
                answered = self._sharing.memory.leases.answer(lease.number)
                await self._require_saved(lease)
                return reply if answered is None else reply.replace(lease=self._view(answered))
            finally:
                self._awaited.discard(lease.number)

    @contextmanager
    def _dropping_if_left(self, lease: LeaseRecord) -> Generator[None]:
        """End a lease whose caller is not told of it, but not if the daemon stops: the caller asks the next one."""
        try:
            yield
        except BaseException as left:
            if not self._sharing.is_stopping and self._sharing.memory.leases.drop(lease.number) is not None:
                self._sharing.note_end(
                    lease, left.message if isinstance(left, HegmError) else "its caller disconnected"
                )
            raise

    async def _leased_request(self, request: protocol.MakeRoom, caller: Caller) -> LeaseRecord:
        """The lease that is asked for, not entered yet. Raises HegmError for one that there cannot be."""
        snapshot = await self._inventory.fresh(FRESH_S)
        gpu = None if request.gpu == protocol.AUTO else gpu_named(request.gpu, snapshot.gpus)
        if not 0 < request.size_bytes <= MAX_SIZE_BYTES:
            raise HegmError(BAD_REQUEST, f"{request.size_bytes} bytes are not a size", "give one such as --bytes 60GiB")
        self._require_room(snapshot, gpu, request.size_bytes)
        for seconds, what in ((request.hold_s, "--seconds"), (request.limit_s, "--timeout")):
            if seconds is not None and not 0 < seconds <= MAX_LIMIT_S:
                hint = f"give more than 0 and at most {MAX_LIMIT_S:,.0f} seconds"
                raise HegmError(BAD_REQUEST, f"{seconds:g} s is not valid for {what}", hint)
        if request.pid is not None and request.hold_s is not None:
            raise HegmError(BAD_REQUEST, "a lease ends with a process or after a time", "leave one of the two out")
        ticks = None
        if request.pid is not None:
            ticks = self._start_ticks(request.pid)
            if ticks is None:
                raise HegmError(NOT_FOUND, f"there is no process {request.pid}", "name a process that runs: --for PID")
            if not caller.may(self._owner_of(request.pid)):
                message = f"process {request.pid} belongs to another user"
                raise HegmError(DENIED, message, "name a process of your own with --for")
        rules = self._sharing.rules
        waiter = caller.pid if request.until_free else None
        lease = LeaseRecord(
            number=0,
            name=request.name,
            gpu=gpu,
            size_bytes=request.size_bytes,
            priority=rules.lease_priority(request.priority, is_admin=caller.is_admin),
            uid=caller.uid,
            is_admin=caller.is_admin,
            since_utc=self._utc(),
            made_ticks=0,
            boot="",
            pid=request.pid,
            start_ticks=ticks,
            hold_s=request.hold_s,
            keeps_context=request.keep_context,
            waiter_pid=waiter,
            waiter_ticks=None if waiter is None else self._start_ticks(waiter),
        )
        return self._sharing.memory.leases.stamped(lease, rules.max_lease_s if request.pid is None else None)

    async def _planned(self, lease: LeaseRecord) -> protocol.RoomReply:
        """Return the planned steps. Raises REFUSED if they would not free enough.

        A daemon that has just started waits for the agents of jobs of before, as it does before it suspends any.
        """
        await self._sharing.until_agents_are_back()
        view, decision = await self._sharing.look(lease)
        steps = steps_for(lease.id, view, decision)
        waiting = decision.waiting_of(lease.id)
        granted = next((one for one in decision.actions if one.subject == lease.id), None)
        gpus = granted.gpus if granted is not None else waiting.gpus if waiting is not None else ()
        if granted is None and waiting is not None and not steps and not is_moving(view, decision, lease.id):
            raise _no_room(lease, waiting.waits)
        return protocol.RoomReply(gpu=gpus[0] if gpus else lease.gpu, steps=steps)

    async def _until_held(self, lease: LeaseRecord, limit_s: float | None, emit: EmitRoom) -> protocol.RoomReply:
        """Wait for the memory. Raises TIMEOUT, and without a limit REFUSED once nothing that is under way helps."""
        sharing, last = self._sharing, ""
        with anyio.CancelScope() as waiting:
            if limit_s is not None:
                waiting.deadline = anyio.current_time() + limit_s
            while True:
                changed = sharing.decided.next
                current = sharing.memory.leases.find(lease.id)
                if current is None:
                    raise HegmError(
                        CANCELLED, f"lease {lease.id} has ended while it was waited for", "ask again", FINAL
                    )
                if current.is_held:
                    return protocol.RoomReply(lease=self._view(current), gpu=current.gpu)
                progress = self._progress(current)
                if progress.waits != last:
                    last = progress.waits
                    await emit(progress)
                if limit_s is None and (why := self._why_never(current)) is not None:
                    raise _no_room(current, why)
                sharing.look_again()
                with anyio.move_on_after(TELL_INTERVAL_S):
                    await changed.wait()
        raise HegmError(
            TIMEOUT,
            f"{gigabytes(lease.size_bytes)} were not free within {limit_s:g} s: {last or 'nothing was decided yet'}",
            "see hegmctl queue; give a longer --timeout, a higher --priority, or fewer --bytes",
            {**FINAL, "lease": lease.id},
        )

    def _progress(self, lease: LeaseRecord) -> protocol.RoomProgress:
        waiting, free_bytes = self._sharing.waiting_of(lease.id), None
        gpu = lease.gpu or (waiting.gpus[0] if waiting is not None and waiting.gpus else None)
        if self._sharing.latest is not None:
            room = rooms_of(self._sharing.latest[0].snapshot).get(gpu or "")
            free_bytes = None if room is None else max(0, room.now_bytes)
        waits = "a decision" if waiting is None else waiting.waits
        return protocol.RoomProgress(
            lease=lease.id, gpu=gpu, free_bytes=free_bytes, size_bytes=lease.size_bytes, waits=waits
        )

    def _why_never(self, lease: LeaseRecord) -> str | None:
        """Why nothing that is under way will free the memory; None if something may."""
        if self._sharing.latest is None or self._sharing.awaits_agents:
            return None
        view, decision = self._sharing.latest
        waiting = decision.waiting_of(lease.id)
        if waiting is None or is_moving(view, decision, lease.id):
            return None
        failed = [past.failure for job in view.jobs if (past := self._sharing.history.of(job)).failure]
        return "; ".join([waiting.waits, *failed])

    async def release(self, request: protocol.Release, caller: Caller) -> protocol.Released:
        """End a lease. Raises NOT_FOUND, DENIED."""
        lease = self._sharing.memory.leases.named(request.lease, caller.may, caller.uid)
        if not caller.may(lease.uid):
            raise _denied(lease)
        self._sharing.memory.leases.drop(lease.number)
        self._sharing.note_end(lease, "it was released")
        what = f"lease {lease} was released, but its end"
        await self._sharing.memory.require_saved(what, f"a new daemon would hold {lease.id} again")
        return protocol.Released(lease=lease.id, gpu=lease.gpu, size_bytes=lease.size_bytes)

    def _require_room(self, node: NodeSnapshot, gpu_id: str | None, size_bytes: int) -> None:
        """See that a GPU can ever have that much free. Raises REFUSED; a GPU whose memory is not known may have it."""
        kept, most = self._sharing.kept_bytes(node), list[tuple[int, model.Gpu]]()
        for gpu in node.gpus:
            if gpu_id in (None, gpu.id):
                if gpu.memory_total_bytes is None:
                    return
                kept_bytes = kept.get(gpu.id, 0)
                seen = model.Gpu(gpu.id, gpu.memory_total_bytes, None, kept_bytes=kept_bytes)
                most.append((seen.total_bytes - kept_bytes, seen))
        if not most:
            raise Refused("this node has no GPU", "see hegmctl doctor", FINAL)
        most_bytes, largest = max(most, key=lambda one: one[0])
        if size_bytes > most_bytes:
            size, has = wording.above(size_bytes, most_bytes), wording.most_of(largest, most_bytes)
            hint = f"ask for {most_bytes >> 20}MiB or less; see hegmctl gpus"
            raise Refused(f"{size} can never be free: {has}", hint, FINAL)

    async def _require_saved(self, lease: LeaseRecord) -> None:
        await self._sharing.memory.require_saved(f"lease {lease}", "there are no leases, since a crash would end them")

    def _view(self, lease: LeaseRecord) -> protocol.Lease:
        latest = self._sharing.latest
        until_utc = self._sharing.memory.leases.until_utc(lease)
        return lease_view(lease, until_utc, None if latest is None else latest[0], self._sharing.waiting_of(lease.id))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def priority(self, request: int | str | None, caller: Caller) -> int | None:
        """The number of a priority that this caller gives. Raises BAD_REQUEST, DENIED."""
        return None if request is None else self._sharing.rules.priority(request, is_admin=caller.is_admin)

    async def set_priority(self, request: protocol.SetPriority, caller: Caller) -> Job:
        """Change the priority of a job. Raises HegmError."""
        record = await self._job_requests.record(request.job, caller.may)
        number = self._sharing.rules.priority(request.priority, is_admin=caller.is_admin)
        if not record.is_alive:
            raise Refused(f"job {record} {self._jobs.describe_end(record)}", "run: hegmctl jobs", {"job": record.id})
        try:
            await self._jobs.set_priority(record.number, number)
        finally:
            self._sharing.note_priority(record, number)
        return await self._job_requests.one(record.id, caller.may)

    async def place(self, request: protocol.PlaceJob, caller: Caller, emit: EmitPlace) -> protocol.JobPlaced:
        """Wait until a job has a GPU. Its place in the queue lasts as long as its process. Raises HegmError."""
        job = self._jobs.of_run(caller.uid, request.run)
        if job is None:
            raise HegmError(NOT_FOUND, "this run is not a job yet", "register it first: hegmctl run does")
        snapshot = await self._inventory.fresh(FRESH_S)
        gpu = None if request.gpu == protocol.AUTO else gpu_named(request.gpu, snapshot.gpus)
        if request.size_bytes is not None and not 0 < request.size_bytes <= MAX_SIZE_BYTES:
            message = f"{request.size_bytes} bytes are not a size"
            raise HegmError(BAD_REQUEST, message, "give one such as --bytes 60GiB", FINAL)
        self._require_room(snapshot, gpu, request.size_bytes or 0)
        _require_gpus(snapshot, gpu, request.gpu_count, request.size_bytes or 0)
        memory = self._sharing.memory
        if job.number not in memory.queue:
            record = QueuedRecord(
                job=job.number,
                gpu=gpu,
                gpu_count=request.gpu_count,
                size_bytes=request.size_bytes,
                since_utc=self._utc(),
            )
            self._sharing.note_queued(job)
            memory.put_queued(record)
            await memory.until_saved()
        return await self._until_placed(job, emit)

    async def _until_placed(self, job: JobRecord, emit: EmitPlace) -> protocol.JobPlaced:
        sharing, last = self._sharing, protocol.PlaceProgress(waits="", ahead=0)
        while True:
            changed = sharing.decided.next
            record = sharing.memory.queue.get(job.number)
            if record is None:
                raise HegmError(CANCELLED, f"job {job} has left the queue", "run it again", FINAL)
            if record.placed is not None:
                await sharing.memory.until_saved()
                return protocol.JobPlaced(gpu=record.placed)
            waiting = sharing.waiting_of(job.id)
            if waiting is not None:
                progress = protocol.PlaceProgress(waits=waiting.waits, ahead=self._ahead_of(job, record))
                if progress != last:
                    last = progress
                    await emit(progress)
            with anyio.move_on_after(TELL_INTERVAL_S):
                await changed.wait()

    def _ahead_of(self, job: JobRecord, record: QueuedRecord) -> int:
        priorities = {one.number: one.priority for one in self._jobs}
        mine = (-job.priority, record.since_utc)
        waiting = [one for one in self._sharing.memory.queue.values() if one.placed is None]
        return sum((-priorities.get(one.job, 0), one.since_utc) < mine for one in waiting)

    # -- the queue -----------------------------------------------------------------------------------------------------

    async def queue(self, caller: Caller) -> protocol.QueueReply:
        """Return the running jobs, the waiting jobs with their reasons, and the leases."""
        view, decision = await self._sharing.look()
        waiting = {one.subject: one for one in decision.waiting}
        known = self._sharing.memory.leases
        leases = [lease_view(lease, known.until_utc(lease), view, waiting.get(lease.id)) for lease in known]
        return protocol.QueueReply(
            taken_utc=self._utc(),
            jobs=job_views(view, decision, self._utc(), caller.may),
            leases=tuple([lease if caller.may(lease.uid) else lease.replace(name=None) for lease in leases]),
            slices=self._sharing.rules.policy.slices,
        )


def _require_gpus(node: NodeSnapshot, gpu_id: str | None, count: int, size_bytes: int) -> None:
    """See that the node has so many GPUs of one chip and that size. Raises BAD_REQUEST, REFUSED."""
    if count < 1 or (count > 1 and gpu_id is not None):
        raise HegmError(BAD_REQUEST, f"{count} GPUs cannot be chosen", "write --gpu auto:2, or name one GPU", FINAL)
    chips = [gpu.chip for gpu in node.gpus if (gpu.memory_total_bytes or size_bytes) >= size_bytes]
    most = max((chips.count(chip) for chip in chips), default=0)
    if count > most:
        size = f" with {gigabytes(size_bytes)} each" if size_bytes else ""
        hint = f"ask for fewer, such as --gpu auto:{most}; or name the GPU for all ranks: --gpu gpu0"
        raise Refused(f"the job wants {count} GPUs of one type{size}, and this node has {most}", hint, FINAL)


def is_moving(view: View, decision: model.Decision, subject: str) -> bool:
    """Return True if something is under way, or due at a known time, after which that one may have its memory."""
    waiting = decision.waiting_of(subject)
    if waiting is None or waiting.at_s is not None:
        return True
    if any(subject in (action.subject, action.beneficiary) for action in decision.actions):
        return True
    gpus = set(waiting.gpus)
    if any(gpu.copying_bytes and (not gpus or gpu.id in gpus) for gpu in view.snapshot.gpus):
        return True
    priority = next((one.priority for one in view.snapshot.leases if one.id == subject), protocol.MAX_PRIORITY)
    passing = [job for job in view.snapshot.jobs if _is_passing(job, view, priority)]
    return any(not gpus or gpus & {*job.gpus, *job.held_bytes} for job in passing)


def _is_passing(job: model.Job, view: View, priority: int) -> bool:
    """Return True if that job will soon have left, or can soon be suspended for that priority."""
    op = view.jobs[job.id].operation
    if job.state == model.LEAVING:
        return True
    if job.state == model.ARRIVING and op is None:
        is_starting = view.now - job.since_s < STARTS_WITHIN_S
        return is_starting and job.is_preemptible and job.priority < priority
    return op is not None and op.phase != HOLDING and job.state in (model.ARRIVING, model.BUSY)


def _no_room(lease: LeaseRecord, why: str) -> Refused:
    where = lease.gpu or "any GPU"
    return Refused(
        f"{gigabytes(lease.size_bytes)} on {where} cannot be freed with priority {lease.priority}: "
        f"it {wording.waits(why)}",
        "see hegmctl queue; give a higher --priority or fewer --bytes, or a --timeout to wait until others end",
        {"lease": lease.id},
    )


def _denied(lease: LeaseRecord) -> HegmError:
    message = f"lease {lease.id} belongs to uid {lease.uid}"
    return HegmError(DENIED, message, "ask its owner, or an administrator of hegmd", {"uid": lease.uid})
