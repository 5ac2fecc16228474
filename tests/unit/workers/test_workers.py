"""Workers over several connections: orders and their ends, and who is who when pids, tokens and agents change."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import pytest

from hegmd.errors import TIMEOUT, HegmError, Refused
from hegmd.protocol.messages import AgentReport, Communicators, CudaFacts
from hegmd.workers.workers import ENDED, AgentAway, AgentConnection, OrderFailed, Workers
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test ends it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


@asynccontextmanager
async def attended(pid: int) -> AsyncIterator[tuple[Workers, ModelAgent, list[str], anyio.abc.TaskGroup]]:
    """Workers that run, one agent that attends, and the news."""
    workers = Workers(lambda _pid: 77)
    news: list[str] = []
    workers.listen(lambda what, worker: news.append(f"{what} {worker.pid}"))
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = ModelAgent(workers, pid)
        await agent.attend(tasks)
        yield workers, agent, news, tasks
        tasks.cancel_scope.cancel()


async def test_an_order_is_awaited_until_its_report_which_is_kept(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, agent, news, _):
        worker = workers.find(process.pid)
        assert worker is not None
        report = await worker.order("park")
        assert report.boundary == worker.boundary == 6
        assert worker.parked
        assert agent.orders == ["park"]
        assert news == [f"came {process.pid}"]
        assert workers.agents()[process.pid].parked


async def test_a_rank_without_a_survey_was_moved_with_connected_communicators(process: subprocess.Popen[bytes]) -> None:
    """After a start of the daemon its size was known, and its groups were not: the plan had no step to disconnect them.

    A rank with steps of more than a second, or on a busy node, does not answer the survey of a plan in time.
    """
    groups = Communicators(mechanism="replace", groups=2, backends=("gloo",))
    workers = Workers(lambda _pid: 77)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = ModelAgent(workers, process.pid)
        agent.about = {"communicators": groups}
        await agent.attend(tasks)
        worker = workers.find(process.pid)
        assert worker is not None
        assert worker.communicators == groups
        await agent.leave()
        agent.about = {"communicators": groups.replace(groups=3)}
        await agent.attend(tasks)
        assert worker.communicators == groups.replace(groups=3)
        tasks.cancel_scope.cancel()


async def test_bytes_travel_by_descriptor_and_return(process: subprocess.Popen[bytes]) -> None:
    memory = os.memfd_create("test")
    async with attended(process.pid) as (workers, agent, _, _):
        worker = workers.find(process.pid)
        assert worker is not None
        await worker.order("park")
        await worker.order("offload", fds=[memory])
        assert (agent.data, worker.held_bytes) == (None, 7)
        assert os.pread(memory, 7, 0) == b"weights"
        await worker.order("reload", fds=[memory])
        assert (agent.data, worker.held_bytes) == (b"weights", 0)
    os.close(memory)


async def test_bytes_leave_while_the_agent_disconnects_its_communicators(process: subprocess.Popen[bytes]) -> None:
    memory = os.memfd_create("bytes")
    async with attended(process.pid) as (workers, agent, _, tasks):
        worker = workers.find(process.pid)
        assert worker is not None
        await worker.order("park")
        agent.slow.add("disconnect")
        tasks.start_soon(worker.order, "disconnect")
        await agent.waiting.wait()
        await worker.order("offload", fds=[memory])
        assert worker.held_bytes == 7
        assert worker.busy
        agent.go_on.set()
    os.close(memory)


async def test_an_agent_that_cannot_reports_the_reason(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, agent, _, _):
        agent.refuses["park"] = "no boundary within 3 s"
        worker = workers.find(process.pid)
        assert worker is not None
        with pytest.raises(OrderFailed, match="no boundary within 3 s"):
            await worker.order("park")
        assert not worker.parked


async def test_open_orders_fail_when_the_agent_disconnects_and_its_handle_stays(
    process: subprocess.Popen[bytes],
) -> None:
    async with attended(process.pid) as (workers, agent, news, tasks):
        agent.slow.add("park")
        worker = workers.find(process.pid)
        assert worker is not None
        failures: list[HegmError] = []

        async def park() -> None:
            try:
                await worker.order("park")
            except HegmError as error:
                failures.append(error)

        tasks.start_soon(park)
        await agent.waiting.wait()
        await agent.leave()
        assert [type(error) for error in failures] == [AgentAway]
        assert not worker.connected
        with pytest.raises(AgentAway):
            await worker.order("survey")
        agent.slow.clear()
        agent.go_on.set()
        await agent.attend(tasks)
        assert workers.find(process.pid) is worker
        assert (await worker.order("survey")).result == "done"
        assert news == [f"came {process.pid}", f"left {process.pid}", f"back {process.pid}"]


async def test_a_newer_connection_replaces_one_that_hangs(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, agent, news, tasks):
        worker = workers.find(process.pid)
        await agent.attend(tasks)
        assert workers.find(process.pid) is worker
        assert news == [f"came {process.pid}", f"back {process.pid}"], "it was never away"
        assert worker is not None
        await worker.order("survey")


async def test_a_late_survey_erased_the_known_state_of_the_worker(process: subprocess.Popen[bytes]) -> None:
    """Issue 14, row 1: nothing was known of a busy job, and its move by peer was refused."""
    async with attended(process.pid) as (workers, agent, _, _):
        worker = workers.find(process.pid)
        assert worker is not None
        worker.cuda = facts = CudaFacts(gpus=("GPU-0",), allocator="native", expandable=False)
        agent.size_bytes = None  # type: ignore[assignment] # as of an agent that came to no boundary in time
        await worker.order("survey")
        assert worker.cuda is facts


async def test_another_token_is_another_program(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, agent, news, tasks):
        before = workers.find(process.pid)
        agent.token = "b" * 32
        await agent.attend(tasks)
        after = workers.find(process.pid)
        assert before is not None
        assert before.ended
        assert after is not before
        assert news == [f"came {process.pid}", f"ended {process.pid}", f"came {process.pid}"]


async def test_the_end_of_the_process_is_the_end_of_the_handle(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, _, news, _):
        process.kill()
        with anyio.fail_after(HANG_S):
            while workers.find(process.pid) is not None:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        assert news[-1] == f"ended {process.pid}"


async def test_a_report_from_who_does_not_attend_is_refused(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, _, _, _):
        with pytest.raises(Refused, match=r"agent\.attend"):
            workers.report(object(), AgentReport(order=1, result="done"))


async def test_orders_wait_for_the_one_before_them_but_for_withdraw(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, agent, _, tasks):
        agent.slow.add("survey")
        worker = workers.find(process.pid)
        assert worker is not None
        await worker.give("survey")
        tasks.start_soon(worker.order, "park")
        await anyio.wait_all_tasks_blocked()
        assert agent.orders == ["survey"]
        await worker.order("withdraw")
        assert agent.orders == ["survey", "withdraw"]
        agent.go_on.set()
        await anyio.wait_all_tasks_blocked()
        assert agent.orders == ["survey", "withdraw", "park"]


async def test_a_count_neither_waits_for_other_orders_nor_delays_them(process: subprocess.Popen[bytes]) -> None:
    """Every listing of jobs requests a count of each job, also of a stopped one."""
    async with attended(process.pid) as (workers, agent, _, _):
        agent.slow |= {"survey"}
        worker = workers.find(process.pid)
        assert worker is not None
        await worker.give("survey")
        agent.boundary = 41
        assert (await worker.order("count", limit_s=60)).boundary == worker.boundary == 41
        agent.go_on.set()
        await anyio.wait_all_tasks_blocked()
        agent.slow, agent.go_on = {"count"}, anyio.Event()
        await worker.give("count", limit_s=60)
        await worker.order("park")
        assert agent.orders == ["survey", "count", "count", "park"]
        agent.go_on.set()


async def test_a_new_order_to_park_replaces_the_current_one(process: subprocess.Popen[bytes]) -> None:
    async with attended(process.pid) as (workers, agent, _, _):
        agent.slow.add("park")
        worker = workers.find(process.pid)
        assert worker is not None
        await worker.give("park", at=7, exact=True)
        await worker.give("park", at=9, exact=True)
        await anyio.wait_all_tasks_blocked()
        assert agent.orders == ["park", "park"]
        agent.go_on.set()


@pytest.mark.thorough
async def test_an_agent_that_ignores_a_survey_does_not_delay_the_next_caller(process: subprocess.Popen[bytes]) -> None:
    """`hegmctl adopt` waited for ten minutes, and so did every later order."""
    async with attended(process.pid) as (workers, agent, _, _):
        worker = workers.find(process.pid)
        assert worker is not None
        agent.slow.add("survey")
        with pytest.raises(HegmError, match="has not answered a survey within") as error:
            await worker.order("survey", limit_s=0.01)
        assert error.value.code is TIMEOUT
        assert (await worker.order("park")).boundary == worker.boundary


async def test_an_order_cancelled_before_it_was_sent_delays_no_other(process: subprocess.Popen[bytes]) -> None:
    """After Ctrl-C in the first moment of `hegmctl checkpoint` the agent answered no order, though the job trained."""
    async with attended(process.pid) as (workers, agent, _, _):
        worker = workers.find(process.pid)
        assert worker is not None
        with anyio.CancelScope() as scope:
            scope.cancel()
            await worker.order("survey", limit_s=5.0)
        assert agent.orders == []
        assert not worker.busy
        with anyio.fail_after(HANG_S):
            await worker.order("park", limit_s=60.0)
        assert agent.orders == ["park"]


@pytest.mark.thorough
async def test_an_order_without_an_answer_holds_up_others_for_its_limit_only(process: subprocess.Popen[bytes]) -> None:
    """The client of the order has disconnected, so no request cancels it."""
    async with attended(process.pid) as (workers, agent, _, _):
        agent.slow.add("survey")
        worker = workers.find(process.pid)
        assert worker is not None
        await worker.give("survey", limit_s=0.001)
        await worker.give("survey", limit_s=0.001)
        await worker.order("export")
        assert agent.orders == ["survey", "survey", "export"]
        link = worker._link
        assert link is not None
        assert [given.do for given in link.order.values()] == []
        agent.go_on.set()


async def test_bytes_in_flight_are_awaited_without_a_limit(process: subprocess.Popen[bytes]) -> None:
    memory = os.memfd_create("test")
    async with attended(process.pid) as (workers, agent, _, tasks):
        agent.slow.add("offload")
        worker = workers.find(process.pid)
        assert worker is not None
        await worker.order("park")
        given = await worker.give("offload", fds=[memory])
        assert given.deadline == math.inf
        tasks.start_soon(worker.order, "export")
        await anyio.wait_all_tasks_blocked()
        assert agent.orders == ["park", "offload"]
        assert worker.busy
        agent.go_on.set()
    os.close(memory)


async def test_an_exited_worker_reports_how_it_ended(process: subprocess.Popen[bytes]) -> None:
    """Issue 14, row 11."""
    workers = Workers(lambda _pid: 77, lambda pid, ticks: f"{pid} of {ticks} was ended")
    messages: list[tuple[str, str | None]] = []
    over = anyio.Event()

    def listen(news: str, worker: AgentConnection) -> None:
        messages.append((news, worker.how_ended))
        if news == ENDED:
            over.set()

    workers.listen(listen)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        await ModelAgent(workers, process.pid).attend(tasks)
        process.kill()
        await over.wait()
        tasks.cancel_scope.cancel()
    assert messages == [("came", None), (ENDED, f"{process.pid} of 77 was ended")]


async def test_a_snapshot_on_a_gpu_is_waited_for_and_one_on_another_gpu_is_not(
    process: subprocess.Popen[bytes],
) -> None:
    async with attended(process.pid) as (workers, agent, _, _):
        worker = workers.find(process.pid)
        assert worker is not None
        worker.gpu = "gpu0,gpu1"
        assert not await workers.wait_for_snapshots({"gpu1"}), "none is taken"
        agent.slow.add("snapshot")
        order = await worker.give("snapshot")
        assert not await workers.wait_for_snapshots({"gpu2"})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.wait_for_snapshots, {"gpu1"})
            await anyio.wait_all_tasks_blocked()
            assert order.over.statistics().tasks_waiting == 1
            agent.go_on.set()
        assert not await workers.wait_for_snapshots({"gpu1"}), "it has ended"
