"""Draining and swapping carried out, over model agents in processes that live.

Longer than 400 lines because each way in which a swap can fail has a test.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import anyio
import pytest

from hegmd.errors import BUSY, DENIED, NOT_FOUND, REFUSED, HegmError
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import MIB, Node, running

Child = subprocess.Popen[bytes]


async def on_both(
    node: Node, process: Child, second_process: Child, size_bytes: int = 7
) -> tuple[ModelAgent, ModelAgent]:
    """A job on gpu0, and another on gpu1."""
    one = await node.attend(process.pid, b"1" * size_bytes, gpu="gpu0")
    two = await node.attend(second_process.pid, b"2" * size_bytes, token="b" * 32, gpu="gpu1")
    return one, two


@pytest.mark.thorough
async def test_a_drain_moves_jobs_one_by_one_and_reports_which_stay(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        first = await node.attend(process.pid)
        await node.operations.migrate([process.pid], "gpu1", node.context())
        await node.attend(second_process.pid, token="b" * 32)
        await node.operations.migrate([process.pid], "gpu0", node.context())
        first.refuses["park"] = "no boundary came"
        outcome = await node.sequences.drain("gpu0", (), node.context())
        assert not outcome.left
        by_pid = {operation.processes[0].pid: operation for operation in outcome.operations}
        assert by_pid[second_process.pid].phase == "done"
        assert by_pid[process.pid].phase == "rolled-back"
        assert node.reservations(second_process.pid) == {"gpu1": 7}
        assert node.reservations(process.pid) == {"gpu0": 7}


@pytest.mark.thorough
async def test_two_jobs_that_fill_their_gpus_swap_through_the_pool(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path, "2x4MiB") as node:
        one = await node.attend(process.pid, b"1" * (3 * MIB))
        two = await node.attend(second_process.pid, b"2" * (3 * MIB), token="b" * 32)
        here, there = (next(iter(node.reservations(pid))) for pid in (process.pid, second_process.pid))
        assert here != there
        outcome = await node.sequences.swap(process.pid, second_process.pid, node.context())
        assert [operation.phase for operation in outcome.operations] == ["done", "done"]
        assert (list(node.reservations(process.pid)), list(node.reservations(second_process.pid))) == ([there], [here])
        assert (one.data, two.data) == (b"1" * (3 * MIB), b"2" * (3 * MIB))


@pytest.mark.thorough
async def test_two_processes_of_one_job_both_ended_on_one_gpu_after_a_swap(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """Each of the two steps took the whole job along, and `done` was reported."""
    async with running(tmp_path) as node:
        await node.attend(process.pid, run="run-1")
        await node.attend(second_process.pid, token="b" * 32, run="run-1")
        here, there = (next(iter(node.reservations(pid))) for pid in (process.pid, second_process.pid))
        assert here != there
        (operation,) = (await node.sequences.swap(process.pid, second_process.pid, node.context())).operations
        assert operation.phase == "done"
        assert (list(node.reservations(process.pid)), list(node.reservations(second_process.pid))) == ([there], [here])


@pytest.mark.thorough
async def test_a_drain_with_no_waiting_client_starts_all_its_migrations(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        for pid, token in ((process.pid, "a" * 32), (second_process.pid, "b" * 32)):
            agent = await node.attend(pid, token=token, gpu="gpu0")
            agent.slow.add("park")
        outcome = await node.sequences.drain("gpu0", (), node.context(wait=False))
        assert [operation.id for operation in outcome.operations] == ["1", "2"]
        assert {operation.processes[0].to for operation in outcome.operations} == {"gpu1"}
        assert node.operations.runner.describe("1").phase not in {"done", "rolled-back"}


@pytest.mark.thorough
async def test_concurrent_moves_do_not_count_the_same_memory(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The second was planned with the room that the first had been promised, and was turned back later."""
    async with running(tmp_path, "2x8MiB") as node:
        agents = []
        for pid, token in ((process.pid, "a" * 32), (second_process.pid, "b" * 32)):
            agents.append(await node.attend(pid, b"x" * (3 * MIB), token, gpu="gpu0"))
        for agent in agents:
            agent.data, agent.size_bytes = b"x" * (5 * MIB), 5 * MIB  # together more than the other GPU has
        outcome = await node.sequences.drain("gpu0", (), node.context(wait=False))
        assert len(outcome.operations) == 1
        (reason,) = outcome.left
        assert (reason.code, "3.0 MiB free" in reason.message) == ("refused", True)
        assert (await node.at_rest("1")).phase == "done"


async def test_a_planned_drain_counts_the_earlier_moves(tmp_path: Path, process: Child, second_process: Child) -> None:
    async with running(tmp_path, "2x8MiB") as node:
        for pid, token in ((process.pid, "a" * 32), (second_process.pid, "b" * 32)):
            await node.attend(pid, b"x" * (3 * MIB), token, gpu="gpu0")
        plan = await node.sequences.drain("gpu0", ("gpu1",), node.context(dry_run=True))
        assert (len(plan.plans), plan.operations, plan.left) == (2, [], [])
        assert [step.gpu_free_bytes for step in plan.plans] == [{"gpu1": 8 * MIB}, {"gpu1": 5 * MIB}]
        assert node.operations.runner.operations() == ()


@pytest.mark.thorough
async def test_a_drain_moves_only_the_ranks_on_its_gpu(tmp_path: Path, process: Child, second_process: Child) -> None:
    """The whole job went to the target, also what was not on the GPU that was to be emptied."""
    async with running(tmp_path, "3x1GiB") as node:
        await node.attend(process.pid, run="1", gpu="gpu0")
        await node.attend(second_process.pid, token="b" * 32, run="1", gpu="gpu1")
        outcome = await node.sequences.drain("gpu0", ("gpu2",), node.context())
        (operation,) = outcome.operations
        assert operation.phase == "done"
        assert node.reservations(process.pid) == {"gpu2": 7}
        assert node.reservations(second_process.pid) == {"gpu1": 7}


@pytest.mark.parametrize(
    ("gpu", "to", "code"), [("gpu7", (), NOT_FOUND), ("gpu0", ("gpu7",), NOT_FOUND), ("gpu0", ("gpu0",), REFUSED)]
)
async def test_a_drain_from_or_to_nowhere_is_refused(
    tmp_path: Path, gpu: str, to: tuple[str, ...], code: object
) -> None:
    async with running(tmp_path) as node:
        with pytest.raises(HegmError) as refused:
            await node.sequences.drain(gpu, to, node.context())
        assert refused.value.code is code


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_drain_leaves_jobs_that_the_caller_may_not_move(tmp_path: Path, process: Child, dry_run: bool) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid, gpu="gpu0")
        outcome = await node.sequences.drain("gpu0", (), node.context(may=False, dry_run=dry_run))
        assert (outcome.operations, outcome.plans) == ([], [])
        assert [(reason.code, reason.pid) for reason in outcome.left] == [(DENIED.name, process.pid)]
        assert "park" not in agent.orders


@pytest.mark.thorough
async def test_two_jobs_swap_one_after_the_other_if_there_is_memory(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        await on_both(node, process, second_process)
        outcome = await node.sequences.swap(process.pid, second_process.pid, node.context())
        assert [(operation.kind, operation.phase) for operation in outcome.operations] == [("migrate", "done")] * 2
        assert node.reservations(process.pid) == {"gpu1": 7}
        assert node.reservations(second_process.pid) == {"gpu0": 7}


@pytest.mark.thorough
async def test_a_planned_swap_names_its_steps_and_does_nothing(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path, "2x4MiB") as node:
        await on_both(node, process, second_process, 3 * MIB)
        plans = (await node.sequences.swap(process.pid, second_process.pid, node.context(dry_run=True))).plans
        steps = [(plan.kind, plan.workers[0].pid, plan.workers[0].to) for plan in plans]
        assert steps == [
            ("suspend", process.pid, None),
            ("suspend", second_process.pid, None),
            ("resume", process.pid, "gpu1"),
            ("resume", second_process.pid, "gpu0"),
        ]
        assert node.operations.runner.operations() == ()


@pytest.mark.thorough
async def test_a_swap_whose_caller_disconnected_left_a_job_suspended_for_ever(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The first job waited in the pool; the swap did not request its other steps nor its return."""
    async with running(tmp_path, "2x4MiB") as node:
        one, two = await on_both(node, process, second_process, 3 * MIB)
        two.slow.add("park")
        with anyio.CancelScope() as caller:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(node.sequences.swap, process.pid, second_process.pid, node.context())
                await two.waiting.wait()
                caller.cancel()
        with anyio.fail_after(HANG_S):
            while one.data is not None:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        two.go_on.set()
        with anyio.fail_after(HANG_S):
            while node.reservations(process.pid) != {"gpu1": 3 * MIB} or one.parked:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        assert one.data == b"1" * (3 * MIB)
        assert node.reservations(second_process.pid) == {"gpu0": 3 * MIB}


@pytest.mark.thorough
@pytest.mark.parametrize("has_room", [True, False])
async def test_a_swap_that_a_killed_daemon_had_begun_left_a_job_suspended(
    tmp_path: Path, process: Child, second_process: Child, has_room: bool
) -> None:
    """The next daemon resumes it on the other GPU, or on its own if the other job has not left that one."""
    async with running(tmp_path, "2x4MiB") as node:
        one, two = await on_both(node, process, second_process, 3 * MIB)
        two.slow.add("offload")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.sequences.swap, process.pid, second_process.pid, node.context())
            await two.waiting.wait()
            with anyio.fail_after(HANG_S):
                while one.data is not None:
                    await anyio.wait_all_tasks_blocked()
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await one.leave()
        await two.leave()
    two.slow.clear()
    if not has_room:
        two.refuses["offload"] = "a storage is in use"
    async with running(tmp_path, "2x4MiB") as node:
        for agent in (one, two):
            agent.workers = node.workers
            await agent.attend(node.tasks)
        with anyio.fail_after(HANG_S):
            while one.data != b"1" * (3 * MIB) or one.parked or two.parked:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        assert two.data == b"2" * (3 * MIB)
        told = node.events.remembered(kinds=["operation.swap-interrupted"])
        assert [event.severity for event in told] == ["info"] * (2 if has_room else 1)
        places = ("gpu1", "gpu0") if has_room else ("gpu0", "gpu1")
        assert node.reservations(process.pid) == {places[0]: 3 * MIB}
        assert node.reservations(second_process.pid) == {places[1]: 3 * MIB}


@pytest.mark.thorough
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_daemon_killed_between_the_two_moves_of_a_swap_left_both_jobs_on_one_gpu(
    tmp_path: Path, process: Child, second_process: Child, is_refused: bool
) -> None:
    """The next daemon makes the second move, or undoes the first if the second fails, and an event says so."""
    async with running(tmp_path) as node:
        one, two = await on_both(node, process, second_process)
        one.slow.add("offload")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.sequences.swap, process.pid, second_process.pid, node.context())
            await one.waiting.wait()
            tasks.cancel_scope.cancel()
        await one.leave()
        await two.leave()
    one.slow.clear()
    if is_refused:
        two.refuses["offload"] = "a storage is in use"
    async with running(tmp_path) as node:
        for agent in (one, two):
            agent.workers = node.workers
            await agent.attend(node.tasks)
        places = ("gpu0", "gpu1") if is_refused else ("gpu1", "gpu0")
        with anyio.fail_after(HANG_S):
            while not (told := node.events.remembered(kinds=["operation.swap-interrupted"])):
                await node.events.wait_beyond(node.events.next_seq)
        assert [event.severity for event in told] == ["info"]
        assert (node.reservations(process.pid), node.reservations(second_process.pid)) == (
            {places[0]: 7},
            {places[1]: 7},
        )
    async with running(tmp_path) as node:  # it is over: another daemon does nothing
        assert node.operations.runner.under_way() == ()
        assert not [op for op in node.operations.runner.operations() if op.created_utc > told[0].time_utc]


async def seen_by_next_daemon(folder: Path, *agents: ModelAgent) -> list[tuple[str, str]]:
    """Return the operations and their phases once a new daemon has all agents and nothing left to do."""
    async with running(folder) as node:
        for agent in agents:
            agent.workers = node.workers
            await agent.attend(node.tasks)
        await anyio.wait_all_tasks_blocked()
        return [(op.id, op.phase) for op in node.operations.runner.operations()]


@pytest.mark.thorough
async def test_the_next_daemon_does_not_make_a_move_of_a_swap_that_was_undone(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        one, two = await on_both(node, process, second_process)
        one.slow.add("offload")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.sequences.swap, process.pid, second_process.pid, node.context())
            await one.waiting.wait()
            await two.leave()
            one.go_on.set()
        undone = node.operations.runner.describe("2")
        assert (undone.phase, undone.processes[0].pid, undone.processes[0].gpu) == ("done", process.pid, "gpu0")
        await one.leave()
    assert [op_id for op_id, _ in await seen_by_next_daemon(tmp_path, one, two)] == ["1", "2"]


@pytest.mark.thorough
async def test_the_next_daemon_made_the_second_move_of_a_swap_whose_moves_had_been_refused_long_before(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        one, two = await on_both(node, process, second_process)
        one.slow.add("reload")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.sequences.swap, process.pid, second_process.pid, node.context())
            await one.waiting.wait()
            two.slow.add("survey")
            one.go_on.set()
            await two.waiting.wait()
            for agent in (one, two):
                await agent.leave()
    one.slow.clear()
    two.slow.clear()
    assert await seen_by_next_daemon(tmp_path, one, two) == [("1", "done"), ("2", "rolled-back")]


@pytest.mark.thorough
async def test_both_jobs_were_left_on_one_gpu_if_the_second_move_of_a_swap_failed(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The next swap was refused for that."""
    async with running(tmp_path) as node:
        _, two = await on_both(node, process, second_process)
        two.refuses["offload"] = "a storage is in use"
        outcome = await node.sequences.swap(process.pid, second_process.pid, node.context())
        ends = [(operation.processes[0].pid, operation.phase) for operation in outcome.operations]
        assert ends == [(process.pid, "done"), (second_process.pid, "rolled-back"), (process.pid, "done")]
        assert node.reservations(process.pid) == {"gpu0": 7}
        assert node.reservations(second_process.pid) == {"gpu1": 7}


@pytest.mark.thorough
async def test_a_job_stayed_suspended_after_a_failed_swap_though_the_other_job_had_left_it_a_gpu(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """It was to return to its own GPU only, where the other job was by then."""
    async with running(tmp_path, "2x4MiB") as node:
        one, two = await on_both(node, process, second_process, 3 * MIB)
        one.refuses["reload"], two.slow = "the test wants it so", {"reload"}
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(node.sequences.swap, process.pid, second_process.pid, node.context())
                await two.waiting.wait()
                while (await node.at_rest("1")).failure is None:
                    await anyio.lowlevel.checkpoint()
                one.refuses.clear()
                two.go_on.set()
        assert (one.data, one.parked) == (b"1" * (3 * MIB), False)
        assert node.reservations(process.pid) == {"gpu1": 3 * MIB}
        assert node.reservations(second_process.pid) == {"gpu0": 3 * MIB}


@pytest.mark.thorough
async def test_a_swap_that_fails_in_the_middle_returns_the_first_job(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path, "2x4MiB") as node:
        one, two = await on_both(node, process, second_process, 3 * MIB)
        two.refuses["offload"] = "a storage is in use"
        outcome = await node.sequences.swap(process.pid, second_process.pid, node.context())
        assert [(operation.kind, operation.phase) for operation in outcome.operations] == [
            ("resume", "done"),
            ("suspend", "rolled-back"),
        ]
        assert (one.data, one.parked) == (b"1" * (3 * MIB), False)
        assert node.reservations(process.pid) == {"gpu0": 3 * MIB}
        assert node.reservations(second_process.pid) == {"gpu1": 3 * MIB}


@pytest.mark.thorough
async def test_both_jobs_are_offloaded_at_the_same_time(tmp_path: Path, process: Child, second_process: Child) -> None:
    """Each over its own GPU's link: neither copy waits for the other one."""
    async with running(tmp_path, "2x4MiB") as node:
        one, two = await on_both(node, process, second_process, 3 * MIB)
        for agent in (one, two):
            agent.slow.add("offload")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.sequences.swap, process.pid, second_process.pid, node.context())
            for agent in (one, two):
                await agent.waiting.wait()
            for agent in (one, two):
                agent.go_on.set()
        assert (node.reservations(process.pid), node.reservations(second_process.pid)) == (
            {"gpu1": 3 * MIB},
            {"gpu0": 3 * MIB},
        )


@pytest.mark.thorough
async def test_after_a_failed_rollback_of_a_swap_one_job_runs_and_the_other_has_a_resume_command(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path, "2x4MiB") as node:
        one, _ = await on_both(node, process, second_process, 3 * MIB)
        one.refuses["reload"] = "the test wants it so"
        outcome = await node.sequences.swap(process.pid, second_process.pid, node.context())
        suspended, moved = sorted(outcome.operations, key=lambda op: op.processes[0].pid != process.pid)
        assert (suspended.phase, moved.phase) == ("suspended", "done")
        assert suspended.waits is not None
        assert suspended.waits.next == f"hegmctl resume {process.pid}"
        one.refuses.clear()
        await node.operations.resume(process.pid, "gpu1", node.context())
        assert one.data == b"1" * (3 * MIB)


@pytest.mark.thorough
async def test_a_swap_completes_without_a_waiting_client(tmp_path: Path, process: Child, second_process: Child) -> None:
    async with running(tmp_path) as node:
        await on_both(node, process, second_process)
        begun = await node.sequences.swap(process.pid, second_process.pid, node.context(wait=False))
        assert [operation.id for operation in begun.operations] == ["1"]
        with anyio.fail_after(HANG_S):
            while node.reservations(process.pid) != {"gpu1": 7} or node.reservations(second_process.pid) != {"gpu0": 7}:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()


@pytest.mark.thorough
async def test_impossible_swaps_give_the_reason(tmp_path: Path, process: Child, second_process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid, gpu="gpu0")
        with pytest.raises(HegmError, match=f"process {second_process.pid} is on no GPU"):
            await node.sequences.swap(process.pid, second_process.pid, node.context())
        await node.attend(second_process.pid, token="b" * 32, gpu="gpu0")
        with pytest.raises(HegmError, match="are both on gpu0"):
            await node.sequences.swap(process.pid, second_process.pid, node.context())
        await node.operations.suspend([process.pid], node.context())
        with pytest.raises(HegmError, match="operation 1") as refused:
            await node.sequences.swap(process.pid, second_process.pid, node.context())
        assert refused.value.code is BUSY


@pytest.mark.parametrize("limit_s", [0.0, -1.0, 1e300, float("inf"), float("nan")])
async def test_an_invalid_limit_is_refused(tmp_path: Path, process: Child, limit_s: float) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        request = node.context(limit_s=limit_s)
        with pytest.raises(HegmError, match="is not a valid limit for the wait for a boundary"):
            await node.operations.suspend([process.pid], request)
        assert "park" not in agent.orders
