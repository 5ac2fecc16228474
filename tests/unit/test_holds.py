"""Jobs that are held at a boundary: their requests, their next operations, and the effect of a daemon's end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import pytest

from hegmd.errors import BAD_REQUEST, BUSY, NOT_FOUND, REFUSED, HegmError
from hegmd.operations.request_context import OperationResult
from hegmd.system.programs import Rights
from tests.patience import HANG_S
from tests.unit.migration.operations import operation, worker
from tests.unit.moving_node import Node, running, start_ticks

Child = subprocess.Popen[bytes]


def phase(answer: OperationResult) -> tuple[str, str]:
    assert answer.operation is not None
    return answer.operation.kind, answer.operation.phase


async def test_quiesce_is_answered_when_the_job_is_parked_and_resume_continues_it(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        held = await node.operations.quiesce([process.pid], 900.0, node.context())
        assert phase(held) == ("quiesce", "holding")
        assert held.operation is not None
        assert held.operation.waits is not None
        assert held.operation.waits.next == f"hegmctl resume {process.pid}"
        assert (agent.parked, agent.is_suspended, agent.data) == (True, False, b"weights")
        over = await node.operations.resume(process.pid, None, node.context())
        assert phase(over) == ("quiesce", "done")
        assert not agent.parked


async def test_a_quiesced_job_resumes_at_its_time_limit(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        held = await node.operations.quiesce([process.pid], 0.01, node.context())
        assert held.operation is not None
        with anyio.fail_after(HANG_S):
            async with node.events.subscribe(1, ("operation.done",)) as subscription:
                async for _ in subscription:
                    break
        assert node.operations.runner.describe(held.operation.id).phase == "done"
        assert not agent.parked


@pytest.mark.thorough
async def test_a_held_job_is_offloaded_under_the_same_operation(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        held = await node.operations.quiesce([process.pid], 900.0, node.context())
        boundary = agent.boundary
        off = await node.operations.suspend([process.pid], node.context())
        assert phase(off) == ("suspend", "suspended")
        assert held.operation is not None
        assert off.operation is not None
        assert off.operation.id == held.operation.id
        assert (agent.data, agent.boundary) == (None, boundary)
        await node.operations.resume(process.pid, "gpu1", node.context())
        assert agent.data == b"weights"


async def test_a_held_job_is_not_held_again_and_only_resumes_in_place(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await node.operations.quiesce([process.pid], 900.0, node.context())
        with pytest.raises(HegmError, match=r"quiesce, holding\) already includes process") as refused:
            await node.operations.quiesce([process.pid], 900.0, node.context())
        assert refused.value.code is BUSY
        with pytest.raises(HegmError, match="can only resume there") as elsewhere:
            await node.operations.resume(process.pid, "gpu1", node.context())
        assert elsewhere.value.code is REFUSED
        # The hint was to adopt the job, which is refused: it is no orphan.
        assert elsewhere.value.hint == f"run: hegmctl migrate {process.pid} --to gpu1"
        with pytest.raises(HegmError, match=r"quiesce, holding\) already includes process") as adopted:
            await node.operations.adopt(process.pid, None, node.context())
        assert adopted.value.hint == f"run: hegmctl resume {process.pid}"
        moved = await node.operations.migrate([process.pid], "gpu1", node.context())
        assert phase(moved) == ("migrate", "done")


async def test_a_hold_continues_under_the_next_daemon_and_ends_on_time(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        held = await node.operations.quiesce([process.pid], 900.0, node.context())
        assert held.operation is not None
    async with running(tmp_path) as after:
        agent.workers = after.workers
        await agent.attend(after.tasks)
        described = await after.at_rest(held.operation.id)
        assert described.phase == "holding"
        await after.operations.resume(process.pid, None, after.context())
        assert not agent.parked


@pytest.mark.parametrize("hold_s", [0.0, -1.0, float("nan"), 1e300])
async def test_an_invalid_time_is_refused(tmp_path: Path, process: Child, hold_s: float) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        with pytest.raises(HegmError, match="is not a valid limit for the time parked there") as refused:
            await node.operations.quiesce([process.pid], hold_s, node.context())
        assert refused.value.code is BAD_REQUEST


async def test_only_a_suspended_job_is_handed_off(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await _refused(node, process.pid, NOT_FOUND.name, "no operation includes it")
        await node.operations.quiesce([process.pid], 900.0, node.context())
        await _refused(node, process.pid, REFUSED.name, "which is holding")


@pytest.mark.thorough
async def test_a_suspended_process_without_an_agent_is_in_no_image(tmp_path: Path, process: Child) -> None:
    """Its bytes are in its own memory; no agent could disconnect it or connect it again."""
    async with running(tmp_path) as node:
        ticks = start_ticks(process.pid)
        member = worker(pid=process.pid, start_ticks=ticks, token="", gpu=None, to=None, reservations={})
        await node.operations.runner.begin(operation(member, kind="suspend", phase="suspended", id="7"))
        wanted = (process.pid, str(tmp_path / "image"), Rights(os.geteuid(), os.getegid(), ()), node.context())
        with pytest.raises(HegmError, match=f"process {process.pid} has no agent, but an image needs one") as refused:
            await node.moving.checkpoints.handoff(*wanted)
        assert "hegmctl run" in refused.value.hint or "\n" in refused.value.message
        assert node.operations.runner.describe("7").phase == "suspended"


async def _refused(node: Node, pid: int, code: str, says: str) -> None:
    with pytest.raises(HegmError, match=says) as refused:
        await node.moving.checkpoints.handoff(pid, "/images/one", Rights(0, 0, ()), node.context())
    assert (refused.value.code.name, f"hegmctl offload {pid}" in refused.value.hint) == (code, True)
