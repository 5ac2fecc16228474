"""Operations carried out: real runner, journal, pool, rooms and inventory over model agents in processes that live."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import anyio
import pytest

from hegmd.errors import BUSY, CANCELLED, DENIED, NOT_FOUND, REFUSED, HegmError, Refused
from hegmd.images.manifests import unrevived
from hegmd.migration.journal import records
from hegmd.migration.journal.disk import Disk
from hegmd.migration.journal.file import JournalFile
from hegmd.migration.machine.operation import Failure, Operation
from hegmd.protocol.images import ImageWorker, Manifest
from tests.patience import HANG_S
from tests.unit.moving_node import running, start_ticks

MIB = 1 << 20

Child = subprocess.Popen[bytes]


class StalledDisk(Disk):
    """The real one, which holds up all records with that in them that are written once the journal is open."""

    def __init__(self, held: bytes = b"") -> None:
        self._held = held
        self._is_open = False
        self._reached, self._goes = threading.Event(), threading.Event()

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._is_open = True

    def write(self, fd: int, data: bytes) -> int:
        if self._is_open and self._held in data:
            self._reached.set()
            self._goes.wait()
        return super().write(fd, data)

    def wait_for_a_record(self) -> None:
        assert self._reached.wait(HANG_S)

    def go_on(self) -> None:
        self._goes.set()


async def test_a_migration_moves_reservation_and_bytes_and_releases_everything(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        assert node.reservations(process.pid) == {"gpu0": 7}
        answer = await node.operations.migrate([process.pid], "gpu1", node.context())
        assert answer.operation is not None
        assert (answer.operation.phase, answer.operation.failure) == ("done", None)
        assert answer.operation.downtime_s is not None
        assert agent.data == b"weights"
        assert not agent.parked
        assert node.reservations(process.pid) == {"gpu1": 7}
        assert node.moving.pool.held_bytes == 0
        assert {"quiescing", "offloading", "reloading"} <= set(node.phases)
        assert agent.orders[1:] == ["survey", "park", "survey", "offload", "reload", "release"]


@pytest.mark.thorough
async def test_a_suspended_job_holds_no_gpu_memory_and_resumes_on_the_named_gpu(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        suspended = await node.operations.suspend([process.pid], node.context())
        assert suspended.operation is not None
        assert suspended.operation.phase == "suspended"
        assert agent.data is None
        assert node.reservations(process.pid) == {}
        (shown,) = (await node.inventory.fresh(0)).processes
        assert (shown.pid, shown.gpus, shown.held_bytes) == (process.pid, (), 7)
        resumed = await node.operations.resume(process.pid, "gpu1", node.context())
        assert resumed.operation is not None
        assert resumed.operation.phase == "done"
        assert agent.data == b"weights"
        assert node.reservations(process.pid) == {"gpu1": 7}
        assert node.moving.pool.held_bytes == 0


async def test_a_dry_run_does_nothing(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        before = list(agent.orders)
        answer = await node.operations.migrate([process.pid], "gpu1", node.context(dry_run=True))
        assert answer.operation is None
        assert answer.plan is not None
        assert answer.plan.size_bytes == 7
        assert agent.orders == [*before, "survey"]
        assert node.operations.runner.operations() == ()


@pytest.mark.thorough
async def test_a_process_that_became_another_program_was_waited_for_without_end(tmp_path: Path, process: Child) -> None:
    """The process has another agent now; the agent that holds the bytes never connects to the next daemon."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
    async with running(tmp_path) as node:
        agent.workers, agent.token, agent.data = node.workers, "b" * 32, b"anew"
        await agent.attend(node.tasks)
        lost = await node.at_rest("1")
        assert lost.phase == "lost"
        assert lost.failure is not None
        assert "it runs another program" in lost.failure.message
        assert lost.processes[0].state == "lost"


@pytest.mark.thorough
async def test_an_order_was_sent_to_an_agent_that_had_reconnected_and_resumed(tmp_path: Path, process: Child) -> None:
    """An effect decided on one connection was sent over the next one, before the daemon had read the agent's state."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        worker = node.workers.find(process.pid)
        assert worker is not None
        agent.slow.add("survey")
        await worker.give("survey")  # the next order waits for it
        begun = await node.operations.migrate([process.pid], "gpu1", node.context(wait=False))
        assert begun.operation is not None
        with anyio.fail_after(HANG_S):
            while node.operations.runner.describe(begun.operation.id).phase != "quiescing":
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        agent.orders.clear()
        agent.slow.clear()
        await agent.attend(node.tasks)
        assert (await node.at_rest(begun.operation.id)).phase == "done"
        assert agent.orders[0] == "survey", "it was not asked how it stands"
        agent.go_on.set()


async def test_a_refused_offload_leaves_the_job_running_where_it_was(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.refuses["offload"] = "a storage is in use"
        answer = await node.operations.migrate([process.pid], "gpu1", node.context())
        assert answer.operation is not None
        assert answer.operation.phase == "rolled-back"
        assert answer.operation.failure is not None
        assert "a storage is in use" in answer.operation.failure.message
        assert (agent.data, agent.parked) == (b"weights", False)
        assert node.reservations(process.pid) == {"gpu0": 7}
        assert node.moving.pool.held_bytes == 0


async def test_the_second_operation_on_a_process_is_refused_by_the_name_of_the_first(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.slow.add("park")
        first = await node.operations.migrate([process.pid], "gpu1", node.context(wait=False))
        assert first.operation is not None
        with pytest.raises(HegmError, match=f"operation {first.operation.id}") as refused:
            await node.operations.suspend([process.pid], node.context())
        assert refused.value.code is BUSY
        agent.go_on.set()
        assert (await node.at_rest(first.operation.id)).phase == "done"


async def test_a_cancelled_wait_for_a_boundary_is_withdrawn_without_a_trace(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.slow.add("park")
        begun = await node.operations.migrate([process.pid], "gpu1", node.context(wait=False))
        assert begun.operation is not None
        await agent.waiting.wait()
        await node.operations.cancel(begun.operation.id, node.context())
        ended = await node.at_rest(begun.operation.id)
        assert ended.phase == "rolled-back"
        assert ended.failure is not None
        assert ended.failure.code == CANCELLED.name
        assert node.reservations(process.pid) == {"gpu0": 7}
        assert node.moving.pool.held_bytes == 0
        with pytest.raises(Refused, match="it has ended"):
            await node.operations.cancel(begun.operation.id, node.context())
        agent.go_on.set()


@pytest.mark.thorough
async def test_a_process_that_dies_while_its_bytes_are_out_is_lost_and_its_bytes_are_freed(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
        assert node.moving.pool.held_bytes > 0
        process.kill()
        with anyio.fail_after(HANG_S):
            while node.operations.runner.describe("1").phase == "suspended":
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        assert (await node.at_rest("1")).phase == "lost"
        assert node.moving.pool.held_bytes == 0


async def test_a_user_without_permission_is_denied_before_anything_is_requested(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        before = list(agent.orders)
        with pytest.raises(HegmError) as denied:
            await node.operations.migrate([process.pid], "gpu1", node.context(may=False))
        assert denied.value.code is DENIED
        assert agent.orders == before


@pytest.mark.parametrize(
    ("pid", "to", "code"), [(None, "gpu7", NOT_FOUND), (None, "gpu0", REFUSED), (1, "gpu1", NOT_FOUND)]
)
async def test_bad_requests_name_their_reason(
    tmp_path: Path, process: Child, pid: int | None, to: str, code: object
) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        with pytest.raises(HegmError) as refused:
            await node.operations.migrate([pid or process.pid], to, node.context())
        assert refused.value.code is code
        assert refused.value.facts["reasons"]


@pytest.mark.thorough
async def test_a_job_suspended_by_a_killed_daemon_is_resumed_by_the_next(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
    async with running(tmp_path) as node:
        assert node.operations.runner.describe("1").phase in {"suspended", "settling"}
        agent.workers = node.workers
        await agent.attend(node.tasks)
        assert (await node.at_rest("1")).phase == "suspended"
        assert agent.data is None
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == b"weights"
        assert node.reservations(process.pid) == {"gpu0": 7}
        assert not (tmp_path / "memory").exists(), "its bytes were not given back"


async def test_a_suspended_job_is_reported_suspended_only_once_the_journal_has_it(
    tmp_path: Path, process: Child
) -> None:
    """The event had left the inbox and was not in the journal yet: a follower got the state from before."""
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
    disk = StalledDisk()
    async with running(tmp_path, disk=disk) as node:
        try:
            await anyio.to_thread.run_sync(disk.wait_for_a_record)
            assert node.operations.runner.describe("1").phase == "suspended"
            said_at_rest = False
            with anyio.CancelScope(deadline=-1):  # one check, without waiting
                await node.operations.follow("1", node.emit)
                said_at_rest = True
            assert not said_at_rest
        finally:
            disk.go_on()


async def test_a_process_that_ended_while_its_operation_did_was_listed_on_its_gpu_for_ever(
    tmp_path: Path, process: Child
) -> None:
    """The operation still had the process, kept its reservation, and did not get the event of its exit."""
    disk = StalledDisk(b"done")
    async with running(tmp_path, disk=disk) as node:
        await node.attend(process.pid)
        who = (process.pid, start_ticks(process.pid) or 0)
        worker = node.workers.find(process.pid)
        assert worker is not None
        try:
            await node.operations.migrate([process.pid], "gpu1", node.context(wait=False))
            await anyio.to_thread.run_sync(disk.wait_for_a_record)
            assert node.moving.simulated_memory.of(who) == {"gpu1": 7}
            process.kill()
            with anyio.fail_after(HANG_S):
                while not worker.ended:
                    await node.workers.changed.wait()
        finally:
            disk.go_on()
        assert (await node.at_rest("1")).phase == "done"
        assert not node.moving.simulated_memory.of(who)


async def test_a_daemon_killed_in_the_middle_leaves_the_move_to_the_next_one(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.slow.add("offload")
        await node.operations.migrate([process.pid], "gpu1", node.context(wait=False))
        await agent.waiting.wait()
    agent.slow.clear()
    async with running(tmp_path) as node:
        assert node.reservations(process.pid) == {"gpu0": 7, "gpu1": 7}, "the room for it was not held again"
        agent.workers = node.workers
        await agent.attend(node.tasks)
        ended = await node.at_rest("1")
        assert ended.phase in {"done", "rolled-back"}
        assert (agent.data, agent.parked) == (b"weights", False)
        assert list(node.reservations(process.pid)) == [ended.processes[0].gpu]
        assert node.moving.pool.held_bytes == 0


def test_a_journal_that_cannot_be_trusted_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "operations.journal").write_bytes(b"something else entirely")
    path = tmp_path / "operations.journal"
    with pytest.raises(records.JournalBroken) as raised:
        JournalFile(tmp_path).open()
    assert raised.value.message.startswith(f"the journal of operations {path} is damaged at byte 0: ")
    assert f"mv {path} {path}.damaged; start hegmd again, and run hegmctl adopt" in raised.value.hint, "issue 19"
    assert (tmp_path / "operations.journal").read_bytes() == b"something else entirely"


async def test_the_downtime_of_a_job_survives_the_daemon(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        moved = await node.operations.migrate([process.pid], "gpu1", node.context())
        assert moved.operation is not None
        downtime_s = moved.operation.downtime_s
        assert downtime_s is not None
    async with running(tmp_path) as node:
        assert node.operations.runner.describe(moved.operation.id).downtime_s == downtime_s


async def test_a_restore_that_failed_is_remembered_after_the_daemon_was_restarted(tmp_path: Path) -> None:
    """Issue 14, row 12: a failed restore left no operation, and nothing to ask about it later."""
    manifest = Manifest(
        workers=(ImageWorker(pid=7, gpus=(), carrier="worker", size_bytes=5, rest_bytes=0, token="t", bytes=("7",)),)
    )
    failure = Failure(code=REFUSED.name, message="criu cannot restore process 7", hint="see its log")
    async with running(tmp_path) as node:
        runner = node.operations.runner
        op_id = runner.reserve_id()
        await runner.remember(unrevived(manifest, op_id, failure, 5.0))
        before = runner.describe(op_id)
        assert (before.kind, before.phase, before.waits) == ("restore", "rolled-back", None)
        assert runner.under_way() == ()
        assert runner.ended_counts["restore", "agent", "rolled-back"] == 1
        assert runner.next_id() != op_id
    async with running(tmp_path) as node:
        runner = node.operations.runner
        assert [op.id for op in runner.operations()] == [op_id]
        assert runner.describe(op_id) == before
        assert before.failure is not None
        assert before.failure.message == "criu cannot restore process 7"
        assert runner.next_id() != op_id


async def test_an_adopted_job_was_refused_when_hegmd_stopped_and_the_next_daemon_continued_it(
    tmp_path: Path, process: Child
) -> None:
    """Its record was written while hegmd stopped: an operation that the next daemon continues is not refused."""
    disk, refused = StalledDisk(b"second"), False

    async with anyio.create_task_group() as requests, running(tmp_path, disk=disk) as node:
        runner = node.operations.runner

        async def begin(operation: Operation) -> None:
            nonlocal refused
            try:
                await runner.begin(operation)
            except HegmError:
                refused = True

        async def go_on_once_it_stops() -> None:
            while runner._tasks is not None:
                await anyio.lowlevel.checkpoint()
            disk.go_on()

        await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
        suspended = runner.find("1")
        assert suspended is not None
        requests.start_soon(begin, suspended.replace(id="second"))
        await anyio.to_thread.run_sync(disk.wait_for_a_record)
        requests.start_soon(go_on_once_it_stops)
    async with running(tmp_path) as node:
        assert (refused, node.operations.runner.describe("second").phase) == (False, "suspended")
