"""A node that is a model: GPUs, jobs and leases in simulated time, and a policy that is asked after each change.

Owns what happens, and keeps its own account of the memory of each GPU: an action that needs memory which is not there
is an error of the policy, and raises `Overcommitted`. The policy sees snapshots only, as in the daemon. A job computes
`load` of a GPU when it is alone there; jobs on one GPU share it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hegmd.sharing.model import (
    ARRIVING,
    BUSY,
    GRANT,
    HELD,
    LEAVING,
    MIGRATE,
    PENDING,
    QUEUED,
    RUNNING,
    START,
    SUSPEND,
    SUSPENDED,
    Action,
    Decision,
    Gpu,
    Job,
    Lease,
    Rules,
    Snapshot,
)

Policy = Callable[[Snapshot, float], Decision]

GIB = 1 << 30
# The duration of a switch, measured on H200s: bytes over PCIe, and the driver's part for a job that keeps its context.
_LINK_BYTES_PER_S = 50e9
_OUT_S, _IN_S = 0.15, 0.1


class Overcommitted(Exception):
    """The policy gave memory away that is in use, or that was promised to others."""


@dataclass(frozen=True)
class JobSpec:
    """A job of a trace."""

    id: str
    arrival_s: float
    #: How long it trains when it is alone on its GPUs; infinity for one that never ends.
    work_s: float
    needs_bytes: tuple[int, ...]
    priority: int = 50
    uid: int = 1000
    #: The part of a GPU that it computes with when it is alone there.
    load: float = 1.0
    #: How long its start takes until its first batch.
    startup_s: float = 10.0
    batch_s: float = 0.3
    is_preemptible: bool = True
    preempts_others: bool = True
    allowed_gpus: tuple[str, ...] | None = None
    #: Whether its user declared the memory it needs.
    is_need_known: bool = True


@dataclass(frozen=True)
class LeaseSpec:
    """A request for room, of a trace."""

    id: str
    arrival_s: float
    hold_s: float
    size_bytes: int
    priority: int = 80
    uid: int = 1000
    gpu: str | None = None


@dataclass
class SimulatedJob:
    """A job and its outcome."""

    spec: JobSpec
    view: Job
    left_s: float
    first_step_s: float | None = None
    ended_s: float | None = None
    switches: int = 0
    #: How long it was neither training nor waiting, but on its way.
    switching_s: float = 0.0

    @property
    def out_s(self) -> float:
        return _OUT_S + max(self.spec.needs_bytes) / _LINK_BYTES_PER_S

    @property
    def in_s(self) -> float:
        return _IN_S + max(self.spec.needs_bytes) / _LINK_BYTES_PER_S


@dataclass
class SimulatedLease:
    """A lease and its outcome."""

    spec: LeaseSpec
    view: Lease
    granted_s: float | None = None
    ended_s: float | None = None


@dataclass
class Node:
    """The node. `run` lets time pass until nothing happens any more, or until `end_s`."""

    gpus: dict[str, int]
    policy: Policy
    rules: Rules = field(default_factory=Rules)
    pool_bytes: int | None = None
    #: Called after each decision, with what it was made from.
    on_decision: Callable[[Snapshot, float, Decision], None] | None = None
    now: float = 0.0
    jobs: dict[str, SimulatedJob] = field(default_factory=dict[str, SimulatedJob])
    leases: dict[str, SimulatedLease] = field(default_factory=dict[str, SimulatedLease])
    #: GPU seconds of computing, summed over all GPUs.
    computed_s: float = 0.0
    #: The same at each instant so far.
    history: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    decisions: int = 0
    unhealthy: set[str] = field(default_factory=set[str])
    _events: list[tuple[float, int, Callable[[], None]]] = field(
        default_factory=list[tuple[float, int, Callable[[], None]]]
    )
    _count: int = 0
    _again_at_s: float | None = None
    _open: dict[str, SimulatedLease] = field(default_factory=dict[str, SimulatedLease])
    _present: dict[str, SimulatedJob] = field(default_factory=dict[str, SimulatedJob])
    _rates: dict[str, float] = field(default_factory=dict[str, float])

    # -- what comes from outside ---------------------------------------------------------------------------------------

    def add(self, specs: Iterable[JobSpec | LeaseSpec]) -> None:
        """Have these jobs and leases arrive in their time."""
        for spec in specs:
            if isinstance(spec, JobSpec):
                self.at(spec.arrival_s, partial(self._arrive, spec))
            else:
                self.at(spec.arrival_s, partial(self._ask, spec))

    def at(self, at_s: float, happens: Callable[[], None]) -> None:
        """Have something happen at that instant."""
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, happens))

    def run(self, end_s: float = math.inf) -> None:
        """Let time pass."""
        while True:
            ending = self._next_end()
            times = [self._events[0][0] if self._events else math.inf, ending[0] if ending else math.inf]
            at_s = min(*times, self._again_at_s if self._again_at_s is not None else math.inf)
            if math.isinf(at_s) or at_s > end_s:
                if not math.isinf(end_s):
                    self._pass(end_s)
                return
            self._pass(at_s)
            if ending is not None and ending[0] <= at_s:
                self._end(ending[1])
            while self._events and self._events[0][0] <= at_s:
                heapq.heappop(self._events)[2]()
            self.decide()

    def decide(self) -> None:
        """Ask the policy, and do what it says."""
        snapshot = self.snapshot()
        decision = self.policy(snapshot, self.now)
        self.decisions += 1
        self._again_at_s = decision.again_at_s
        if self.on_decision is not None:
            self.on_decision(snapshot, self.now, decision)
        for action in decision.actions:
            self._perform(action)
        self._set_rates()

    # -- what the policy sees ------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            gpus=tuple(
                Gpu(gpu_id, total_bytes, total_bytes - self.used_bytes(gpu_id), "H200", gpu_id not in self.unhealthy)
                for gpu_id, total_bytes in self.gpus.items()
            ),
            jobs=tuple(job.view for job in self._present.values()),
            leases=tuple(lease.view for lease in self._open.values()),
            rules=self.rules,
            pool_free_bytes=self.pool_free_bytes(),
        )

    def used_bytes(self, gpu_id: str) -> int:
        """Return what is taken on that GPU."""
        jobs_bytes = sum(job.view.held_bytes.get(gpu_id, 0) for job in self._present.values())
        return jobs_bytes + sum(lease.view.used_bytes for lease in self._open.values() if lease.view.gpu == gpu_id)

    def pool_free_bytes(self) -> int | None:
        if self.pool_bytes is None:
            return None
        out = [job for job in self._present.values() if job.view.state in (SUSPENDED, LEAVING)]
        return self.pool_bytes - sum(sum(job.spec.needs_bytes) for job in out)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _arrive(self, spec: JobSpec) -> None:
        job = Job(
            *(spec.id, spec.id, QUEUED, spec.priority, spec.uid, self.now),
            needs_bytes=spec.needs_bytes if spec.is_need_known else None,
            allowed_gpus=spec.allowed_gpus,
            is_preemptible=spec.is_preemptible,
            preempts_others=spec.preempts_others,
        )
        self.jobs[spec.id] = self._present[spec.id] = SimulatedJob(spec, job, spec.work_s)

    def change(self, job_id: str, **changes: Any) -> None:
        """Change what the policy sees of a job."""
        job = self.jobs[job_id]
        job.view = replace(job.view, **changes)

    def _end(self, job: SimulatedJob) -> None:
        job.ended_s = self.now
        del self._present[job.spec.id]
        self._set_rates()

    def _perform(self, action: Action) -> None:
        if action.kind == GRANT:
            self._grant(self.leases[action.subject], action)
            return
        job = self.jobs[action.subject]
        if action.kind == SUSPEND:
            self._suspend(job, action)
        elif action.kind == MIGRATE:
            self._migrate(job, action)
        else:
            self._bring(job, action)

    def _bring(self, job: SimulatedJob, action: Action) -> None:
        spec = job.spec
        assert job.view.state in (QUEUED, SUSPENDED), job.view
        held = dict(zip(action.gpus, spec.needs_bytes, strict=True))
        self.change(spec.id, state=ARRIVING, since_s=self.now, gpus=action.gpus, held_bytes=held, chip="H200")
        self._check(action)
        took_s = spec.startup_s if action.kind == START else job.in_s
        job.switching_s += 0 if action.kind == START else took_s
        self.at(self.now + took_s, lambda: self._arrived(job))

    def _arrived(self, job: SimulatedJob) -> None:
        job.first_step_s = self.now if job.first_step_s is None else job.first_step_s
        self.change(
            job.spec.id,
            state=RUNNING,
            since_s=self.now,
            needs_bytes=job.spec.needs_bytes,
            switch_s=job.out_s + job.in_s,
        )
        self._set_rates()

    def _suspend(self, job: SimulatedJob, action: Action) -> None:
        assert job.view.state == RUNNING, job.view
        if (pool_free_bytes := self.pool_free_bytes()) is not None and sum(job.spec.needs_bytes) > pool_free_bytes:
            raise Overcommitted(f"the pool has no room for {action}")
        turn_s = 0.0 if action.ends_turn else job.view.turn_s + self.now - job.view.since_s
        self.change(job.spec.id, state=LEAVING, since_s=self.now, turn_s=turn_s)
        job.switches += 1
        job.switching_s += job.out_s
        # It computes until the boundary, half a batch later. The model counts that half as lost.
        self.at(self.now + job.spec.batch_s / 2 + job.out_s, lambda: self._suspended(job))

    def _suspended(self, job: SimulatedJob) -> None:
        self.change(job.spec.id, state=SUSPENDED, since_s=self.now, held_bytes={})

    def _migrate(self, job: SimulatedJob, action: Action) -> None:
        assert job.view.state == RUNNING, job.view
        turn_s = 0.0 if action.ends_turn else job.view.turn_s + self.now - job.view.since_s
        target = dict(zip(action.gpus, job.spec.needs_bytes, strict=True))
        held = {**job.view.held_bytes, **target}
        self.change(job.spec.id, state=ARRIVING, since_s=self.now, gpus=action.gpus, held_bytes=held, turn_s=turn_s)
        self._check(action)
        job.switches += 1
        job.switching_s += job.in_s
        self.at(self.now + job.spec.batch_s / 2 + job.in_s, lambda: self._migrated(job, target))

    def _migrated(self, job: SimulatedJob, target: dict[str, int]) -> None:
        self.change(job.spec.id, held_bytes=target)
        self._arrived(job)

    def occupy(self, job_id: str, for_s: float) -> None:
        """Have another operation take a running job for a while, such as a checkpoint."""
        if self.jobs[job_id].view.state == RUNNING and self.jobs[job_id].ended_s is None:
            since_s = self.jobs[job_id].view.since_s
            self.change(job_id, state=BUSY)
            self.at(self.now + for_s, lambda: self.change(job_id, state=RUNNING, since_s=since_s))

    # -- leases --------------------------------------------------------------------------------------------------------

    def _ask(self, spec: LeaseSpec) -> None:
        lease = Lease(
            *(spec.id, spec.id, PENDING, spec.priority, spec.uid, self.now, spec.size_bytes, spec.gpu),
            preempts_others=True,
        )
        self.leases[spec.id] = self._open[spec.id] = SimulatedLease(spec, lease)

    def _grant(self, lease: SimulatedLease, action: Action) -> None:
        assert lease.view.state == PENDING, lease.view
        lease.granted_s = self.now
        lease.view = lease.view._replace(state=HELD, gpu=action.gpus[0])
        self._check(action)
        self.at(self.now + 1.0, lambda: self._use(lease))
        self.at(self.now + lease.spec.hold_s, lambda: self._release(lease))

    def _use(self, lease: SimulatedLease) -> None:
        if lease.ended_s is None:
            lease.view = lease.view._replace(used_bytes=lease.spec.size_bytes // 2)

    def _release(self, lease: SimulatedLease) -> None:
        lease.ended_s = self.now
        del self._open[lease.spec.id]

    # -- accounts ------------------------------------------------------------------------------------------------------

    def _check(self, action: Action) -> None:
        """Raise Overcommitted if more memory of a GPU is used or promised than it has."""
        for gpu_id, total_bytes in self.gpus.items():
            promised_bytes = self.used_bytes(gpu_id)
            for lease in self._open.values():
                if lease.view.state == HELD and lease.view.gpu == gpu_id:
                    promised_bytes += lease.spec.size_bytes - lease.view.used_bytes
            if promised_bytes > total_bytes:
                raise Overcommitted(f"{promised_bytes / GIB:.1f} GiB of {gpu_id} after {action}")

    def _set_rates(self) -> None:
        loads = dict.fromkeys(self.gpus, 0.0)
        running = [job for job in self._present.values() if job.view.state == RUNNING]
        for job in running:
            for gpu_id in job.view.gpus:
                loads[gpu_id] += job.spec.load
        self._rates = {
            job.spec.id: min(1.0, *(1.0 / loads[gpu_id] for gpu_id in job.view.gpus if loads[gpu_id] > 0), 1.0)
            for job in running
        }

    def _pass(self, at_s: float) -> None:
        passed_s = at_s - self.now
        for job_id, rate in self._rates.items():
            job = self.jobs[job_id]
            job.left_s -= passed_s * rate
            self.computed_s += passed_s * rate * job.spec.load * len(job.view.gpus)
        self.now = at_s
        self.history.append((at_s, self.computed_s))

    def computed_at(self, at_s: float) -> float:
        """Return the GPU seconds of computing until that instant."""
        return max((computed_s for then_s, computed_s in self.history if then_s <= at_s), default=0.0)

    def _next_end(self) -> tuple[float, SimulatedJob] | None:
        """Return when the next job ends, and which."""
        ends = [
            (self.now + max(0.0, self.jobs[job_id].left_s) / rate, job_id)
            for job_id, rate in self._rates.items()
            if not math.isinf(self.jobs[job_id].left_s)
        ]
        if not ends:
            return None
        at_s, job_id = min(ends)
        return at_s, self.jobs[job_id]
