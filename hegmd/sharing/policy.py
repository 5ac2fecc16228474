"""The sharing policy: from the node at one moment to what has to be done now.

Owns the decision and nothing else: no clock, no I/O, no memory of earlier decisions. All that waits is looked at once,
the highest priority first and equals in the order in which they began to wait. Each gets memory that is free, or is
promised memory that becomes free, or has others suspended, or holds the GPU that it will have first. Nobody after it
can have what it got. Jobs that have to leave are looked at in the same order, and migrate if a GPU has room for them.

Longer than 400 lines because every step of a decision changes the same accounts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from hegmd.sharing import wording
from hegmd.sharing.clearing import FreeingSteps, ReadyJobs, clearing, pool_bytes
from hegmd.sharing.model import (
    ARRIVING,
    BUSY,
    LEAVING,
    MIGRATE,
    PENDING,
    QUEUED,
    RESUME,
    RUNNING,
    START,
    SUSPEND,
    SUSPENDED,
    Action,
    Decision,
    Job,
    Lease,
    Snapshot,
    WaitReason,
)
from hegmd.sharing.room import GpuBudget, GpuHold, rooms_of
from hegmd.sharing.wanted import MemoryRequest, request_of, turn_of, wanted_by

Turn = tuple[int, int, float, str]
Rooms = tuple[GpuBudget, ...]
# A decision has others leave for so many waiting jobs. The jobs after them are served when those have left: that many
# copies keep a node busy, and a decision stays short.
MAX_SERVED_BY_LEAVING = 8


def decide(snapshot: Snapshot, now: float) -> Decision:
    """Return what to do now, what everyone waits for, and when to decide again."""
    return _Decider(snapshot, now).decision()


def explain(snapshot: Snapshot, now: float) -> tuple[WaitReason, ...]:
    """Return what each waiting job and pending lease waits for, and what happens next, in the order of their turns."""
    return decide(snapshot, now).waiting


class _Decider:
    """A decision while it is made."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self._rules = snapshot.rules
        self._jobs = snapshot.jobs
        self._now = now
        self._gpus = {gpu.id: gpu for gpu in snapshot.gpus}
        self._rooms = rooms_of(snapshot)
        self._pool_bytes = math.inf if snapshot.pool_free_bytes is None else snapshot.pool_free_bytes
        self._suspended: dict[int, int] = {}
        # The jobs that have to leave their GPUs, and for whom.
        self._displaced: dict[str, tuple[Job, MemoryRequest]] = {}
        self._served_by_leaving = 0
        # Results that are the same for all waiting jobs of a kind, with the number of jobs on the GPU for which it
        # holds.
        self._known_candidates: dict[tuple[str, tuple[object, ...]], tuple[int, list[Job]]] = {}
        self._known_ready: dict[tuple[str, int | None], tuple[int, ReadyJobs]] = {}
        self._most_freed: dict[tuple[str, int], tuple[int, int]] = {}
        self._known_suitable: dict[tuple[object, ...], tuple[list[GpuBudget], list[GpuBudget]]] = {}
        # The most that becomes free on one GPU; None if that has changed since it was computed.
        self._most_soon_bytes: int | None = None
        # The smallest of each kind that found no room: larger ones need not look.
        self._blocked: dict[tuple[object, ...], int] = {}
        # The jobs that could have a turn if the pool had more room.
        self._lack_pool: set[str] = set()
        # The GPUs on which this decision starts or resumes a job.
        self._admitted: set[str] = set()
        self._actions: list[Action] = []
        self._waiting: list[WaitReason] = []
        self._again_at_s = math.inf
        # All who wait, the first one last, with their places in the order; and the jobs that have to leave.
        line = [(turn_of(job), job) for job in snapshot.jobs if job.state in (QUEUED, SUSPENDED)]
        self._line: list[tuple[Turn, Job | Lease]] = [
            *line,
            *((turn_of(lease), lease) for lease in snapshot.leases if lease.state == PENDING),
        ]
        self._line.sort(key=lambda each: each[0], reverse=True)
        self._leavers: list[tuple[Turn, Job]] = []
        for _, job in line:
            if job.state == SUSPENDED:
                self._suspended[job.priority] = self._suspended.get(job.priority, 0) + 1

    def decision(self) -> Decision:
        """Serve all who wait, in order, and see off those who have to leave for them."""
        while self._line or self._leavers:
            if self._leavers and (not self._line or self._leavers[0][0] < self._line[-1][0]):
                _, job = heapq.heappop(self._leavers)
                self._migrate_or_suspend(wanted_by(job, self._now), job)
            elif self._is_hindered(waiting := self._line.pop()[1]):
                continue
            elif self._served_by_leaving < MAX_SERVED_BY_LEAVING:
                self._serve(request_of(waiting))
            else:
                self._waiting.append(WaitReason(waiting.id, wording.FIRST, "its turn, after theirs"))
        again_at_s = None if math.isinf(self._again_at_s) else self._again_at_s
        return Decision(tuple(self._actions), tuple(self._waiting), again_at_s)

    # -- who waits -----------------------------------------------------------------------------------------------------

    def _is_hindered(self, waiting: Job | Lease) -> bool:
        """Return whether nothing can be done with it now, and note why."""
        if isinstance(waiting, Job) and waiting.hindrance:
            self._wait(waiting.id, f"until this has changed: {waiting.hindrance}", "a retry then")
        elif waiting.retry_at_s is not None and waiting.retry_at_s > self._now:
            why = f"until it is tried again: {waiting.failure}"
            self._wait(waiting.id, why, "a retry", waiting.retry_at_s)
        else:
            return False
        return True

    def _serve(self, wanted: MemoryRequest) -> None:
        kinds = [(one, rooms) for one in self._by_chip(wanted) if (rooms := self._suitable(one))]
        if not kinds:
            if not self._admit_with_least(wanted):
                waits = wording.unsuitable(self._nearest(wanted), self._gpus.values(), self._rooms)
                self._wait(wanted.id, waits, "a retry when a GPU can hold it")
        elif self._is_blocked(wanted):
            self._wait(wanted.id, wording.FIRST, "its turn, after theirs")
        elif chosen := self._fit_one(kinds, at_once=True):
            self._admit(wanted, chosen)
        elif chosen := self._fit_one(kinds, at_once=False):
            self._await_leaving(wanted, chosen)
        else:
            self._clear(wanted, kinds)

    def _by_chip(self, wanted: MemoryRequest) -> list[MemoryRequest]:
        """Return the request once for each chip that it may have: a job starts on several GPUs of one chip only."""
        chips = [room.gpu.chip for room in self._rooms.values()]
        if wanted.action != START or wanted.gpu_count == 1 or wanted.chip is not None or len(set(chips)) <= 1:
            return [wanted]
        return [wanted._replace(chip=chip) for chip in sorted(dict.fromkeys(chips), key=chips.count, reverse=True)]

    def _nearest(self, wanted: MemoryRequest) -> MemoryRequest:
        """Return the request for the chip of which the most GPUs could ever hold a share of it."""

        def count(one: MemoryRequest) -> int:
            rooms = [room for room in self._rooms.values() if one.chip in (None, room.gpu.chip)]
            return sum(room.capacity_bytes >= one.need_bytes(room.gpu, 0, self._rules) for room in rooms)

        return max(self._by_chip(wanted), key=count)

    def _fit_one(self, kinds: Iterable[tuple[MemoryRequest, Sequence[GpuBudget]]], *, at_once: bool) -> Rooms:
        """Return the GPUs of the first chip that has room for it; none if no chip has."""
        return next((chosen for one, rooms in kinds if (chosen := self._fit(one, rooms, at_once=at_once))), ())

    def _suitable(self, wanted: MemoryRequest) -> list[GpuBudget]:
        """Return the GPUs on which it could ever be; none unless there are as many as it needs."""
        key = wanted.allowed_gpus, wanted.chip
        if key not in self._known_suitable:
            rooms = [
                room
                for room in self._rooms.values()
                if (wanted.allowed_gpus is None or room.gpu.id in wanted.allowed_gpus)
                and (wanted.chip is None or room.gpu.chip == wanted.chip)
            ]
            self._known_suitable[key] = rooms, sorted(rooms, key=lambda room: -room.capacity_bytes)
        rooms, by_size = self._known_suitable[key]
        # The share that needs the most goes to the largest GPU, and so on: if that does not fit, nothing does.
        largest = by_size[: wanted.gpu_count]
        fits = len(largest) == wanted.gpu_count and all(
            room.capacity_bytes >= wanted.need_bytes(room.gpu, share, self._rules)
            for room, share in zip(largest, wanted.shares(), strict=True)
        )
        return rooms if fits else []

    def _fit(self, wanted: MemoryRequest, rooms: Iterable[GpuBudget], *, at_once: bool) -> Rooms:
        """Return a GPU with room for each share of it, in their order; none if it does not fit."""
        if self._most_soon_bytes is None:
            self._most_soon_bytes = max([room.soon_bytes for room in self._rooms.values()], default=0)
        if wanted.needs_bytes is not None and not wanted.within and max(wanted.needs_bytes) > self._most_soon_bytes:
            return ()
        left = list(rooms)
        chosen: dict[int, GpuBudget] = {}
        last = wanted.job.gpus if wanted.job is not None else ()
        for share in wanted.shares():
            best: tuple[tuple[int, bool, int, str], GpuBudget] | None = None
            for room in left:
                open_bytes = room.open_bytes(wanted) if at_once else room.open_soon_bytes(wanted)
                if open_bytes >= wanted.need_bytes(room.gpu, share, self._rules):
                    beside = sum(priority >= wanted.priority for priority in room.priorities)
                    key = (beside, room.gpu.id not in last, -open_bytes, room.gpu.id)
                    if best is None or key < best[0]:
                        best = key, room
            if best is None:
                return ()
            left.remove(best[1])
            chosen[share] = best[1]
        return tuple(chosen[share] for share in range(wanted.gpu_count))

    def _admit(self, wanted: MemoryRequest, chosen: Rooms) -> None:
        """Let it have memory that is free, unless it was suspended a moment ago."""
        if wanted.job is not None and wanted.action == RESUME:
            settled_s = wanted.job.since_s + self._rules.settle_s
            if settled_s > self._now:
                self._take(wanted, chosen, at_once=False)
                then = wording.follows(wanted, chosen)
                waits = f"until it has been suspended for {self._rules.settle_s:g} s"
                self._wait(wanted.id, waits, then, settled_s, _ids(chosen))
                return
        sizes = tuple(
            min(room.open_bytes(wanted), wanted.claim_bytes(room.gpu, share)) for share, room in enumerate(chosen)
        )
        self._take(wanted, chosen, at_once=True)
        reason = wording.admitted(wanted, chosen, sizes)
        self._actions.append(Action(wanted.action, wanted.id, _ids(chosen), sizes, reason))
        self._admitted.update(_ids(chosen))
        self._wait(wanted.id, "nothing", reason, self._now, _ids(chosen))

    @cached_property
    def _changing(self) -> frozenset[str]:
        """The GPUs with a job that cannot leave now and soon may: it is in an operation, or an attempt has failed."""
        return frozenset(
            gpu_id
            for job in self._jobs
            if job.state in (ARRIVING, LEAVING, BUSY)
            or (job.state == RUNNING and job.retry_at_s is not None and job.retry_at_s > self._now)
            for gpu_id in job.gpus
        )

    def _admit_with_least(self, wanted: MemoryRequest) -> bool:
        """Let a suspended job have what it had before, if that is free. Return whether it has it.

        No other job can leave for the rest of its stated need, which it may never use. A GPU on which a job starts now
        is left out: both jobs might use what they stated, and that one can be suspended later.
        """
        least_bytes = None if wanted.job is None else wanted.job.least_bytes
        if least_bytes is None or least_bytes == wanted.needs_bytes:
            return False
        modest = wanted._replace(needs_bytes=least_bytes)
        settled = [room for room in self._suitable(modest) if room.gpu.id not in self._admitted | self._changing]
        chosen = self._fit(modest, settled, at_once=True)
        if chosen:
            self._admit(modest, chosen)
        return bool(chosen)

    def _await_leaving(self, wanted: MemoryRequest, chosen: Rooms) -> None:
        """Promise it memory that becomes free."""
        self._take(wanted, chosen, at_once=False)
        self._wait(wanted.id, wording.leaving(chosen), wording.follows(wanted, chosen), gpus=_ids(chosen))

    # -- who has to leave ----------------------------------------------------------------------------------------------

    def _clear(self, wanted: MemoryRequest, kinds: Sequence[tuple[MemoryRequest, Sequence[GpuBudget]]]) -> None:
        """Have others leave, if that makes room at once; otherwise hold the GPUs where it has room first."""
        found = [clearings for one, rooms in kinds if (clearings := self._clearings(one, rooms))]
        if not found:
            self._block(wanted)
            self._wait(
                wanted.id, wording.held([room for _, rooms in kinds for room in rooms]), "its turn, after theirs"
            )
            return
        clearings = min(found, key=lambda options: max(option.at_s for option in options))
        at_s = max(option.at_s for option in clearings)
        if at_s == math.inf and self._admit_with_least(wanted):
            return
        if at_s > -math.inf:
            self._hold(wanted, clearings, at_s)
        elif not self._displace(wanted, clearings):
            self._hold(wanted, clearings, math.inf, wording.full_pool(self._pool_bytes))

    def _clearings(self, wanted: MemoryRequest, rooms: Sequence[GpuBudget]) -> tuple[FreeingSteps, ...]:
        """Return what makes room for each share of it, in their order; none if others wait for the GPUs."""
        found: dict[int, FreeingSteps] = {}
        left = list(rooms)
        for share in wanted.shares():
            options = self._at_once(wanted, left, share)
            if not options:
                options = [option for room in left if (option := self._clearing(wanted, room, share)) is not None]
            if not options:
                return ()
            found[share] = min(options, key=lambda option: option.cost(wanted.priority))
            left.remove(found[share].room)
        return tuple(found[share] for share in range(wanted.gpu_count))

    def _at_once(self, wanted: MemoryRequest, rooms: Sequence[GpuBudget], share: int) -> list[FreeingSteps]:
        """Return what makes room for a share of it at once, where jobs of the lowest priority have to leave."""
        lowest, found = wanted.priority, list[tuple[ReadyJobs, int]]()
        for room in rooms:
            need_bytes = wanted.need_bytes(room.gpu, share, self._rules) - room.own_bytes(wanted)
            if self._is_closed(wanted, room, need_bytes):
                continue
            ready, missing_bytes = self._ready(wanted, room), need_bytes - room.soon_bytes
            highest = ready.highest_needed(missing_bytes, wanted.priority)
            if highest is not None and highest < lowest:
                lowest, found = highest, []
            if highest == lowest:
                found.append((ready, missing_bytes))
        return [ready.leaving(missing_bytes, lowest) for ready, missing_bytes in found]

    def _ready(self, wanted: MemoryRequest, room: GpuBudget) -> ReadyJobs:
        """Return who can leave `room` at once for a job like `wanted`: the same for all with its rights."""
        key = room.gpu.id, None if wanted.preempts_others else wanted.uid
        known = self._known_ready.get(key)
        if known is None or known[0] != len(room.jobs):
            jobs = [
                job
                for job in room.jobs
                if job.is_preemptible
                and not job.hindrance
                and (job.retry_at_s is None or job.retry_at_s <= self._now)
                and wanted.may_preempt(job.uid)
            ]
            known = len(room.jobs), ReadyJobs(room, jobs, self._rules, self._now)
            self._known_ready[key] = known
        return known[1]

    def _is_closed(self, wanted: MemoryRequest, room: GpuBudget, need_bytes: int) -> bool:
        """Return whether a GPU is too small for it or kept for others."""
        limit_bytes = room.hold.limit_bytes(wanted) if room.hold is not None else None
        return room.capacity_bytes < need_bytes or (limit_bytes is not None and limit_bytes < need_bytes)

    def _clearing(self, wanted: MemoryRequest, room: GpuBudget, share: int) -> FreeingSteps | None:
        """Return what makes room for a share of it on that GPU; None if the GPU is kept for others or too small."""
        need_bytes = wanted.need_bytes(room.gpu, share, self._rules) - room.own_bytes(wanted)
        if self._is_closed(wanted, room, need_bytes):
            return None
        most_bytes = self._most_freed_bytes(room, wanted.priority)
        if room.soon_bytes + most_bytes < need_bytes:
            return FreeingSteps(room, (), math.inf, most_bytes)
        jobs = self._candidates(wanted, room)
        return clearing(room, wanted, need_bytes, jobs, self._rules, self._now)

    def _most_freed_bytes(self, room: GpuBudget, priority: int) -> int:
        known = self._most_freed.get((room.gpu.id, priority))
        if known is None or known[0] != len(room.jobs):
            known = len(room.jobs), room.most_freed_bytes(priority)
            self._most_freed[room.gpu.id, priority] = known
        return known[1]

    def _candidates(self, wanted: MemoryRequest, room: GpuBudget) -> list[Job]:
        """Return who may be asked to leave `room` for `wanted`: the same for all of its kind, if the pool is large."""
        if wanted.action == START and self._pool_bytes != math.inf:
            return [job for job in room.jobs if self._may_leave(job, wanted)]
        key = room.gpu.id, wanted.kind()
        known = self._known_candidates.get(key)
        if known is None or known[0] != len(room.jobs):
            known = len(room.jobs), [job for job in room.jobs if self._may_leave(job, wanted)]
            self._known_candidates[key] = known
        return known[1]

    def _may_leave(self, job: Job, wanted: MemoryRequest) -> bool:
        """Return whether `job` may be suspended for `wanted`, now or when its turn has ended."""
        if not job.is_preemptible or job.hindrance or job.id in self._displaced or job.priority > wanted.priority:
            return False
        if not wanted.may_preempt(job.uid) or (job.priority == wanted.priority and not self._take_turns(job, wanted)):
            return False
        if job.retry_at_s is not None and job.retry_at_s > self._now:
            self._wake(job.retry_at_s)
            return False
        return True

    def _take_turns(self, job: Job, wanted: MemoryRequest) -> bool:
        """Return whether both would give way to each other, and the node can keep one more suspended job."""
        if not self._rules.slices or wanted.job is None or not wanted.is_preemptible:
            return False
        if wanted.uid != job.uid and not job.preempts_others:
            return False
        if wanted.action == RESUME:
            return True
        if self._suspended.get(wanted.priority, 0) >= (self._rules.turns_per_gpu - 1) * len(self._rooms):
            return False
        # The pool needs room for the next exchange too, or the turns would come to a stop.
        leaving_bytes = pool_bytes(job)
        if self._pool_bytes >= leaving_bytes + max(leaving_bytes, sum(wanted.needs_bytes or (0,))):
            return True
        self._lack_pool.add(wanted.id)
        return False

    def _displace(self, wanted: MemoryRequest, clearings: Sequence[FreeingSteps]) -> bool:
        """Have the jobs of `clearings` leave for `wanted`. Return False if the pool has no room, with nothing changed.

        If the pool has room for all, whether they migrate is decided when those before them have been served.
        """
        jobs = list({job.id: job for option in clearings for job in option.victims}.values())
        before = [(room, room.accounts()) for room in self._rooms.values()]
        migrating: dict[str, Rooms] = {}
        if sum(map(pool_bytes, jobs)) > self._pool_bytes:
            for job in jobs:
                if chosen := self._other_gpus(job):
                    migrating[job.id] = chosen
                    self._take(wanted_by(job, self._now), chosen, at_once=True)
        suspended = [job for job in jobs if job.id not in migrating]
        if sum(map(pool_bytes, suspended)) > self._pool_bytes:
            self._most_soon_bytes = None
            for room, accounts in before:
                room.reset(accounts)
            return False
        self._served_by_leaving += 1
        for job in jobs:
            self._displaced[job.id] = (job, wanted)
            self._leave(job)
        for job in suspended:
            self._pool_bytes -= pool_bytes(job)
            heapq.heappush(self._leavers, (wanted_by(job, self._now).turn, job))
        for job in jobs:
            if job.id in migrating:
                self._act_on_leaver(job, migrating[job.id])
        self._await_leaving(wanted, tuple(option.room for option in clearings))
        return True

    def _leave(self, job: Job) -> None:
        self._most_soon_bytes = None
        for gpu_id in job.gpus:
            if (room := self._rooms.get(gpu_id)) is not None:
                room.leave(job)

    def _other_gpus(self, job: Job) -> Rooms:
        """Return other GPUs that have room for a job that has to leave its own; none if there are none."""
        leaver = wanted_by(job, self._now)
        return self._fit(leaver, [room for room in self._suitable(leaver) if room.gpu.id not in job.gpus], at_once=True)

    def _migrate_or_suspend(self, wanted: MemoryRequest, job: Job) -> None:
        """Migrate a job that has to leave, if another GPU has room for it by now; otherwise suspend it."""
        chosen = self._other_gpus(job)
        if chosen:
            self._pool_bytes += pool_bytes(job)
            self._take(wanted, chosen, at_once=True)
        self._act_on_leaver(job, chosen)

    def _act_on_leaver(self, job: Job, chosen: Rooms) -> None:
        beneficiary = self._displaced[job.id][1]
        ends_turn = job.priority == beneficiary.priority
        if chosen:
            leaver = wanted_by(job, self._now)
            kind, gpus = MIGRATE, _ids(chosen)
            sizes = tuple(leaver.claim_bytes(room.gpu, share) for share, room in enumerate(chosen))
        else:
            kind, gpus = SUSPEND, job.gpus
            sizes = tuple(job.held_bytes.get(gpu_id, 0) for gpu_id in gpus)
        ran_s = job.turn_s + self._now - job.since_s
        reason = wording.displaced(beneficiary, job.gpus, ran_s if ends_turn else None)
        self._actions.append(Action(kind, job.id, gpus, sizes, reason, beneficiary.id, ends_turn))

    def _hold(self, wanted: MemoryRequest, clearings: Sequence[FreeingSteps], at_s: float, waits: str = "") -> None:
        """Keep the GPUs for `wanted`, unless another waits for them already."""
        if all(option.room.hold is not None for option in clearings):
            self._block(wanted)
        known_s = at_s if at_s < math.inf else None
        for share, option in enumerate(clearings):
            room = option.room
            if room.hold is None:
                left_bytes = room.capacity_bytes if known_s is None else room.soon_bytes + option.freed_bytes
                room.hold = GpuHold(wanted, left_bytes - wanted.claim_bytes(room.gpu, share), known_s)
        chosen = tuple(option.room for option in clearings)
        if known_s is not None:
            names = list(dict.fromkeys(job.name for option in clearings for job in option.victims))
            waits = wording.turns(names, self._now, known_s)
        elif not waits and wanted.id in self._lack_pool:
            waits = wording.full_pool(self._pool_bytes)
        then = wording.follows(wanted, chosen)
        if not waits:
            needs = [wanted.need_bytes(room.gpu, share, self._rules) for share, room in enumerate(chosen)]
            waits, then = wording.occupied(wanted, chosen, needs, self._now)
        self._wait(wanted.id, waits, then, known_s, _ids(chosen))

    # -- accounts ------------------------------------------------------------------------------------------------------

    def _take(self, wanted: MemoryRequest, chosen: Rooms, *, at_once: bool) -> None:
        self._most_soon_bytes = None
        for share, room in enumerate(chosen):
            room.take(wanted, share, at_once=at_once)

    def _block(self, wanted: MemoryRequest) -> None:
        kind = wanted.kind()
        size_bytes = max(wanted.needs_bytes or (0,))
        self._blocked[kind] = min(size_bytes, self._blocked.get(kind, size_bytes))

    def _is_blocked(self, wanted: MemoryRequest) -> bool:
        """Return whether a smaller one of its kind found no room before it: then there is none for it either."""
        blocked_bytes = self._blocked.get(wanted.kind())
        return blocked_bytes is not None and min(wanted.needs_bytes or (0,)) >= blocked_bytes

    def _wait(self, subject: str, waits: str, then: str, at_s: float | None = None, gpus: tuple[str, ...] = ()) -> None:
        self._waiting.append(WaitReason(subject, waits, then, at_s, gpus))
        if at_s is not None:
            self._wake(at_s)

    def _wake(self, at_s: float) -> None:
        if at_s > self._now:
            self._again_at_s = min(self._again_at_s, at_s)


def _ids(rooms: Iterable[GpuBudget]) -> tuple[str, ...]:
    return tuple(room.gpu.id for room in rooms)
