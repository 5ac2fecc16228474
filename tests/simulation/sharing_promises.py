"""The promises of every decision of the sharing policy on any node, judged by other code than the policy's own.

`broken` names each promise that a decision breaks. It computes free memory again, from the snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hegmd.sharing.model import (
    ARRIVING,
    BUSY,
    GRANT,
    HELD,
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
    Gpu,
    Job,
    Lease,
    Rules,
    Snapshot,
)

STATES = {START: QUEUED, RESUME: SUSPENDED, SUSPEND: RUNNING, MIGRATE: RUNNING, GRANT: PENDING}
ADMISSIONS = (START, RESUME, GRANT)
Party = Job | Lease


def broken(snapshot: Snapshot, now: float, decision: Decision) -> list[str]:
    """Return every promise that is broken, in words."""
    return list(_PromiseCheck(snapshot, now, decision).all())


def turn_ended(job: Job, rules: Rules, now: float) -> bool:
    """Return whether a running job has had its quantum."""
    quantum_s = max(rules.min_quantum_s, rules.quantum_per_switch * job.switch_s)
    return job.turn_s + now - job.since_s >= quantum_s - 1e-6


class _PromiseCheck:
    def __init__(self, snapshot: Snapshot, now: float, decision: Decision) -> None:
        self.now = now
        self.rules = snapshot.rules
        self.decision = decision
        self.snapshot = snapshot
        self.gpus = {gpu.id: gpu for gpu in snapshot.gpus}
        all_parties: list[Party] = [*snapshot.jobs, *snapshot.leases]
        self.parties = {party.id: party for party in all_parties}
        self.actions = {action.subject: action for action in decision.actions}
        self.is_moving = any(job.state in (LEAVING, ARRIVING) for job in snapshot.jobs)

    def all(self) -> Iterator[str]:
        if len(self.actions) < len(self.decision.actions):
            yield "one job or lease has two actions"
        for action in self.decision.actions:
            yield from self._actionable(action)
            yield from self._placed(action)
            if action.kind in (SUSPEND, MIGRATE):
                yield from self._rightful(action)
        yield from self._memory()
        yield from self._pool()
        yield from self._useful()
        yield from self._strict_priority()
        yield from self._first_in_line()
        yield from self._told()

    # -- one action ----------------------------------------------------------------------------------------------------

    def _actionable(self, action: Action) -> Iterator[str]:
        party = self.parties[action.subject]
        if party.state != STATES[action.kind]:
            yield f"{action.kind} of {party.id}, which is {party.state}"
        if isinstance(party, Job) and party.hindrance:
            yield f"{action.kind} of {party.id} although {party.hindrance}"
        if party.retry_at_s is not None and party.retry_at_s > self.now:
            yield f"{action.kind} of {party.id}, which was refused a moment ago"
        if action.kind == RESUME and isinstance(party, Job) and party.since_s + self.rules.settle_s > self.now:
            yield f"{party.id} resumes as soon as it was suspended"
        if not action.reason:
            yield f"{action.kind} of {party.id} without a reason"

    def _placed(self, action: Action) -> Iterator[str]:
        if action.kind == SUSPEND:
            return
        party = self.parties[action.subject]
        count = party.gpu_count if isinstance(party, Job) else 1
        if len(set(action.gpus)) != count or len(action.size_bytes) != count:
            yield f"{party.id} needs {count} GPUs and gets {action.gpus}"
        for gpu_id in action.gpus:
            if not _may_be_on(party, self.gpus[gpu_id]):
                yield f"{action.kind} of {party.id} to {gpu_id}"
        if isinstance(party, Job) and party.needs_bytes is not None and action.size_bytes != party.needs_bytes:
            yield f"{party.id} needs {party.needs_bytes} and gets {action.size_bytes}"
        if isinstance(party, Lease) and action.size_bytes != (party.size_bytes,):
            yield f"lease {party.id} gets {action.size_bytes}"

    def _rightful(self, action: Action) -> Iterator[str]:
        victim, winner = self.parties[action.subject], self.parties.get(action.beneficiary or "")
        if not isinstance(victim, Job):
            yield f"{action.kind} of a lease"
        elif winner is None or winner.state not in (QUEUED, SUSPENDED, PENDING) or winner.id in self.actions:
            yield f"{victim.id} leaves for {action.beneficiary}, which does not wait"
        elif not self._may_displace(winner, victim, self.now):
            yield f"{victim.id} leaves for {winner.id}"
        elif action.ends_turn != (winner.priority == victim.priority):
            yield f"the turn of {victim.id} ends: {action.ends_turn}"

    def _may_displace(self, winner: Party, victim: Job, now: float) -> bool:
        """Return whether `victim` may be asked to leave for `winner` at once, the pool aside."""
        if victim.state != RUNNING or victim.hindrance or not victim.is_preemptible:
            return False
        if (victim.retry_at_s or 0) > now or not (winner.preempts_others or winner.uid == victim.uid):
            return False
        if victim.turn_s > 0 and now < victim.since_s + self.rules.run_per_switch * victim.switch_s:
            return False
        if winner.priority != victim.priority:
            return winner.priority > victim.priority
        mutual = isinstance(winner, Job) and winner.is_preemptible
        mutual = mutual and (victim.preempts_others or victim.uid == winner.uid)
        return mutual and self.rules.slices and turn_ended(victim, self.rules, now)

    # -- all of them ---------------------------------------------------------------------------------------------------

    def _free_bytes(self, gpu: Gpu) -> int:
        """Return the bytes that are free there now and promised to no job."""
        if gpu.free_bytes is None or not gpu.is_healthy:
            return -1
        free_bytes = gpu.free_bytes - self.rules.headroom_bytes
        for job in self.snapshot.jobs:
            if job.state in (RUNNING, ARRIVING, BUSY) and gpu.id in job.gpus:
                needs = dict.fromkeys(job.gpus, gpu.total_bytes)
                if job.needs_bytes is not None:
                    needs = dict(zip(job.gpus, job.needs_bytes, strict=True))
                free_bytes -= max(0, needs[gpu.id] - job.held_bytes.get(gpu.id, 0))
        for lease in self.snapshot.leases:
            if lease.state == HELD and lease.gpu == gpu.id:
                free_bytes -= max(0, lease.size_bytes - lease.used_bytes)
        return free_bytes

    def _memory(self) -> Iterator[str]:
        for gpu in self.snapshot.gpus:
            arriving = [action for action in self.decision.actions if action.kind != SUSPEND and gpu.id in action.gpus]
            given_bytes = sum(action.size_bytes[action.gpus.index(gpu.id)] for action in arriving)
            if arriving and given_bytes > self._free_bytes(gpu):
                yield f"{given_bytes} of {self._free_bytes(gpu)} bytes of {gpu.id} are given away"

    def _pool(self) -> Iterator[str]:
        leaving = [self.parties[action.subject] for action in self.decision.actions if action.kind == SUSPEND]
        taken_bytes = sum(sum(job.held_bytes.values()) for job in leaving if isinstance(job, Job))
        if self.snapshot.pool_free_bytes is not None and leaving and taken_bytes > self.snapshot.pool_free_bytes:
            yield f"{taken_bytes} bytes go to the pool, where {self.snapshot.pool_free_bytes} are free"

    def _useful(self) -> Iterator[str]:
        """No job leaves in vain: the job it leaves for fits with all that leave, and would not fit without this one."""
        by_winner: dict[str, list[Job]] = {}
        for action in self.decision.actions:
            victim = self.parties[action.subject]
            if action.kind in (SUSPEND, MIGRATE) and action.beneficiary and isinstance(victim, Job):
                by_winner.setdefault(action.beneficiary, []).append(victim)
        for winner_id, victims in by_winner.items():
            winner = self.parties[winner_id]
            if isinstance(winner, Job) and winner.gpu_count > 1:
                continue
            if not any(self._covers(winner, gpu, victims) for gpu in self.snapshot.gpus):
                yield f"{winner_id} does not fit after {[job.id for job in victims]} have left"
            for victim in victims:
                rest = [job for job in victims if job is not victim]
                if any(
                    self._free_bytes(gpu) + _freed(rest, gpu) >= self._need(winner, gpu)
                    for gpu in self.snapshot.gpus
                    if _may_be_on(winner, gpu)
                    and all(gpu.id in job.gpus for job in victims)
                    and not self.is_moving
                    and not self._is_wanted_before(winner, gpu)
                ):
                    yield f"{victim.id} leaves in vain for {winner_id}"

    def _is_wanted_before(self, winner: Party, gpu: Gpu) -> bool:
        """Return whether a job before it got memory of that GPU, or waits and could want it."""
        return any(self._turn(party) < self._turn(winner) for party in self._waiting() if _may_be_on(party, gpu))

    def _covers(self, winner: Party, gpu: Gpu, victims: list[Job]) -> bool:
        coming = [job for job in self.snapshot.jobs if job.state in (LEAVING, ARRIVING)]
        coming_bytes = sum(
            job.held_bytes.get(gpu.id, 0) for job in coming if job.state == LEAVING or gpu.id not in job.gpus
        )
        others = [
            victim
            for action in self.decision.actions
            if action.kind in (SUSPEND, MIGRATE)
            and isinstance(victim := self.parties[action.subject], Job)
            and victim not in victims
        ]
        free_bytes = self._free_bytes(gpu) + coming_bytes + _freed(victims, gpu) + _freed(others, gpu)
        return _may_be_on(winner, gpu) and free_bytes >= self._need(winner, gpu)

    def _need(self, party: Party, gpu: Gpu) -> float:
        if isinstance(party, Lease):
            return party.size_bytes
        return int(gpu.total_bytes * self.rules.whole_gpu_share) if party.needs_bytes is None else party.needs_bytes[0]

    # -- the order -----------------------------------------------------------------------------------------------------

    def _turn(self, party: Party) -> tuple[float, ...]:
        is_first = isinstance(party, Lease) or (party.state == SUSPENDED and party.turn_s > 0)
        return -party.priority, 0 if is_first else 1, party.since_s

    def _waiting(self) -> list[Party]:
        """Return who waits and may be acted upon, in their order."""
        jobs = [job for job in self.snapshot.jobs if job.state in (QUEUED, SUSPENDED) and not job.hindrance]
        leases = [lease for lease in self.snapshot.leases if lease.state == PENDING]
        both: list[Party] = [*jobs, *leases]
        ready = [party for party in both if (party.retry_at_s or -math.inf) <= self.now]
        return sorted(ready, key=lambda party: (*self._turn(party), party.id))

    def _strict_priority(self) -> Iterator[str]:
        """An admitted job got nothing that a job of higher priority, which got nothing, could have had."""
        coming = self.is_moving or any(action.kind in (SUSPEND, MIGRATE) for action in self.decision.actions)
        for action in self.decision.actions:
            if action.kind not in ADMISSIONS or coming:
                continue
            lower = self.parties[action.subject]
            for higher in self._waiting():
                if higher.priority <= lower.priority or higher.id in self.actions or _count(higher) > 1:
                    continue
                if isinstance(higher, Job) and higher.state == SUSPENDED and self._settles(higher):
                    continue
                for gpu_id, size_bytes in zip(action.gpus, action.size_bytes, strict=True):
                    gpu = self.gpus[gpu_id]
                    fits = _may_be_on(higher, gpu) and self._need(higher, gpu) <= size_bytes
                    if fits and not self._is_kept_from(higher, gpu):
                        yield f"{lower.id} got {gpu_id} before {higher.id}"

    def _is_kept_from(self, party: Party, gpu: Gpu) -> bool:
        """Return whether a job before it waits for that GPU that could not have it suspended again at once."""
        for earlier in self._waiting():
            if earlier is party:
                return False
            if earlier.id not in self.actions and _may_be_on(earlier, gpu):
                is_lower = isinstance(party, Job) and party.is_preemptible and party.priority < earlier.priority
                if not (is_lower and (earlier.preempts_others or earlier.uid == party.uid)):
                    return True
        return False

    def _settles(self, job: Job) -> bool:
        return job.since_s + self.rules.settle_s > self.now

    def _first_in_line(self) -> Iterator[str]:
        """The first waiting job gets free memory; if there is none, others leave for it as soon as they may."""
        first = next((party for party in self._waiting() if self._could_ever(party)), None)
        if first is None or first.id in self.actions or self.is_moving or _count(first) > 1:
            return
        if isinstance(first, Job) and first.state == SUSPENDED and self._settles(first):
            return
        gpus = [gpu for gpu in self.snapshot.gpus if _may_be_on(first, gpu) and gpu.free_bytes is not None]
        for gpu in gpus:
            if self._free_bytes(gpu) >= self._need(first, gpu):
                yield f"{first.id} is the first and does not get {gpu.id}"
            if self.snapshot.pool_free_bytes is not None or any(
                action.beneficiary == first.id for action in self.decision.actions
            ):
                continue
            lower = [
                job
                for job in self.snapshot.jobs
                if gpu.id in job.gpus and job.priority < first.priority and self._may_displace(first, job, self.now)
            ]
            if self._free_bytes(gpu) + _freed(lower, gpu) >= self._need(first, gpu):
                yield f"nobody leaves {gpu.id} for {first.id}"

    def _could_ever(self, party: Party) -> bool:
        gpus = [gpu for gpu in self.snapshot.gpus if _may_be_on(party, gpu) and gpu.free_bytes is not None]
        foreign = {gpu.id: gpu.total_bytes - (gpu.free_bytes or 0) for gpu in gpus}
        for job in self.snapshot.jobs:
            for gpu_id, held_bytes in job.held_bytes.items():
                if gpu_id in foreign:
                    foreign[gpu_id] -= held_bytes
        for lease in self.snapshot.leases:
            if lease.state == HELD and lease.gpu in foreign:
                foreign[lease.gpu] -= lease.used_bytes
        room = sorted((gpu.total_bytes - foreign[gpu.id] - self.rules.headroom_bytes for gpu in gpus), reverse=True)
        if isinstance(party, Job) and party.needs_bytes is not None:
            needs: list[float] = sorted(party.needs_bytes, reverse=True)
        else:
            needs = [self._need(party, gpu) for gpu in gpus[:1]]
        return len(room) >= _count(party) and all(left >= need for left, need in zip(room, needs, strict=False))

    def _told(self) -> Iterator[str]:
        """Every waiting job is told the reason once, and no decision misses the next instant."""
        explained = sorted(waiting.subject for waiting in self.decision.waiting)
        waits = sorted(party.id for party in self.parties.values() if party.state in (QUEUED, SUSPENDED, PENDING))
        if explained != waits:
            yield f"{waits} wait, and {explained} are told"
        if self.decision.again_at_s is not None and self.decision.again_at_s <= self.now:
            yield f"decide again at {self.decision.again_at_s}, which has passed"
        for waiting in self.decision.waiting:
            again_at_s = self.decision.again_at_s
            if waiting.at_s is not None and waiting.at_s > self.now and (again_at_s or math.inf) > waiting.at_s:
                yield f"{waiting.subject} is told {waiting.at_s}, and nobody decides then"


def _freed(jobs: list[Job], gpu: Gpu) -> int:
    """Return what these running jobs free there."""
    freed_bytes = 0
    for job in jobs:
        needs = dict.fromkeys(job.gpus, gpu.total_bytes)
        if job.needs_bytes is not None:
            needs = dict(zip(job.gpus, job.needs_bytes, strict=True))
        freed_bytes += max(needs.get(gpu.id, 0), job.held_bytes.get(gpu.id, 0))
    return freed_bytes


def _count(party: Party) -> int:
    return party.gpu_count if isinstance(party, Job) else 1


def _may_be_on(party: Party, gpu: Gpu) -> bool:
    if not gpu.is_healthy:
        return False
    if isinstance(party, Lease):
        return party.gpu is None or party.gpu == gpu.id
    return (party.allowed_gpus is None or gpu.id in party.allowed_gpus) and party.chip in (None, gpu.chip)
