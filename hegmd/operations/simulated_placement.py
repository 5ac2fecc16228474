"""Places workers on simulated GPUs when they connect, and keeps their sizes there up to date.

On real GPUs only restartable workers are asked, until they train: whether they train on the CPU.

A simulated driver does not see a training's memory, so the agent is asked: at a boundary soon after it connected, then
at intervals. A worker that trains is placed on the GPU that it was started for, or on the one with most free memory.
One that an operation has moved stays where that left it, also under a new daemon. A worker that belongs to a running
operation is not asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import anyio

from hegmd.errors import HegmError
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.node.gpu_sets import CPU
from hegmd.workers.workers import BACK, CAME, ENDED, AgentConnection, Workers

logger = logging.getLogger(__name__)

# A new worker has its storages within seconds; after that they change little.
EAGER_S = 0.5
CALM_S = 10.0
SURVEY_LIMIT_S = 5.0


class WorkerPlacement(Protocol):
    """An operation's knowledge about a worker's GPU."""

    @property
    def gpu(self) -> str | None: ...


class SimulatedPlacement:
    """Listens to the workers. `in_hand` tells whether an operation has a process, `last_place` which GPUs it left."""

    def __init__(
        self,
        workers: Workers,
        memory: SimulatedMemory,
        *,
        in_hand: Callable[[int], bool],
        last_place: Callable[[int, int], WorkerPlacement | None],
        out_bytes: Callable[[], Mapping[int, int]],
        changed: Callable[[], object],
        supervised: Callable[[AgentConnection], object] = lambda _worker: None,
    ) -> None:
        self._workers = workers
        self._memory = memory
        self._in_hand = in_hand
        self._last_place = last_place
        self._out_bytes = out_bytes
        self._changed = changed
        self._supervised = supervised
        self._due: dict[int, float] = {}
        self._ended: set[tuple[int, int]] = set()
        self._news = anyio.Event()

    def on_event(self, event: str, worker: AgentConnection) -> None:
        who = (worker.pid, worker.identity.start_ticks)
        if event == CAME and self._memory.simulated:  # on real GPUs the driver reports where they are
            place = self._last_place(*who)
            if place is not None:
                worker.gpu = None if place.gpu == CPU else place.gpu
        if event in (CAME, BACK):
            self._due[worker.pid] = 0.0
            self._news.set()
        if event == ENDED:
            self._ended.add(who)
            self.drop_ended()
        self._changed()

    def drop_ended(self) -> None:
        """Forget processes that have exited, once no operation owns them. Called at the end of each operation."""
        for who in [who for who in self._ended if not self._in_hand(who[0])]:
            self._ended.discard(who)
            self._memory.drop(who)

    def held_bytes(self) -> Mapping[int, int]:
        """For each worker that trains, the bytes that are held for it outside of its process; by pid.

        One on the CPU is among them if it can be started again on a GPU.
        """
        training = [worker for worker in self._workers if worker.gpu is not None or self._may_leave_cpu(worker)]
        return {**{worker.pid: 0 for worker in training}, **self._out_bytes()}

    def _may_leave_cpu(self, worker: AgentConnection) -> bool:
        return bool(worker.on_cpu) and worker.gpu is None and bool(self._supervised(worker))

    def _is_asked(self, worker: AgentConnection) -> bool:
        """True if the agent must say where it trains: on real GPUs only a restartable one that may be on the CPU."""
        return worker.connected and (
            self._memory.simulated or (worker.on_cpu is None and bool(self._supervised(worker)))
        )

    async def run(self) -> None:
        """Ask them how much they hold, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                now = anyio.current_time()
                for worker in self._workers:
                    if self._is_asked(worker) and self._due.get(worker.pid, now) <= now:
                        self._due[worker.pid] = now + CALM_S
                        tasks.start_soon(self.count, worker)
                known = {worker.pid for worker in self._workers}
                self._due = {pid: due for pid, due in self._due.items() if pid in known}
                wait_s = min(self._due.values(), default=now + CALM_S) - now
                self._news = anyio.Event()
                with anyio.move_on_after(max(0.05, wait_s)):
                    await self._news.wait()

    async def count(self, worker: AgentConnection, limit_s: float = SURVEY_LIMIT_S) -> None:
        """Survey a worker, and place it on a GPU if it trains. Never raises. After the limit its former sizes stay.

        A parked worker is surveyed once: it may have come to a `hegm.released()` block before its agent was connected.
        """
        is_known = worker.size_bytes is not None
        if self._in_hand(worker.pid) or worker.held_bytes or worker.weighing.locked() or (worker.parked and is_known):
            return
        try:
            await worker.order("survey", limit_s=limit_s)
        except HegmError as error:
            logger.debug("worker %d was not counted: %s", worker.pid, error.message)
            return
        # A worker that reached no boundary in time reported its count of boundaries, but not its memory.
        if worker.size_bytes is None or not (worker.size_bytes or worker.boundary):
            self._due[worker.pid] = anyio.current_time() + EAGER_S
            self._news.set()
        elif not self._in_hand(worker.pid) and not worker.ended:
            self._place(worker)

    def _place(self, worker: AgentConnection) -> None:
        before = worker.on_cpu, worker.gpu
        if worker.boundary:  # its tensors are where it trains
            worker.on_cpu = worker.about.gpu == CPU if self._memory.simulated else worker.cuda is None
        if worker.gpu is None and worker.about.gpu != CPU:
            worker.gpu = self._memory.place(worker.about.gpu, worker.about.rank)
        if worker.gpu is not None:
            self._memory.hold_what_fits((worker.pid, worker.identity.start_ticks), worker.gpu, worker.size_bytes or 0)
        if (worker.on_cpu, worker.gpu) != before:
            self._changed()
