"""A daemon's inside without its socket, for the tests of what moves jobs: all real but the agents and the GPUs.

Leaving the context is the daemon's end, as far as operations can tell it from a kill; a second one on the same folder
is the next daemon.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc

from hegmd.memory.pool import MemoryKeeping, Pool
from hegmd.memory.pool_checksums import SumFolder
from hegmd.memory.pool_places import PoolDirectory
from hegmd.memory.ready_memory import ReadyMemory
from hegmd.memory.spill_file import SpillFolder
from hegmd.migration.journal.disk import Disk
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from hegmd.node.inventory import Inventory
from hegmd.node.inventory.vendors import VendorWatch
from hegmd.node.processes import ProcessTable
from hegmd.node.processes.procfs import ProcessGone, Unreadable, read_start
from hegmd.operations.request_context import RequestContext
from hegmd.operations.service import OperationsService
from hegmd.protocol.operations import Operation, OperationProgress
from hegmd.telemetry.events import EventLog
from hegmd.workers.workers import Workers
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent

MIB = 1 << 20


def start_ticks(pid: int) -> int | None:
    try:
        return read_start("/proc", pid)[0]
    except (ProcessGone, Unreadable):
        return None


class Node:
    """A daemon's inside without its socket. `spill` is the setting, `spare_bytes` what the disk is to keep free.

    `disk` is where the journal goes.
    """

    def __init__(
        self,
        state_dir: Path,
        tasks: anyio.abc.TaskGroup,
        spec: str,
        *,
        spill: str = "asked",
        spare_bytes: int = 0,
        disk: Disk | None = None,
        ready: ReadyMemory | None = None,
    ) -> None:
        state_dir.mkdir(exist_ok=True)
        self.simulator = SimulatedProvider(parse_topology(spec))
        self.workers = Workers(start_ticks)
        self.events = EventLog()
        self.tasks = tasks
        self.phases: list[str] = []
        #: The agents that attended, by pid.
        self.agents: dict[int, ModelAgent] = {}
        self.inventory = Inventory(
            [VendorWatch(self.simulator)],
            query_deadline_s=5,
            events=self.events,
            table=ProcessTable(),
            held=self.held_bytes,
        )
        keep = MemoryKeeping(
            [PoolDirectory(state_dir / "memory", huge=False)],
            None,
            SpillFolder(state_dir / "spill", spare_bytes=spare_bytes),
            SumFolder(state_dir / "sums"),
        )
        self.moving = OperationsService(
            state_dir=state_dir,
            pool=Pool(64 * MIB, keep=keep, ready=ready),
            spill=spill,
            simulator=self.simulator,
            inventory=self.inventory,
            workers=self.workers,
            events=self.events,
            start_ticks=start_ticks,
            disk=disk,
        )
        self.operations = self.moving.operations
        self.sequences = self.moving.sequences

    def held_bytes(self) -> Mapping[int, int]:
        return self.moving.attendance.held_bytes()

    async def emit(self, progress: OperationProgress) -> None:
        self.phases.append(progress.phase)

    def context(
        self, *, may: bool = True, wait: bool = True, dry_run: bool = False, limit_s: float | None = None
    ) -> RequestContext:
        return RequestContext(
            by="the test", may=lambda _uid: may, emit=self.emit, wait=wait, dry_run=dry_run, limit_s=limit_s
        )

    async def attend(self, pid: int, data: bytes = b"weights", token: str = "a" * 32, **about: object) -> ModelAgent:
        agent = ModelAgent(self.workers, pid, data, token)
        agent.about = about
        self.agents[pid] = agent
        await agent.attend(self.tasks)
        await self.until_placed(pid)
        return agent

    async def until_placed(self, pid: int) -> None:
        with anyio.fail_after(HANG_S):
            while (worker := self.workers.find(pid)) is None or worker.gpu is None:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()

    async def at_rest(self, op_id: str) -> Operation:
        with anyio.fail_after(HANG_S):
            await self.operations.follow(op_id, self.emit)
        return self.operations.runner.describe(op_id)

    def reservations(self, pid: int) -> dict[str, int]:
        ticks = start_ticks(pid)
        assert ticks is not None
        return dict(self.moving.simulated_memory.of((pid, ticks)))


@asynccontextmanager
async def running(
    state_dir: Path,
    spec: str = "2x1GiB",
    *,
    spill: str = "asked",
    spare_bytes: int = 0,
    disk: Disk | None = None,
    ready: ReadyMemory | None = None,
) -> AsyncIterator[Node]:
    """A node that runs; leaving it is the daemon's end, as far as operations can tell a kill."""
    await anyio.Path(state_dir).mkdir(parents=True, exist_ok=True)
    async with anyio.create_task_group() as tasks:
        node = Node(state_dir, tasks, spec, spill=spill, spare_bytes=spare_bytes, disk=disk, ready=ready)
        async with node.inventory:
            await node.moving.open()
            await node.inventory.refresh()
            await tasks.start(node.moving.run)
            yield node
            tasks.cancel_scope.cancel()
    node.moving.pool.close()
