"""Which jobs have to leave a GPU so that a waiting job fits there, and when they can.

Owns the choice on one GPU. Jobs of lower priority can leave at once, equals when their turn has ended. Among the
former, those of the lowest priority that suffice are considered, and of these the fewest bytes leave; among equals, the
one whose turn ended first leaves first. Decides nothing about GPUs and changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from hegmd.sharing.model import Job, Rules
from hegmd.sharing.room import GpuBudget
from hegmd.sharing.wanted import MemoryRequest

# How many bytes each job frees on the GPU in question, by its id.
Freed = Mapping[str, int]


class FreeingSteps(NamedTuple):
    """The steps that free memory on one GPU."""

    room: GpuBudget
    #: The jobs that leave; none if the instant is unknown.
    victims: tuple[Job, ...]
    #: When all of them can leave: minus infinity for at once, infinity if unknown.
    at_s: float
    #: The bytes that they free there. If the instant is unknown: what all jobs could free that may be asked to leave.
    freed_bytes: int

    def cost(self, priority: int) -> tuple[float, int, int, int, str]:
        """Return the order in which GPUs are chosen, the best first, for a waiting job of that priority."""
        if self.at_s == math.inf:
            return self.at_s, 0, 0, -(self.room.soon_bytes + self.freed_bytes), self.room.gpu.id
        equals = sum(1 for job in self.victims if job.priority == priority)
        highest = max((job.priority for job in self.victims), default=-1)
        return self.at_s, equals, highest, sum(map(moved_bytes, self.victims)), self.room.gpu.id


class ReadyJobs:
    """The jobs of `jobs` that can leave a GPU at once for others of higher priority."""

    def __init__(self, room: GpuBudget, jobs: Iterable[Job], rules: Rules, now: float) -> None:
        self._room = room
        ready = [job for job in jobs if has_run_s(job, rules) <= now]
        lowest_first = sorted((job.priority, room.freed_bytes[job.id]) for job in ready)
        self._priorities = [priority for priority, _ in lowest_first]
        #: The bytes that each of them and those before it free there together.
        self._sums_bytes = list(accumulate([freed_bytes for _, freed_bytes in lowest_first]))
        self._by_bytes = sorted(ready, key=lambda job: (moved_bytes(job), job.priority, -job.since_s, job.id))

    def highest_needed(self, missing_bytes: int, below: int) -> int | None:
        """Return the highest priority of which a job has to leave, if those `below` suffice; None if they do not."""
        if missing_bytes <= 0:
            return -1
        index = bisect_left(self._sums_bytes, missing_bytes)
        if index == len(self._priorities) or self._priorities[index] >= below:
            return None
        return self._priorities[index]

    def leaving(self, missing_bytes: int, highest: int) -> FreeingSteps:
        """Return who of that priority and below leaves. Together they suffice, and of them the fewest bytes leave."""
        freed = self._room.freed_bytes
        jobs = [job for job in self._by_bytes if job.priority <= highest]
        victims = _of_fewest_bytes(jobs, missing_bytes, freed)
        return FreeingSteps(self._room, victims, -math.inf, _sum(victims, freed))


def moved_bytes(job: Job) -> int:
    """Return how much becomes free if `job` leaves its GPUs."""
    return sum(job.held_bytes.values())


def pool_bytes(job: Job) -> int:
    """Return what a suspension of `job` puts into the pool: its contexts, for one, are not among that."""
    return moved_bytes(job) if job.pool_bytes is None else job.pool_bytes


def quantum_s(job: Job, rules: Rules) -> float:
    """Return how long a turn of `job` is."""
    return max(rules.min_quantum_s, rules.quantum_per_switch * job.switch_s)


def turn_ends_s(job: Job, rules: Rules) -> float:
    """Return when the turn of a running job ends."""
    return job.since_s + max(0.0, quantum_s(job, rules) - job.turn_s)


def has_run_s(job: Job, rules: Rules) -> float:
    """Return when a running job may be asked to leave for one of higher priority."""
    return job.since_s + rules.run_per_switch * job.switch_s if job.turn_s > 0 else -math.inf


def free_at_s(job: Job, wanted: MemoryRequest, rules: Rules) -> float:
    """Return when a running job may be asked to leave for `wanted`."""
    at_s = has_run_s(job, rules)
    return max(at_s, turn_ends_s(job, rules)) if job.priority == wanted.priority else at_s


def clearing(
    room: GpuBudget, wanted: MemoryRequest, need_bytes: int, candidates: Sequence[Job], rules: Rules, now: float
) -> FreeingSteps:
    """Return who has to leave `room` so that `wanted` fits, where others than those that are ready have to."""
    freed = room.freed_bytes
    missing_bytes = need_bytes - room.soon_bytes
    # Jobs of lower priority first, then those that may leave first: the id keeps jobs from being compared.
    timed = [
        (job.priority == wanted.priority, free_at_s(job, wanted, rules), job.since_s, job.id, job) for job in candidates
    ]
    timed.sort()
    leaving: list[Job] = []
    found_bytes = 0
    for _, _, _, _, job in timed:
        leaving.append(job)
        found_bytes += freed[job.id]
        if found_bytes >= missing_bytes:
            kept = _without_needless(leaving, missing_bytes, freed)
            at_s = max(free_at_s(one, wanted, rules) for one in kept)
            return FreeingSteps(room, kept, at_s if at_s > now else -math.inf, _sum(kept, freed))
    return FreeingSteps(room, (), math.inf, found_bytes)


def _of_fewest_bytes(jobs: Sequence[Job], missing_bytes: int, freed: Freed) -> tuple[Job, ...]:
    """Return one of `jobs` that suffices, or several smaller ones if these are fewer bytes. The smallest is first."""
    single = next((job for job in jobs if freed[job.id] >= missing_bytes), None)
    several: list[Job] = []
    found_bytes = 0
    for job in jobs:
        if found_bytes >= missing_bytes:
            break
        several.append(job)
        found_bytes += freed[job.id]
    few = _without_needless(several, missing_bytes, freed)
    return few if single is None or sum(map(moved_bytes, few)) < moved_bytes(single) else (single,)


def _without_needless(jobs: Sequence[Job], missing_bytes: int, freed: Freed) -> tuple[Job, ...]:
    """Return `jobs` without those that need not leave, the ones of the highest priority and most bytes first."""
    ordered = sorted(jobs, key=lambda job: (job.priority, moved_bytes(job)))
    spare_bytes = _sum(ordered, freed) - missing_bytes
    kept: list[Job] = []
    for job in reversed(ordered):
        if freed[job.id] <= spare_bytes:
            spare_bytes -= freed[job.id]
        else:
            kept.append(job)
    return tuple(reversed(kept))


def _sum(jobs: Sequence[Job], freed: Freed) -> int:
    return sum([freed[job.id] for job in jobs])
