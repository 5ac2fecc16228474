"""The node as it will be: what running operations will still take, and the state after a plan.

Owns this arithmetic, which lets several operations be planned before any of them has reserved anything. Pure, without
any rule of moving.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hegmd.memory.sizes import whole_size
from hegmd.migration.machine.operation import FORWARD, RESUME, SIMULATED, JobProcess, Operation
from hegmd.migration.model import Candidate, GpuMemory, MigrationPlan, NodeSnapshotForPlan, PoolMemory
from hegmd.node.gpu_sets import added, gpus_of, more_than, shared_out
from hegmd.protocol.operations import BY_DRIVER, PEER, PlannedProcess


def expected(snapshot: NodeSnapshotForPlan) -> NodeSnapshotForPlan:
    """Return the node without the memory that running operations were promised and have not reserved yet."""
    deltas: dict[str, int] = {}
    pool_bytes = 0
    real = {gpu.id for gpu in snapshot.gpus if gpu.vendor != SIMULATED}
    for op in snapshot.running:
        for worker in op.live:
            missing = _promised(worker, real) or _missing_reservations(worker)
            for gpu, size_bytes in missing.items():
                deltas[gpu] = deltas.get(gpu, 0) - size_bytes
            if not _has_memory_to_take(op, worker):
                continue
            if worker.carrier == PEER and worker.target_gpu is not None:
                missing_bytes = worker.size_bytes - worker.pool_bytes
                for gpu, size_bytes in shared_out(
                    worker.target_gpu, worker.storage_bytes_by_gpu, missing_bytes
                ).items():
                    deltas[gpu] = deltas.get(gpu, 0) - size_bytes
            else:
                pool_bytes -= whole_size(worker.size_bytes) - (
                    whole_size(worker.pool_bytes) if worker.pool_bytes else 0
                )
    return _changed(snapshot, deltas, pool_bytes)


def after(snapshot: NodeSnapshotForPlan, plan: MigrationPlan) -> NodeSnapshotForPlan:
    """The node once that plan was carried out."""
    deltas: dict[str, int] = {}
    carried = [worker for worker in plan.workers if worker.to != worker.gpu]
    for worker in carried:
        taken_bytes = _taken_bytes(worker)
        for place, sign in ((worker.to, -1), (worker.gpu, 1)):
            bytes_by_gpu = added(worker.driver_bytes_by_gpu, worker.storage_bytes_by_gpu)
            for gpu, size_bytes in shared_out(place, bytes_by_gpu, taken_bytes).items():
                deltas[gpu] = deltas.get(gpu, 0) + sign * size_bytes
    pool_bytes = 0
    for worker in carried:
        if not worker.size_bytes or worker.carrier == BY_DRIVER:
            continue
        if plan.kind == RESUME:
            pool_bytes += whole_size(worker.size_bytes)
        elif worker.to is None:
            pool_bytes -= whole_size(worker.size_bytes)
    moved = {worker.pid: worker for worker in carried}
    candidates = tuple([_moved(candidate, moved.get(candidate.pid)) for candidate in snapshot.candidates])
    return _changed(snapshot, deltas, pool_bytes).replace(candidates=candidates)


def _taken_bytes(worker: PlannedProcess) -> int:
    """Return the bytes that it takes on a GPU while it runs there, with the margin that a restore needs."""
    return worker.driver_bytes + (worker.size_bytes if worker.carrier != BY_DRIVER else 0)


def reservations_for(bytes_by_gpu: Sequence[int], here: str | None, there: str) -> dict[str, int]:
    """Return what a process on several GPUs needs beyond its own memory to move, by GPU."""
    return more_than(shared_out(there, bytes_by_gpu, 0), shared_out(here, bytes_by_gpu, 0))


def _promised(worker: JobProcess, real: Collection[str]) -> dict[str, int]:
    """Return what a process that kept its CUDA context will take on real GPUs, by GPU.

    Its reservation there is only a promise: the memory looks free until its agent has allocated it.
    """
    if not worker.keeps_context or not worker.offloaded or not set(gpus_of(worker.target_gpu)) <= set(real):
        return {}
    return shared_out(worker.target_gpu, worker.storage_bytes_by_gpu, worker.size_bytes)


def _missing_reservations(worker: JobProcess) -> dict[str, int]:
    if worker.target_gpu is None or worker.gpu == worker.target_gpu:
        return {}
    missing_bytes = max(0, worker.reservation_bytes - worker.reservations.get(worker.target_gpu, 0))
    if worker.driver_bytes_by_gpu and missing_bytes:
        return reservations_for(worker.reservation_bytes_by_gpu, worker.gpu, worker.target_gpu)
    return dict.fromkeys(gpus_of(worker.target_gpu), missing_bytes)


def _has_memory_to_take(op: Operation, worker: JobProcess) -> bool:
    """True if its carrier must still reserve memory for its bytes: in the pool, or by peer on the target GPU."""
    leaves = (
        op.direction == FORWARD and worker.gpu is not None and worker.gpu != worker.target_gpu and not worker.offloaded
    )
    return leaves and worker.is_carried and worker.pool_bytes < worker.size_bytes


def _moved(candidate: Candidate, worker: PlannedProcess | None) -> Candidate:
    if worker is None:
        return candidate
    agent = candidate.agent
    if agent is not None and worker.to is not None and worker.method == BY_DRIVER:
        agent = agent.replace(driver_restored=True)
    return candidate.replace(gpus=gpus_of(worker.to), agent=agent)


def _changed(snapshot: NodeSnapshotForPlan, deltas: dict[str, int], pool_bytes: int) -> NodeSnapshotForPlan:
    pool: PoolMemory = snapshot.pool.replace(free_bytes=max(0, snapshot.pool.free_bytes + pool_bytes))
    return snapshot.replace(
        gpus=tuple([_with_free_bytes(gpu, deltas.get(gpu.id, 0)) for gpu in snapshot.gpus]), pool=pool
    )


def _with_free_bytes(gpu: GpuMemory, size_bytes: int) -> GpuMemory:
    return gpu if gpu.free_bytes is None else gpu.replace(free_bytes=max(0, gpu.free_bytes + size_bytes))
