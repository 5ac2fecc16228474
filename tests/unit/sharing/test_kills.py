"""A kill of any process in any phase of make-room, of its end and of a turn: no job is lost, and none starves.

An agent blocks at an order. Then the test kills the daemon (and starts another), the client or the job, or it lets the
order fail as after a kill of the GPU helper. A job that lives trains again in the end with its original bytes, and
the daemon holds no memory or lease for it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.protocol import sharing as protocol
from hegmd.sharing import model, state_file
from hegmd.workers import job_file
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent
from tests.unit.sharing.shared_node import ADMIN, MIB, SharedNode, sharing_on, user

Child = subprocess.Popen[bytes]
BYTES, OTHERS = b"1" * (6 * MIB), b"2" * (6 * MIB)
DAEMON, CLIENT, JOB, ORDER = "daemon", "client", "job", "order"
#: The orders of a suspension and of a resumption at which the agent blocks.
LEAVING, RETURNING = ("park", "offload"), ("reload", "release")
#: Turns that end as soon as they may.
SHORT = model.Rules(slices=True, min_quantum_s=0.02, quantum_per_switch=0.0, run_per_switch=0.0, settle_s=0.0)


def trains(agent: ModelAgent, data: bytes) -> bool:
    return not agent.parked and agent.data == data


async def attend_again(shared: SharedNode, agents: Sequence[ModelAgent]) -> None:
    """Connect the agents to the next daemon."""
    for agent in agents:
        agent.workers = shared.node.workers
        agent.slow.clear()
        await agent.attend(shared.node.tasks)


async def until_finished(shared: SharedNode, agent: ModelAgent, child: Child) -> None:
    """Release every lease. A job that lives trains again; the daemon holds nothing of a job that ended."""
    await shared.until(lambda: all(lease.is_held for lease in shared.sharing.memory.leases))
    for lease in shared.sharing.memory.leases:
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
    if child.poll() is None:
        await shared.until(lambda: trains(agent, BYTES))
        await shared.until_states(j1="running")
    else:
        await shared.until_states()
    await shared.until(lambda: not shared.sharing.memory.suspended and not shared.sharing.is_wanted)
    await shared.until(lambda: not shared.node.moving.pool.held_bytes)


async def ask(shared: SharedNode, replies: list[protocol.RoomReply | HegmError]) -> None:
    try:
        replies.append(await shared.make_room(7 * MIB, until_free=True, limit_s=HANG_S))
    except HegmError as error:
        replies.append(error)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("accepted", DAEMON),
        *[(phase, victim) for phase in LEAVING for victim in (DAEMON, CLIENT, JOB, ORDER)],
        ("held", DAEMON),
        ("held", JOB),
        *[(phase, victim) for phase in RETURNING for victim in (DAEMON, JOB)],
        ("reload", ORDER),
    ],
)
async def test_no_kill_in_any_phase_of_make_room_loses_or_starves_a_job(
    tmp_path: Path, process: Child, phase: str, victim: str
) -> None:
    replies: list[protocol.RoomReply | HegmError] = []
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as requests:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.until_states(j1="running")
        agent.slow.update({phase} & {*LEAVING, *RETURNING})
        if phase == "accepted":
            await agent.leave()
        requests.start_soon(ask, shared, replies)
        await shared.until(lambda: any(shared.sharing.memory.leases))
        if phase not in ("accepted", *LEAVING):
            await shared.until(lambda: bool(replies))
        if phase in RETURNING:
            await shared.requests.release(protocol.Release(lease="l1"), ADMIN)
        if agent.slow:
            with anyio.fail_after(HANG_S):
                await agent.waiting.wait()
        if victim == DAEMON:
            shared.sharing.stop()
            await agent.leave()
            requests.cancel_scope.cancel()
        else:
            if victim == CLIENT:
                requests.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await shared.until(lambda: not any(shared.sharing.memory.leases))
            elif victim == JOB:
                process.kill()
                process.wait()
            else:
                agent.refuses[phase] = "the GPU helper was killed"
                agent.slow.clear()
                agent.go_on.set()
                await shared.until(lambda: "failed" in shared.events)
                agent.refuses.clear()
                shared.sharing.history.note_success("j1")  # the daemon retries immediately instead of in 5 s
            agent.slow.clear()
            agent.go_on.set()
            with anyio.CancelScope(shield=True):
                await until_finished(shared, agent, process)
    if victim == DAEMON:
        async with sharing_on(tmp_path) as shared:
            await attend_again(shared, [agent])
            await until_finished(shared, agent, process)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [DAEMON, "the one that leaves", "the one that comes"])
@pytest.mark.parametrize("phase", ["offload", "reload"])
async def test_no_kill_in_any_phase_of_a_turn_loses_or_starves_a_job(
    tmp_path: Path, process: Child, second_process: Child, phase: str, victim: str
) -> None:
    async with sharing_on(tmp_path, policy=SHORT) as shared:
        first = await shared.node.attend(process.pid, BYTES)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.until_states(j1="suspended")
        second = await shared.node.attend(second_process.pid, OTHERS, token="b" * 32)
        delayed = second if phase == "offload" else first
        delayed.slow.add(phase)
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
        with anyio.fail_after(HANG_S):
            await delayed.waiting.wait()
        if victim == DAEMON:
            await first.leave()
            await second.leave()
        else:
            killed_process, (survivor, data) = (
                (second_process, (first, BYTES)) if "leaves" in victim else (process, (second, OTHERS))
            )
            killed_process.kill()
            killed_process.wait()
            delayed.slow.clear()
            delayed.go_on.set()
            await shared.until(lambda: trains(survivor, data) and not shared.sharing.memory.suspended)
            await shared.until(lambda: not shared.node.moving.pool.held_bytes)
    if victim == DAEMON:
        async with sharing_on(tmp_path, policy=SHORT) as shared:
            await attend_again(shared, [first, second])
            for _ in range(2):
                await shared.until(lambda: trains(first, BYTES))
                await shared.until(lambda: trains(second, OTHERS))


@pytest.mark.thorough
async def test_a_daemon_killed_while_the_disk_is_full_resumes_the_job_that_it_was_suspending(
    tmp_path: Path, process: Child
) -> None:
    """The file on disk is the one from before the operation."""
    blocked = tmp_path / f".{state_file.NAME}.new"
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.until_states(j1="running")
        agent.slow.add("park")
        await shared.make_room(7 * MIB)
        with anyio.fail_after(HANG_S):
            await agent.waiting.wait()
        blocked.mkdir()
        agent.slow.clear()
        agent.go_on.set()
        await shared.until_states(j1="suspended")
        await agent.leave()
    blocked.rmdir()
    async with sharing_on(tmp_path) as shared:
        await attend_again(shared, [agent])
        await until_finished(shared, agent, process)


async def test_a_priority_was_reported_as_set_although_it_was_not_on_disk(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        blocked = tmp_path / f".{job_file.NAME}.new"
        blocked.mkdir()
        with pytest.raises(HegmError, match="has priority 80, but that cannot be written to disk") as raised:
            await shared.requests.set_priority(protocol.SetPriority(job="j1", priority="production"), ADMIN)
        assert str(tmp_path) in raised.value.hint
        assert "priority" in shared.events
        blocked.rmdir()


@pytest.mark.thorough
async def test_a_hundred_short_leases_neither_lose_nor_starve_a_job(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.until_states(j1="running")
        for _ in range(100):
            reply = await shared.make_room(7 * MIB)
            assert reply.lease is not None
            await shared.requests.release(protocol.Release(lease=reply.lease.id), ADMIN)
        await until_finished(shared, agent, process)
        assert shared.events.count("lease-requested") == 100
        assert shared.events.count("suspended") == shared.events.count("resumed")


@pytest.mark.thorough
async def test_with_a_full_pool_no_job_is_suspended_and_the_request_reports_it(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The pool has 64 MiB. A job that its user has suspended uses 56."""
    async with sharing_on(tmp_path, "1x60MiB") as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.node.attend(second_process.pid, b"2" * (50 * MIB), token="b" * 32)
        await shared.until_states(j1="running", j2="running")
        await shared.node.operations.suspend([second_process.pid], shared.node.context())
        with pytest.raises(HegmError, match="python with 6 MiB cannot be suspended"):
            await shared.make_room(56 * MIB, until_free=True)
        (job, _) = (await shared.requests.queue(ADMIN)).jobs
        assert job.why == "cannot be suspended: 12.0 MiB of the pool are needed to move 6.0 MiB, but 8.0 MiB are free"
        assert trains(agent, BYTES)
        assert "park" not in agent.orders
        await shared.node.operations.resume(second_process.pid, None, shared.node.context())
        await shared.until_states(j1="running", j2="running")
        assert not any(shared.sharing.memory.leases)


@pytest.mark.thorough
async def test_an_unreleased_lease_expires_and_the_job_returns(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path, max_lease_s=0.3) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.until_states(j1="running")
        await shared.make_room(7 * MIB)
        # On a slow machine the lease expires before its memory is free.
        await shared.until(lambda: bool({"lease-ended", "lease-dropped"} & set(shared.events)))
        await until_finished(shared, agent, process)


@pytest.mark.thorough
async def test_a_user_without_the_right_cannot_suspend_jobs_of_others(tmp_path: Path, process: Child) -> None:
    """Users may suspend only their own jobs here: neither a high nor a permitted priority suspends another's."""
    async with sharing_on(tmp_path, suspends_others=False) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        await shared.until_states(j1="running")
        await shared.requests.set_priority(protocol.SetPriority(job="j1", priority="best-effort"), ADMIN)
        stranger: Any = user(4711)
        with pytest.raises(HegmError, match="priority production is above 50"):
            await shared.make_room(7 * MIB, stranger, priority="production", until_free=True)
        with pytest.raises(HegmError, match="belongs to another user"):
            await shared.make_room(7 * MIB, stranger, until_free=True)
        assert trains(agent, BYTES)
        assert "park" not in agent.orders
        assert not any(shared.sharing.memory.leases)
