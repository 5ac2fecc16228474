"""Suspended jobs: kept suspended, spilled to disk on request, and never with their bytes in no place.

Longer than 400 lines because the preparation of a resume is tested against the same moments.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from hegmd.errors import REFUSED, HegmError, Refused
from hegmd.memory.pool import Key, MemoryKeeping
from hegmd.memory.ready_memory import ReadyMemory
from hegmd.migration.machine.communicators import MAX_RECONNECTS
from hegmd.operations.suspended import ALWAYS, FULL, SuspendedOperations
from hegmd.telemetry.events import EventLog
from hegmd.workers.workers import Workers
from tests.patience import HANG_S
from tests.unit.moving_node import MIB, Node, running

Child = subprocess.Popen[bytes]


class TellingReadyMemory(ReadyMemory):
    """Sets `full` when there is nothing more to make ready."""

    full = anyio.Event()

    def __init__(self, wanted_bytes: int, *, step_bytes: int) -> None:
        super().__init__(wanted_bytes, step_bytes=step_bytes)
        type(self).full = anyio.Event()

    async def adjust(self, limit_bytes: int, keep: MemoryKeeping, *, may_grow: bool) -> bool:
        more = await super().adjust(limit_bytes, keep, may_grow=may_grow)
        if self.size_bytes == self.wanted_bytes:
            self.full.set()
        return more


def spilled_files(state_dir: Path) -> list[str]:
    folder = state_dir / "spill"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


async def until(node: Node, kind: str, count: int = 1) -> None:
    """Wait until so many events of that kind were recorded."""
    with anyio.fail_after(HANG_S):
        async with node.events.subscribe(1, (kind,)) as subscription:
            observed = 0
            async for _ in subscription:
                observed += 1
                if observed == count:
                    return


@pytest.mark.thorough
async def test_a_suspended_job_stays_parked_however_long_no_daemon_runs(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
        await anyio.wait_all_tasks_blocked()
        assert (agent.is_suspended, agent.entrusted) == (True, False)
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"


@pytest.mark.thorough
async def test_a_suspend_takes_memory_that_was_ready_and_the_next_daemon_finds_the_rest(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path, ready=TellingReadyMemory(12 * MIB, step_bytes=4 * MIB)) as node:
        agent = await node.attend(process.pid)
        ready = node.moving.pool.ready
        await TellingReadyMemory.full.wait()
        assert ready.size_bytes == 12 * MIB
        planned = await node.operations.suspend([process.pid], node.context(dry_run=True))
        assert planned.plan is not None
        assert planned.plan.pool_ready_bytes == 12 * MIB
        inode = os.fstat(ready.segments[0].memory.fd).st_ino
        answer = await node.operations.suspend([process.pid], node.context())
        assert answer.operation is not None
        memory = node.moving.pool.memory(Key(answer.operation.id, str(process.pid)))
        assert os.fstat(memory.fd).st_ino == inode
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"
    async with running(tmp_path, ready=TellingReadyMemory(12 * MIB, step_bytes=4 * MIB)) as node:
        await TellingReadyMemory.full.wait()
        assert (node.moving.pool.ready.size_bytes, node.moving.pool.unclaimed()) == (12 * MIB, {})


@pytest.mark.thorough
async def test_a_spilled_job_takes_no_memory_and_resumes_with_its_bytes(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        answer = await node.operations.suspend([process.pid], node.context(), spill=True)
        assert answer.operation is not None
        assert answer.operation.phase == "suspended"
        assert agent.entrusted
        assert node.moving.pool.held_bytes == 0
        assert len(spilled_files(tmp_path)) == 1
        assert not (tmp_path / "memory").exists()
        await node.operations.resume(process.pid, "gpu1", node.context())
        assert (agent.data, agent.parked) == (b"weights", False)
        assert spilled_files(tmp_path) == []
        assert node.moving.pool.spilled_bytes == 0


@pytest.mark.thorough
async def test_a_suspended_job_is_spilled_on_request(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
        await anyio.wait_all_tasks_blocked()
        assert node.moving.pool.held_bytes
        await node.operations.suspend([process.pid], node.context(), spill=True)
        assert node.moving.pool.held_bytes == 0
        assert agent.orders[-2:] == ["rest", "entrust"]
        assert "spilling" in node.phases


@pytest.mark.thorough
async def test_held_bytes_are_dropped_by_no_other_user_and_for_no_living_process(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        answer = await node.operations.suspend([process.pid], node.context())
        assert answer.operation is not None
        for may, why in ((False, "belongs to uid"), (True, "is running and owns its saved state")):
            with pytest.raises(HegmError, match=why):
                await node.operations.drop(answer.operation.id, node.context(may=may))
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"


async def test_ranks_that_cannot_connect_again_are_ended_by_their_owner_and_free_their_memory(
    tmp_path: Path, process: Child
) -> None:
    """A job whose launcher had ended kept its bytes, and no command freed them."""
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        answer = await node.operations.suspend([process.pid], node.context())
        assert answer.operation is not None
        op_id, runner = answer.operation.id, node.moving.runner
        operation = runner.history(op_id).operation.replace(failed_reconnects=MAX_RECONNECTS)
        failed = runner.history(op_id)._replace(operation=operation)
        runner._running[op_id].history = runner._ledger._histories[op_id] = failed
        with pytest.raises(HegmError, match="belongs to uid"):
            await node.operations.drop(op_id, node.context(may=False))
        assert process.poll() is None
        dropped = await node.operations.drop(op_id, node.context())
        assert (dropped.phase, node.moving.pool.held_bytes) == ("lost", 0)
        assert process.wait() == -signal.SIGKILL


async def test_a_full_disk_leaves_it_suspended_with_its_bytes_in_memory(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path, spare_bytes=1 << 60) as node:
        agent = await node.attend(process.pid)
        with pytest.raises(HegmError, match=r"is suspended, and its bytes stay in memory.*MiB free") as refused:
            await node.operations.suspend([process.pid], node.context(), spill=True)
        assert refused.value.code is REFUSED
        assert "pool.spill_dir" in refused.value.hint
        assert not agent.entrusted
        assert node.moving.pool.held_bytes
        assert node.events.counts["pool.spill-failed"] == 1
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"


@pytest.mark.thorough
async def test_an_agent_that_keeps_its_descriptor_keeps_the_memory_and_is_reported(
    tmp_path: Path, process: Child
) -> None:
    """An agent of an older release does not know the order: its memory would not become free."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.refuses = {"rest": "there is no order 'rest'", "entrust": "there is no order 'entrust'"}
        with pytest.raises(HegmError, match="also keeps its bytes in memory"):
            await node.operations.suspend([process.pid], node.context(), spill=True)
        assert node.moving.pool.held_bytes
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"
        assert spilled_files(tmp_path) == []


@pytest.mark.thorough
async def test_the_next_daemon_notifies_the_agent_if_the_first_was_killed_before(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.slow.add("entrust")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: node.operations.suspend([process.pid], node.context(wait=False), spill=True))
            await agent.waiting.wait()
            tasks.cancel_scope.cancel()
        assert node.moving.pool.held_bytes, "given back while the agent still had a descriptor"
        assert len(spilled_files(tmp_path)) == 1
    agent.slow.clear()
    async with running(tmp_path) as node:
        agent.workers = node.workers
        await agent.attend(node.tasks)
        await until(node, "pool.spilled")
        assert (node.moving.pool.held_bytes, agent.entrusted) == (0, True)
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"
        assert spilled_files(tmp_path) == []


@pytest.mark.thorough
async def test_a_later_daemon_resumes_a_job_that_an_earlier_one_wrote_to_disk(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context(), spill=True)
    async with running(tmp_path) as node:
        agent.workers = node.workers
        await agent.attend(node.tasks)
        assert (await node.at_rest("1")).phase == "suspended"
        await node.operations.resume(process.pid, None, node.context())
        assert (agent.data, spilled_files(tmp_path)) == (b"weights", [])


@pytest.mark.thorough
async def test_a_damaged_file_keeps_the_job_suspended_and_is_reported(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context(), spill=True)
        (path,) = (tmp_path / "spill").iterdir()
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"!")
        answer = await node.operations.resume(process.pid, None, node.context())
        assert answer.operation is not None
        assert answer.operation.phase == "suspended"
        assert answer.operation.failure is not None
        assert "does not match its checksum" in answer.operation.failure.message
        assert path.exists()
        assert agent.data is None
        with path.open("r+b") as file:  # put right again, as from a copy
            file.seek(5000)
            file.write(b"\0")
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"


@pytest.mark.thorough
async def test_a_resume_while_it_is_spilled_waits_for_nothing_and_leaves_no_file(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid, b"w" * (20 * MIB))
        await node.operations.suspend([process.pid], node.context(wait=False), spill=True)
        await node.at_rest("1")
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"w" * (20 * MIB)
        assert spilled_files(tmp_path) == []
        assert node.moving.pool.held_bytes == 0


async def test_always_needs_no_asking(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path, spill=ALWAYS) as node:
        await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
        await until(node, "pool.spilled")
        assert node.moving.pool.held_for(Key("1", str(process.pid))) == 7
        assert node.moving.pool.held_bytes == 0


@pytest.mark.thorough
async def test_a_full_budget_spills_the_oldest_suspended_job_to_disk(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path, spill=FULL) as node:
        one = await node.attend(process.pid, b"1" * (40 * MIB))
        two = await node.attend(second_process.pid, b"2" * (40 * MIB), token="b" * 32)
        await node.operations.suspend([process.pid], node.context())
        assert spilled_files(tmp_path) == []
        answer = await node.operations.suspend([second_process.pid], node.context())
        assert answer.operation is not None
        assert answer.operation.phase == "suspended", answer.operation.failure
        assert (one.entrusted, two.entrusted) == (True, False)
        await node.operations.resume(second_process.pid, None, node.context())
        await node.operations.resume(process.pid, None, node.context())
        assert (one.data, two.data) == (b"1" * (40 * MIB), b"2" * (40 * MIB))
        assert spilled_files(tmp_path) == []


async def test_a_worker_that_dies_takes_its_file_with_it(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context(), spill=True)
        process.kill()
        await until(node, "operation.lost")
        assert spilled_files(tmp_path) == []


async def test_a_state_that_must_not_be_dropped_was_not_spilled(tmp_path: Path, process: Child) -> None:
    """The client that had requested the spill got a success message."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.slow.add("entrust")
        entrusted: list[bool] = []

        async def suspend() -> None:
            await node.operations.suspend([process.pid], node.context(), spill=True)
            entrusted.append(agent.entrusted)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(suspend)
            await agent.waiting.wait()
            (op,) = node.operations.runner.operations()
            with pytest.raises(Refused, match="is running and owns its saved state"):
                await node.operations.drop(op.id, node.context())
            await anyio.wait_all_tasks_blocked()
            agent.go_on.set()
        assert entrusted == [True]


class Preparations:
    """Replaces pool, runner and executor of one suspended operation. Each call waits until the test ends it."""

    def __init__(self, *, spill: bool = False) -> None:
        self.member = SimpleNamespace(name="1", offloaded=True)
        self.op = SimpleNamespace(id="op1", phase="suspended", live=(self.member,), spill=spill)
        self.ops: list[Any] = [self.op]
        self.done: list[str] = []
        self.compared, self.opened = anyio.Event(), anyio.Event()

    def by_owner(self) -> dict[Key, Any]:
        return {Key("op1", "1"): SimpleNamespace(memory=object())}

    def under_way(self) -> tuple[Any, ...]:
        return tuple(self.ops)

    def find(self, op_id: str) -> Any:
        return next((op for op in self.ops if op.id == op_id), None)

    async def compare_ahead(self, _key: Key) -> None:
        self.done.append("compare")
        await self.compared.wait()

    async def prepare_ahead(self, _op: object, _member: object) -> None:
        self.done.append("open")
        await self.opened.wait()

    async def undo_preparation(self, _op: object, _member: object) -> None:
        self.done.append("close")

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[SuspendedOperations]:
        """A preparation of that operation, as far as it comes."""
        its: Any = self
        suspended = SuspendedOperations(cast("Workers", ()), its, its, its, EventLog())
        async with anyio.create_task_group() as tasks:
            self.ops, ops = [], self.ops  # nothing is spilled at the start
            await tasks.start(suspended.run)
            self.ops = ops
            suspended.prepare_soon("op1")
            await anyio.wait_all_tasks_blocked()
            yield suspended
            tasks.cancel_scope.cancel()


async def test_a_resume_ends_the_comparison_and_opens_no_second_session() -> None:
    """The preparation continued beside the resume, and could open a session that nothing closed."""
    node = Preparations()
    async with node.preparing() as suspended:
        assert node.done == ["compare"]
        with anyio.fail_after(HANG_S):
            await suspended.stop_spilling("op1")
        node.compared.set()
        await anyio.wait_all_tasks_blocked()
    assert node.done == ["compare"]


async def test_a_resume_waits_for_a_session_that_is_being_opened() -> None:
    node = Preparations()
    node.compared.set()

    async def resume() -> None:
        await suspended.stop_spilling("op1")
        node.done.append("resume")

    async with node.preparing() as suspended, anyio.create_task_group() as tasks:
        tasks.start_soon(resume)
        await anyio.wait_all_tasks_blocked()
        assert node.done == ["compare", "open"], "the session is not there yet"
        node.opened.set()
    assert node.done == ["compare", "open", "resume"]


async def test_a_job_that_ended_while_it_was_prepared_kept_its_copy_session() -> None:
    node = Preparations()
    node.compared.set()
    async with node.preparing():
        node.ops.clear()
        node.opened.set()
        await anyio.wait_all_tasks_blocked()
    assert node.done == ["compare", "open", "close"]


async def test_a_turn_that_goes_to_another_job_closes_the_copy_session_that_was_opened_for_it() -> None:
    """It stayed open, with a context on the GPU, until the job resumed."""
    node = Preparations()
    node.compared.set()
    node.opened.set()
    async with node.preparing() as suspended:
        suspended.keep_prepared({"op1"})
        await anyio.wait_all_tasks_blocked()
        assert node.done == ["compare", "open"]
        suspended.keep_prepared(())
        with anyio.fail_after(HANG_S):
            await suspended.stop_spilling("op1")
        assert node.done == ["compare", "open", "close"], "a resume waits for its end"
        suspended.keep_prepared(())
        await anyio.wait_all_tasks_blocked()
    assert node.done == ["compare", "open", "close"]


@pytest.mark.parametrize("moment", ["compare", "open"])
async def test_a_turn_that_goes_to_another_job_during_the_preparation_leaves_no_copy_session(moment: str) -> None:
    """The session was opened afterwards, and stayed open: the daemon does not look at the node again once no job
    waits.
    """
    node = Preparations()
    if moment == "open":
        node.compared.set()
    async with node.preparing() as suspended:
        assert node.done[-1] == moment
        suspended.keep_prepared(())
        node.compared.set()
        node.opened.set()
        await anyio.wait_all_tasks_blocked()
        assert node.done == (["compare"] if moment == "compare" else ["compare", "open", "close"])
        suspended.prepare_soon("op1")
        await anyio.wait_all_tasks_blocked()
        assert node.done[-2:] == ["compare", "open"]


async def test_bytes_that_go_to_disk_are_not_prepared() -> None:
    """The helper had their memory mapped, which the node then did not get back."""
    node = Preparations(spill=True)
    async with node.preparing() as suspended:
        assert not suspended._preparing
    assert node.done == []
