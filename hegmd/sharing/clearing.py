"""Which jobs have to leave a GPU so that a waiting job fits there, and when they can.

Owns the choice on one GPU. Jobs of lower priority can leave at once, equals when their turn has ended. Among the
former, those of the lowest priority that suffice are considered, and of these the fewest bytes leave; among equals, the
one whose turn ended first leaves first. Decides nothing about GPUs and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hegmd.sharing.model import Job, Rules
from hegmd.sharing.room import GpuBudget
from hegmd.sharing.wanted import MemoryRequest

# How many bytes each job frees on the GPU in question, by its id.
Freed = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FreeingSteps:
    """The steps that free memory on one GPU."""

    room: GpuBudget
    #: Who leaves. If the instant is unknown: none.
    victims: tuple[Job, ...]
    #: When all of them can leave: minus infinity for at once, infinity if unknown.
    at_s: float
    #: What they free there; if the instant is unknown, what all could free that may be asked to leave.
    freed_bytes: int

    def cost(self, priority: int) -> tuple[float, int, int, int, str]:
        """Return the order in which GPUs are chosen, the best first, for a waiting job of that priority."""
        if self.at_s == math.inf:
            return self.at_s, 0, 0, -(self.room.soon_bytes + self.freed_bytes), self.room.gpu.id
        equals = sum(1 for job in self.victims if job.priority == priority)
        highest = max((job.priority for job in self.victims), default=-1)
        return self.at_s, equals, highest, sum(map(moved_bytes, self.victims)), self.room.gpu.id


def moved_bytes(job: Job) -> int:
    """Return how much has to be copied if `job` leaves its GPUs, and what a suspension puts into the pool."""
    return sum(job.held_bytes.values())


def quantum_s(job: Job, rules: Rules) -> float:
    """Return how long a turn of `job` is."""
    return max(rules.min_quantum_s, rules.quantum_per_switch * job.switch_s)


def turn_ends_s(job: Job, rules: Rules) -> float:
    """Return when the turn of a running job ends."""
    return job.since_s + max(0.0, quantum_s(job, rules) - job.turn_s)


def free_at_s(job: Job, wanted: MemoryRequest, rules: Rules) -> float:
    """Return when a running job may be asked to leave for `wanted`."""
    has_run_s = job.since_s + rules.run_per_switch * job.switch_s if job.turn_s > 0 else -math.inf
    return max(has_run_s, turn_ends_s(job, rules)) if job.priority == wanted.priority else has_run_s


def clearing(
    room: GpuBudget, wanted: MemoryRequest, need_bytes: int, candidates: Sequence[Job], rules: Rules, now: float
) -> FreeingSteps:
    """Return who has to leave `room` so that `wanted` fits, from those who may be asked to."""

    freed = room.freed_bytes
    missing_bytes = need_bytes - room.soon_bytes
    times = {job.id: free_at_s(job, wanted, rules) for job in candidates}
    ready = [job for job in candidates if job.priority < wanted.priority and times[job.id] <= now]
    if _sum(ready, freed) >= missing_bytes:
        victims = _of_lowest_priority(ready, missing_bytes, freed)
        return FreeingSteps(room, victims, -math.inf, _sum(victims, freed))
    ordered = sorted(candidates, key=lambda job: (job.priority == wanted.priority, times[job.id], job.since_s, job.id))
    leaving: list[Job] = []
    found_bytes = 0
    for job in ordered:
        leaving.append(job)
        found_bytes += freed[job.id]
        if found_bytes >= missing_bytes:
            kept = _without_needless(leaving, missing_bytes, freed)
            at_s = max(times[one.id] for one in kept)
            return FreeingSteps(room, kept, at_s if at_s > now else -math.inf, _sum(kept, freed))
    return FreeingSteps(room, (), math.inf, found_bytes)


def _of_lowest_priority(jobs: Sequence[Job], missing_bytes: int, freed: Freed) -> tuple[Job, ...]:
    """Return those to suspend: none of higher priority than needed, and of these the fewest bytes.

    All `jobs` together suffice.
    """
    ordered = sorted(jobs, key=lambda job: job.priority)
    found_bytes, highest = 0, 0
    for job in ordered:
        found_bytes += freed[job.id]
        highest = job.priority
        if found_bytes >= missing_bytes:
            break
    return _of_fewest_bytes([job for job in ordered if job.priority <= highest], missing_bytes, freed)


def _of_fewest_bytes(jobs: Sequence[Job], missing_bytes: int, freed: Freed) -> tuple[Job, ...]:
    """Return one job that suffices, or several smaller ones if these are fewer bytes."""
    ordered = sorted(jobs, key=lambda job: (moved_bytes(job), job.priority, -job.since_s, job.id))
    single = next((job for job in ordered if freed[job.id] >= missing_bytes), None)
    several: list[Job] = []
    found_bytes = 0
    for job in ordered:
        if found_bytes >= missing_bytes:
            break
        several.append(job)
        found_bytes += freed[job.id]
    few = _without_needless(several, missing_bytes, freed)
    return few if single is None or sum(map(moved_bytes, few)) < moved_bytes(single) else (single,)


def _without_needless(jobs: Sequence[Job], missing_bytes: int, freed: Freed) -> tuple[Job, ...]:
    """Return `jobs` without those that need not leave, the ones of the highest priority and most bytes first."""
    kept = sorted(jobs, key=lambda job: (job.priority, moved_bytes(job)))
    spare_bytes = _sum(kept, freed) - missing_bytes
    for job in reversed(tuple(kept)):
        if freed[job.id] <= spare_bytes:
            spare_bytes -= freed[job.id]
            kept.remove(job)
    return tuple(kept)


def _sum(jobs: Sequence[Job], freed: Freed) -> int:
    return sum([freed[job.id] for job in jobs])
