"""The daemon's side of hegm.released(): one operation for all ranks, which only the job ends."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from hegmd.errors import BUSY, NOT_FOUND, REFUSED, TIMEOUT, HegmError
from hegmd.operations.lending import Lending
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import running

Child = subprocess.Popen[bytes]


async def test_two_requests_for_one_job_are_one_operation(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        lending = Lending(node.operations, node.workers)
        found: list[str] = []

        async def lend() -> None:
            found.append(await lending.lend(process.pid, node.context()))

        async with anyio.create_task_group() as both:
            both.start_soon(lend)
            agent.slow.add("park")
            with anyio.fail_after(HANG_S):
                await agent.waiting.wait()
            both.start_soon(lend)
            await anyio.wait_all_tasks_blocked()
            agent.go_on.set()
        assert len(found) == 2
        assert len(set(found)) == 1
        assert agent.data is None
        assert node.reservations(process.pid) == {}
        await lending.reclaim(process.pid, node.context())
        assert (agent.data, agent.parked) == (b"weights", False)


async def test_a_resume_that_waited_for_the_end_of_a_block_had_a_limit(tmp_path: Path, process: Child) -> None:
    """The daemon then suspended the job again, and tried its resume up to five minutes after the end of the block."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        lent = await Lending(node.operations, node.workers).lend(process.pid, node.context())
        agent.slow.add("reload")
        with pytest.raises(HegmError) as late:
            await node.operations.resume(process.pid, None, replace(node.context(), limit_s=0.05))
        assert late.value.code is TIMEOUT
        with anyio.fail_after(HANG_S):
            await agent.waiting.wait()
        op = node.operations.runner.history(lent).operation
        assert (op.phase, op.deadline) == ("reloading", None)
        waits = node.operations.runner.describe(lent).waits
        assert waits is not None
        assert "hegm.released()" in waits.why
        agent.go_on.set()
        await node.operations.follow(lent, node.context().emit)
        assert (agent.data, agent.parked) == (b"weights", False)


@pytest.mark.thorough
async def test_the_next_daemon_knows_the_lent_memory(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        lent = await Lending(node.operations, node.workers).lend(process.pid, node.context())
        await agent.leave()
    async with running(tmp_path) as node:
        agent.workers = node.workers
        await agent.attend(node.tasks)
        await node.at_rest(lent)
        assert await Lending(node.operations, node.workers).lend(process.pid, node.context()) == lent
        await Lending(node.operations, node.workers).reclaim(process.pid, node.context())
        assert agent.data == b"weights"


async def test_a_block_right_after_the_start_ran_with_its_memory_in_place(tmp_path: Path, process: Child) -> None:
    """The GPU of the job was not known yet. The agent repeats its request for some seconds and then gets the reason."""
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        worker = node.workers.find(process.pid)
        assert worker is not None
        for lending, code in (
            (Lending(node.operations, node.workers), BUSY),
            (Lending(node.operations, node.workers, known_within_s=0.0), REFUSED),
        ):
            worker.gpu = None
            with pytest.raises(HegmError) as refused:
                await lending.lend(process.pid, node.context())
            assert refused.value.code is code
        assert node.operations.runner.of_process(process.pid) is None


async def test_a_job_that_waited_in_its_block_before_its_agent_was_connected_is_placed(
    tmp_path: Path, process: Child
) -> None:
    """The daemon asked no parked agent for its memory. So the GPU of this one stayed unknown, and nothing was lent."""
    async with running(tmp_path) as node:
        agent = ModelAgent(node.workers, process.pid)
        agent.parked, agent.about = True, {"size_bytes": 0}
        await agent.attend(node.tasks)
        await node.until_placed(process.pid)
        await Lending(node.operations, node.workers).lend(process.pid, node.context())
        assert agent.data is None
        await Lending(node.operations, node.workers).reclaim(process.pid, node.context())
        assert agent.data == b"weights"


async def test_a_job_suspended_by_its_user_is_not_resumed_for_others(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context(), keep_context=True)
        lending = Lending(node.operations, node.workers)
        with pytest.raises(HegmError) as busy:
            await lending.lend(process.pid, node.context())
        assert busy.value.code is BUSY
        with pytest.raises(HegmError) as unknown:
            await lending.reclaim(process.pid, node.context())
        assert unknown.value.code is NOT_FOUND
        assert agent.data is None
        await node.operations.resume(process.pid, None, node.context())
