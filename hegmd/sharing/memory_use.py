"""GPU memory that jobs have, need and leave behind, and the used part of a lease. Reads parents from /proc."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from hegmd.migration.machine.operation import QUIESCE, JobProcess, Operation
from hegmd.migration.model import Candidate, GpuMemory, MigrationPlan
from hegmd.migration.plan.carrier_choice import is_helped
from hegmd.node.gpu_sets import gpus_of, shared_out
from hegmd.node.processes.surroundings import parent_of
from hegmd.protocol.operations import BY_DRIVER
from hegmd.sharing.records import LeaseRecord, QueuedRecord
from hegmd.workers.workers import AgentConnection

# How far a process is from the one that a lease is for: a shell, its launcher, its ranks.
MAX_GENERATIONS = 16


def held_by_gpu(candidates: Sequence[Candidate]) -> dict[str, int]:
    """Return what these processes hold on each GPU, as the driver reports it."""
    held: dict[str, int] = {}
    for candidate in candidates:
        for gpu in candidate.gpus:
            held[gpu] = held.get(gpu, 0) + candidate.driver_bytes_by_gpu.get(gpu, 0)
    return held


def needs_by_gpu(members: Sequence[JobProcess], place: Callable[[JobProcess], str | None]) -> dict[str, int]:
    """Return what the processes of an operation need on each GPU of that place."""
    needs: dict[str, int] = {}
    for member in members:
        for gpu, size in shared_out(place(member), member.reservation_bytes_by_gpu, member.reservation_bytes).items():
            needs[gpu] = needs.get(gpu, 0) + size
    return needs


def needs_whole_gpus(workers: Iterable[AgentConnection], op: Operation | None) -> bool:
    """Return True for ranks with NCCL that the driver has restored or will restore: they share no GPU (XID 109)."""
    by_driver = {member.pid for member in op.live if member.method == BY_DRIVER} if op and op.kind != QUIESCE else ()
    groups = [one.communicators for one in workers if one.driver_restored or one.pid in by_driver]
    return any(found is not None and found.uses_nccl for found in groups)


def with_stated(needs: Mapping[str, int], queued: QueuedRecord | None, kept: Mapping[str, int]) -> tuple[int, ...]:
    """Return what a job needs on each GPU, at least what it said without what it has left there: it may not have taken
    all of it yet.
    """
    if queued is None or queued.size_bytes is None or len(needs) != queued.gpu_count:
        return tuple(needs.values())
    return tuple([max(size_bytes, queued.size_bytes - kept.get(gpu, 0)) for gpu, size_bytes in needs.items()])


def copies_by_gpu(
    members: Sequence[JobProcess], place: Callable[[JobProcess], str | None], gpus: Sequence[GpuMemory]
) -> dict[str, int]:
    """Return what the contexts that copy the bytes of these processes take on each GPU of that place, besides that."""
    contexts = {gpu.id: gpu.context_bytes for gpu in gpus}
    copies: dict[str, int] = {}
    for member in members:
        for gpu in gpus_of(place(member)) if member.offloaded and is_helped(member.carrier) else ():
            copies[gpu] = copies.get(gpu, 0) + contexts.get(gpu, 0)
    return copies


def stays_by_gpu(plan: MigrationPlan) -> dict[str, int]:
    """Return what stays on each GPU after a suspension that keeps CUDA contexts."""
    stays: dict[str, int] = {}
    for worker in plan.workers:
        for gpu in gpus_of(worker.gpu):
            stays[gpu] = stays.get(gpu, 0) + (worker.stays_bytes or 0)
    return stays


def kept_by_gpu(members: Sequence[JobProcess]) -> dict[str, int]:
    """Return what suspended processes of an operation have left on each GPU with their CUDA contexts, as measured."""
    kept: dict[str, int] = {}
    for member in members:
        for gpu in gpus_of(member.previous_gpu) if member.keeps_context else ():
            kept[gpu] = kept.get(gpu, 0) + (member.stays_bytes or 0)
    return kept


def used_of_lease(lease: LeaseRecord, candidates: Sequence[Candidate], others: Collection[int]) -> int:
    """Return how much of its GPU the processes have that a lease is for.

    With a process, these are that one and all that descend from it. Without, they are those that were started after the
    lease was made. `others` are left out: processes of jobs that are older, or to which sharing gave their GPU.
    """
    used_bytes = 0
    for candidate in candidates:
        size_bytes = candidate.driver_bytes_by_gpu.get(lease.gpu or "", 0)
        if not size_bytes:
            continue
        if lease.pid is not None:
            is_its = descends(candidate.pid, lease.pid)
        else:
            is_its = candidate.start_ticks >= lease.made_ticks
        used_bytes += size_bytes if is_its and candidate.pid not in others else 0
    return min(used_bytes, lease.size_bytes)


def descends(pid: int, ancestor: int) -> bool:
    """Return whether that process is `ancestor`, or was started by it or its descendants."""
    one: int | None = pid
    for _ in range(MAX_GENERATIONS):
        if one == ancestor:
            return True
        if one is None or one <= 1:
            break
        one = parent_of(one)
    return False


def is_open_to(lease: LeaseRecord, pids: Iterable[int], started_utc: float) -> bool:
    """Return whether a job of these processes may use the lease: the lease's process has started it since."""
    return lease.pid is not None and started_utc >= lease.since_utc and any(descends(pid, lease.pid) for pid in pids)
