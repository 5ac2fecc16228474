"""The methods of moving processes, each held to one contract: books for simulated GPUs, the driver over its stub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.migration.contracts import MigratedProcess
from hegmd.migration.methods.simulated import SimulatedMethod
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from hegmd.workers.workers import Workers
from tests.contract.driven import driven, in_force
from tests.contract.helped import GIB, MIB, Owner
from tests.kit.methods import check_method
from tests.stubs.cuda.node import CudaNode
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import start_ticks


def subject(pid: int, **values: Any) -> MigratedProcess:
    ticks = start_ticks(pid)
    assert ticks is not None
    plain: dict[str, Any] = {"driver_bytes": 700 * MIB, "gpu": "gpu0", "target_gpu": "gpu1", "previous_gpu": None}
    return MigratedProcess(operation="1", name=str(pid), pid=pid, start_ticks=ticks, **{**plain, **values})


async def test_books_for_simulated_gpus_keep_the_contract() -> None:
    workers = Workers(start_ticks)
    simulated = SimulatedMemory(SimulatedProvider(parse_topology("2x1GiB")))
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        await ModelAgent(workers, os.getpid()).attend(tasks)
        worker = workers.find(os.getpid())
        assert worker is not None
        worker.gpu = "gpu0"
        simulated.reserve((worker.pid, worker.identity.start_ticks), "gpu0", 700 * MIB)
        moved = subject(worker.pid, agent=worker)
        await check_method(SimulatedMethod(simulated), moved, "gpu1", total_bytes=2 * GIB, needs_reservation=False)
        tasks.cancel_scope.cancel()


@pytest.mark.thorough
async def test_the_driver_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = CudaNode.make(tmp_path / "node")
    scenario = in_force(node, tmp_path, monkeypatch)
    owner = Owner(node, 0, 12, 4)
    async with driven(node, scenario) as parts:
        moved = subject(owner.pid, driver_bytes=529 * MIB + RESTORE_MARGIN_BYTES)
        await check_method(parts.method, moved, "gpu1", total_bytes=16 * GIB)
        assert parts.memory.by_owner() == {}
    assert owner.ask("digest") == owner.digest
    owner.close()
