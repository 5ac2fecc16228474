"""`hegmctl resume --queue`: a job that its user has suspended waits for memory, with model agents."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.errors import BAD_REQUEST, CANCELLED, DENIED, NOT_FOUND, REFUSED, TIMEOUT, HegmError
from hegmd.operations.lending import Lending
from hegmd.operations.request_context import OperationResult, RequestContext
from hegmd.protocol import sharing as protocol
from hegmd.protocol.messages import RegisterJob
from hegmd.sharing import model
from hegmd.sharing.resumes import QueuedResumes
from tests.patience import HANG_S
from tests.unit.sharing.shared_node import ADMIN, MIB, UID, SharedNode, sharing_on

pytestmark = pytest.mark.thorough

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


def _context(shared: SharedNode, **changes: Any) -> RequestContext:
    return RequestContext(**{"by": "a user", "may": lambda _uid: True, "emit": shared.emit, **changes})


async def _suspended_with_memory_leased(shared: SharedNode, process: Child) -> QueuedResumes:
    """Suspend a job as its user, and lease the memory that it needs."""
    await shared.node.attend(process.pid, BYTES)
    await shared.node.moving.operations.suspend([process.pid], _context(shared))
    await shared.make_room(7 * MIB, gpu="gpu0", until_free=True)
    assert await shared.states() == {"j1": "suspended"}
    shared.progress.clear()
    moving = shared.node.moving
    return QueuedResumes(shared.sharing, moving.operations, moving.job_requests)


async def test_a_job_that_its_user_resumes_waits_in_the_queue_for_memory(tmp_path: Path, process: Child) -> None:
    """The daemon refused the resume, and the user had to retry."""
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        resumes = await _suspended_with_memory_leased(shared, process)
        with pytest.raises(HegmError, match="are needed") as refused:
            await shared.node.moving.operations.resume(process.pid, None, _context(shared))
        assert refused.value.code is REFUSED
        assert refused.value.hint.endswith("or add --queue, to wait for room")
        results: list[OperationResult] = []

        async def resume() -> None:
            results.append(await resumes.resume(process.pid, None, _context(shared)))

        tasks.start_soon(resume)
        await shared.until(lambda: bool(shared.progress))
        (progress, *_) = shared.progress
        assert progress.phase == "queued"
        assert "6 MiB on gpu0" in progress.waits.why
        assert progress.waits.next.startswith("it resumes on gpu0 once lease l1 ends")
        (job,) = (await shared.requests.queue(ADMIN)).jobs
        assert (job.state, job.why) == ("suspended", progress.waits.why)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: bool(results))
        assert results[0].operation is not None
        assert results[0].operation.phase == "done"
        assert await shared.states() == {"j1": "running"}
        assert not shared.sharing.memory.suspended


async def test_a_queued_job_keeps_its_place_without_its_client_and_after_a_kill_of_the_daemon(
    tmp_path: Path, process: Child
) -> None:
    async with sharing_on(tmp_path) as shared:
        resumes = await _suspended_with_memory_leased(shared, process)
        with anyio.move_on_after(0):
            await resumes.resume(process.pid, None, _context(shared))
        result = await resumes.resume(process.pid, None, _context(shared, wait=False))
        assert result.operation is not None
        assert result.operation.phase == "suspended"
        assert result.operation.waits is not None
        assert result.operation.waits.next == "hegmctl queue shows when it resumes", (
            "the hint named resume as the next step"
        )
        agent = shared.node.agents[process.pid]
        await agent.leave()
    async with sharing_on(tmp_path) as shared:
        agent.workers = shared.node.workers
        await agent.attend(shared.node.tasks)
        await shared.until_states(j1="suspended")
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until_states(j1="running")
        assert agent.data == BYTES


async def test_a_suspend_or_a_timeout_removes_a_job_from_the_queue(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        resumes = await _suspended_with_memory_leased(shared, process)
        with pytest.raises(HegmError, match=r"there was no room for job .* within 0\.05 s: 6 MiB on gpu0") as late:
            await resumes.resume(process.pid, None, _context(shared, limit_s=0.05))
        assert late.value.code is TIMEOUT
        assert not shared.sharing.memory.suspended
        errors: list[HegmError] = []

        async def resume() -> None:
            with pytest.raises(HegmError, match="has left the queue, and stays suspended") as left:
                await resumes.resume(process.pid, None, _context(shared))
            errors.append(left.value)

        tasks.start_soon(resume)
        await shared.until(lambda: bool(shared.sharing.memory.suspended))
        await shared.node.moving.operations.suspend([process.pid], _context(shared))
        await shared.until(lambda: bool(errors))
        assert errors[0].code is CANCELLED
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        assert await shared.states() == {"j1": "suspended"}


async def test_a_queued_resume_is_refused_or_immediate_if_it_need_not_wait(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path, policy=model.Rules(settle_s=1000.0)) as shared:
        resumes = await _suspended_with_memory_leased(shared, process)
        with pytest.raises(HegmError, match="hegmd chooses the GPU") as refused:
            await resumes.resume(process.pid, "gpu0", _context(shared))
        assert refused.value.code is BAD_REQUEST
        with pytest.raises(HegmError, match="belongs to") as denied:
            await resumes.resume(process.pid, None, _context(shared, may=lambda _uid: False))
        assert denied.value.code is DENIED
        assert not shared.sharing.memory.suspended
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        with anyio.fail_after(HANG_S):
            await resumes.resume(process.pid, None, _context(shared))
        assert await shared.states() == {"j1": "running"}
        with pytest.raises(HegmError, match="is not suspended"):
            await resumes.resume(process.pid, None, _context(shared))


async def test_a_less_urgent_job_is_suspended_for_a_job_that_lent_its_gpu(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The agent repeated its request every two seconds, and no job was suspended: the training never continued."""
    async with sharing_on(tmp_path) as shared:
        lender = await shared.node.attend(process.pid, BYTES)
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        lending = Lending(moving.operations, shared.node.workers, queue=resumes.enter)
        await lending.lend(process.pid, _context(shared))
        await shared.node.attend(second_process.pid, BYTES, token="b" * 32)
        await shared.requests.set_priority(protocol.SetPriority(job="j2", priority=20), ADMIN)
        with pytest.raises(HegmError) as refused:
            await lending.reclaim(process.pid, _context(shared))
        assert refused.value.code is REFUSED
        await shared.until_states(j1="running", j2="suspended")
        assert (lender.data, lender.parked) == (BYTES, False)
        with pytest.raises(
            HegmError
        ) as not_found:  # the agent repeats its request, and the reply shows that it has its memory
            await lending.reclaim(process.pid, _context(shared))
        assert not_found.value.code is NOT_FOUND


async def test_a_job_that_slurm_has_suspended_is_shown_with_its_slurm_job(tmp_path: Path, process: Child) -> None:
    """The queue said that it waits for its user."""
    async with sharing_on(tmp_path) as shared:
        request = RegisterJob(run="train", command=("sleep",), slurm_job=42)
        await shared.node.moving.job_requests.register(process.pid, UID, request)
        await shared.node.attend(process.pid, BYTES, run="train")
        await shared.node.operations.suspend([process.pid], shared.node.context())
        (job,) = (await shared.requests.queue(ADMIN)).jobs
        assert (job.job, job.why) == ("j1", "Slurm job 42, which Slurm resumes, or its user")
        assert job.next == "Slurm resumes it; or by hand: hegmctl resume j1"
