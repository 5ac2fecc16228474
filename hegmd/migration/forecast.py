"""The node as it will be: what operations under way will still take, and how things stand once a plan was carried out.

Owns that arithmetic, which lets several operations be planned one after the other, or begun one beside the other,
before any of them has taken anything. Pure; knows no rule of moving.
"""

from __future__ import annotations

from hegmd.migration.candidates import Candidate, GpuRoom, Plan, PoolRoom, Snapshot
from hegmd.migration.carriage import PEER
from hegmd.migration.operation import BY_DRIVER, FORWARD, RESUME, Operation, Worker
from hegmd.pieces import whole_size
from hegmd.protocol.operations import PlannedProcess


def expected(snapshot: Snapshot) -> Snapshot:
    """The node without the room and the pool that operations under way were promised and have not taken yet."""
    rooms: dict[str, int] = {}
    pool_bytes = 0
    for op in snapshot.running:
        for worker in op.live:
            if worker.goal is not None:
                rooms[worker.goal] = rooms.get(worker.goal, 0) - _room_to_take(worker)
            if not _has_memory_to_take(op, worker):
                continue
            if worker.carrier == PEER and worker.goal is not None:
                rooms[worker.goal] -= worker.size_bytes - worker.pool_bytes
            else:
                pool_bytes -= whole_size(worker.size_bytes) - (
                    whole_size(worker.pool_bytes) if worker.pool_bytes else 0
                )
    return _changed(snapshot, rooms, pool_bytes)


def after(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The node once that plan was carried out."""
    rooms: dict[str, int] = {}
    carried = [worker for worker in plan.workers if worker.to != worker.gpu]
    for worker in carried:
        taken_bytes = _taken_bytes(worker)
        for gpu, more_bytes in ((worker.to, -taken_bytes), (worker.gpu, taken_bytes)):
            if gpu is not None:
                rooms[gpu] = rooms.get(gpu, 0) + more_bytes
    pool_bytes = 0
    for worker in carried:
        if not worker.size_bytes or worker.carrier == BY_DRIVER:
            continue
        if plan.kind == RESUME:
            pool_bytes += whole_size(worker.size_bytes)
        elif worker.to is None:
            pool_bytes -= whole_size(worker.size_bytes)
    to = {worker.pid: worker.to for worker in carried}
    candidates = tuple([_moved(candidate, to) for candidate in snapshot.candidates])
    return _changed(snapshot, rooms, pool_bytes).replace(candidates=candidates)


def _taken_bytes(worker: PlannedProcess) -> int:
    """What it takes on a GPU while it runs there, with the margin that a restore needs."""
    return worker.rest_bytes + (worker.size_bytes if worker.carrier != BY_DRIVER else 0)


def _room_to_take(worker: Worker) -> int:
    return 0 if worker.at == worker.goal else max(0, worker.room_bytes - worker.rooms.get(str(worker.goal), 0))


def _has_memory_to_take(op: Operation, worker: Worker) -> bool:
    """Whether its carrier still has memory to take for its bytes: of the pool, or by peer on the GPU it goes to."""
    leaves = op.heading == FORWARD and worker.at is not None and worker.at != worker.goal and not worker.out
    return leaves and worker.is_carried and worker.pool_bytes < worker.size_bytes


def _moved(candidate: Candidate, to: dict[int, str | None]) -> Candidate:
    if candidate.pid not in to:
        return candidate
    gpu = to[candidate.pid]
    return candidate.replace(gpus=() if gpu is None else (gpu,))


def _changed(snapshot: Snapshot, rooms: dict[str, int], pool_bytes: int) -> Snapshot:
    pool: PoolRoom = snapshot.pool.replace(free_bytes=max(0, snapshot.pool.free_bytes + pool_bytes))
    return snapshot.replace(gpus=tuple([_with_room(gpu, rooms.get(gpu.id, 0)) for gpu in snapshot.gpus]), pool=pool)


def _with_room(gpu: GpuRoom, size_bytes: int) -> GpuRoom:
    return gpu if gpu.free_bytes is None else gpu.replace(free_bytes=max(0, gpu.free_bytes + size_bytes))
