"""Processes that the driver has checkpointed and no operation owns, over the stub: whose they are, and whether the pid
is still the same process.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hegmd.errors import DENIED, NOT_FOUND, HegmError, Refused
from hegmd.gpu_helper.link import Link, child_environment
from hegmd.migration.methods.other_processes import OtherProcesses
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.operations.driver_orphans import DriverOrphans
from hegmd.operations.operations import Operations
from hegmd.operations.orphaned_memory import OrphanedMemory, VideoOrphans
from hegmd.operations.orphans import ParkedOrphans
from hegmd.operations.survey import PlanSurvey
from tests.contract.helped import Owner, ask, linked
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode
from tests.unit.moving_node import Node, running, start_ticks

LONG_S = HANG_S


@pytest.fixture
def node(tmp_path: Path) -> CudaNode:
    return CudaNode.make(tmp_path / "node")


@pytest.fixture
def owner(node: CudaNode) -> Iterator[Owner]:
    made = Owner(node, 0, 1)
    yield made
    made.close()


@asynccontextmanager
async def looking(cuda: CudaNode, node: Node, folder: Path, *taken: int) -> AsyncIterator[DriverOrphans]:
    """Orphans of the driver on that stub, beside the parts of a simulated daemon."""
    link = Link(environment={**child_environment({}), **cuda.environment()})
    other_processes = OtherProcesses(link, folder, start_ticks=start_ticks, is_stopped=is_stopped)
    orphans = DriverOrphans(link, other_processes, node.inventory.refresh, is_taken=lambda pid: pid in taken)
    async with anyio.create_task_group() as tasks:
        await tasks.start(orphans.run)
        yield orphans
        tasks.cancel_scope.cancel()


async def off(cuda: CudaNode, owner: Owner) -> None:
    """Checkpoint it from a process that then exits."""
    async with linked(cuda) as link:
        await ask(link, "lock", pid=owner.pid, timeout_s=1)
        await ask(link, "checkpoint", pid=owner.pid)


@pytest.mark.thorough
async def test_a_checkpointed_process_is_its_owners_alone_to_adopt(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    """It is listed nowhere, so the kernel has to name its owner: once any user could have restored it."""
    await off(node, owner)
    async with running(tmp_path / "state") as daemon, looking(node, daemon, tmp_path) as orphans:
        moving, parked_orphans = daemon.moving, ParkedOrphans(daemon.workers, lambda _: False, orphans)
        lookout = PlanSurvey(
            daemon.inventory,
            daemon.workers,
            moving.suspended_operations.pool_memory,
            count=moving.attendance.count,
            running=tuple,
            supervisors=moving.supervisors,
        )
        in_video = VideoOrphans(moving.memory, lambda _: False, str, str, daemon.workers)
        operations = Operations(
            daemon.inventory,
            daemon.workers,
            lookout,
            moving.runner,
            found=OrphanedMemory(moving.pool, moving.memory, in_video),
            suspended=moving.suspended_operations,
            parked_orphans=parked_orphans,
        )
        with pytest.raises(HegmError) as refused:
            await operations.adopt(owner.pid, None, daemon.context(may=False))
        assert refused.value.code is DENIED
        assert refused.value.facts["uid"] == os.geteuid()
        assert moving.runner.operations() == ()


@pytest.mark.thorough
async def test_an_exited_process_is_no_longer_an_orphan_and_its_pid_is_free(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    await off(node, owner)
    async with running(tmp_path / "state") as daemon, looking(node, daemon, tmp_path) as orphans:
        await orphans.search(thorough=True, within_s=LONG_S)
        assert owner.pid in [orphan.pid for orphan in orphans.orphans()]
        with pytest.raises(Refused, match="is a process, not saved bytes"):
            await orphans.drop(str(owner.pid))
        owner.close()
        assert owner.pid not in [orphan.pid for orphan in orphans.orphans()]
        with pytest.raises(HegmError) as refused:
            await orphans.inspect(owner.pid)
        assert refused.value.code is NOT_FOUND


@pytest.mark.thorough
async def test_a_process_in_the_drivers_failed_state_is_reported_and_not_adopted(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    """Adopting it would hold room for it, and wait, for nothing."""
    await off(node, owner)
    node.order(f"fail step:state@{owner.pid}")
    async with running(tmp_path / "state") as daemon, looking(node, daemon, tmp_path) as orphans:
        await orphans.search(thorough=True, within_s=LONG_S)
        (orphan,) = [orphan for orphan in orphans.orphans() if orphan.pid == owner.pid]
        assert "failed permanently" in orphan.why
        assert orphan.where == "lost"
        assert orphan.next == f"kill it and start it again: kill {owner.pid}"
        assert orphan.size_bytes is None, "nobody gets it back"
        with pytest.raises(Refused, match=f"process {owner.pid} has failed permanently") as refused:
            await orphans.inspect(owner.pid)
        assert f"kill {owner.pid}" in refused.value.hint


@pytest.mark.thorough
async def test_a_process_of_an_operation_is_no_orphan(node: CudaNode, owner: Owner, tmp_path: Path) -> None:
    await off(node, owner)
    async with running(tmp_path / "state") as daemon, looking(node, daemon, tmp_path, owner.pid) as orphans:
        await orphans.search(thorough=True, within_s=LONG_S)
        assert owner.pid not in [orphan.pid for orphan in orphans.orphans()]
    assert owner.pid not in {call.subject for call in node.calls("cuCheckpointProcessGetState")}


@pytest.mark.thorough
async def test_a_briefly_paused_process_is_no_orphan(node: CudaNode, owner: Owner, tmp_path: Path) -> None:
    async with running(tmp_path / "state") as daemon, linked(node) as link:
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=is_stopped)
        orphans = DriverOrphans(link, other_processes, daemon.inventory.refresh, is_taken=lambda _: False)
        ticks = start_ticks(owner.pid)
        assert ticks is not None
        async with anyio.create_task_group() as tasks, other_processes.paused([(owner.pid, ticks)]):
            tasks.start_soon(orphans.inspect, owner.pid)
            await anyio.wait_all_tasks_blocked()
            assert (await ask(link, "state", pid=owner.pid))["state"] == "locked"
            tasks.cancel_scope.cancel()
        assert (await ask(link, "state", pid=owner.pid))["state"] == "running"


async def test_without_a_cuda_process_no_helper_is_started_to_search(node: CudaNode, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    async with running(tmp_path / "state") as daemon, linked(node) as link:
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=is_stopped)
        own = Link(environment={**child_environment({}), **node.environment()})
        orphans = DriverOrphans(
            own, other_processes, daemon.inventory.refresh, is_taken=lambda _: False, proc_root=str(tmp_path / "proc")
        )
        async with anyio.create_task_group() as tasks:
            await tasks.start(orphans.run)
            await orphans.search(thorough=True, within_s=LONG_S)
            tasks.cancel_scope.cancel()
        assert list(orphans.orphans()) == []
    assert not node.calls("cuInit")
