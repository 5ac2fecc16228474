"""The facts for a plan when agents answer late or at different moments, and the GPU memory that no job can have."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path

import anyio
import pytest

from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import Operation
from hegmd.migration.model import PoolMemory
from hegmd.operations.request_context import OperationResult
from hegmd.operations.service import OperationsService
from hegmd.operations.survey import AGENT_SHARE, FIRST_SURVEY_S, SURVEY_S, PlanSurvey
from hegmd.workers.workers import AgentConnection
from tests.patience import HANG_S
from tests.unit.migration.operations import operation
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import MIB, Node, running, start_ticks

Child = subprocess.Popen[bytes]


async def test_ranks_with_short_steps_that_answer_at_different_moments_count_as_distributed(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """They were quiesced one by one: each waited for another that was parked already."""
    async with running(tmp_path) as node:
        first = await node.attend(process.pid, run="1", rank=0, world_size=2)
        second = await node.attend(second_process.pid, token="b" * 32, run="1", rank=1, world_size=2)
        second.slow.add("survey")
        plans: list[OperationResult] = []

        async def plan() -> None:
            plans.append(await node.operations.suspend([process.pid], node.context(dry_run=True)))

        node.tasks.start_soon(plan)
        with anyio.fail_after(HANG_S):
            await second.waiting.wait()
            while "survey" not in first.orders:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            first.boundary += 1000
            second.boundary += 1000
            second.go_on.set()
            while not plans:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        assert plans[0].plan is not None
        assert plans[0].plan.is_distributed


async def test_the_gpus_are_read_while_agents_are_surveyed(tmp_path: Path, process: Child) -> None:
    surveyed: list[int] = []

    async def count(worker: AgentConnection, _limit_s: float) -> None:
        while node.inventory.refresh_count == looks:
            await anyio.lowlevel.checkpoint()
        surveyed.append(worker.pid)

    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await anyio.wait_all_tasks_blocked()
        looks = node.inventory.refresh_count
        survey = PlanSurvey(
            *(node.inventory, node.workers, lambda: PoolMemory(budget_bytes=0, free_bytes=0)),
            count=count,
            running=tuple,
            supervisors=node.moving.supervisors,
        )
        await survey.snapshot([process.pid], may=lambda _uid: True)
        assert surveyed == [process.pid]


async def test_the_first_plan_of_a_job_with_long_steps_had_the_driver_copy_all_its_bytes(
    tmp_path: Path, process: Child
) -> None:
    """Its agent reached no boundary within a second, as a rank of 16 GiB did after its restore: 14 s instead of 2."""
    limits_s: list[float] = []

    async def count(_worker: AgentConnection, limit_s: float) -> None:
        await anyio.lowlevel.checkpoint()
        limits_s.append(limit_s)

    async with running(tmp_path) as node:
        await node.attend(process.pid, boundary=3)
        worker = node.workers.find(process.pid)
        assert worker is not None
        survey = PlanSurvey(
            *(node.inventory, node.workers, lambda: PoolMemory(budget_bytes=0, free_bytes=0)),
            count=count,
            running=tuple,
            supervisors=node.moving.supervisors,
        )
        for worker.is_surveyed in (False, True):
            await survey.snapshot([process.pid], may=lambda _uid: True)
        await survey.snapshot([process.pid], may=lambda _uid: True, first_s=SURVEY_S)
        assert limits_s == [FIRST_SURVEY_S * AGENT_SHARE, SURVEY_S * AGENT_SHARE, SURVEY_S * AGENT_SHARE]


async def test_a_survey_that_found_nothing_new_had_the_gpus_read_twice(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await node.moving.survey.snapshot([process.pid], may=lambda _uid: True)
        announced = node.inventory._changes_known  # after each, the GPUs are read again
        await node.moving.survey.snapshot([process.pid], may=lambda _uid: True)
        assert node.inventory._changes_known == announced


@pytest.mark.thorough
async def test_a_job_whose_first_survey_was_late_was_placed_as_if_it_held_nothing(
    tmp_path: Path, process: Child
) -> None:
    """Others were placed beside it, in memory that it had."""
    async with running(tmp_path, "1x8MiB") as node:
        agent = ModelAgent(node.workers, process.pid, b"1" * (6 << 20))
        agent.about, agent.is_late = {"size_bytes": 0}, True
        await agent.attend(node.tasks)
        with anyio.fail_after(HANG_S):
            while agent.orders.count("survey") < 2:
                await anyio.lowlevel.checkpoint()
        worker = node.workers.find(process.pid)
        assert worker is not None
        assert (worker.gpu, node.reservations(process.pid)) == (None, {})
        agent.is_late = False
        await node.until_placed(process.pid)
        assert node.reservations(process.pid) == {"gpu0": 6 << 20}


async def test_the_reserve_of_driver_and_hegmd_is_no_memory_for_jobs(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """A request for nearly a whole GPU waited until its time limit, since no job can ever have that much."""
    async with running(tmp_path, "1x8MiB") as node:
        await node.attend(process.pid, b"1" * 100)
        await node.attend(second_process.pid, b"1" * 20, token="b" * 32)
        snapshot = await node.inventory.fresh(0.0)
        real = snapshot._replace(gpus=tuple([gpu.replace(memory_free_bytes=8 << 20) for gpu in snapshot.gpus]))
        real = real._replace(gpus=tuple([gpu.replace(memory_total_bytes=9 << 20) for gpu in real.gpus]))
        own = PlanSurvey(
            *(node.inventory, node.workers, lambda: PoolMemory(budget_bytes=0, free_bytes=0)),
            count=node.moving.attendance.count,
            running=tuple,
            supervisors=node.moving.supervisors,
            own_pids=lambda: (second_process.pid,),
            copying_pids=lambda: copying,
        )
        copying: tuple[int, ...] = ()
        assert own.kept_bytes(snapshot) == {"gpu0": 20}
        assert own.kept_bytes(real) == {"gpu0": (1 << 20) - 120 + 20}
        assert [gpu.copying_bytes for gpu in (await own.snapshot([], may=lambda _uid: True)).gpus] == [0]
        copying = (second_process.pid,)
        assert own.kept_bytes(snapshot) == {"gpu0": 0}, "a request was refused for ever because of a copy"
        assert [gpu.copying_bytes for gpu in (await own.snapshot([], may=lambda _uid: True)).gpus] == [20]


async def test_a_snapshot_is_taken_again_if_an_operation_ends_meanwhile(tmp_path: Path) -> None:
    """The memory of the GPU was from before a suspend and the job from after it: make-room was refused."""
    suspending, suspended = operation(kind="suspend", phase="offloading"), operation(kind="suspend", phase=SUSPENDED)
    moments: list[tuple[Operation, ...]] = [(suspending,), (suspending,), (suspended,)]
    async with running(tmp_path, "1x8MiB") as node:
        survey = PlanSurvey(
            *(node.inventory, node.workers, lambda: PoolMemory(budget_bytes=0, free_bytes=0)),
            count=node.moving.attendance.count,
            running=lambda: moments.pop(0) if len(moments) > 1 else moments[0],
            supervisors=node.moving.supervisors,
        )
        snapshot = await survey.snapshot([])
        assert snapshot.running == (suspended,)
        changing = iter(range(99))
        survey = PlanSurvey(
            *(node.inventory, node.workers, lambda: PoolMemory(budget_bytes=0, free_bytes=0)),
            count=node.moving.attendance.count,
            running=lambda: (operation(id=f"op{next(changing)}"),),
            supervisors=node.moving.supervisors,
        )
        assert await survey.snapshot([]), "operations that begin again and again keep no request waiting"


async def until_awaited(worker: AgentConnection) -> None:
    """Return once its snapshot is waited for."""
    with anyio.fail_after(HANG_S):
        while worker.snapshot is None or not worker.snapshot.over.statistics().tasks_waiting:
            await anyio.wait_all_tasks_blocked()
            await anyio.lowlevel.checkpoint()


async def drained(node: Node, _first: int, _second: int) -> None:
    outcome = await node.sequences.drain("gpu0", (), node.context())
    assert [operation.phase for operation in outcome.operations] == ["done"]


async def drain_planned(node: Node, _first: int, _second: int) -> None:
    outcome = await node.sequences.drain("gpu0", (), node.context(dry_run=True))
    assert (len(outcome.plans), outcome.left) == (1, [])


async def migrated(node: Node, first: int, _second: int) -> None:
    moved = (await node.operations.migrate([first], "gpu1", node.context())).operation
    assert moved is not None
    assert moved.phase == "done"


async def swapped(node: Node, first: int, second: int) -> None:
    outcome = await node.sequences.swap(first, second, node.context())
    assert [operation.phase for operation in outcome.operations] == ["done", "done"]


@pytest.mark.parametrize("move", [migrated, drained, drain_planned, swapped])
async def test_a_move_was_refused_for_the_memory_of_another_jobs_snapshot(
    tmp_path: Path, process: Child, second_process: Child, move: Callable[[Node, int, int], Coroutine[None, None, None]]
) -> None:
    """A copy of a job's state has up to half of its GPU's free memory for a second or two."""
    async with running(tmp_path, "2x8MiB") as node:
        await node.attend(process.pid, b"x" * (5 * MIB), gpu="gpu0")
        other = await node.attend(second_process.pid, token="b" * 32, gpu="gpu1")
        worker = node.workers.find(second_process.pid)
        assert worker is not None
        other.slow.add("snapshot")
        await worker.give("snapshot")
        node.simulator.hold("its copy", second_process.pid, "gpu1", 4 * MIB)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move, node, process.pid, second_process.pid)
            await until_awaited(worker)
            node.simulator.release("its copy")
            other.go_on.set()


async def test_a_reservation_was_refused_for_the_memory_of_another_jobs_snapshot(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        other = await node.attend(process.pid, gpu="gpu0")
        worker = node.workers.find(process.pid)
        assert worker is not None
        on_gpus = OperationsService(
            state_dir=tmp_path / "other",
            pool=node.moving.pool,
            simulator=None,
            inventory=node.inventory,
            workers=node.workers,
            events=node.events,
            start_ticks=start_ticks,
        )
        free_memory = on_gpus.memory.free_memory
        assert free_memory is not None
        assert not await free_memory("gpu0")
        other.slow.add("snapshot")
        await worker.give("snapshot")

        async def end_it() -> None:
            await until_awaited(worker)
            other.go_on.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_it)
            assert await free_memory("gpu0")
