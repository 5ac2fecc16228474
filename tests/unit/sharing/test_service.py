"""The sharing service with model agents: jobs leave for leases and return, wait for a GPU and take turns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import anyio
import pytest

from hegmd.errors import DENIED, REFUSED, TIMEOUT, HegmError
from hegmd.protocol import sharing as protocol
from hegmd.protocol.messages import RegisterJob
from hegmd.sharing import model
from hegmd.sharing.actions import is_enough, target_of
from tests.patience import HANG_S
from tests.unit.sharing.shared_node import ADMIN, MIB, UID, SharedNode, sharing_on, user
from tests.wide import quick_first

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


@pytest.mark.thorough
async def test_a_job_leaves_for_a_lease_and_returns_once_it_has_ended(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        reply = await shared.make_room(7 * MIB, gpu="gpu0", until_free=True)
        assert reply.lease is not None
        assert (reply.lease.state, reply.lease.gpu) == ("held", "gpu0")
        assert shared.node.reservations(process.pid) == {}
        await shared.until_states(j1="suspended")
        waits = shared.node.moving.runner.describe(shared.node.moving.runner.under_way()[0].id).waits
        assert "hegmctl queue" in str(waits), "the hint named resume, for which there is no memory"
        (job,) = await shared.node.moving.job_requests.jobs((), lambda _: True, ended=False)
        assert job.state == "suspended"
        assert job.waits is not None
        assert "on gpu0" in job.waits
        await shared.requests.release(protocol.Release(lease=reply.lease.id), ADMIN)
        await shared.until_states(j1="running")
        assert agent.data == BYTES
        await shared.until(lambda: "resumed" in shared.events)
        assert sorted(shared.events) == ["lease-ended", "lease-held", "lease-requested", "resumed", "suspended"]


async def test_a_job_without_a_memory_report_is_surveyed_before_it_is_planned(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES, boundary=3)
        worker = shared.node.workers.find(process.pid)
        assert worker is not None
        worker.size_bytes = None  # like a job on a real GPU that no operation has surveyed yet
        planned = await shared.make_room(7 * MIB, dry_run=True)
        assert [step.job for step in planned.steps] == ["j1"]
        assert worker.size_bytes == len(BYTES)


async def test_a_job_without_a_survey_counts_as_running(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        worker = shared.node.workers.find(process.pid)
        assert worker is not None
        # Like a job on a real GPU: its agent connected before the first batch and has sent no report.
        worker.boundary, worker.size_bytes = 0, None
        planned = await shared.make_room(7 * MIB, dry_run=True)
        assert [step.job for step in planned.steps] == ["j1"]
        assert await shared.states() == {"j1": "running"}


@pytest.mark.thorough
async def test_a_resumed_job_counts_as_running(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        reply = await shared.make_room(7 * MIB, gpu="gpu0", until_free=True)
        assert reply.lease is not None
        await shared.requests.release(protocol.Release(lease=reply.lease.id), ADMIN)
        await shared.until(lambda: "resumed" in shared.events)
        history = shared.sharing.actions._history.of("j1")  # no later survey corrects the state
        assert history.state == model.RUNNING


async def test_a_dry_run_names_the_jobs_to_suspend_and_changes_nothing(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        planned = await shared.make_room(7 * MIB, dry_run=True)
        assert [(step.job, step.action, step.size_bytes) for step in planned.steps] == [("j1", "suspend", 6 * MIB)]
        assert (await shared.make_room(MIB, dry_run=True)).steps == ()
        assert await shared.states() == {"j1": "running"}
        assert list(shared.sharing.memory.leases) == []


async def test_an_impossible_request_for_memory_is_refused_and_leaves_no_lease(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        await shared.requests.set_priority(protocol.SetPriority(job="j1", priority="production"), ADMIN)
        for dry_run in (True, False):
            with pytest.raises(HegmError, match="cannot be freed with priority 80") as refused:
                await shared.make_room(7 * MIB, until_free=True, dry_run=dry_run)
            assert refused.value.code is REFUSED
        with pytest.raises(HegmError, match="were not free within") as late:
            await shared.make_room(7 * MIB, until_free=True, limit_s=0.05)
        assert late.value.code is TIMEOUT
        with pytest.raises(HegmError, match=r"9\.0 MiB can never be free: gpu0 has at most 8\.0 MiB"):
            await shared.make_room(9 * MIB, gpu="gpu0")
        assert list(shared.sharing.memory.leases) == []
        assert await shared.states() == {"j1": "running"}


async def test_a_lease_fails_if_a_job_reaches_no_boundary(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        agent.refuses["park"] = "no boundary came"
        with pytest.raises(HegmError, match="no boundary came"):
            await shared.make_room(7 * MIB, until_free=True)
        assert "failed" in shared.events
        assert agent.data == BYTES
        assert shared.sharing.memory.suspended == {}
        del agent.refuses["park"]
        await shared.until_states(j1="running")


async def test_a_caller_who_leaves_drops_the_lease_and_a_daemon_that_stops_does_not(
    tmp_path: Path, process: Child
) -> None:
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        agent.slow.add("park")
        for is_stopping in (False, True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait_for_room, shared)
                await shared.until(lambda: any(shared.sharing.memory.leases))
                if is_stopping:
                    shared.sharing.stop()
                tasks.cancel_scope.cancel()
            assert any(shared.sharing.memory.leases) == is_stopping
        agent.go_on.set()


async def _wait_for_room(shared: SharedNode) -> None:
    await shared.make_room(7 * MIB, until_free=True)


async def test_two_equal_requests_of_one_process_get_two_leases(tmp_path: Path) -> None:
    async with sharing_on(tmp_path) as shared, anyio.create_task_group() as tasks:
        whole_gpu = (await shared.make_room(8 * MIB, until_free=True)).lease
        assert whole_gpu is not None
        for _ in range(2):
            tasks.start_soon(lambda: shared.make_room(2 * MIB, gpu="gpu0", until_free=True, limit_s=HANG_S))
        await shared.until(lambda: len(list(shared.sharing.memory.leases)) == 3)
        await shared.requests.release(protocol.Release(lease=whole_gpu.id), ADMIN)
        await shared.until(lambda: [lease.is_held for lease in shared.sharing.memory.leases] == [True, True])


@pytest.mark.thorough
async def test_a_new_daemon_continues_with_leases_queue_and_suspended_jobs(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        reply = await shared.make_room(7 * MIB, name="serve", until_free=True)
        assert reply.lease is not None
        await shared.until_states(j1="suspended")
        await agent.leave()
    async with sharing_on(tmp_path) as shared:
        agent.workers = shared.node.workers
        await agent.attend(shared.node.tasks)
        await shared.until_states(j1="suspended")
        assert shared.sharing.history.of("j1").turn_s > 0, "its turn was interrupted, so it comes before others"
        (lease,) = (await shared.requests.queue(ADMIN)).leases
        assert (lease.id, lease.name, lease.state, lease.size_bytes) == (reply.lease.id, "serve", "held", 7 * MIB)
        await shared.requests.release(protocol.Release(lease="serve"), ADMIN)
        await shared.until_states(j1="running")
        assert agent.data == BYTES
        assert shared.sharing.memory.leases.next_number == 2


async def test_a_job_that_its_user_has_suspended_is_left_alone(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        await shared.node.operations.suspend([process.pid], shared.node.context())
        reply = await shared.make_room(7 * MIB, until_free=True)
        assert reply.lease is not None
        with pytest.raises(HegmError, match="of it kept for"):
            await shared.node.operations.resume(process.pid, None, shared.node.context())
        await shared.requests.release(protocol.Release(lease=reply.lease.id), ADMIN)
        (job,) = (await shared.requests.queue(ADMIN)).jobs
        assert (job.state, job.why, job.next) == ("suspended", "its user", "hegmctl resume j1")
        assert not shared.sharing.is_wanted
        resumed = await shared.node.operations.resume(process.pid, None, shared.node.context())
        assert resumed.operation is not None
        assert resumed.operation.phase == "done"


@pytest.mark.thorough
async def test_a_user_resumes_a_job_that_was_suspended_for_others(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path, "2x8MiB") as shared:
        await shared.node.attend(process.pid, BYTES, gpu="gpu0")
        reply = await shared.make_room(7 * MIB, gpu="gpu0", until_free=True)
        await shared.until_states(j1="suspended")
        resumed = await shared.node.operations.resume(process.pid, "gpu1", shared.node.context())
        assert resumed.operation is not None
        assert resumed.operation.phase == "done"
        shared.sharing.look_again()
        await shared.until(lambda: shared.sharing.memory.suspended == {})
        assert reply.lease is not None
        await shared.requests.release(protocol.Release(lease=reply.lease.id), ADMIN)
        assert shared.node.reservations(process.pid) == {"gpu1": 6 * MIB}


async def test_a_job_migrates_for_a_lease_if_another_gpu_has_memory(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path, "2x8MiB") as shared:
        agent = await shared.node.attend(process.pid, BYTES)
        source = next(iter(shared.node.reservations(process.pid)))
        target = {"gpu0": "gpu1", "gpu1": "gpu0"}[source]
        await shared.make_room(7 * MIB, gpu=source, until_free=True)
        await shared.until_states(j1="running")
        assert shared.node.reservations(process.pid) == {target: 6 * MIB}
        assert agent.data == BYTES


async def test_users_cannot_set_high_priorities_or_change_what_others_own(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        reply = await shared.make_room(MIB, until_free=True, name="roots")
        assert reply.lease is not None
        ada, bob = user(UID + 1), user(UID + 2)
        with pytest.raises(HegmError, match="priority production is above 50") as denied:
            await shared.make_room(MIB, ada, priority="production")
        assert denied.value.code is DENIED
        own_reply = await shared.make_room(MIB, ada, gpu="gpu0")
        assert own_reply.lease is not None
        assert own_reply.lease.priority == 50
        for lease in (reply.lease.id, own_reply.lease.id):
            with pytest.raises(HegmError, match="belongs to uid"):
                await shared.requests.release(protocol.Release(lease=lease), bob)
        with pytest.raises(HegmError, match=r"job j1 .* belongs to uid"):
            await shared.requests.set_priority(protocol.SetPriority(job="j1", priority=0), bob)
        with pytest.raises(HegmError, match="cannot be freed with priority 50"):
            await shared.make_room(7 * MIB, ada, until_free=True)  # the job has the same priority
        assert await shared.states() == {"j1": "running"}


async def test_a_job_keeps_its_place_in_the_queue_when_it_reconnects(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with sharing_on(tmp_path) as shared:
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        placed: list[str] = []

        async def wait(run: str) -> None:
            reply = await shared.requests.place(protocol.PlaceJob(run=run, size_bytes=5 * MIB), ADMIN, shared.emit)
            placed.append(f"{run} on {reply.gpu}")

        for child, run in ((process, "first"), (second_process, "second")):
            await shared.node.moving.job_requests.register(child.pid, UID, RegisterJob(run=run, command=("train",)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "first")
            await shared.until(lambda: len(shared.sharing.memory.queue) == 1)
            since_utc = shared.sharing.memory.queue[1].since_utc
            tasks.start_soon(wait, "second")
            tasks.start_soon(wait, "first")  # its connection ended, and it repeats the request
            await shared.until(lambda: any(getattr(progress, "ahead", 0) == 1 for progress in shared.progress))
            assert shared.sharing.memory.queue[1].since_utc == since_utc
            assert await shared.states() == {"j1": "waiting", "j2": "waiting"}
            await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
            await shared.until(lambda: len(placed) == 2)
            assert placed == ["first on gpu0"] * 2, "its requested memory is reserved until it trains"
            process.kill()
            process.wait()
            await shared.until(lambda: len(placed) == 3)
        assert placed[-1] == "second on gpu0"


@pytest.mark.thorough
async def test_jobs_of_equal_priority_take_turns_and_keep_their_data(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    policy = model.Rules(slices=True, min_quantum_s=0.02, quantum_per_switch=0.0, settle_s=0.0)
    async with sharing_on(tmp_path, policy=policy) as shared:
        first_agent = await shared.node.attend(process.pid, BYTES)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.until_states(j1="suspended")
        second_agent = await shared.node.attend(second_process.pid, b"2" * len(BYTES), token="b" * 32)
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
        await shared.until(lambda: shared.events.count("resumed") >= 4)
        assert shared.events.count("suspended") >= 4
        await shared.until(lambda: first_agent.data is not None and not first_agent.parked)
        assert first_agent.data == BYTES
        await shared.until(lambda: second_agent.data is not None and not second_agent.parked)
        assert second_agent.data == b"2" * len(BYTES)


async def test_a_user_who_suspends_a_suspended_job_keeps_it_suspended(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.until_states(j1="suspended")
        result = await shared.node.operations.suspend([process.pid], shared.node.context())
        assert result.operation is not None
        assert result.operation.phase == "suspended"
        with pytest.raises(HegmError, match="suspended"):
            await shared.node.operations.suspend([process.pid], shared.node.context())
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
        (job,) = (await shared.requests.queue(ADMIN)).jobs
        assert (job.state, job.why) == ("suspended", "its user")


@pytest.mark.thorough
async def test_requested_memory_is_reserved_until_the_job_ends(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with sharing_on(tmp_path, "2x8MiB") as shared:
        await shared.node.attend(second_process.pid, b"2" * (4 * MIB), token="b" * 32, gpu="gpu1")
        register = shared.node.moving.job_requests.register
        await register(process.pid, UID, RegisterJob(run="first", command=("train",)))
        await shared.requests.place(protocol.PlaceJob(run="first", gpu="gpu0", size_bytes=5 * MIB), ADMIN, shared.emit)
        assert (await shared.states())["j2"] == "starting"
        with pytest.raises(HegmError, match="cannot be freed"):
            await shared.make_room(4 * MIB, gpu="gpu0", priority="normal", until_free=True)
        with pytest.raises(HegmError, match=r"5\.0 MiB of it kept for"):
            await shared.node.operations.migrate([second_process.pid], "gpu0", shared.node.context())
        await shared.node.attend(process.pid, b"1" * MIB, run="first")
        await shared.until(lambda: shared.sharing.memory.queue[2].has_trained)
        await shared.until_states(j1="running", j2="running")
        assert not shared.sharing.is_wanted
        with pytest.raises(HegmError, match=r"4\.0 MiB of it kept for"):
            await shared.node.operations.migrate([second_process.pid], "gpu0", shared.node.context())
        process.kill()
        process.wait()
        await shared.until(lambda: shared.sharing.memory.queue == {})
        await shared.node.operations.migrate([second_process.pid], "gpu0", shared.node.context())


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "kept_context"), quick_first([("auto", True), ("whole", False)], 1))
async def test_a_job_keeps_its_context_between_turns_if_the_method_allows_it(
    tmp_path: Path, process: Child, second_process: Child, method: str, kept_context: bool
) -> None:
    policy = model.Rules(slices=True, min_quantum_s=0.02, quantum_per_switch=0.0, settle_s=0.0)
    async with sharing_on(tmp_path, policy=policy, method=method) as shared:
        await shared.node.attend(process.pid, BYTES)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.until_states(j1="suspended")
        await shared.node.attend(second_process.pid, b"2" * len(BYTES), token="b" * 32)
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
        await shared.until(lambda: shared.events.count("suspended") >= 3)
        first, *turns = shared.node.operations.runner.operations()[:3]
        assert not any(worker.keeps_context for worker in first.workers), "a lease needs all of the memory"
        assert [worker.keeps_context for op in turns for worker in op.workers] == [kept_context, kept_context]


@pytest.mark.thorough
@pytest.mark.parametrize("kept_context", [True, False])
async def test_jobs_keep_their_contexts_if_the_lease_requests_it(
    tmp_path: Path, process: Child, *, kept_context: bool
) -> None:
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        await shared.make_room(7 * MIB, gpu="gpu0", until_free=True, keep_context=kept_context)
        (operation,) = shared.node.operations.runner.operations()
        assert [worker.keeps_context for worker in operation.workers] == [kept_context]


def test_a_kept_context_must_leave_enough_for_a_lease() -> None:
    lease = model.Lease("l1", "l1", model.PENDING, 80, 0, 0.0, 60, "gpu0")
    node = model.Snapshot((model.Gpu("gpu0", 100, 20, chip="H200", is_healthy=True),), (), (lease,))
    action = model.Action(model.SUSPEND, "j1", ("gpu0",), (50,), "it is needed", "l1")
    assert is_enough(action, {"gpu0": 10}, node)
    assert not is_enough(action, {"gpu0": 11}, node)


@pytest.mark.thorough
async def test_a_job_with_a_kept_context_returns_to_its_own_gpu_only(tmp_path: Path, process: Child) -> None:
    async with sharing_on(tmp_path, "2x8MiB", method="keep-context") as shared:
        agent = await shared.node.attend(process.pid, BYTES, gpu="gpu0")
        await shared.requests.set_priority(protocol.SetPriority(job="j1", priority=0), ADMIN)
        other_gpu = (await shared.make_room(7 * MIB, gpu="gpu1", until_free=True)).lease
        lease = (await shared.make_room(7 * MIB, gpu="gpu0", until_free=True)).lease
        assert lease is not None
        assert other_gpu is not None
        await shared.until_states(j1="suspended")
        await shared.requests.release(protocol.Release(lease=other_gpu.id), ADMIN)
        (job,) = (await shared.requests.queue(ADMIN)).jobs
        assert (job.state, job.gpu) == ("suspended", "gpu0")
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
        await shared.until_states(j1="running")
        assert agent.data == BYTES


def test_the_target_of_a_job_on_several_gpus_maps_each_gpu() -> None:
    def to(former: tuple[str, ...], gpus: tuple[str, ...]) -> str | None:
        job = model.Job("j1", "train", model.SUSPENDED, 50, 0, 0.0, former, (1,) * len(former))
        action = model.Action(model.RESUME, "j1", gpus, (1,) * len(gpus), "there is room")
        return target_of(action, model.Snapshot((), (job,)))

    assert to(("gpu0",), ("gpu0",)) is None
    assert to(("gpu0",), ("gpu1",)) == "gpu1"
    assert to(("gpu1", "gpu0"), ("gpu1", "gpu0")) is None
    assert to(("gpu1", "gpu0"), ("gpu1", "gpu2")) == "gpu0=gpu2"
