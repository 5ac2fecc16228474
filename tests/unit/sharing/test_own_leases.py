"""Jobs within a lease, whose memory is theirs, and processes that only seem to be."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hegmd.errors import TIMEOUT, HegmError
from hegmd.protocol import sharing as protocol
from hegmd.protocol.messages import RegisterJob
from hegmd.sharing.resumes import QueuedResumes
from tests.unit.sharing.shared_node import ADMIN, MIB, UID, SharedNode, sharing_on

pytestmark = pytest.mark.thorough

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


def _started_now() -> Child:
    return subprocess.Popen(["sleep", "infinity"])


async def _with_a_lease(shared: SharedNode, process: Child, priority: int | None = None) -> None:
    """A lease for this process, and a job that is its child and has most of that memory."""
    await shared.make_room(7 * MIB, gpu="gpu0", until_free=True, pid=os.getpid(), priority=priority)
    await shared.node.attend(process.pid, BYTES, gpu="gpu0")


async def test_a_job_within_a_lease_is_not_suspended_for_memory_that_the_lease_keeps(
    tmp_path: Path, process: Child
) -> None:
    """The job's own lease kept the memory that it left: no job got it, and the job never returned."""
    async with sharing_on(tmp_path) as shared:
        await _with_a_lease(shared, process, priority=50)
        with pytest.raises(HegmError, match="cannot be freed with priority 80"):
            await shared.make_room(7 * MIB, until_free=True)
        assert await shared.states() == {"j1": "running"}
        assert "suspended" not in shared.events
        granted = await shared.make_room(MIB, until_free=True)
        assert granted.gpu == "gpu0"


@pytest.mark.parametrize("queue", [False, True])
async def test_a_job_returns_into_the_memory_of_its_own_lease(tmp_path: Path, process: Child, *, queue: bool) -> None:
    """It was refused, or waited for as long as the process of its lease waited for it."""
    async with sharing_on(tmp_path) as shared:
        await _with_a_lease(shared, process)
        await shared.node.operations.suspend([process.pid], shared.node.context())
        queued = QueuedResumes(shared.sharing, shared.node.operations, shared.node.moving.job_requests)
        resume = queued.resume if queue else shared.node.operations.resume
        resumed = await resume(process.pid, None, replace(shared.node.context(), limit_s=60.0))
        assert resumed.operation is not None
        assert resumed.operation.phase == "done"
        (lease,) = (await shared.requests.queue(ADMIN)).leases
        assert lease.used_bytes == len(BYTES)


async def test_a_job_starts_in_the_memory_of_its_own_lease_and_no_other_job_does(
    tmp_path: Path, process: Child
) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.make_room(7 * MIB, gpu="gpu0", until_free=True, pid=process.pid)
        register = shared.node.moving.job_requests.register
        await register(os.getpid(), UID, RegisterJob(run="outside", command=("train",)))
        place = protocol.PlaceJob(run="outside", size_bytes=5 * MIB)
        await register(process.pid, UID, RegisterJob(run="inside", command=("train",)))
        placed = await shared.requests.place(place.replace(run="inside"), ADMIN, shared.emit)
        assert placed.gpu == "gpu0"
        assert (await shared.states())["j2"] == "starting"
        with pytest.raises(HegmError) as late:
            await shared.make_room(2 * MIB, gpu="gpu0", until_free=True, limit_s=0.1)
        assert late.value.code is TIMEOUT


async def test_a_rank_of_a_placed_job_does_not_use_up_a_lease_on_its_gpu(tmp_path: Path, process: Child) -> None:
    """Its launcher was left out, and its ranks counted: the memory of the lease was given away."""
    async with sharing_on(tmp_path, "1x16MiB") as shared:
        await shared.make_room(6 * MIB, gpu="gpu0", until_free=True)
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="r", command=("torchrun",)))
        await shared.requests.place(protocol.PlaceJob(run="r", size_bytes=5 * MIB), ADMIN, shared.emit)
        with _started_now() as rank:
            await shared.node.attend(rank.pid, b"1" * (5 * MIB), gpu="gpu0", run="r", rank=0, world_size=1)
            (lease,) = (await shared.requests.queue(ADMIN)).leases
            rank.kill()
        assert lease.used_bytes == 0


async def test_a_job_that_is_older_than_a_lease_of_its_shell_does_not_use_the_lease(
    tmp_path: Path, process: Child
) -> None:
    """Its memory counted as the lease's. A job that was suspended for the lease could also return into that memory."""
    async with sharing_on(tmp_path, "1x16MiB") as shared:
        await shared.node.attend(process.pid, BYTES, gpu="gpu0")
        await shared.make_room(7 * MIB, gpu="gpu0", until_free=True, pid=os.getpid())
        (lease,) = (await shared.requests.queue(ADMIN)).leases
        assert lease.used_bytes == 0
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
        await shared.make_room(12 * MIB, gpu="gpu0", until_free=True, pid=os.getpid())
        await shared.until_states(j1="suspended")
        with pytest.raises(HegmError, match="kept for leases"):
            await shared.node.operations.resume(process.pid, None, shared.node.context())
        assert await shared.states() == {"j1": "suspended"}
