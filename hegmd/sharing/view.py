"""Takes the snapshot for the sharing policy: GPUs, jobs and leases as they are at this moment.

Owns how the node's jobs, operations and processes become the states that the policy knows. Decides nothing about them.

Longer than 400 lines because all states that a job can be in are told apart here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import anyio

from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import FORWARD, MIGRATE, RESUME, SUSPEND, JobProcess, Operation
from hegmd.migration.model import Candidate, GpuMemory, MigrationPlan, NodeSnapshotForPlan, PlanRequest
from hegmd.migration.plan.forecast import expected
from hegmd.migration.plan.planner import planned
from hegmd.node.gpu_sets import gpus_of
from hegmd.operations.job_requests import JobOperationsOf
from hegmd.operations.survey import SURVEY_S, PlanSurvey
from hegmd.protocol.agents import not_connected
from hegmd.protocol.snapshots import HEALTHY
from hegmd.sharing import model
from hegmd.sharing.history import UNKNOWN_SWITCH_S, History
from hegmd.sharing.memory_use import (
    copies_by_gpu,
    held_by_gpu,
    is_open_to,
    kept_by_gpu,
    needs_by_gpu,
    needs_whole_gpus,
    stays_by_gpu,
    used_of_lease,
    with_stated,
)
from hegmd.sharing.records import LeaseRecord, QueuedRecord, SuspendedRecord
from hegmd.sharing.rules import AUTO, KEEP_CONTEXT, WHOLE, SharingRules
from hegmd.sharing.state import SharingMemory
from hegmd.workers.job_file import JobRecord
from hegmd.workers.job_names import trains
from hegmd.workers.jobs import Jobs
from hegmd.workers.workers import AgentConnection, Workers

# A process that does not say what it holds is asked again after this long.
ASK_AGAIN_S = 10.0
# A process that has had no batch yet is asked again after this long, and has so long to answer.
COUNT_AGAIN_S, COUNT_S = 2.0, 0.3
# A job that was given a GPU has so long to train. After that no memory is kept for it which it has not taken.
STARTS_WITHIN_S = 600.0


class SuspendOptions(NamedTuple):
    """The ways in which a running job can leave its GPUs, as planned."""

    #: Why it cannot; empty if it can.
    hindrance: str = ""
    #: About how long one suspension and one resumption take.
    switch_s: float | None = None
    #: The memory that stays on its GPUs if its contexts are kept; None if they cannot be.
    stays_bytes: Mapping[str, int] | None = None
    #: Whether it can only leave so.
    keeps_context: bool = False
    #: The bytes that it puts into the pool.
    pool_bytes: int | None = None


class JobView(NamedTuple):
    """A job, and what actions on it need to know."""

    record: JobRecord
    pids: tuple[int, ...]
    operation: Operation | None
    leaves: SuspendOptions | None = None


class View(NamedTuple):
    """The node at one moment: as the policy sees it, and the jobs behind it by their ids."""

    now: float
    snapshot: model.Snapshot
    jobs: Mapping[str, JobView] = MappingProxyType({})


class SharingView:
    """`acting` returns the action that is under way on a job, by the job's id.

    `returns_to` returns the GPUs on which a job that has failed is started again; none for any other job.
    `starts_ranks` returns True for a job whose launcher starts its ranks again, which it can on the same GPUs only.
    `awaits_resume` returns True for a job that is started again once its user resumes it.
    """

    def __init__(  # noqa: PLR0913 - the parts that it asks, each named
        self,
        jobs: Jobs,
        workers: Workers,
        operations: JobOperationsOf,
        survey: PlanSurvey,
        memory: SharingMemory,
        history: History,
        rules: SharingRules,
        *,
        acting: Callable[[str], model.Action | None],
        returns_to: Callable[[str], Sequence[str]],
        starts_ranks: Callable[[str], bool],
        awaits_resume: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = jobs
        self._workers = workers
        self._operations = operations
        self._survey = survey
        self._memory = memory
        self._history = history
        self._rules = rules
        self._acting = acting
        self._returns_to = returns_to
        self._starts_ranks = starts_ranks
        self._awaits_resume = awaits_resume
        self._clock = clock
        self._utc = utc
        #: The wall clock at the moment of this look: one reading for all, or the order of jobs would depend on pauses.
        self._now_utc = utc()
        #: The processes with an agent of each job at this look, by the job's number.
        self._attending: dict[int, list[AgentConnection]] = {}
        #: When each process that had not said what it holds was asked last.
        self._asked_at: dict[int, float] = {}
        #: The same for processes that were not seen to train.
        self._counted_at: dict[int, float] = {}
        #: The held leases whose process has started a job, by the job's number.
        self._within: dict[int, list[LeaseRecord]] = {}
        #: The memory that suspended jobs left on each GPU with their contexts.
        self._contexts: dict[str, int] = {}

    async def take(self, *more: LeaseRecord) -> View:
        """Look at the node. `more` are leases that are only thought of."""
        now = self._clock()
        node = await self._survey.snapshot(self._uncounted(now), may=lambda _uid: True, first_s=SURVEY_S)
        if await self._learn_who_trains(node.candidates, now):  # which takes a while
            node = await self._survey.snapshot(self._uncounted(now), may=lambda _uid: True, first_s=SURVEY_S)
        now, self._now_utc, ages_s = self._clock(), self._utc(), self._memory.leases.ages_s()
        free = {gpu.id: gpu.free_bytes for gpu in expected(node).gpus}
        gpus = [
            model.Gpu(
                *(gpu.id, gpu.total_bytes, free.get(gpu.id), gpu.chip, gpu.kept_bytes, gpu.copying_bytes),
                is_healthy=_is_healthy(gpu),
            )
            for gpu in node.gpus
            if gpu.total_bytes is not None
        ]
        jobs: list[model.Job] = []
        views: dict[str, JobView] = {}
        self._attending = self._workers_by_job()
        candidates = self._candidates_of(node.candidates)
        self._within, self._contexts = self._jobs_within_leases(candidates), {}
        for record in self._jobs:
            if record.is_alive:
                found = self._job(record, candidates.get(record.number, ()), node, now)
                if found is not None:
                    jobs.append(found[0])
                    views[record.id] = found[1]
        gpus = [gpu._replace(contexts_bytes=self._contexts.get(gpu.id, 0)) for gpu in gpus]
        used = self.used_bytes([lease for lease in (*self._memory.leases, *more) if lease.is_held], node.candidates)
        leases = [self._lease(lease, used, ages_s, now) for lease in (*self._memory.leases, *more)]
        snapshot = model.Snapshot(
            tuple(gpus), tuple(jobs), tuple(leases), self._rules.policy, pool_free_bytes=node.pool.free_bytes
        )
        return View(now, snapshot, views)

    async def _learn_who_trains(self, candidates: Sequence[Candidate], now: float) -> bool:
        """Ask each process on a GPU that was not seen to train for its count of batches: it sends none unasked.

        Return whether any was asked.
        """
        workers = [self._workers.find(candidate.pid) for candidate in candidates if candidate.gpus]
        found = [worker for worker in workers if worker is not None and worker.connected and not trains(worker)]
        asked = _due(found, self._counted_at, COUNT_AGAIN_S, now)
        async with anyio.create_task_group() as tasks:
            for worker in asked:
                tasks.start_soon(worker.count_boundaries, COUNT_S)
        return bool(asked)

    def _uncounted(self, now: float) -> tuple[int, ...]:
        """The processes that train and have not said yet what they hold. Each is asked rarely: it may not answer."""
        found = [worker for worker in self._workers if worker.boundary and worker.size_bytes is None]
        return tuple([worker.pid for worker in _due(found, self._asked_at, ASK_AGAIN_S, now)])

    def is_ours(self, op: Operation, record: SuspendedRecord | None) -> bool:
        """Return True if a suspended operation is one that sharing began."""
        if record is None:
            return False
        return op.id == record.operation or (record.operation is None and op.created_utc >= record.since_utc)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _workers_by_job(self) -> dict[int, list[AgentConnection]]:
        found: dict[int, list[AgentConnection]] = {}
        for worker in self._workers:
            job = self._jobs.of_worker(worker)
            if job is not None and job.is_alive:
                found.setdefault(job.number, []).append(worker)
        return found

    def _candidates_of(self, candidates: Sequence[Candidate]) -> dict[int, list[Candidate]]:
        """The processes on GPUs of each job, by its number."""
        owners: dict[int, int] = {}
        for number, workers in self._workers_by_job().items():
            owners.update({worker.pid: number for worker in workers})
        for job in self._jobs:
            if job.is_alive and job.pid is not None and not job.is_gone:
                owners.setdefault(job.pid, job.number)
        found: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            if candidate.pid in owners:
                found.setdefault(owners[candidate.pid], []).append(candidate)
        return found

    def _job(
        self, record: JobRecord, candidates: Sequence[Candidate], node: NodeSnapshotForPlan, now: float
    ) -> tuple[model.Job, JobView] | None:
        """The job as the policy sees it; None for one that neither has nor wants a GPU."""
        workers = [worker for worker in self._attending.get(record.number, ()) if trains(worker)]
        held = held_by_gpu(candidates)
        op, queued = self._operations.of(record), self._memory.queue.get(record.number)
        if queued is not None and queued.placed is None and workers and held:  # it did not wait
            self._memory.forget_queued(record.number)
            queued = None
        if queued is not None and not queued.has_trained and workers and self._is_on_its_gpus(queued, held):
            queued = queued.replace(has_trained=True)
            self._memory.put_queued(queued)
        if op is not None:
            return self._in_operation(record, op, held, node, now)
        note, has_launcher = self._memory.suspended.get(record.number), self._starts_ranks(record.id)
        returns_to = tuple(self._returns_to(record.id))
        if queued is not None and not queued.has_trained and (note is None or not returns_to):
            return self._starting(record, queued, held, now)
        if note is not None and has_launcher and not held:
            returns_to = gpus_of(note.gpu)
        if returns_to:
            return self._recovering(record, returns_to, held, now, note, node)
        if not held:
            return None
        if not workers:
            return self._with_facts(record, model.BUSY, now, JobView(record, (), None), gpus=tuple(held), held=held)
        return self._running(record, workers, held, queued, node, now)

    def _recovering(
        self,
        record: JobRecord,
        gpus: tuple[str, ...],
        held: Mapping[str, int],
        now: float,
        note: SuspendedRecord | None,
        node: NodeSnapshotForPlan,
    ) -> tuple[model.Job, JobView]:
        """A job that is started again from a snapshot: its memory is free meanwhile, and not for others.

        One that has failed while it was suspended for others waits for room, as if it were suspended still.
        """
        last = self._history.of(record.id).held_bytes
        needs = tuple([max(held.get(gpu, 0), last.get(gpu, max(last.values()))) for gpu in gpus]) if last else None
        if self._awaits_resume(record.id):
            return self._with_facts(
                record, model.USER_SUSPENDED, now, JobView(record, (), None), gpus=gpus, needs=needs
            )
        if note is not None:
            if needs is None and note.size_bytes:
                needs = (-(-note.size_bytes // len(gpus)),) * len(gpus)
            healthy = {gpu.id: gpu.chip for gpu in node.gpus if _is_healthy(gpu)}
            are_healthy, chip = healthy.keys() >= set(gpus), _chip(node, dict.fromkeys(gpus, 0))
            return self._with_facts(
                *(record, model.SUSPENDED, now, JobView(record, (), None)),
                gpus=gpus,
                needs=needs,
                allowed=gpus if are_healthy or self._starts_ranks(record.id) else None,
                chip=chip if chip in healthy.values() else None,
                since_utc=note.since_utc,
            )
        return self._with_facts(
            *(record, model.ARRIVING, now, JobView(record, (), None)), gpus=gpus, needs=needs, held=held
        )

    def _running(
        self,
        record: JobRecord,
        workers: Sequence[AgentConnection],
        held: Mapping[str, int],
        queued: QueuedRecord | None,
        node: NodeSnapshotForPlan,
        now: float,
    ) -> tuple[model.Job, JobView]:
        pids = tuple([worker.pid for worker in workers])
        self._history.of(record.id).held_bytes = dict(held)
        action = self._acting(record.id)
        state = model.RUNNING if action is None else model.LEAVING if action.kind == SUSPEND else model.ARRIVING
        gpus, needs = tuple(held), tuple(held.values())
        if action is not None and action.kind == MIGRATE:
            gpus, needs = action.gpus, action.size_bytes
        leaves = self._judge(record, node, pids, workers) if action is None else SuspendOptions()
        stays: Mapping[str, int] = {}
        if leaves.keeps_context and leaves.stays_bytes is not None:
            stays = leaves.stays_bytes
            held = {gpu: max(0, size - stays.get(gpu, 0)) for gpu, size in held.items()}
            needs = tuple(held.values())
        if action is None or action.kind != MIGRATE:
            needs = with_stated(dict(zip(gpus, needs, strict=True)), queued, stays)
        return self._with_facts(
            *(record, state, now, JobView(record, pids, None, leaves)),
            gpus=gpus,
            needs=needs,
            held=held,
            allowed=_pinned(workers, queued, held),
            chip=_chip(node, held),
            hindrance=leaves.hindrance,
            estimate_s=leaves.switch_s,
            since_utc=None if self._history.of(record.id).state else record.started_utc,
        )

    def _judge(
        self, record: JobRecord, node: NodeSnapshotForPlan, pids: tuple[int, ...], workers: Sequence[AgentConnection]
    ) -> SuspendOptions:
        """Plan how a running job can leave its GPUs."""
        away = [worker.pid for worker in workers if not worker.connected]
        if away:
            return SuspendOptions(not_connected(away[0]))
        whole = planned(node, PlanRequest(kind=SUSPEND, pids=pids))
        kept = planned(node, PlanRequest(kind=SUSPEND, pids=pids, keep_context=True))
        stays = stays_by_gpu(kept) if isinstance(kept, MigrationPlan) else None
        if stays is not None:  # more may have stayed the last time than the plan expects
            measured = self._history.of(record.id).kept_bytes
            stays = {gpu: max(size, measured.get(gpu, 0)) for gpu, size in stays.items()}
        if self._rules.method == AUTO and isinstance(whole, MigrationPlan) and isinstance(kept, MigrationPlan):
            # At the end of a turn it keeps its contexts if it can, so the faster way says how long a turn is.
            pool_bytes = max(whole.pool_needed_bytes, kept.pool_needed_bytes)
            return SuspendOptions("", 2 * min(whole.estimate_s, kept.estimate_s), stays, pool_bytes=pool_bytes)
        if self._rules.method != KEEP_CONTEXT and isinstance(whole, MigrationPlan):
            return SuspendOptions("", 2 * whole.estimate_s, pool_bytes=whole.pool_needed_bytes)
        if self._rules.method != WHOLE and isinstance(kept, MigrationPlan):
            pool_bytes = kept.pool_needed_bytes
            return SuspendOptions("", 2 * kept.estimate_s, stays, keeps_context=True, pool_bytes=pool_bytes)
        against = kept if self._rules.method == KEEP_CONTEXT else whole
        return SuspendOptions(
            against[0].message if not isinstance(against, MigrationPlan) else "it cannot be suspended"
        )

    def _in_operation(
        self, record: JobRecord, op: Operation, held: Mapping[str, int], node: NodeSnapshotForPlan, now: float
    ) -> tuple[model.Job, JobView]:
        members = tuple(op.live)
        job_view = JobView(record, tuple([member.pid for member in members]), op)
        action, suspended = self._acting(record.id), self._memory.suspended.get(record.number)
        # A rank that has ended is started again once the others are back, and needs as much.
        former = needs_by_gpu(op.workers, lambda one: one.previous_gpu or one.first_gpu)
        chip = members[0].chip if members else None
        if op.phase == SUSPENDED and action is not None and action.kind == model.RESUME:
            return self._with_facts(
                *(record, model.ARRIVING, now, job_view), gpus=action.gpus, needs=action.size_bytes, chip=chip
            )
        if op.phase == SUSPENDED:
            is_ours = suspended is not None and self.is_ours(op, suspended)
            if suspended is not None and is_ours:  # a new daemon knows the turn by this alone
                self._history.of(record.id).turn_s = suspended.turn_s
            kept, copies = (
                kept_by_gpu(members),
                copies_by_gpu(members, lambda one: one.previous_gpu or one.first_gpu, node.gpus),
            )
            for gpu, size in kept.items():
                self._contexts[gpu] = self._contexts.get(gpu, 0) + size
            least = tuple([size + copies.get(gpu, 0) for gpu, size in former.items()])
            self._history.of(record.id).kept_bytes = kept or self._history.of(record.id).kept_bytes
            return self._with_facts(
                *(record, model.SUSPENDED if is_ours else model.USER_SUSPENDED, now, job_view),
                gpus=tuple(former),
                needs=with_stated(dict(zip(former, least, strict=True)), self._memory.queue.get(record.number), kept),
                least=least,
                allowed=tuple(former) if kept else self._pinned_in_queue(record, former),
                chip=chip,
                hindrance=self._return_obstacle(members),
                since_utc=suspended.since_utc if suspended is not None and is_ours else op.created_utc,
            )
        if op.phase != HOLDING and op.direction == FORWARD and op.kind == SUSPEND:
            needs = with_stated(held, self._memory.queue.get(record.number), {})
            return self._with_facts(
                *(record, model.LEAVING, now, job_view), gpus=tuple(held), needs=needs, held=held, chip=chip
            )
        if op.phase != HOLDING and op.direction == FORWARD and op.kind in (RESUME, MIGRATE):
            to = needs_by_gpu(members, lambda one: one.target_gpu)
            left = {gpu: size for gpu, size in held.items() if gpu not in to}
            # The memory that it needs does not count as free: it is reserved, or was subtracted.
            return self._with_facts(
                *(record, model.ARRIVING, now, job_view), gpus=tuple(to), needs=tuple(to.values()), held={**to, **left}
            )
        return self._with_facts(*(record, model.BUSY, now, job_view), gpus=tuple(held), held=held, chip=chip)

    def _return_obstacle(self, members: Sequence[JobProcess]) -> str:
        for member in members:
            worker = self._workers.find(member.pid)
            if member.has_agent and not member.is_absent and (worker is None or not worker.connected):
                return not_connected(member.pid)
        return ""

    def _starting(
        self, record: JobRecord, queued: QueuedRecord, held: Mapping[str, int], now: float
    ) -> tuple[model.Job, JobView]:
        """A job that waits for its start, or was given GPUs and has not trained yet."""
        needs = None if queued.size_bytes is None else (queued.size_bytes,) * queued.gpu_count
        is_overdue, gpus = self._is_overdue(queued), gpus_of(queued.placed)
        if is_overdue:
            needs = tuple([held.get(gpu, 0) for gpu in gpus])
        state = model.QUEUED if queued.placed is None else model.ARRIVING
        return self._with_facts(
            *(record, state, now, JobView(record, (), None)),
            gpus=gpus,
            needs=needs,
            held=held,
            wanted_gpus=queued.gpu_count,
            allowed=None if queued.gpu is None else (queued.gpu,),
            since_utc=queued.since_utc,
            hindrance=f"it has not trained within {STARTS_WITHIN_S / 60:.0f} min of its start" if is_overdue else "",
        )

    def _is_on_its_gpus(self, queued: QueuedRecord, held: Mapping[str, int]) -> bool:
        """Return True if a job has memory on each GPU that it was given. Until then all of it is kept for the job."""
        is_on_all = queued.placed is not None and held.keys() >= set(gpus_of(queued.placed))
        return bool(held) and (is_on_all or self._is_overdue(queued))

    def _is_overdue(self, queued: QueuedRecord) -> bool:
        """Return True if a job that was given a GPU has not trained in time."""
        is_started = queued.placed is not None and not queued.has_trained
        return is_started and self._clock() - (queued.placed_s or 0.0) >= STARTS_WITHIN_S

    def _pinned_in_queue(self, record: JobRecord, former: Mapping[str, int]) -> tuple[str, ...] | None:
        workers = [worker for worker in self._attending.get(record.number, ()) if trains(worker)]
        return _pinned(workers, self._memory.queue.get(record.number), former)

    def _with_facts(  # noqa: PLR0913 - the facts of a job, each named
        self,
        record: JobRecord,
        state: str,
        now: float,
        job_view: JobView,
        *,
        gpus: tuple[str, ...] = (),
        needs: tuple[int, ...] | None = (),
        wanted_gpus: int = 1,
        least: tuple[int, ...] | None = None,
        held: Mapping[str, int] | None = None,
        allowed: tuple[str, ...] | None = None,
        chip: str | None = None,
        hindrance: str = "",
        estimate_s: float | None = None,
        since_utc: float | None = None,
    ) -> tuple[model.Job, JobView]:
        since_s = None if since_utc is None else now - max(0.0, self._now_utc - since_utc)
        past = self._history.note_state(record.id, state, now, since_s)
        known = needs if needs != () else tuple((held or {}).get(gpu, 0) for gpu in gpus)
        is_alone = needs_whole_gpus(self._attending.get(record.number, ()), job_view.operation)
        job = model.Job(
            id=record.id,
            name=record.name,
            state=state,
            priority=self._priority(record),
            uid=record.uid,
            since_s=past.since_s,
            gpus=gpus,
            needs_bytes=None if is_alone else known,
            wanted_gpus=wanted_gpus,
            least_bytes=None if is_alone else least,
            held_bytes=dict(held or {}),
            pool_bytes=None if job_view.leaves is None else job_view.leaves.pool_bytes,
            allowed_gpus=allowed,
            chip=chip,
            is_preemptible=self._priority(record) < self._rules.preemptible_below,
            preempts_others=self._rules.suspends_others or record.uid == 0,
            turn_s=past.turn_s,
            switch_s=past.switch_s or estimate_s or UNKNOWN_SWITCH_S,
            hindrance=hindrance,
            retry_at_s=past.retry_at_s,
            failure=past.failure,
            within=tuple([lease.id for lease in self._within.get(record.number, ())]),
        )
        return job, job_view

    def _priority(self, record: JobRecord) -> int:
        """Return its priority, or that of its lease if higher: the lease would keep the memory that it leaves."""
        return max([record.priority, *(lease.priority for lease in self._within.get(record.number, ()))])

    # -- leases --------------------------------------------------------------------------------------------------------

    def _lease(
        self, lease: LeaseRecord, used: Mapping[str, int], ages_s: Mapping[int, float], now: float
    ) -> model.Lease:
        return model.Lease(
            id=lease.id,
            name=str(lease),
            state=model.HELD if lease.is_held else model.PENDING,
            priority=lease.priority,
            uid=lease.uid,
            since_s=now - ages_s.get(lease.number, 0.0),
            size_bytes=lease.size_bytes,
            gpu=lease.gpu,
            used_bytes=used.get(lease.id, 0),
            preempts_others=self._rules.suspends_others or lease.is_admin,
            ends_with=lease.ends_with,
            retry_at_s=self._history.of(lease.id).retry_at_s,
            failure=self._history.of(lease.id).failure,
        )

    def _jobs_within_leases(self, candidates: Mapping[int, Sequence[Candidate]]) -> dict[int, list[LeaseRecord]]:
        """The held leases whose process has started a job, wherever the job is now, by the job's number."""
        leases = [lease for lease in self._memory.leases if lease.is_held and lease.pid is not None]
        within: dict[int, list[LeaseRecord]] = {}
        for record in (job for job in self._jobs if job.is_alive) if leases else ():
            op = self._operations.of(record)
            pids = {candidate.pid for candidate in candidates.get(record.number, ())}
            pids |= {member.pid for member in op.live} if op is not None else set()
            pids |= {record.pid} if record.pid is not None and not record.is_gone else set()
            if own := [lease for lease in leases if is_open_to(lease, pids, record.started_utc)]:
                within[record.number] = own
        return within

    def is_open_to(self, lease: LeaseRecord, pids: Sequence[int]) -> bool:
        """Return whether those processes may use a lease: its process has started them, or their job, after it."""
        jobs = [job for pid in pids if (job := self._jobs.of_pid(pid)) is not None]
        return is_open_to(lease, pids, min([job.started_utc for job in jobs], default=math.inf))

    def stated_bytes(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        """Return the memory that jobs said they need and have not taken yet, by GPU. A suspended one keeps none."""
        kept: dict[str, int] = {}
        if not any(record.size_bytes and record.placed for record in self._memory.queue.values()):
            return kept
        by_job = self._candidates_of(candidates)
        jobs = {job.number: job for job in self._jobs}
        for number, record in self._memory.queue.items():
            job = jobs.get(number)
            if job is None or record.placed is None or record.size_bytes is None or self._is_overdue(record):
                continue
            held = held_by_gpu(by_job.get(number, ()))
            gpus = gpus_of(record.placed) if not record.has_trained else tuple(held)
            op = self._operations.of(job)
            leaves = op is not None and op.kind == SUSPEND and op.phase != SUSPENDED
            if len(gpus) == record.gpu_count and len(held) <= record.gpu_count and (op is None or leaves):
                for gpu in gpus:
                    kept[gpu] = kept.get(gpu, 0) + max(0, record.size_bytes - held.get(gpu, 0))
        return kept

    def used_bytes(self, leases: Sequence[LeaseRecord], candidates: Sequence[Candidate]) -> dict[str, int]:
        """Return how much of each lease is in use by those that it is for, by its id."""
        jobs = {job.number: job for job in self._jobs} if leases else {}
        by_job = self._candidates_of(candidates) if leases else {}
        used: dict[str, int] = {}
        for lease in leases:
            others: set[int] = set()
            for number, own in by_job.items():
                is_placed = lease.pid is None and number in self._memory.queue
                if is_placed or jobs[number].started_utc < lease.since_utc:
                    others.update(candidate.pid for candidate in own)
            used[lease.id] = used_of_lease(lease, candidates, others)
        return used


def _due(
    workers: Sequence[AgentConnection], asked_at: dict[int, float], again_s: float, now: float
) -> list[AgentConnection]:
    """Return those that were not asked for `again_s`, and note in `asked_at`, by pid, that they are asked now."""
    for pid in [pid for pid, at in asked_at.items() if now - at >= again_s]:
        del asked_at[pid]
    due = [worker for worker in workers if worker.pid not in asked_at]
    asked_at.update({worker.pid: now for worker in due})
    return due


def _pinned(
    workers: Sequence[AgentConnection], queued: QueuedRecord | None, held: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The only GPUs on which its user lets it be; None for any."""
    if queued is not None:
        return None if queued.gpu is None else (queued.gpu,)
    named = [worker.about.gpu for worker in workers if worker.about.gpu]
    return tuple(dict.fromkeys([gpu for name in named for gpu in gpus_of(name)] + list(held))) if named else None


def _is_healthy(gpu: GpuMemory) -> bool:
    return gpu.state == "ok" and gpu.condition == HEALTHY


def _chip(node: NodeSnapshotForPlan, held: Mapping[str, int]) -> str | None:
    return next((gpu.chip for gpu in node.gpus if gpu.id in held), None)
