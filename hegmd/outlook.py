"""The node as the planner sees it: GPUs with their room, processes with their agents, the pool, what is under way.

Owns the translation from what the daemon's parts know to the plain records that plans are made from. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from hegmd.inventory import Inventory, NodeSnapshot
from hegmd.migration.candidates import AgentSurvey, Candidate, GpuRoom, PoolRoom, Snapshot
from hegmd.migration.runner import Runner
from hegmd.pool import Pool
from hegmd.protocol.snapshots import Gpu
from hegmd.resting import Resting
from hegmd.strays import StandingStrays
from hegmd.workers import Worker, Workers

FRESH_S = 0.0


class Outlook:
    """Looks when it is asked. `count` has a worker count its storages."""

    def __init__(
        self,
        inventory: Inventory,
        workers: Workers,
        pool: Pool,
        runner: Runner,
        *,
        resting: Resting,
        standing: StandingStrays,
        count: Callable[[Worker], Awaitable[None]],
    ) -> None:
        self._inventory = inventory
        self._workers = workers
        self._pool = pool
        self._runner = runner
        self._resting = resting
        self._standing = standing
        self._count = count

    async def snapshot(self, pids: Sequence[int]) -> Snapshot:
        """The node now. Those named, if they were not counted yet, are counted first. Raises nothing of theirs."""
        for pid in pids:
            worker = self._workers.find(pid)
            if worker is not None and worker.connected and worker.size_bytes is None:
                await self._count(worker)
        node = await self._inventory.fresh(FRESH_S)
        return Snapshot(
            gpus=tuple(_room(gpu) for gpu in node.gpus),
            candidates=tuple(self._candidates(node)),
            pool=PoolRoom(
                budget_bytes=self._pool.budget_bytes(),
                free_bytes=self._pool.free_bytes() + self._resting.reclaimable_bytes(),
            ),
            running=self._runner.under_way(),
        )

    def _candidates(self, node: NodeSnapshot) -> Iterable[Candidate]:
        for standing in self._standing.standing():  # on no GPU, and in no operation that would have them shown
            yield _standing_candidate(standing)
        for process in node.processes:
            if process.start_ticks is None:
                continue
            worker = self._workers.find(process.pid)
            attends = worker is not None and worker.connected and worker.identity.start_ticks == process.start_ticks
            yield Candidate(
                pid=process.pid,
                start_ticks=process.start_ticks,
                uid=process.uid,
                name=process.name,
                job=worker.about.job if worker is not None and attends else None,
                gpus=tuple(use.gpu for use in process.gpus),
                agent=_survey(worker) if worker is not None and attends else None,
            )


def _survey(worker: Worker) -> AgentSurvey:
    return AgentSurvey(
        token=worker.token,
        size_bytes=worker.size_bytes,
        left_alone=worker.left_alone,
        boundary=worker.boundary,
        rank=worker.about.rank,
        world_size=worker.about.world_size,
    )


def _standing_candidate(worker: Worker) -> Candidate:
    pid, start_ticks, uid = worker.identity.pid, worker.identity.start_ticks, worker.identity.uid
    about = worker.about
    return Candidate(pid=pid, start_ticks=start_ticks, uid=uid, job=about.job, gpus=(), agent=_survey(worker))


def _room(gpu: Gpu) -> GpuRoom:
    known = gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None
    return GpuRoom(
        id=gpu.id,
        vendor=gpu.vendor,
        chip=gpu.chip,
        state=gpu.state,
        free_bytes=(gpu.memory_total_bytes or 0) - (gpu.memory_used_bytes or 0) if known else None,
        mig=gpu.mig,
        mps=gpu.mps,
    )
