"""The jobs that have a prestarted successor, from when on, how often it is requested, and when it is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from hegmd.errors import TIMEOUT, HegmError
from hegmd.migration.carriers.prestart import ALWAYS, BEFOREHAND, MIN_AVAILABLE_BYTES, PrestartPolicy, PrestartService
from hegmd.operations.prestarted import ANSWERS_WITHIN_S, PrestartedJobs, RetryDelays
from hegmd.protocol.agents import AgentAttend
from hegmd.protocol.messages import AgentReport, Order, Supervise, SuperviseReport, SupervisorOrder
from hegmd.protocol.snapshots import AgentInfo
from hegmd.system.condition import Condition
from hegmd.telemetry.events import EventLog
from hegmd.workers.agent_orders import LIMITED, AgentAway, answered_within_s
from hegmd.workers.supervisors import Supervisor, Supervisors
from hegmd.workers.workers import AgentConnection, Workers

PID = os.getpid()

# With a delay that one pass through the tasks exceeds, they are never all blocked.
OFTEN_S = 0.05


class UnansweringAgents(PrestartService):
    """Agents that do not answer a number of requests, for that reason."""

    deaf_times = 0
    why = HegmError(TIMEOUT, "no answer", "ask again")

    async def keep(self, supervisor: Supervisor, worker: AgentConnection) -> bool:
        if self.deaf_times:
            self.deaf_times -= 1
            raise self.why
        return await super().keep(supervisor, worker)


class Node:
    """A job and its supervisor, both in this process, their messages, and the operation that has the job."""

    def __init__(
        self,
        when: str,
        available_bytes: int | None = None,
        *,
        uid: int = 0,
        answers: bool = True,
        deaf_times: int = 0,
        why: HegmError = UnansweringAgents.why,
        patience: RetryDelays | None = None,
    ) -> None:
        self.uid, self.answers = uid, answers
        self.ticks = 1
        self.workers = Workers(lambda _pid: self.ticks)
        self.supervisors = Supervisors(lambda pid: pid)
        self.available_bytes, self.events = available_bytes, EventLog()
        readying = UnansweringAgents(
            self.supervisors,
            lambda _subject, _place: {},
            PrestartPolicy(when),
            available_bytes=lambda: self.available_bytes,
        )
        readying.deaf_times, readying.why = deaf_times, why
        self.in_hand = False
        self.kept = PrestartedJobs(
            self.supervisors,
            self.workers,
            readying,
            self.events,
            in_hand=lambda _pid: self.in_hand,
            patience=patience or RetryDelays(first_s=3600.0, longest_s=36000.0),
        )
        self.requests: list[str] = []
        self.orders: list[SupervisorOrder] = []
        self._heard = Condition()

    async def until_told(self, count: int) -> None:
        """Wait until the supervisor has received that many messages."""
        while len(self.orders) < count:
            await self._heard.wait()

    @asynccontextmanager
    async def running(self, *, boundary: int = 5, **offer: Any) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.workers.run)
            tasks.start_soon(self.kept.run)
            about = AgentAttend(token="token", python_version="3.11", boundary=boundary, run="run")
            program = AgentInfo(name="agent", version="1")
            tasks.start_soon(self.workers.attend, "agent", PID, 0, program, about, self.obey)
            offered = Supervise(**{"run": "run", "pid": PID, "python": True, **offer})
            tasks.start_soon(self.supervisors.attend, "supervisor", PID, self.uid, offered, self._hear)
            await anyio.wait_all_tasks_blocked()
            yield
            tasks.cancel_scope.cancel()
        self.supervisors.close()

    async def obey(self, order: Order, _fds: Sequence[int]) -> None:
        self.requests.append(order.do)
        if not self.answers:
            return
        report = AgentReport(order=order.order, result="done", imports=("torch",), path=("/lib",))
        self.workers.report("agent", report)

    async def _hear(self, order: SupervisorOrder, _fds: Sequence[int]) -> None:
        self.orders.append(order)
        self._heard.notify_all()


@pytest.fixture
def second_pid() -> Iterator[int]:
    """A process that lives as long as the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child.pid
        child.kill()


async def test_it_is_requested_once_as_soon_as_the_job_has_passed_a_boundary() -> None:
    node = Node(ALWAYS)
    async with node.running():
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=7))
        await anyio.wait_all_tasks_blocked()
    assert node.requests == ["beforehand"]
    assert [(order.do, order.operation, order.imports, order.path) for order in node.orders] == [
        ("ready", "", ("torch",), ("/lib",))
    ]


@pytest.mark.parametrize(
    ("when", "offer", "available_bytes"),
    [
        (BEFOREHAND, {}, None),
        (ALWAYS, {"ready": "in-turn"}, None),
        (ALWAYS, {"python": False}, None),
        (ALWAYS, {"pid": PID + 1}, None),
        (ALWAYS, {"boundary": 0}, None),
        (ALWAYS, {"operation": "4", "started": True}, None),
        (ALWAYS, {}, MIN_AVAILABLE_BYTES - 1),
    ],
)
async def test_no_process_is_prestarted_before_the_first_batch_or_during_an_operation(
    when: str, offer: dict[str, Any], available_bytes: int | None
) -> None:
    node = Node(when, available_bytes)
    async with node.running(**offer):
        pass
    assert node.orders == []


async def test_a_job_may_hold_it_alone_and_is_waited_for_while_an_operation_has_it() -> None:
    node = Node(BEFOREHAND)
    node.in_hand = True
    async with node.running(ready=ALWAYS):
        assert node.orders == []
        node.in_hand = False
        node.supervisors.changed.notify_all()
        node.supervisors.report("supervisor", SuperviseReport(result="done"))
        await anyio.wait_all_tasks_blocked()
        assert [order.do for order in node.orders] == ["ready"]


async def test_a_user_cannot_learn_the_imports_of_another_users_job() -> None:
    """The daemon asks neither the other user's agent nor the other user's supervisor, only the caller's own."""
    node = Node(ALWAYS, uid=1000)
    async with node.running(ready=ALWAYS):
        assert (node.requests, node.orders) == ([], [])
        messages: list[str] = []

        async def hear(order: SupervisorOrder, _fds: Sequence[int]) -> None:
            messages.append(order.do)

        async with anyio.create_task_group() as tasks:
            offered = Supervise(run="run", pid=PID, python=True)
            tasks.start_soon(node.supervisors.attend, "its own", PID, 0, offered, hear)
            await anyio.wait_all_tasks_blocked()
            assert (node.requests, messages, node.orders) == (["beforehand"], ["ready"], [])
            tasks.cancel_scope.cancel()


async def test_a_job_that_does_not_answer_does_not_delay_the_others(second_pid: int) -> None:
    """The daemon stops waiting for a stopped job after a while, and asks again later."""
    node = Node(ALWAYS, answers=False)
    async with node.running():
        messages: list[str] = []

        async def obey(order: Order, _fds: Sequence[int]) -> None:
            node.workers.report("other agent", AgentReport(order=order.order, result="done", imports=("torch",)))

        async def hear(order: SupervisorOrder, _fds: Sequence[int]) -> None:
            messages.append(order.do)

        assert (node.requests, node.orders) == (["beforehand"], [])
        async with anyio.create_task_group() as tasks:
            about = AgentAttend(token="other", python_version="3.11", boundary=1, run="other")
            program = AgentInfo(name="agent", version="1")
            tasks.start_soon(node.workers.attend, "other agent", second_pid, 0, program, about, obey)
            offered = Supervise(run="other", pid=second_pid, python=True)
            tasks.start_soon(node.supervisors.attend, "other", second_pid, 0, offered, hear)
            await anyio.wait_all_tasks_blocked()
            assert messages == ["ready"]
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("why", [UnansweringAgents.why, AgentAway(PID, "it left")], ids=["stopped", "away"])
async def test_a_worker_that_did_not_answer_gets_the_request_again_later(why: HegmError) -> None:
    """A job that was stopped at the request gets it again once it continues; before, only one with a connected agent
    did.
    """
    node = Node(ALWAYS, deaf_times=2, why=why, patience=RetryDelays(first_s=0.0))
    async with node.running():
        assert [order.do for order in node.orders] == ["ready"]


async def test_all_prestarted_processes_were_replaced_when_hegmd_restarted() -> None:
    """The next daemon learns that a prestarted process exists. After a restart it requests a new one."""
    node = Node(ALWAYS)
    async with node.running(kept=True):
        assert (node.requests, node.orders) == ([], [])
        supervisor = node.supervisors.find(0, "run")
        assert supervisor is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.order, "start", "4")
            await anyio.wait_all_tasks_blocked()
            started = SuperviseReport(order=node.orders[-1].order, result="done", pid=PID, was_ready=True)
            node.supervisors.report("supervisor", started)
        assert not supervisor.offer.kept
        await supervisor.tell("forget", "4")
        about = AgentAttend(token="another", python_version="3.11", boundary=1, run="run")
        node.ticks += 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                node.workers.attend, "agent", PID, 0, AgentInfo(name="agent", version="1"), about, node.obey
            )
            await anyio.wait_all_tasks_blocked()
            assert [order.do for order in node.orders] == ["start", "forget", "ready"]
            tasks.cancel_scope.cancel()


async def test_a_prestarted_process_that_is_no_longer_wanted_is_released() -> None:
    node = Node(BEFOREHAND)
    async with node.running(kept=True):
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=7))
        await anyio.wait_all_tasks_blocked()
    assert [(order.do, order.operation) for order in node.orders] == [("unready", "")]
    assert node.requests == []


async def test_a_prestarted_process_ended_for_lack_of_memory_is_replaced_before_the_restart() -> None:
    """Each one is reported. A supervisor's message about another operation's process does not count."""
    node = Node(ALWAYS, patience=RetryDelays(first_s=0.0))
    async with node.running():
        for pid in (7, None, 8, None):
            node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=pid))
            await anyio.wait_all_tasks_blocked()
        assert [(order.do, order.operation) for order in node.orders] == [("ready", "")] * 3
        fallen = node.events.remembered(kinds=("process.next-fell",))
        assert [(event.pid, event.facts["fallen"]) for event in fallen] == [(PID, 1), (PID, 2)]
        supervisor = node.supervisors.find(0, "run")
        assert supervisor is not None
        await supervisor.tell("ready", "4", imports=("torch",))
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=None))
        await anyio.wait_all_tasks_blocked()
        assert [(order.do, order.operation) for order in node.orders[3:]] == [("ready", "4")]
        await supervisor.tell("unready", "4")
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=None))
        await anyio.wait_all_tasks_blocked()
        assert [(order.do, order.operation) for order in node.orders[4:]] == [("unready", "4"), ("ready", "")]


async def test_a_prestarted_process_that_keeps_failing_is_replaced_later_each_time() -> None:
    """Else a job whose group has no memory for it would import PyTorch without end."""
    node = Node(ALWAYS)
    async with node.running():
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=None))
        await anyio.wait_all_tasks_blocked()
        assert [order.do for order in node.orders] == ["ready"]
        assert [event.facts["wait_s"] for event in node.events.remembered(kinds=("process.next-fell",))] == [3600.0]
    assert [RetryDelays(10.0, 600.0).after(fallen) for fallen in (1, 2, 3, 7, 1000)] == [10.0, 20.0, 40.0, 600.0, 600.0]


@pytest.mark.thorough
async def test_it_is_started_once_memory_for_it_is_free() -> None:
    node = Node(ALWAYS, MIN_AVAILABLE_BYTES - 1, patience=RetryDelays(first_s=0.001, longest_s=0.002))
    async with node.running():
        assert node.orders == []
        node.available_bytes = MIN_AVAILABLE_BYTES
        await node.until_told(1)
    assert node.orders[0].do == "ready"


@pytest.mark.thorough
async def test_an_old_prestarted_process_checks_its_files_again() -> None:
    """The daemon repeats the list of imports, and the process checks its files; also one of an earlier daemon."""
    for kept in (False, True):
        node = Node(ALWAYS, patience=RetryDelays(first_s=3600.0, longest_s=OFTEN_S))
        async with node.running(kept=kept):
            await node.until_told(2)
        assert {(order.do, order.operation) for order in node.orders} == {("ready", "")}
        assert not node.events.remembered(kinds=("process.next-fell",))


async def test_a_prestarted_process_that_waits_on_a_node_short_of_memory_is_not_reported_as_ended() -> None:
    """The daemon replaced it every ten minutes, and did not check its files."""
    node = Node(ALWAYS, patience=RetryDelays(first_s=3600.0, longest_s=OFTEN_S))
    async with node.running():
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=7))
        node.available_bytes = MIN_AVAILABLE_BYTES - 1
        count = len(node.orders)
        await node.until_told(count + 2)
        assert not node.events.remembered(kinds=("process.next-fell",))
        supervisor = node.supervisors.find(0, "run")
        assert supervisor is not None
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=None))
        await anyio.wait_all_tasks_blocked()
        assert not supervisor.keeps
    assert node.events.remembered(kinds=("process.next-fell",))


def test_the_wait_for_an_agents_list_of_imports_is_limited() -> None:
    assert "beforehand" in LIMITED
    assert answered_within_s("beforehand", None) < ANSWERS_WITHIN_S < RetryDelays().longest_s
