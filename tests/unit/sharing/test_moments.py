"""A snapshot of the node is of one moment, whatever begins or ends while the daemon reads processes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from hegmd.protocol import sharing as protocol
from hegmd.protocol.messages import RegisterJob
from hegmd.protocol.operations import OperationProgress
from hegmd.sharing.view import View
from tests.patience import HANG_S
from tests.unit.sharing.shared_node import ADMIN, MIB, UID, SharedNode, sharing_on

Child = subprocess.Popen[bytes]


@pytest.mark.thorough
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


class SlowingClock:
    """A clock for a machine that pauses for `pause_s` after each reading of the wall clock."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def utc(self) -> float:
        now, self._now = self._now, self._now + self.pause_s
        return now


def _is_queued(shared: SharedNode, count: int) -> bool:
    return len(shared.sharing.memory.queue) == count


async def test_a_pause_during_a_look_put_a_job_before_one_that_had_waited_for_longer(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """Each job's wait was computed with another reading of the clock, so that later ones had waited for longer."""
    clock = SlowingClock()
    async with sharing_on(tmp_path, "1x8MiB", clock=clock.monotonic, utc=clock.utc) as shared:
        await shared.make_room(7 * MIB, until_free=True)
        for count, (child, run) in enumerate([(process, "first"), (second_process, "second")], 1):
            await shared.node.moving.job_requests.register(child.pid, UID, RegisterJob(run=run, command=("train",)))
            request = protocol.PlaceJob(run=run, size_bytes=5 * MIB)
            shared.node.tasks.start_soon(shared.requests.place, request, ADMIN, shared.emit)
            await shared.until(partial(_is_queued, shared, count))
            view, _ = await shared.sharing.look()
            clock.pause_s = 1.0
            clock.utc()  # the second job begins to wait later
            clock.pause_s = 10.0
        waits_since = {job.id: job.since_s for job in view.snapshot.jobs}
        assert waits_since["j1"] < waits_since["j2"]


async def test_a_drain_just_after_a_daemon_start_found_nothing_to_move(tmp_path: Path, process: Child) -> None:
    """On simulated GPUs a process is where its agent says."""
    async with sharing_on(tmp_path, "2x8MiB") as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="one", command=("train",)))
        agent = await shared.node.attend(process.pid, b"1" * MIB, run="one", gpu="gpu0")
        await agent.leave()
    async with sharing_on(tmp_path, "2x8MiB", clock=lambda: 0.0) as shared:
        told: list[str] = []

        async def connect(progress: OperationProgress) -> None:
            if progress.waits is not None and not told:
                told.append(progress.waits.why)
                await shared.node.attend(process.pid, b"1" * MIB, run="one", gpu="gpu0")

        context = replace(shared.node.context(), emit=connect)
        with anyio.fail_after(HANG_S):
            outcome = await shared.node.sequences.drain("gpu0", (), context)
        assert [operation.phase for operation in outcome.operations] == ["done"]
        assert told == ["agents of jobs have not connected since hegmd was started"]
