"""The methods of moving processes, each held to one contract: books for simulated GPUs, the driver over its stub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.devices.simulated import SimulatedProvider
from hegmd.devices.topology import parse_topology
from hegmd.events import EventLog
from hegmd.inventory import Inventory
from hegmd.methods.base import Subject
from hegmd.methods.driver import DriverMethod, is_stopped
from hegmd.methods.gpus import Gpus
from hegmd.methods.neighbours import Neighbours
from hegmd.methods.simulated import SimulatedMethod
from hegmd.pieces import RESTORE_MARGIN_BYTES
from hegmd.processes import ProcessTable
from hegmd.rooms import Rooms
from hegmd.testing.methods import check_method
from hegmd.vram import VideoMemory
from hegmd.ways import NodeMeans
from hegmd.workers import Workers
from tests.contract.helped import GIB, MIB, Owner, linked
from tests.stubs.cuda.node import CudaNode
from tests.stubs.nvml.node import NvidiaNode
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import start_ticks


def subject(pid: int, **values: Any) -> Subject:
    ticks = start_ticks(pid)
    assert ticks is not None
    plain: dict[str, Any] = {"rest_bytes": 700 * MIB, "gpu": "gpu0", "goal": "gpu1", "left": None}
    return Subject(operation="1", name=str(pid), pid=pid, start_ticks=ticks, **{**plain, **values})


async def test_books_for_simulated_gpus_keep_the_contract() -> None:
    workers = Workers(start_ticks)
    rooms = Rooms(SimulatedProvider(parse_topology("2x1GiB")))
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        await ModelAgent(workers, os.getpid()).attend(tasks)
        worker = workers.find(os.getpid())
        assert worker is not None
        worker.gpu = "gpu0"
        rooms.hold((worker.pid, worker.identity.start_ticks), "gpu0", 700 * MIB)
        moved = subject(worker.pid, agent=worker)
        await check_method(SimulatedMethod(rooms), moved, "gpu1", total_bytes=2 * GIB, needs_room=False)
        tasks.cancel_scope.cancel()


async def test_the_driver_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = CudaNode.make(tmp_path / "node")
    scenario = node.nvml(tmp_path / "nvml")
    for name, value in {**node.environment(), **scenario.environment()}.items():
        monkeypatch.setenv(name, value)
    nvml = NvidiaNode(tmp_path / "node", scenario, tmp_path / "node/libnvidia-ml.so.1")
    owner = Owner(node, 0, 48, 16)
    inventory = Inventory(
        [nvml.provider()],
        query_deadline_s=10,
        events=EventLog(),
        table=ProcessTable(),
        means=lambda: NodeMeans(uid=os.geteuid(), criu_path=None),
    )
    async with linked(node) as link, inventory:
        memory = VideoMemory(link)
        neighbours = Neighbours(link, tmp_path, start_ticks=start_ticks, is_stopped=is_stopped)
        gpus = Gpus(inventory.refresh, inventory.expire)
        moved = subject(owner.pid, rest_bytes=577 * MIB + RESTORE_MARGIN_BYTES)
        await check_method(DriverMethod(link, memory, gpus, neighbours), moved, "gpu1", total_bytes=16 * GIB)
        assert memory.by_owner() == {}
        memory.close()
    assert owner.ask("digest") == owner.digest
    owner.close()
    nvml.close()
