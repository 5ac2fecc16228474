"""The order in which effects are performed, and the connection that orders go over."""

from __future__ import annotations

import subprocess
from pathlib import Path

import anyio
import pytest

from hegmd.memory.pool import Key, Memory, Pool, Source
from hegmd.migration.carriers.worker import WorkerCarrier
from hegmd.migration.journal.records import History
from hegmd.migration.machine.effects import (
    Dump,
    Effect,
    Offload,
    Park,
    ReleasePool,
    ReleaseReservation,
    Reserve,
    ReservePool,
    Restore,
    Withdraw,
)
from hegmd.migration.machine.events import AgentBack, CancelRequested, WorkerExited
from hegmd.migration.machine.operation import Limits, Operation
from hegmd.migration.methods.simulated import SimulatedMethod
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.migration.run.executor import EffectExecutor
from hegmd.migration.run.runner import Runner
from hegmd.migration.run.task import OperationTask, PendingEffect
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from hegmd.telemetry.events import EventLog
from hegmd.workers.workers import Workers
from tests.patience import HANG_S
from tests.unit.migration.operations import operation, worker
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import MIB, start_ticks

TAKE = ReservePool(number=1, worker="a", cause=1, size_bytes=5)
ROOM = Reserve(number=1, worker="a", cause=1, gpu="gpu1", size_bytes=5)
PARK = Park(number=1, worker="a", cause=1, at=None, limit_s=5.0)
OFFLOAD = Offload(number=1, worker="a", cause=1)


@pytest.mark.parametrize(
    ("earlier", "later", "waits"),
    [
        (TAKE, ReleasePool(number=2, worker="a", cause=1), True),
        (TAKE, ReleasePool(number=2, worker="b", cause=1), False),
        (TAKE, Reserve(number=2, worker="a", cause=1, gpu="gpu1", size_bytes=5), False),
        (ROOM, ReleaseReservation(number=2, worker="a", cause=1, gpu="gpu1"), True),
        (ROOM, ReleaseReservation(number=2, worker="a", cause=1, gpu="gpu0"), False),
        (TAKE, OFFLOAD.replace(number=2), False),
        (PARK, Withdraw(number=2, worker="a", cause=1), False),
        (PARK.replace(number=3), Withdraw(number=2, worker="a", cause=1), False),
    ],
)
async def test_operations_wait_for_each_other(earlier: Effect, later: Effect, waits: bool) -> None:
    assert PendingEffect(earlier, None).holds_up(later) is waits


async def test_an_order_waits_for_the_end_of_a_cancelled_one() -> None:
    errand = PendingEffect(PARK, None)
    errand.scope.cancel()
    assert errand.holds_up(Withdraw(number=2, worker="a", cause=1))


async def test_effects_after_a_dropped_dump_wait_until_it_is_undone() -> None:
    """The dump may have paused the processes, those of other ranks too."""
    errand = PendingEffect(Dump(number=1, worker="a", cause=1, find=False), None)
    assert not errand.holds_up(Restore(number=2, worker="a", cause=1, gpu="gpu0"))
    errand.scope.cancel()
    assert errand.holds_up(Restore(number=2, worker="a", cause=1, gpu="gpu0"))
    assert errand.holds_up(Restore(number=3, worker="b", cause=1, gpu="gpu0"))


async def test_old_news_of_a_connection_do_not_take_the_place_of_newer() -> None:
    running = OperationTask(History(operation()))
    for connection in (1, 3, 2, None):
        running.note_connection("a", connection)
    assert running.start(OFFLOAD).heard == 3
    running.note_connection("a", 4)
    assert running.performing[1].heard == 3, "an order that was decided upon before went over a later connection"
    assert running.start(OFFLOAD.replace(number=2, worker="b")).heard is None


async def test_the_exit_of_a_process_that_another_had_replaced_meanwhile_counted_as_that_of_the_other() -> None:
    """It waited while the record of the new process was written, and the restart was rolled back, or the job held."""
    running = OperationTask(History(operation(worker())))
    exited = running.enqueue(WorkerExited(worker="a"), process=worker().key)
    assert not running.is_outdated(exited)
    running.history = History(operation(worker(pid=300, token="token-300")))
    assert running.is_outdated(exited)
    assert not running.is_outdated(running.enqueue(WorkerExited(worker="a"), process=(300, 7)))
    assert not running.is_outdated(running.enqueue(CancelRequested(by="its owner")))


class SlowPool(Pool):
    """A pool whose pages take until `go_on`."""

    def __init__(self) -> None:
        super().__init__(64 * MIB)
        self.go_on = anyio.Event()

    async def take(self, key: Key, size_bytes: int, source: Source | None = None) -> Memory:
        await self.go_on.wait()
        return await super().take(key, size_bytes, source)


async def test_memory_that_arrived_after_a_timeout_stayed_in_the_pool(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    """The operation turned back for its limit and gave the pool back what was not there yet; then it came."""
    workers, pool = Workers(start_ticks), SlowPool()
    simulated = SimulatedMemory(SimulatedProvider(parse_topology("2x1GiB")))
    methods, carriers = {"simulated": SimulatedMethod(simulated)}, {"worker": WorkerCarrier(pool)}
    runner = Runner(tmp_path, EffectExecutor(workers, methods, carriers, start_ticks=start_ticks), EventLog())
    runner.open()
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        await tasks.start(runner.run)
        await ModelAgent(workers, process.pid).attend(tasks)
        member = worker(pid=process.pid, start_ticks=start_ticks(process.pid), token="a" * 32)
        await runner.begin(operation(member, id="1", limits=Limits(arm_s=0.02, settle_s=0.02, retry_s=0.02)))
        with anyio.fail_after(HANG_S):
            async for progress in runner.follow("1"):
                if progress.phase == "tidying":
                    pool.go_on.set()
        assert runner.describe("1").phase == "rolled-back"
        assert pool.held_bytes == 0
        tasks.cancel_scope.cancel()


class SeenStopped(EffectExecutor):
    """Says at each look which processes are stopped."""

    def __init__(self, *readings: tuple[int, ...]) -> None:
        self.remaining = list(readings)

    def stopped(self, op: Operation) -> tuple[int, ...]:
        return self.remaining.pop(0) if len(self.remaining) > 1 else self.remaining[0]


@pytest.mark.thorough
async def test_an_operation_inspects_a_process_when_that_runs_again_before_its_next_attempt(tmp_path: Path) -> None:
    """After `kill -CONT` it waited for its next attempt, up to five minutes."""
    op = operation(worker("a"), worker("b", pid=4712)).replace(phase="reloading", attempts=7)
    pid = op.workers[0].pid
    running = OperationTask(History(op))
    runner = Runner(tmp_path, SeenStopped((pid, 4712), (4712,)), EventLog())
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner._watch_stopped, running)
            await running.changed.wait()
            tasks.cancel_scope.cancel()
    (asking,) = running.inbox
    assert asking.event == AgentBack(worker="a", token=op.workers[0].token, cause="it runs again")


async def test_stopped_processes_of_an_operation_that_waits_for_nothing_are_not_looked_for(tmp_path: Path) -> None:
    running = OperationTask(History(operation(worker("a")).replace(phase="suspended", attempts=7)))
    runner = Runner(tmp_path, SeenStopped(), EventLog())  # which cannot say
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner._watch_stopped, running)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
