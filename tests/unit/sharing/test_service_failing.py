"""Sharing while a job is stopped, a boundary is late, or an error occurs: the other jobs continue.

Longer than 400 lines because all tests of failing jobs share one set-up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.errors import TIMEOUT, HegmError
from hegmd.memory.pool import Source
from hegmd.node.processes.procfs import seconds_since_boot
from hegmd.protocol import sharing as protocol
from hegmd.protocol.messages import RegisterJob, Supervise, SuperviseReport, SupervisorOrder
from hegmd.protocol.supervision import RecoveryWish
from hegmd.recovery.records import JobSnapshots, SnapshotFiles
from hegmd.recovery.slots import JobSlots
from hegmd.sharing import model, state_file
from hegmd.sharing.records import QueuedRecord
from hegmd.sharing.resumes import QueuedResumes
from hegmd.sharing.service import MIN_INTERVAL_S, SETTLED_AFTER_S, next_look_at
from tests.patience import HANG_S
from tests.unit.recovery.test_snapshots import write
from tests.unit.sharing.shared_node import ADMIN, MIB, UID, SharedNode, sharing_on, user

pytestmark = pytest.mark.thorough

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


def appender(orders: list[SupervisorOrder]) -> Callable[[SupervisorOrder, object], Awaitable[None]]:
    """Return a function that appends a supervisor's orders to `orders`."""

    async def send(order: SupervisorOrder, _fds: object) -> None:
        orders.append(order)

    return send


@asynccontextmanager
async def a_protected_job(
    tmp_path: Path,
    process: Child,
    second_process: Child,
    *,
    ends_supervisor: bool = True,
    spec: str = "1x8MiB",
    **known: Any,
) -> AsyncIterator[tuple[SharedNode, list[SupervisorOrder]]]:
    """Job j1 trains and has a snapshot; `other` is its supervisor, which gets the orders."""
    known = {"job": "j1", "uid": UID, "ranks": 1, "gpus": ("gpu0",), "generation": 1, **known}
    to_register = second_process.pid, UID, RegisterJob(run="first", command=("train",))
    async with sharing_on(tmp_path, spec) as shared:
        await shared.node.moving.job_requests.register(*to_register)
    SnapshotFiles(tmp_path).save({"j1": JobSnapshots(**known)})
    orders: list[SupervisorOrder] = []
    async with sharing_on(tmp_path, spec) as shared:
        await (moving := shared.node.moving).job_requests.register(*to_register)
        write((await JobSlots(moving.pool, "j1").take(0, 0, 8192, Source(UID, 1))).fd, generation=1, step=7)
        await shared.node.attend(process.pid, BYTES, run="first", gpu="gpu0")
        offer = Supervise(run="first", python=True, pid=process.pid, recover=RecoveryWish())
        line = ("line", second_process.pid, UID, offer, appender(orders))
        shared.node.tasks.start_soon(moving.supervisors.attend, *line)
        await shared.until_states(j1="running")
        await shared.until(lambda: any(order.do == "protect" for order in orders))
        yield shared, orders
        if ends_supervisor:
            await end_supervisor(shared, second_process)


async def end_supervisor(shared: SharedNode, child: Child) -> None:
    child.kill()
    child.wait()
    await shared.until(lambda: not any(supervisor.is_alive for supervisor in shared.node.moving.supervisors))


async def test_a_stopped_job_does_not_delay_the_decisions_of_a_new_daemon(tmp_path: Path, process: Child) -> None:
    """The agent of a stopped job cannot connect, and all leases waited 15 s for it."""
    async with sharing_on(tmp_path) as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="one", command=("train",)))
        agent = await shared.node.attend(process.pid, BYTES, run="one")
        await agent.leave()
    process.send_signal(signal.SIGSTOP)
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
    async with sharing_on(tmp_path, clock=lambda: 0.0) as shared:
        reply = await shared.make_room(MIB, until_free=True, limit_s=HANG_S)
        assert reply.lease is not None
        assert reply.lease.state == "held"


async def test_a_dry_run_after_a_daemon_start_waits_for_agents_of_earlier_jobs(tmp_path: Path, process: Child) -> None:
    """The dry run listed no job, but the command itself suspended one."""
    async with sharing_on(tmp_path) as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="one", command=("train",)))
        agent = await shared.node.attend(process.pid, BYTES, run="one")
        await agent.leave()
    async with sharing_on(tmp_path, clock=lambda: 0.0) as shared, anyio.create_task_group() as tasks:
        planned: list[protocol.RoomReply] = []

        async def ask() -> None:
            planned.append(await shared.make_room(7 * MIB, dry_run=True))

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        await shared.node.attend(process.pid, BYTES, run="one")
        await shared.until(lambda: bool(planned))
        assert [step.action for step in planned[0].steps] == ["suspend"]


async def test_the_seconds_of_a_lease_begin_when_its_memory_is_free(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        agent = await shared.node.attend(process.pid, BYTES)
        agent.slow.add("park")
        replies: list[protocol.RoomReply] = []

        async def ask() -> None:
            replies.append(await shared.make_room(7 * MIB, hold_s=50.0, until_free=True, limit_s=HANG_S))

        tasks.start_soon(ask)
        await shared.until(lambda: any(shared.sharing.memory.leases))
        (lease,) = shared.sharing.memory.leases
        await shared.until(lambda: time.time() > lease.since_utc + 0.02)
        freed_s = seconds_since_boot()
        agent.go_on.set()
        await shared.until(lambda: bool(replies))
        (held,) = shared.sharing.memory.leases
        assert held.until_s is not None
        assert held.until_s >= freed_s + 50.0


async def test_a_wait_for_a_boundary_does_not_count_as_cost_of_a_switch(tmp_path: Path, process: Child) -> None:
    """A turn lasts 20 times as long as a switch costs: a batch of one minute made turns of 20 minutes."""
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        agent = await shared.node.attend(process.pid, BYTES)
        agent.slow.add("park")
        tasks.start_soon(partial(shared.make_room, 7 * MIB, hold_s=50.0, until_free=True, limit_s=HANG_S))
        await shared.until(lambda: any(shared.sharing.memory.suspended))
        began = time.monotonic()
        await shared.until(lambda: time.monotonic() > began + 0.5)
        agent.go_on.set()
        await shared.until(lambda: any(lease.is_held for lease in shared.sharing.memory.leases))
        await shared.until(lambda: shared.sharing.history.of("j1").suspend_s is not None)
        cost_s = shared.sharing.history.of("j1").suspend_s
        assert cost_s is not None
        assert cost_s < time.monotonic() - began - 0.5
        tasks.cancel_scope.cancel()


async def test_one_failed_decision_does_not_end_the_later_ones(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        broken: Any = None
        shared.sharing.memory.queue[1] = broken
        shared.sharing.look_again()
        await anyio.wait_all_tasks_blocked()
        del shared.sharing.memory.queue[1]
        reply = await shared.make_room(MIB, until_free=True, limit_s=HANG_S)
        assert reply.lease is not None


async def test_the_memory_of_a_restarting_job_stays_reserved(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """A waiting job got the memory, and the daemon gave the restarting job up: no start had enough memory."""
    async with a_protected_job(tmp_path, process, second_process) as (shared, orders):
        moving = shared.node.moving
        process.kill()
        process.wait()
        moving.supervisors.report("line", SuperviseReport(result="fell", status=-9))
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await shared.make_room(6 * MIB)
        for _ in range(3):
            shared.sharing.look_again()
            await shared.sharing.decided.wait()
            assert await shared.states() == {"j1": "starting"}
        (lease,) = shared.sharing.memory.leases
        assert not lease.is_held
        second_process.kill()
        second_process.wait()
        await shared.until(lambda: all(lease.is_held for lease in shared.sharing.memory.leases))


@pytest.mark.parametrize("gpus", [("gpu0",), ()])
async def test_a_job_that_fails_while_suspended_for_a_lease_restarts_after_the_lease(
    tmp_path: Path, process: Child, second_process: Child, gpus: tuple[str, ...]
) -> None:
    """The daemon restarted it at once, although others used its memory; or never, if its snapshot knew no GPU."""
    async with a_protected_job(tmp_path, process, second_process, gpus=gpus) as (shared, orders):
        reply = await shared.make_room(6 * MIB, until_free=True, limit_s=HANG_S)
        assert reply.lease is not None
        await _fail(shared, process)
        await shared.until(
            lambda: any("failed while it was off its GPU, and waits for room" in order.message for order in orders)
        )
        for _ in range(3):
            shared.sharing.look_again()
            await shared.sharing.decided.wait()
            assert await shared.states() == {"j1": "suspended"}
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease=reply.lease.id), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert await shared.states() == {"j1": "starting"}
        assert not shared.sharing.memory.suspended


async def test_a_failed_job_that_left_the_queue_was_taken_for_suspended_by_its_user(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """A daemon that was killed before the start was complete: the next one waited for ever for a resume."""
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, second_process, ends_supervisor=False) as (shared, earlier_orders):
        await shared.make_room(6 * MIB, until_free=True, limit_s=HANG_S)
        await _fail(shared, process)
        await shared.until(lambda: any("waits for room" in order.message for order in earlier_orders))
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in earlier_orders))
        for supervisor in shared.node.moving.supervisors:
            supervisor.close()  # as at the daemon's end
    async with sharing_on(tmp_path) as shared:
        offer = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(
            shared.node.moving.supervisors.attend, "line", second_process.pid, UID, offer, appender(orders)
        )
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await end_supervisor(shared, second_process)


async def test_a_job_that_lost_its_gpu_before_it_was_seen_to_train_there_waited_for_ever(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """It counted as one that is about to start, which is given no other GPU."""
    async with a_protected_job(tmp_path, process, second_process, spec="2x8MiB") as (shared, orders):
        shared.node.simulator.set_fault("gpu0", "lost")
        placed = QueuedRecord(job=1, size_bytes=6 * MIB, since_utc=0.0, placed="gpu0", placed_s=time.monotonic())
        shared.sharing.memory.put_queued(placed)
        await _fail(shared, process)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert shared.node.moving.recoveries.returns_to("j1") == ("gpu1",)
        assert shared.sharing.memory.queue[1].placed == "gpu1"


async def test_a_job_whose_gpu_is_lost_waits_until_another_gpu_has_memory(
    tmp_path: Path, process: Child, second_process: Child, third_process: Child
) -> None:
    """It was started beside the job that had all of that memory, failed, and was given up; its snapshots were sound."""
    async with a_protected_job(tmp_path, process, second_process, spec="2x8MiB") as (shared, orders):
        await shared.node.attend(third_process.pid, BYTES, token="b" * 32, run="second", gpu="gpu1")
        await shared.until_states(j1="running", j2="running")
        shared.node.simulator.set_fault("gpu0", "lost")
        await _fail(shared, process)
        await shared.until(
            lambda: any("cannot return to its GPU, and waits for room" in order.message for order in orders)
        )
        assert not any(order.do == "start" for order in orders)
        assert await shared.states() == {"j1": "suspended", "j2": "running"}
        third_process.kill()
        third_process.wait()
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert not shared.sharing.memory.suspended
        assert shared.node.moving.recoveries.returns_to("j1") == ("gpu1",)


async def test_a_job_that_fails_while_its_user_suspended_it_waits_for_resume_and_memory(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """It was started as soon as there was room: on a GPU that its user had freed on purpose."""
    async with a_protected_job(tmp_path, process, second_process) as (shared, orders):
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        await shared.node.operations.suspend([process.pid], shared.node.context())
        await _fail(shared, process)
        await shared.until(
            lambda: any(
                "failed while it was suspended, and waits until it is resumed" in order.message for order in orders
            )
        )
        assert any("hegmctl resume j1" in order.hint for order in orders)
        await shared.until_states(j1="suspended")
        (view,) = (await moving.recoveries.show([], lambda _uid: True)).jobs
        assert (view.state, "hegmctl resume j1 starts it again" in (view.why or "")) == ("recovering", True)
        (job,) = await moving.job_requests.jobs([], lambda _uid: True, ended=False)
        assert (job.state, job.operation) == ("suspended", None)
        with pytest.raises(HegmError, match="has no process now, and waits for its user"):
            await moving.job_requests.pids(["j1"], lambda _uid: True)
        reply = await shared.make_room(7 * MIB, until_free=True, limit_s=HANG_S)
        assert reply.lease is not None, "the memory of the failed job is free for others"
        assert await resumes.failed("j1", lambda _uid: False) is None, "the job belongs to another user"
        failed = await resumes.failed("j1", lambda _uid: True)
        assert failed is not None
        with pytest.raises(HegmError, match="where hegmd finds room"):
            await resumes.start_failed(failed, "gpu1", shared.node.context())
        await resumes.start_failed(failed, None, replace(shared.node.context(), dry_run=True))
        assert shared.sharing.awaits_resume(failed), "`hegmctl top` begins with a dry run, which was refused"
        with pytest.raises(HegmError, match=r"there was no room for job j1 .* within 0\.05 s") as timeout:
            await resumes.start_failed(failed, None, replace(shared.node.context(), limit_s=0.05))
        assert timeout.value.code is TIMEOUT
        assert shared.sharing.awaits_resume(failed), "the job stays suspended"
        assert not shared.sharing.memory.suspended
        assert not any(order.do == "start" for order in orders)
        await resumes.start_failed(failed, None, replace(shared.node.context(), wait=False))
        await shared.until(lambda: any("waits for room" in order.message for order in orders))
        assert await resumes.failed("j1", lambda _uid: True) is None
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert await shared.states() == {"j1": "starting"}
        assert not shared.sharing.memory.suspended


@pytest.mark.parametrize("trains", [True, False])
async def test_the_resume_of_a_failed_job_returns_when_it_trains_or_ends(
    tmp_path: Path, process: Child, second_process: Child, third_process: Child, *, trains: bool
) -> None:
    """The daemon replied immediately, and hegmctl exited with 0 before the job was started."""
    async with (
        a_protected_job(tmp_path, process, second_process) as (shared, orders),
        anyio.create_task_group() as tasks,
    ):
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        await shared.node.operations.suspend([process.pid], shared.node.context())
        await _fail(shared, process)
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in orders))
        failed = await resumes.failed("j1", lambda _uid: True)
        assert failed is not None
        results: list[str] = []

        async def resume() -> None:
            try:
                await resumes.start_failed(failed, None, shared.node.context())
                results.append("trains")
            except HegmError as error:
                results.append(f"{error.code.name}: {error.message}")

        tasks.start_soon(resume)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert not results
        if not trains:
            second_process.kill()
            second_process.wait()
            await shared.until(lambda: bool(results))
            assert results[0].startswith("external: job j1 (train) has ended before it trained again"), results
            return
        (start,) = [order for order in orders if order.do == "start"]
        moving.supervisors.report("line", SuperviseReport(order=start.order, result="done", pid=third_process.pid))
        agent = await shared.node.attend(third_process.pid, BYTES, token="c" * 32, run="first", restarted="j1")
        agent.boundary += 10
        await shared.until(lambda: bool(results))
        assert results == ["trains"]


async def test_a_job_resumed_before_its_supervisor_is_back_waits_for_memory(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """In the first seconds of a daemon the job was not queued: it started on a GPU that was leased."""
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, second_process, ends_supervisor=False) as (shared, earlier_orders):
        await shared.node.operations.suspend([process.pid], shared.node.context())
        await _fail(shared, process)
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in earlier_orders))
        await shared.make_room(7 * MIB, until_free=True, limit_s=HANG_S)
        for supervisor in shared.node.moving.supervisors:
            supervisor.close()  # as at the daemon's end
    async with sharing_on(tmp_path) as shared:
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        failed = await resumes.failed("j1", lambda _uid: True)
        assert failed is not None
        await resumes.start_failed(failed, None, replace(shared.node.context(), wait=False))
        assert set(shared.sharing.memory.suspended) == {1}
        shared.sharing.memory.forget_suspended(1)  # as after a longer absence of the supervisor
        reconnection = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(
            moving.supervisors.attend, "line", second_process.pid, UID, reconnection, appender(orders)
        )
        await shared.until(lambda: any("waits for room" in order.message for order in orders))
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await end_supervisor(shared, second_process)


async def test_a_failed_job_still_waits_for_resume_after_a_kill_of_the_daemon(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, second_process, ends_supervisor=False) as (shared, earlier_orders):
        await shared.node.operations.suspend([process.pid], shared.node.context())
        await _fail(shared, process)
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in earlier_orders))
        for supervisor in shared.node.moving.supervisors:
            supervisor.close()  # as at the daemon's end
    async with sharing_on(tmp_path) as shared:
        moving = shared.node.moving
        reconnection = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(
            moving.supervisors.attend, "line", second_process.pid, UID, reconnection, appender(orders)
        )
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in orders))
        assert not any(order.do == "start" for order in orders)
        await end_supervisor(shared, second_process)


async def _fail(shared: SharedNode, process: Child) -> None:
    """Kill the job's only process. Its supervisor reports that."""
    process.kill()
    process.wait()
    shared.node.moving.supervisors.report("line", SuperviseReport(result="fell", status=-9))


async def test_a_job_that_failed_while_there_was_no_daemon_waits_for_its_turn_too(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The supervisor connected a moment late, and the next daemon counted the job as not suspended."""
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, second_process, ends_supervisor=False) as (shared, _):
        await shared.make_room(6 * MIB, until_free=True, limit_s=HANG_S)
        await shared.until_states(j1="suspended")
        await shared.node.agents[process.pid].leave()
    for supervisor in shared.node.moving.supervisors:
        supervisor.close()  # as at the daemon's end
    process.kill()
    process.wait()
    async with sharing_on(tmp_path) as shared:
        offer = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(
            shared.node.moving.supervisors.attend, "line", second_process.pid, UID, offer, appender(orders)
        )
        await shared.until(lambda: any("waits for room" in order.message for order in orders))
        assert await shared.states() == {"j1": "suspended"}
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await end_supervisor(shared, second_process)


@pytest.mark.parametrize(("size_bytes", "waits"), [(8 * MIB, True), (MIB, False)])
async def test_a_job_that_failed_without_a_daemon_waits_for_leases_on_its_own_gpu(
    tmp_path: Path, process: Child, second_process: Child, size_bytes: int, *, waits: bool
) -> None:
    """The next daemon leased the memory before the supervisor connected, and started the job there all the same."""
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, second_process, ends_supervisor=False) as (shared, _):
        await shared.until_states(j1="running")
    for supervisor in shared.node.moving.supervisors:
        supervisor.close()  # as at the daemon's end
    process.kill()
    process.wait()
    late_s = [0.0]
    async with sharing_on(tmp_path, clock=lambda: time.monotonic() + late_s[0]) as shared:
        late_s[0] = SETTLED_AFTER_S  # the supervisor has not connected by then
        reply = await shared.make_room(size_bytes, until_free=True, limit_s=HANG_S)
        assert reply.lease is not None
        offer = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(
            shared.node.moving.supervisors.attend, "line", second_process.pid, UID, offer, appender(orders)
        )
        if waits:
            await shared.until(lambda: any("waits for room" in order.message for order in orders))
            assert not any(order.do == "start" for order in orders)
            await shared.requests.release(protocol.Release(lease=reply.lease.id), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await end_supervisor(shared, second_process)


async def test_a_job_that_failed_while_it_was_being_suspended_waits_for_its_turn(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with (
        a_protected_job(tmp_path, process, second_process) as (shared, orders),
        anyio.create_task_group() as tasks,
    ):
        agent = shared.node.agents[process.pid]
        agent.slow.add("park")
        tasks.start_soon(partial(shared.make_room, 6 * MIB, until_free=True, limit_s=HANG_S))
        with anyio.fail_after(HANG_S):
            await agent.waiting.wait()
        await _fail(shared, process)
        await shared.until(lambda: all(lease.is_held for lease in shared.sharing.memory.leases))
        assert await shared.states() == {"j1": "suspended"}
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))


async def test_a_job_is_not_suspended_for_others_while_the_disk_is_full(tmp_path: Path, process: Child) -> None:
    """A daemon killed afterwards could not know that it has to resume the job."""
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.until_states(j1="running")
        await agent.leave()
        await shared.make_room(6 * MIB)
        blocked = tmp_path / f".{state_file.NAME}.new"
        blocked.mkdir()
        await agent.attend(shared.node.tasks)
        await shared.until(lambda: "failed" in shared.events)
        assert "park" not in agent.orders
        assert not shared.sharing.memory.suspended
        with pytest.raises(HegmError, match=r"lease l2 cannot be written to disk: .*Is a directory"):
            await shared.make_room(MIB)
        assert [lease.id for lease in shared.sharing.memory.leases] == ["l1"]
        blocked.rmdir()


async def test_a_release_fails_if_it_cannot_be_written_to_disk(tmp_path: Path) -> None:
    """After a kill of the daemon the lease existed again, without a message."""
    async with sharing_on(tmp_path) as shared:
        await shared.make_room(6 * MIB, until_free=True)
        blocked = tmp_path / f".{state_file.NAME}.new"
        blocked.mkdir()
        with pytest.raises(HegmError, match=r"lease l1 was released, but its end cannot be written to disk") as raised:
            await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        assert "a new daemon would hold l1 again" in raised.value.hint
        assert not list(shared.sharing.memory.leases)
        blocked.rmdir()
    assert state_file.load(tmp_path).leases == ()


async def test_a_job_that_trained_and_asked_for_a_gpu_could_not_be_suspended(tmp_path: Path, process: Child) -> None:
    """It counted as one that waits for its start, and so kept its memory from jobs of any priority."""
    async with sharing_on(tmp_path) as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="run", command=("train",)))
        await shared.node.attend(process.pid, b"1" * (5 * MIB), gpu="gpu0", run="run")
        with pytest.raises(HegmError, match="has left the queue"), anyio.fail_after(HANG_S):
            await shared.requests.place(protocol.PlaceJob(run="run", size_bytes=8 * MIB), user(UID), shared.emit)
        assert (await shared.make_room(6 * MIB, until_free=True)).gpu == "gpu0"
        assert await shared.states() == {"j1": "suspended"}


def test_a_slow_decision_is_followed_by_an_equal_pause() -> None:
    """With a thousand jobs the daemon spent all its time on decisions."""
    assert next_look_at(100.0, 100.001, 0.001) == pytest.approx(100.0 + MIN_INTERVAL_S)
    assert next_look_at(100.0, 101.5, 1.5) == pytest.approx(103.0)
    assert next_look_at(100.0, 101.5, 0.1) == pytest.approx(101.6)


async def test_a_leaving_job_still_needs_its_requested_memory(tmp_path: Path, process: Child) -> None:
    """Before the suspension began, the daemon resumed another job into that memory."""
    async with sharing_on(tmp_path) as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="first", command=("train",)))
        await shared.requests.place(protocol.PlaceJob(run="first", gpu="gpu0", size_bytes=5 * MIB), ADMIN, shared.emit)
        await shared.node.attend(process.pid, b"1" * (2 * MIB), run="first")
        shared.sharing.actions.acting["j1"] = model.Action(model.SUSPEND, "j1", ("gpu0",), (2 * MIB,), "its turn ended")
        view, _ = await shared.sharing.look()
        (job,) = view.snapshot.jobs
        assert (job.state, job.held_bytes, job.needs_bytes) == (model.LEAVING, {"gpu0": 2 * MIB}, (5 * MIB,))
        del shared.sharing.actions.acting["j1"]


async def test_memory_of_a_job_that_never_trains_is_reserved_for_a_limited_time(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """A suspended job of the same priority waited for ever. Then, a clock that was set gave the memory away at once."""
    later_s = set_by_s = 0.0
    clocks: dict[str, Any] = {"clock": lambda: time.monotonic() + later_s, "utc": lambda: time.time() + set_by_s}
    async with sharing_on(tmp_path, **clocks) as shared:
        await shared.node.attend(second_process.pid, b"2" * (4 * MIB), token="b" * 32)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="first", command=("sleep",)))
        async with anyio.create_task_group() as tasks:
            request = protocol.PlaceJob(run="first", gpu="gpu0", size_bytes=5 * MIB)
            tasks.start_soon(shared.requests.place, request, ADMIN, shared.emit)
            await shared.until_states(j1="suspended", j2="waiting")
            await shared.requests.set_priority(protocol.SetPriority(job="j2", priority=60), ADMIN)
            await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
            await shared.until_states(j1="suspended", j2="starting")
        await shared.requests.set_priority(protocol.SetPriority(job="j2", priority="normal"), ADMIN)
        set_by_s = 86400.0
        assert {job.job: job.why for job in (await shared.requests.queue(ADMIN)).jobs}["j2"] is None
        later_s = 601.0
        shared.sharing.look_again()
        await shared.until_states(j1="running", j2="starting")
        why = {job.job: job.why for job in (await shared.requests.queue(ADMIN)).jobs}["j2"]
        assert why == "it has not trained within 10 min of its start: no memory is kept for it"


async def test_a_waiting_lease_shows_memory_that_no_other_lease_holds(tmp_path: Path) -> None:
    """One line showed both "8.0 MiB free" and 0 free bytes."""
    async with sharing_on(tmp_path) as shared:
        await shared.make_room(8 * MIB, until_free=True)
        with pytest.raises(HegmError, match="nothing is free, 8 MiB is kept for lease l1"):
            await shared.make_room(MIB, until_free=True)
        assert [
            progress.free_bytes
            for progress in shared.progress
            if progress.lease == "l2" and progress.waits != "a decision"
        ][:1] == [0]
