"""A look at the node is of one moment, whatever begins or ends while processes are asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import anyio

from hegmd.sharing.view import View
from tests.patience import HANG_S
from tests.unit.sharing.shared_node import MIB, sharing_on

Child = subprocess.Popen[bytes]


async def test_a_resume_during_a_survey_does_not_get_the_memory_of_another_process(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The memory that the resume had reserved counted as free, and a queued job was started there too."""
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, b"1" * (5 * MIB), gpu="gpu0")
        await shared.node.operations.suspend([process.pid], shared.node.context())
        silent = await shared.node.attend(second_process.pid, b"2" * MIB, token="b" * 32, gpu="gpu0")
        worker = shared.node.workers.find(second_process.pid)
        assert worker is not None
        worker.boundary, worker.size_bytes = 0, None  # as of one that prepares its data
        silent.slow.add("count")
        views: list[View] = []

        async def look() -> None:
            views.append((await shared.sharing.look())[0])

        shared.node.tasks.start_soon(look)
        with anyio.fail_after(HANG_S):
            await silent.waiting.wait()
            agent.slow.add("reload")
            await shared.node.operations.resume(process.pid, None, shared.node.context(wait=False))
            await agent.waiting.wait()
            silent.go_on.set()
            while not views:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        agent.go_on.set()
        (gpu,), first = views[0].snapshot.gpus, next(job for job in views[0].snapshot.jobs if job.id == "j1")
        assert gpu.free_bytes == 7 * MIB - first.held_bytes.get("gpu0", 0)
