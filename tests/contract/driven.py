"""The daemon's parts around the driver on the stub's node, put together as the daemon puts them together.

NVML's stub shows the same node as the driver's stub, so each shows what the other does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio.to_thread
import pytest

from hegmd.gpu_helper.link import Link
from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.memory.video_memory import VideoMemory
from hegmd.migration.contracts import MigratedProcess
from hegmd.migration.methods.driver import DriverMethod
from hegmd.migration.methods.driver_calls import Steps
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.other_processes import OtherProcesses
from hegmd.migration.methods.progress_probe import ProgressLimits, is_stopped
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.node.inventory.vendors import VendorWatch
from hegmd.node.processes import ProcessTable
from hegmd.telemetry.events import EventLog
from tests.contract.helped import MIB, Owner, ask, linked
from tests.stubs.cuda.node import CudaNode
from tests.stubs.nvml.node import NvidiaNode
from tests.stubs.nvml.scenario import Scenario as NvmlScenario
from tests.unit.moving_node import start_ticks

REST_BYTES = 529 * MIB + RESTORE_MARGIN_BYTES
# The number of queries in which another program has time to interfere.
QUESTIONS = 20


@dataclass
class DriverProcess:
    """The process that carriers and methods act on."""

    node: CudaNode
    link: Link
    gpus: Gpus
    memory: VideoMemory
    other_processes: OtherProcesses
    method: DriverMethod
    inventory: Inventory
    #: The observations of the node so far.
    looks: list[NodeSnapshot]


def in_force(node: CudaNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlScenario:
    """This test's process on that node, for both libraries."""
    scenario = node.nvml(folder / "nvml")
    for name, value in {**node.environment(), **scenario.environment()}.items():
        monkeypatch.setenv(name, value)
    return scenario


@asynccontextmanager
async def driven(
    node: CudaNode, scenario: NvmlScenario, patience: ProgressLimits | None = None
) -> AsyncIterator[DriverProcess]:
    """In the test's own task, since a task group ends where it began. Nothing may be held at the end."""
    folder = node.folder.parent
    nvml = NvidiaNode(node.folder, scenario, node.folder / "libnvidia-ml.so.1")
    inventory = Inventory([VendorWatch(nvml.provider())], query_deadline_s=10, events=EventLog(), table=ProcessTable())
    async with linked(node) as link, inventory:
        memory = VideoMemory(link)
        other_processes = OtherProcesses(link, folder, start_ticks=start_ticks, is_stopped=is_stopped)
        looks: list[NodeSnapshot] = []

        async def take_snapshot() -> NodeSnapshot:
            looks.append(await inventory.refresh())
            return looks[-1]

        gpus = Gpus(take_snapshot, inventory.expire)
        method = DriverMethod(Steps(link, gpus, other_processes, patience), memory, gpus, other_processes)
        yield DriverProcess(node, link, gpus, memory, other_processes, method, inventory, looks)
        memory.close()
    nvml.close()


@dataclass
class Rig:
    """One process that is moved, and another on the target GPU."""

    node: CudaNode
    link: Link
    method: DriverMethod
    other_processes: OtherProcesses
    memory: VideoMemory
    moved: Owner
    other: Owner
    inventory: Inventory
    looks: list[NodeSnapshot]

    @property
    def subject(self) -> MigratedProcess:
        ticks = start_ticks(self.moved.pid)
        assert ticks is not None
        who = ("1", "0", self.moved.pid, ticks)
        return MigratedProcess(*who, driver_bytes=REST_BYTES, gpu="gpu0", target_gpu="gpu1", previous_gpu=None)

    @property
    def other_who(self) -> tuple[int, int]:
        ticks = start_ticks(self.other.pid)
        assert ticks is not None
        return self.other.pid, ticks

    async def take_off(self) -> MigratedProcess:
        """It as it is after its checkpoint, with its room held."""
        await self.method.reserve(self.subject, "gpu1", REST_BYTES)
        await self.method.checkpoint(self.subject)
        return replace(self.subject, gpu=None, previous_gpu="gpu0")

    async def state(self, owner: Owner) -> str:
        return str((await ask(self.link, "state", pid=owner.pid))["state"])

    async def stands(self, owner: Owner) -> None:
        """It is locked and stays so."""
        assert [await self.state(owner) for _ in range(QUESTIONS)] == ["locked"] * QUESTIONS


@dataclass
class Parts:
    """The parts of a rig. The test's own task builds them: a task group ends in the task where it began."""

    node: CudaNode
    scenario: NvmlScenario
    moved: Owner
    other: Owner


@asynccontextmanager
async def rigged(parts: Parts, patience: ProgressLimits | None = None) -> AsyncIterator[Rig]:
    async with driven(parts.node, parts.scenario, patience) as by:
        yield Rig(
            parts.node,
            by.link,
            by.method,
            by.other_processes,
            by.memory,
            parts.moved,
            parts.other,
            by.inventory,
            by.looks,
        )


@asynccontextmanager
async def standing_in(rig: Rig, call: str, gate: Path) -> AsyncIterator[None]:
    """Keep a call for the moved process running until the end of the block."""
    rig.node.order(f"hold {call}@{rig.moved.pid} {gate}")
    file = await anyio.to_thread.run_sync(gate.open, "w")
    try:
        rig.node.mend()
        yield
    finally:
        file.close()
