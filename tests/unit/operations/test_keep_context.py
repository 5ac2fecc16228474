"""A suspend that keeps CUDA contexts, through the whole daemon: away, restarted, back, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hegmd.errors import HegmError, Refused
from hegmd.protocol.operations import KEEP_CONTEXT
from hegmd.system.programs import Rights
from tests.unit.moving_node import running

Child = subprocess.Popen[bytes]


async def test_it_frees_the_gpu_and_resumes_there(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        (home,) = node.reservations(process.pid)
        answer = await node.operations.suspend([process.pid], node.context(), keep_context=True)
        assert answer.plan is not None
        assert answer.operation is not None
        assert answer.plan.workers[0].method == KEEP_CONTEXT
        assert answer.operation.phase == "suspended"
        assert answer.operation.processes[0].stays_bytes == 0, "a simulated context takes no memory"
        assert (agent.data, agent.parked, agent.is_suspended) == (None, True, True)
        assert node.reservations(process.pid) == {}
        assert "disconnect" not in agent.orders
        other = "gpu1" if home == "gpu0" else "gpu0"
        with pytest.raises(HegmError, match=f"can resume there only, not on {other}"):
            await node.operations.resume(process.pid, other, node.context())
        with pytest.raises(Refused, match="which an image cannot have"):
            await node.moving.checkpoints.handoff(process.pid, str(tmp_path / "image"), Rights(0, 0), node.context())
        assert agent.data is None, "a refusal has changed something"
        ended = await node.operations.resume(process.pid, None, node.context())
        assert ended.operation is not None
        assert (ended.operation.phase, agent.data, agent.parked) == ("done", b"weights", False)
        assert node.moving.pool.held_bytes == 0


async def test_it_stays_suspended_across_a_restart_of_the_daemon(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context(), keep_context=True)
        await agent.leave()
    async with running(tmp_path) as node:
        agent.workers = node.workers
        await agent.attend(node.tasks)
        (op,) = node.operations.runner.under_way()
        assert (await node.at_rest(op.id)).phase == "suspended"
        assert agent.data is None
        assert node.moving.pool.held_bytes
        await node.operations.resume(process.pid, None, node.context())
        assert (agent.data, agent.parked) == (b"weights", False)


@pytest.mark.thorough
async def test_its_bytes_can_be_on_disk(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context(), keep_context=True, spill=True)
        assert agent.entrusted
        assert node.moving.pool.held_bytes == 0
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"


async def test_a_copy_that_fails_leaves_it_training(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.refuses["offload"] = "no memory to copy to"
        answer = await node.operations.suspend([process.pid], node.context(), keep_context=True)
        assert answer.operation is not None
        assert answer.operation.phase == "rolled-back"
        assert (agent.data, agent.parked) == (b"weights", False)
        assert node.moving.pool.held_bytes == 0


@pytest.mark.thorough
async def test_a_quiesced_job_can_keep_its_context_and_its_bytes_can_go_to_disk(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.quiesce([process.pid], 60.0, node.context())
        answer = await node.operations.suspend([process.pid], node.context(), keep_context=True)
        assert answer.operation is not None
        assert (answer.operation.phase, agent.data) == ("suspended", None)
        assert node.operations.runner.history(answer.operation.id).operation.workers[0].keeps_context
        await node.operations.suspend([process.pid], node.context(), spill=True)
        assert agent.entrusted
        await node.operations.resume(process.pid, None, node.context())
        assert (agent.data, agent.parked) == (b"weights", False)
