"""The memory of each GPU during one decision: what is free, what becomes free, and for whom it is kept.

Owns these accounts and nothing else; the policy changes them while it goes through the waiting jobs, highest priority
first. A promise counts like memory in use: what a job that runs has not taken yet, and what a lease has not used yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hegmd.sharing.model import ARRIVING, BUSY, HELD, LEAVING, RUNNING, Gpu, Job, Lease, Snapshot
from hegmd.sharing.wanted import MemoryRequest

# The states in which a job has memory on its GPUs, or a promise of some.
PRESENT = (RUNNING, ARRIVING, BUSY)


class GpuHold(NamedTuple):
    """A GPU that is kept for the first job that waits for it."""

    request: MemoryRequest
    #: The memory that others may keep, because they fit beside it.
    spare_bytes: int
    #: When it can have the GPU; None if unknown.
    at_s: float | None

    def limit_bytes(self, other: MemoryRequest) -> int | None:
        """Return how much `other` may take of the GPU at most; None for no limit.

        While the instant is unknown, jobs that can be suspended for the waiting job at once may use the GPU.
        """
        is_evictable = (
            other.is_preemptible and other.priority < self.request.priority and self.request.may_preempt(other.uid)
        )
        return None if self.at_s is None and is_evictable else self.spare_bytes


@dataclass(slots=True, eq=False, repr=False)
class GpuBudget:
    """The memory of one GPU, while a decision is made. Amounts may be negative: more is promised than there is."""

    gpu: Gpu
    #: Free now, less all promises.
    now_bytes: int
    #: The same once all leaving jobs have left, less what the jobs waiting for that will take.
    soon_bytes: int
    #: The memory that jobs and leases can have in all: the rest belongs to other processes.
    capacity_bytes: int
    #: The jobs that run there and may be suspended or migrated, and what each frees there.
    jobs: list[Job] = field(default_factory=list[Job])
    freed_bytes: dict[str, int] = field(default_factory=dict[str, int])
    #: The names of those that leave it.
    leaving: list[str] = field(default_factory=list[str])
    #: The leases that are held there; all jobs that are there or come, with what each has or was promised.
    leases: list[Lease] = field(default_factory=list[Lease])
    present: list[tuple[Job, int]] = field(default_factory=list[tuple[Job, int]])
    #: The memory that each held lease keeps there and does not use, by its id. Jobs within the lease may have it.
    leased_bytes: dict[str, int] = field(default_factory=dict[str, int])
    #: The requests that get memory there by this decision, and how much.
    takers: list[tuple[MemoryRequest, int]] = field(default_factory=list[tuple[MemoryRequest, int]])
    #: The priorities of all that is placed there.
    priorities: list[int] = field(default_factory=list[int])
    hold: GpuHold | None = None

    def open_bytes(self, request: MemoryRequest) -> int:
        """Return what `request` could take at once."""
        return min(self.now_bytes + self.own_bytes(request), self.open_soon_bytes(request))

    def open_soon_bytes(self, request: MemoryRequest) -> int:
        """Return what `request` could take once all leaving jobs have left."""
        limit_bytes = self.hold.limit_bytes(request) if self.hold is not None else None
        soon_bytes = self.soon_bytes if limit_bytes is None else min(self.soon_bytes, limit_bytes)
        return soon_bytes + self.own_bytes(request)

    def own_bytes(self, request: MemoryRequest) -> int:
        """Return what leases keep there for `request` alone."""
        return sum([self.leased_bytes.get(lease_id, 0) for lease_id in request.within])

    @property
    def other_bytes(self) -> int:
        """Return what programs have there that are no jobs, as far as the driver and hegmd do not keep it."""
        return self.gpu.total_bytes - self.gpu.kept_bytes - self.gpu.contexts_bytes - self.capacity_bytes

    def leave(self, job: Job) -> None:
        """Count on the memory of a job that runs there and is asked to leave."""
        self.soon_bytes += self.freed_bytes[job.id]
        self.leaving.append(job.name)
        self.jobs = [other for other in self.jobs if other is not job]

    def most_freed_bytes(self, priority: int) -> int:
        """Return what all jobs of that priority and below would free, whether or not they may be asked to leave."""
        return sum([self.freed_bytes[job.id] for job in self.jobs if job.priority <= priority])

    def accounts(self) -> tuple[int, int, int, int, GpuHold | None, dict[str, int]]:
        """Return what `reset` needs to undo `take`."""
        counts = len(self.priorities), len(self.takers)
        return self.now_bytes, self.soon_bytes, *counts, self.hold, dict(self.leased_bytes)

    def reset(self, accounts: tuple[int, int, int, int, GpuHold | None, dict[str, int]]) -> None:
        """Undo every `take` since `accounts` were returned."""
        self.now_bytes, self.soon_bytes, count, taker_count, self.hold, self.leased_bytes = accounts
        del self.priorities[count:]
        del self.takers[taker_count:]

    def take(self, request: MemoryRequest, share: int, *, at_once: bool) -> None:
        """Keep memory for `request`: that of its leases, free memory, or memory that will become free."""
        size_bytes = request.claim_bytes(self.gpu, share)
        self.takers.append((request, size_bytes))
        for lease_id in request.within:
            own_bytes = min(size_bytes, self.leased_bytes.get(lease_id, 0))
            if own_bytes:
                self.leased_bytes[lease_id] -= own_bytes
                size_bytes -= own_bytes
        self.soon_bytes -= size_bytes
        if at_once:
            self.now_bytes -= size_bytes
        self.priorities.append(request.priority)
        if self.hold is not None and self.hold.limit_bytes(request) is not None:
            self.hold = GpuHold(self.hold.request, self.hold.spare_bytes - size_bytes, self.hold.at_s)


def footprint_bytes(job: Job, gpus: Mapping[str, Gpu]) -> dict[str, int]:
    """Return the memory that a present job holds or was promised, by GPU: its leaving frees that much."""
    footprint = dict(job.held_bytes)
    for index, gpu_id in enumerate(job.gpus):
        if job.needs_bytes is not None:
            needed_bytes = job.needs_bytes[index]
        else:
            needed_bytes = gpus[gpu_id].total_bytes if gpu_id in gpus else 0
        footprint[gpu_id] = max(needed_bytes, footprint.get(gpu_id, 0))
    return footprint


def rooms_of(snapshot: Snapshot) -> dict[str, GpuBudget]:
    """Return the memory of all GPUs on which something may be placed, by id."""
    gpus = {gpu.id: gpu for gpu in snapshot.gpus}
    rooms: dict[str, GpuBudget] = {}
    for gpu in snapshot.gpus:
        if gpu.is_healthy and gpu.free_bytes is not None:
            free_bytes = gpu.free_bytes - snapshot.rules.headroom_bytes
            rooms[gpu.id] = GpuBudget(gpu, free_bytes, free_bytes, free_bytes)
    _count_jobs(snapshot.jobs, rooms, gpus)
    _count_leases(snapshot.leases, rooms)
    return rooms


def _count_jobs(jobs: Iterable[Job], rooms: Mapping[str, GpuBudget], gpus: Mapping[str, Gpu]) -> None:
    for job in jobs:
        if not job.held_bytes and job.state not in PRESENT:
            continue
        for gpu_id, held_bytes in job.held_bytes.items():
            if (room := rooms.get(gpu_id)) is None:
                continue
            room.capacity_bytes += held_bytes
            # A job that migrates also leaves the GPUs that it comes from.
            if job.state == LEAVING or (job.state == ARRIVING and gpu_id not in job.gpus):
                room.soon_bytes += held_bytes
                room.leaving.append(job.name)
        if job.state == LEAVING:  # until it is parked, it can still take its stated need
            for gpu_id, size_bytes in footprint_bytes(job, gpus).items():
                if (room := rooms.get(gpu_id)) is not None:
                    room.now_bytes -= size_bytes - job.held_bytes.get(gpu_id, 0)
        if job.state in PRESENT:
            for gpu_id, size_bytes in footprint_bytes(job, gpus).items():
                if (room := rooms.get(gpu_id)) is None or gpu_id not in job.gpus:
                    continue
                promised_bytes = size_bytes - job.held_bytes.get(gpu_id, 0)
                room.now_bytes -= promised_bytes
                room.soon_bytes -= promised_bytes
                room.priorities.append(job.priority)
                room.present.append((job, size_bytes))
                if job.state == RUNNING:
                    room.jobs.append(job)
                    room.freed_bytes[job.id] = size_bytes


def _count_leases(leases: Iterable[Lease], rooms: Mapping[str, GpuBudget]) -> None:
    within: dict[tuple[str, str], list[tuple[Job, int]]] = {}
    for gpu_id, budget in rooms.items():
        for job, size_bytes in budget.present:
            for lease_id in job.within:
                within.setdefault((lease_id, gpu_id), []).append((job, size_bytes))
    for lease in leases:
        if lease.state == HELD and lease.gpu is not None and (room := rooms.get(lease.gpu)) is not None:
            _count_lease(lease, room, within.get((lease.id, lease.gpu), ()))


def _count_lease(lease: Lease, room: GpuBudget, within: Iterable[tuple[Job, int]]) -> None:
    """Count a held lease, and the jobs within it: of what they have there, the lease keeps its part when they leave."""
    left_bytes, unused_bytes, others_bytes = lease.size_bytes, lease.size_bytes - lease.used_bytes, lease.used_bytes
    for job, size_bytes in within:
        held_bytes, own_bytes = job.held_bytes.get(room.gpu.id, 0), min(size_bytes, left_bytes)
        unused_bytes -= size_bytes - held_bytes
        others_bytes -= held_bytes
        left_bytes -= own_bytes
        if job.id in room.freed_bytes:
            room.freed_bytes[job.id] -= own_bytes
    unused_bytes = max(0, unused_bytes)
    room.now_bytes -= unused_bytes
    room.soon_bytes -= unused_bytes
    room.capacity_bytes += max(0, others_bytes)
    if unused_bytes:
        room.leased_bytes[lease.id] = unused_bytes
    room.leases.append(lease)
    room.priorities.append(lease.priority)
