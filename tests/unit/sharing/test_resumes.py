"""`hegmctl resume --queue`: a job that its user has suspended waits for room, over model agents."""

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
from hegmd.sharing import model
from hegmd.sharing.resumes import QueuedResumes
from tests.patience import HANG_S
from tests.unit.sharing.shared_node import ADMIN, MIB, SharedNode, sharing_on

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


def _asked(shared: SharedNode, **changes: Any) -> RequestContext:
    return RequestContext(**{"by": "a user", "may": lambda _uid: True, "emit": shared.emit, **changes})


async def _suspended_beside_a_lease(shared: SharedNode, process: Child) -> QueuedResumes:
    """A job that its user has suspended, while a lease has the memory that it needs."""
    await shared.node.attend(process.pid, BYTES)
    await shared.node.moving.operations.suspend([process.pid], _asked(shared))
    await shared.make_room(7 * MIB, gpu="gpu0", until_free=True)
    assert await shared.states() == {"j1": "suspended"}
    shared.heard.clear()
    moving = shared.node.moving
    return QueuedResumes(shared.sharing, moving.operations, moving.job_requests)


async def test_a_job_that_its_user_resumes_waits_in_the_queue_until_there_is_room(
    tmp_path: Path, process: Child
) -> None:
    """The resume was refused, and the user had to try again and again."""
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        resumes = await _suspended_beside_a_lease(shared, process)
        with pytest.raises(HegmError, match="are needed") as refused:
            await shared.node.moving.operations.resume(process.pid, None, _asked(shared))
        assert refused.value.code is REFUSED
        assert refused.value.hint.endswith("or add --queue, to wait for room")
        answers: list[OperationResult] = []

        async def resume() -> None:
            answers.append(await resumes.resume(process.pid, None, _asked(shared)))

        tasks.start_soon(resume)
        await shared.until(lambda: bool(shared.heard))
        (first, *_) = shared.heard
        assert first.phase == "queued"
        assert "6 MiB on gpu0" in first.waits.why
        assert first.waits.next.startswith("it resumes on gpu0 once lease l1 ends")
        (job,) = (await shared.requests.queue(ADMIN)).jobs
        assert (job.state, job.why) == ("suspended", first.waits.why)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: bool(answers))
        assert answers[0].operation is not None
        assert answers[0].operation.phase == "done"
        assert await shared.states() == {"j1": "running"}
        assert not shared.sharing.memory.suspended


async def test_a_queued_job_keeps_its_place_without_its_client_and_after_a_kill_of_the_daemon(
    tmp_path: Path, process: Child
) -> None:
    async with sharing_on(tmp_path) as shared:
        resumes = await _suspended_beside_a_lease(shared, process)
        with anyio.move_on_after(0):
            await resumes.resume(process.pid, None, _asked(shared))
        answer = await resumes.resume(process.pid, None, _asked(shared, wait=False))
        assert answer.operation is not None
        assert answer.operation.phase == "suspended"
        assert answer.operation.waits is not None
        assert answer.operation.waits.next == "hegmctl queue shows when it resumes", "it named resume as the next step"
        agent = shared.node.agents[process.pid]
        await agent.leave()
    async with sharing_on(tmp_path) as shared:
        agent.workers = shared.node.workers
        await agent.attend(shared.node.tasks)
        await shared.until_states(j1="suspended")
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until_states(j1="running")
        assert agent.data == BYTES


async def test_a_job_leaves_the_queue_with_a_suspend_and_after_the_time(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        resumes = await _suspended_beside_a_lease(shared, process)
        with pytest.raises(HegmError, match=r"there was no room for job .* within 0\.05 s: 6 MiB on gpu0") as late:
            await resumes.resume(process.pid, None, _asked(shared, limit_s=0.05))
        assert late.value.code is TIMEOUT
        assert not shared.sharing.memory.suspended
        errors: list[HegmError] = []

        async def resume() -> None:
            with pytest.raises(HegmError, match="has left the queue, and stays suspended") as left:
                await resumes.resume(process.pid, None, _asked(shared))
            errors.append(left.value)

        tasks.start_soon(resume)
        await shared.until(lambda: bool(shared.sharing.memory.suspended))
        await shared.node.moving.operations.suspend([process.pid], _asked(shared))
        await shared.until(lambda: bool(errors))
        assert errors[0].code is CANCELLED
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        assert await shared.states() == {"j1": "suspended"}


async def test_what_cannot_wait_is_refused_and_what_need_not_wait_resumes_at_once(
    tmp_path: Path, process: Child
) -> None:
    async with sharing_on(tmp_path, policy=model.Rules(settle_s=1000.0)) as shared:
        resumes = await _suspended_beside_a_lease(shared, process)
        with pytest.raises(HegmError, match="hegmd chooses the GPU") as refused:
            await resumes.resume(process.pid, "gpu0", _asked(shared))
        assert refused.value.code is BAD_REQUEST
        with pytest.raises(HegmError, match="belongs to") as denied:
            await resumes.resume(process.pid, None, _asked(shared, may=lambda _uid: False))
        assert denied.value.code is DENIED
        assert not shared.sharing.memory.suspended
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        with anyio.fail_after(HANG_S):
            await resumes.resume(process.pid, None, _asked(shared))
        assert await shared.states() == {"j1": "running"}
        with pytest.raises(HegmError, match="is not suspended"):
            await resumes.resume(process.pid, None, _asked(shared))


async def test_a_job_that_lent_its_gpu_waits_in_the_queue_and_a_less_urgent_job_leaves_for_it(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """Its agent asked again every two seconds, and nobody left for it: the training never continued."""
    async with sharing_on(tmp_path) as shared:
        lender = await shared.node.attend(process.pid, BYTES)
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        lending = Lending(moving.operations, shared.node.workers, queue=resumes.enter)
        await lending.lend(process.pid, _asked(shared))
        await shared.node.attend(other.pid, BYTES, token="b" * 32)
        await shared.requests.set_priority(protocol.SetPriority(job="j2", priority=20), ADMIN)
        with pytest.raises(HegmError) as refused:
            await lending.reclaim(process.pid, _asked(shared))
        assert refused.value.code is REFUSED
        await shared.until_states(j1="running", j2="suspended")
        assert (lender.data, lender.parked) == (BYTES, False)
        with pytest.raises(HegmError) as over:  # the agent asks once more, and learns that it has its memory
            await lending.reclaim(process.pid, _asked(shared))
        assert over.value.code is NOT_FOUND
