"""Sharing while a job is stopped, a boundary is late, or an error comes: others go on, and nobody loses their time.

Longer than 400 lines because all its jobs that fail are made in one way.
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
from hegmd.protocol import sharing as protocol
from hegmd.protocol.messages import RegisterJob, Supervise, SuperviseReport, SupervisorOrder
from hegmd.protocol.supervision import RecoveryWish
from hegmd.recovery.records import JobSnapshots, SnapshotFiles
from hegmd.recovery.slots import JobSlots
from hegmd.sharing import model, state_file
from hegmd.sharing.leases import seconds_since_boot
from hegmd.sharing.resumes import QueuedResumes
from hegmd.sharing.service import MIN_INTERVAL_S, next_look_at
from tests.patience import HANG_S
from tests.unit.recovery.test_snapshots import write
from tests.unit.sharing.shared_node import ADMIN, MIB, UID, SharedNode, sharing_on

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


def into(orders: list[SupervisorOrder]) -> Callable[[SupervisorOrder, object], Awaitable[None]]:
    """Return what sends a supervisor its orders: into that list."""

    async def send(order: SupervisorOrder, _fds: object) -> None:
        orders.append(order)

    return send


@asynccontextmanager
async def a_protected_job(
    tmp_path: Path, process: Child, other: Child, *, ends: bool = True
) -> AsyncIterator[tuple[SharedNode, list[SupervisorOrder]]]:
    """Job j1 trains and has a snapshot; `other` is its supervisor, which gets the orders."""
    SnapshotFiles(tmp_path).save({"j1": JobSnapshots(job="j1", uid=UID, ranks=1, gpus=("gpu0",), generation=1)})
    orders: list[SupervisorOrder] = []
    async with sharing_on(tmp_path) as shared:
        moving = shared.node.moving
        await moving.job_requests.register(other.pid, UID, RegisterJob(run="first", command=("train",)))
        write((await JobSlots(moving.pool, "j1").take(0, 0, 8192, Source(UID, 1))).fd, generation=1, step=7)
        await shared.node.attend(process.pid, BYTES, run="first")
        offer = Supervise(run="first", python=True, pid=process.pid, recover=RecoveryWish())
        shared.node.tasks.start_soon(moving.supervisors.attend, "line", other.pid, UID, offer, into(orders))
        await shared.until_states(j1="running")
        await shared.until(lambda: any(order.do == "protect" for order in orders))
        yield shared, orders
        if ends:
            await end_supervisor(shared, other)


async def end_supervisor(shared: SharedNode, child: Child) -> None:
    child.kill()
    child.wait()
    await shared.until(lambda: not any(one.is_alive for one in shared.node.moving.supervisors))


@pytest.mark.thorough
async def test_a_stopped_job_keeps_a_new_daemon_from_no_decision(tmp_path: Path, process: Child) -> None:
    """Its agent cannot connect, and all leases waited 15 s for it."""
    async with sharing_on(tmp_path) as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="one", command=("train",)))
        agent = await shared.node.attend(process.pid, BYTES, run="one")
        await agent.leave()
    process.send_signal(signal.SIGSTOP)
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
    async with sharing_on(tmp_path, clock=lambda: 0.0) as shared:
        made = await shared.make_room(MIB, until_free=True, limit_s=HANG_S)
        assert made.lease is not None
        assert made.lease.state == "held"


async def test_a_dry_run_after_a_start_waits_for_the_agents_of_jobs_of_before(tmp_path: Path, process: Child) -> None:
    """It said that no job has to leave, and the command itself suspended one."""
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


@pytest.mark.thorough
async def test_the_seconds_of_a_lease_begin_when_its_memory_is_free(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        agent = await shared.node.attend(process.pid, BYTES)
        agent.slow.add("park")
        made: list[protocol.RoomReply] = []

        async def ask() -> None:
            made.append(await shared.make_room(7 * MIB, hold_s=50.0, until_free=True, limit_s=HANG_S))

        tasks.start_soon(ask)
        await shared.until(lambda: any(shared.sharing.memory.leases))
        (lease,) = shared.sharing.memory.leases
        await shared.until(lambda: time.time() > lease.since_utc + 0.02)
        freed_s = seconds_since_boot()
        agent.go_on.set()
        await shared.until(lambda: bool(made))
        (held,) = shared.sharing.memory.leases
        assert held.until_s is not None
        assert held.until_s >= freed_s + 50.0


@pytest.mark.thorough
async def test_a_wait_for_a_boundary_does_not_count_as_cost_of_a_switch(tmp_path: Path, process: Child) -> None:
    """Turns last 20 times as long as a switch costs: a batch of a minute made them last for 20."""
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


async def test_an_error_about_what_is_over_ends_no_decisions(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        broken: Any = None
        shared.sharing.memory.queue[1] = broken
        shared.sharing.look_again()
        await anyio.wait_all_tasks_blocked()
        del shared.sharing.memory.queue[1]
        made = await shared.make_room(MIB, until_free=True, limit_s=HANG_S)
        assert made.lease is not None


@pytest.mark.thorough
async def test_the_memory_of_a_job_that_is_started_again_is_given_to_nobody_else(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """Whoever waited got it, and the job was given up: none of its starts had room."""
    async with a_protected_job(tmp_path, process, other) as (shared, orders):
        moving = shared.node.moving
        process.kill()
        process.wait()
        moving.supervisors.report("line", SuperviseReport(result="fell", status=-9))
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await shared.make_room(6 * MIB)
        for _ in range(3):
            await shared.sharing.decided.wait()
            assert await shared.states() == {"j1": "starting"}
        (lease,) = shared.sharing.memory.leases
        assert not lease.is_held
        other.kill()
        other.wait()
        await shared.until(lambda: all(lease.is_held for lease in shared.sharing.memory.leases))


async def test_a_job_that_failed_while_it_was_suspended_for_a_lease_is_started_again_once_that_has_ended(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """It was started at once, beside the job or the server that had its memory."""
    async with a_protected_job(tmp_path, process, other) as (shared, orders):
        made = await shared.make_room(6 * MIB, until_free=True, limit_s=HANG_S)
        assert made.lease is not None
        process.kill()
        process.wait()
        shared.node.moving.supervisors.report("line", SuperviseReport(result="fell", status=-9))
        await shared.until(lambda: any("waits for room" in order.message for order in orders))
        for _ in range(3):
            shared.sharing.look_again()
            await shared.sharing.decided.wait()
            assert await shared.states() == {"j1": "suspended"}
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease=made.lease.id), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert await shared.states() == {"j1": "starting"}
        assert not shared.sharing.memory.suspended


async def test_a_job_that_failed_while_its_user_had_suspended_it_waits_until_they_resume_it_and_then_for_room(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """It was started as soon as there was room: on a GPU that its user had freed on purpose."""
    async with a_protected_job(tmp_path, process, other) as (shared, orders):
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        await shared.node.operations.suspend([process.pid], shared.node.asked())
        await _fail(shared, process)
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in orders))
        assert any("hegmctl resume j1" in order.hint for order in orders)
        await shared.until_states(j1="suspended")
        (view,) = (await moving.recoveries.show([], lambda _uid: True)).jobs
        assert (view.state, "hegmctl resume j1 starts it again" in (view.why or "")) == ("recovering", True)
        (job,) = await moving.job_requests.jobs([], lambda _uid: True, ended=False)
        assert (job.state, job.operation) == ("suspended", None)
        with pytest.raises(HegmError, match="has no process now, and waits for its user"):
            await moving.job_requests.pids(["j1"], lambda _uid: True)
        made = await shared.make_room(7 * MIB, until_free=True, limit_s=HANG_S)
        assert made.lease is not None, "its memory is free for others"
        assert await resumes.failed("j1", lambda _uid: False) is None, "another user's"
        failed = await resumes.failed("j1", lambda _uid: True)
        assert failed is not None
        with pytest.raises(HegmError, match="where hegmd finds room"):
            await resumes.start_failed(failed, "gpu1", shared.node.asked())
        await resumes.start_failed(failed, None, replace(shared.node.asked(), dry_run=True))
        assert shared.sharing.awaits_resume(failed), "a dry run was refused, and `hegmctl top` begins with one"
        with pytest.raises(HegmError, match=r"there was no room for job j1 .* within 0\.05 s") as late:
            await resumes.start_failed(failed, None, replace(shared.node.asked(), limit_s=0.05))
        assert late.value.code is TIMEOUT
        assert shared.sharing.awaits_resume(failed), "it stays suspended"
        assert not shared.sharing.memory.suspended
        assert not any(order.do == "start" for order in orders)
        await resumes.start_failed(failed, None, replace(shared.node.asked(), wait=False))
        await shared.until(lambda: any("waits for room" in order.message for order in orders))
        assert await resumes.failed("j1", lambda _uid: True) is None
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert await shared.states() == {"j1": "starting"}
        assert not shared.sharing.memory.suspended


@pytest.mark.parametrize("trains", [True, False])
async def test_a_resume_of_a_job_that_has_failed_ends_once_it_trains_or_has_ended(
    tmp_path: Path, process: Child, other: Child, again: Child, *, trains: bool
) -> None:
    """Its reply came at once, and hegmctl exited with 0 before anything was started."""
    async with a_protected_job(tmp_path, process, other) as (shared, orders), anyio.create_task_group() as tasks:
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        await shared.node.operations.suspend([process.pid], shared.node.asked())
        await _fail(shared, process)
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in orders))
        failed = await resumes.failed("j1", lambda _uid: True)
        assert failed is not None
        results: list[str] = []

        async def resume() -> None:
            try:
                await resumes.start_failed(failed, None, shared.node.asked())
                results.append("trains")
            except HegmError as error:
                results.append(f"{error.code.name}: {error.message}")

        tasks.start_soon(resume)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        assert not results
        if not trains:
            other.kill()
            other.wait()
            await shared.until(lambda: bool(results))
            assert results[0].startswith("external: job j1 (train) has ended before it trained again"), results
            return
        (start,) = [order for order in orders if order.do == "start"]
        moving.supervisors.report("line", SuperviseReport(order=start.order, result="done", pid=again.pid))
        agent = await shared.node.attend(again.pid, BYTES, token="c" * 32, run="first", restarted="j1")
        agent.boundary += 10
        await shared.until(lambda: bool(results))
        assert results == ["trains"]


async def test_a_job_that_is_resumed_before_its_supervisor_is_back_waits_for_room(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """In the first seconds of a daemon it was not queued, and started on its GPU beside a lease."""
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, other, ends=False) as (shared, before):
        await shared.node.operations.suspend([process.pid], shared.node.asked())
        await _fail(shared, process)
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in before))
        await shared.make_room(7 * MIB, until_free=True, limit_s=HANG_S)
        for supervisor in shared.node.moving.supervisors:
            supervisor.close()  # the daemon's end does
    async with sharing_on(tmp_path) as shared:
        moving = shared.node.moving
        resumes = QueuedResumes(shared.sharing, moving.operations, moving.job_requests)
        failed = await resumes.failed("j1", lambda _uid: True)
        assert failed is not None
        await resumes.start_failed(failed, None, replace(shared.node.asked(), wait=False))
        assert set(shared.sharing.memory.suspended) == {1}
        shared.sharing.memory.forget_suspended(1)  # as if the supervisor was away for longer
        fell = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(moving.supervisors.attend, "line", other.pid, UID, fell, into(orders))
        await shared.until(lambda: any("waits for room" in order.message for order in orders))
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await end_supervisor(shared, other)


async def test_a_job_that_waits_for_its_users_resume_still_does_after_a_kill_of_the_daemon(
    tmp_path: Path, process: Child, other: Child
) -> None:
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, other, ends=False) as (shared, before):
        await shared.node.operations.suspend([process.pid], shared.node.asked())
        await _fail(shared, process)
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in before))
        for supervisor in shared.node.moving.supervisors:
            supervisor.close()  # the daemon's end does
    async with sharing_on(tmp_path) as shared:
        moving = shared.node.moving
        fell = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(moving.supervisors.attend, "line", other.pid, UID, fell, into(orders))
        await shared.until(lambda: any("waits until it is resumed" in order.message for order in orders))
        assert not any(order.do == "start" for order in orders)
        await end_supervisor(shared, other)


async def _fail(shared: SharedNode, process: Child) -> None:
    """Kill the job's only process. Its supervisor reports that."""
    process.kill()
    process.wait()
    shared.node.moving.supervisors.report("line", SuperviseReport(result="fell", status=-9))


@pytest.mark.thorough
async def test_a_job_that_failed_while_there_was_no_daemon_waits_for_its_turn_too(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """The next daemon took it for a job that was not suspended: its supervisor connected a moment later."""
    orders: list[SupervisorOrder] = []
    async with a_protected_job(tmp_path, process, other, ends=False) as (shared, _):
        await shared.make_room(6 * MIB, until_free=True, limit_s=HANG_S)
        await shared.until_states(j1="suspended")
        await shared.node.agents[process.pid].leave()
    for supervisor in shared.node.moving.supervisors:
        supervisor.close()  # the daemon's end does
    process.kill()
    process.wait()
    async with sharing_on(tmp_path) as shared:
        offer = Supervise(run="first", python=True, fell=-9, recover=RecoveryWish())
        shared.node.tasks.start_soon(shared.node.moving.supervisors.attend, "line", other.pid, UID, offer, into(orders))
        await shared.until(lambda: any("waits for room" in order.message for order in orders))
        assert await shared.states() == {"j1": "suspended"}
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))
        await end_supervisor(shared, other)


@pytest.mark.thorough
async def test_a_job_that_failed_while_it_was_being_suspended_waits_for_its_turn(
    tmp_path: Path, process: Child, other: Child
) -> None:
    async with a_protected_job(tmp_path, process, other) as (shared, orders), anyio.create_task_group() as tasks:
        agent = shared.node.agents[process.pid]
        agent.slow.add("park")
        tasks.start_soon(partial(shared.make_room, 6 * MIB, until_free=True, limit_s=HANG_S))
        with anyio.fail_after(HANG_S):
            await agent.waiting.wait()
        process.kill()
        process.wait()
        shared.node.moving.supervisors.report("line", SuperviseReport(result="fell", status=-9))
        await shared.until(lambda: all(lease.is_held for lease in shared.sharing.memory.leases))
        assert await shared.states() == {"j1": "suspended"}
        assert not any(order.do == "start" for order in orders)
        await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        await shared.until(lambda: any(order.do == "start" for order in orders))


@pytest.mark.thorough
async def test_a_job_is_not_suspended_for_others_while_the_disk_is_full(tmp_path: Path, process: Child) -> None:
    """A daemon killed after it would not have known that the job is to resume by itself."""
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.until_states(j1="running")
        await agent.leave()
        await shared.make_room(6 * MIB)
        blocked = tmp_path / f".{state_file.NAME}.new"
        blocked.mkdir()
        await agent.attend(shared.node.tasks)
        await shared.until(lambda: "failed" in shared.events)
        assert "park" not in agent.seen
        assert not shared.sharing.memory.suspended
        with pytest.raises(HegmError, match=r"lease l2 cannot be written to disk: .*Is a directory"):
            await shared.make_room(MIB)
        assert [lease.id for lease in shared.sharing.memory.leases] == ["l1"]
        blocked.rmdir()


async def test_a_release_that_was_not_written_to_disk_is_not_a_success(tmp_path: Path) -> None:
    """The lease was back after a kill of the daemon, and nobody knew."""
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


def test_a_look_that_took_long_is_followed_by_as_long_a_pause() -> None:
    """With a thousand jobs the daemon did nothing else."""
    assert next_look_at(100.0, 100.001, 0.001) == pytest.approx(100.0 + MIN_INTERVAL_S)
    assert next_look_at(100.0, 101.5, 1.5) == pytest.approx(103.0)
    assert next_look_at(100.0, 101.5, 0.1) == pytest.approx(101.6)


async def test_a_job_that_is_about_to_leave_still_needs_what_it_said(tmp_path: Path, process: Child) -> None:
    """Until its suspension has begun, another job was resumed into that memory beside it."""
    async with sharing_on(tmp_path) as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="first", command=("train",)))
        await shared.requests.place(protocol.PlaceJob(run="first", gpu="gpu0", size_bytes=5 * MIB), ADMIN, shared.emit)
        await shared.node.attend(process.pid, b"1" * (2 * MIB), run="first")
        shared.sharing.actions.acting["j1"] = model.Action(model.SUSPEND, "j1", ("gpu0",), (2 * MIB,), "its turn ended")
        view, _ = await shared.sharing.look()
        (job,) = view.snapshot.jobs
        assert (job.state, job.held_bytes, job.needs_bytes) == (model.LEAVING, {"gpu0": 2 * MIB}, (5 * MIB,))
        del shared.sharing.actions.acting["j1"]


async def test_a_job_that_never_trains_keeps_its_memory_from_others_for_a_time_only(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """A suspended job of the same priority waited for ever."""
    later_s = 0.0
    async with sharing_on(tmp_path, utc=lambda: time.time() + later_s) as shared:
        await shared.node.attend(other.pid, b"2" * (4 * MIB), token="b" * 32)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="first", command=("sleep",)))
        async with anyio.create_task_group() as tasks:
            asked = protocol.PlaceJob(run="first", gpu="gpu0", size_bytes=5 * MIB)
            tasks.start_soon(shared.requests.place, asked, ADMIN, shared.emit)
            await shared.until_states(j1="suspended", j2="waiting")
            await shared.requests.set_priority(protocol.SetPriority(job="j2", priority=60), ADMIN)
            await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
            await shared.until_states(j1="suspended", j2="starting")
        await shared.requests.set_priority(protocol.SetPriority(job="j2", priority="normal"), ADMIN)
        assert await shared.states() == {"j1": "suspended", "j2": "starting"}
        later_s = 601.0
        shared.sharing.look_again()
        await shared.until_states(j1="running", j2="starting")
        (one,) = [job for job in (await shared.requests.queue(ADMIN)).jobs if job.job == "j2"]
        assert one.why == "it has not trained within 10 min of its start: no memory is kept for it"


async def test_who_waits_is_told_of_the_memory_that_no_other_lease_keeps(tmp_path: Path) -> None:
    """It said "8.0 MiB free" and in the same line that 0 bytes were free."""
    async with sharing_on(tmp_path) as shared:
        await shared.make_room(8 * MIB, until_free=True)
        with pytest.raises(HegmError, match="nothing is free, 8 MiB is kept for lease l1"):
            await shared.make_room(MIB, until_free=True)
        assert [one.free_bytes for one in shared.heard if one.lease == "l2" and one.waits != "a decision"][:1] == [0]
