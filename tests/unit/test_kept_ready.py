"""Whose next process is kept ready, from when on, and how often that is asked for."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from hegmd.kept_ready import KeptReady
from hegmd.methods.readying import ALWAYS, BEFOREHAND, LEAST_AVAILABLE_BYTES, Ready, Readying
from hegmd.protocol.agents import AgentAttend
from hegmd.protocol.messages import AgentReport, Order, Supervise, SuperviseReport, SupervisorOrder
from hegmd.protocol.snapshots import AgentInfo
from hegmd.supervisors import Supervisors
from hegmd.workers import Workers

PID = os.getpid()


class Node:
    """A job and its supervisor, which are both this process; what they are told; and who has the job in hand."""

    def __init__(self, when: str, available_bytes: int | None = None) -> None:
        self.workers = Workers(lambda pid: pid)
        self.supervisors = Supervisors(lambda pid: pid)
        readying = Readying(
            self.supervisors, lambda _subject, _place: {}, Ready(when), available_bytes=lambda: available_bytes
        )
        self.in_hand = False
        self.kept = KeptReady(self.supervisors, self.workers, readying, in_hand=lambda _pid: self.in_hand)
        self.asked: list[str] = []
        self.told: list[SupervisorOrder] = []

    @asynccontextmanager
    async def running(self, *, boundary: int = 5, **offer: Any) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.workers.run)
            tasks.start_soon(self.kept.run)
            about = AgentAttend(token="token", python_version="3.11", boundary=boundary, run="run")
            program = AgentInfo(name="agent", version="1")
            tasks.start_soon(self.workers.attend, "agent", PID, 0, program, about, self._obey)
            offered = Supervise(**{"run": "run", "pid": PID, "python": True, **offer})
            tasks.start_soon(self.supervisors.attend, "supervisor", PID, 0, offered, self._hear)
            await anyio.wait_all_tasks_blocked()
            yield
            tasks.cancel_scope.cancel()
        self.supervisors.close()

    async def _obey(self, order: Order, _fds: Sequence[int]) -> None:
        self.asked.append(order.do)
        report = AgentReport(order=order.order, result="done", imports=("torch",), path=("/lib",))
        self.workers.report("agent", report)

    async def _hear(self, order: SupervisorOrder, _fds: Sequence[int]) -> None:
        self.told.append(order)


async def test_it_is_asked_for_once_as_soon_as_the_job_has_passed_a_boundary() -> None:
    node = Node(ALWAYS)
    async with node.running():
        node.supervisors.report("supervisor", SuperviseReport(result="ready", pid=7))
        await anyio.wait_all_tasks_blocked()
    assert node.asked == ["beforehand"]
    assert [(order.do, order.operation, order.imports, order.path) for order in node.told] == [
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
        (ALWAYS, {}, LEAST_AVAILABLE_BYTES - 1),
    ],
)
async def test_nobody_waits_unasked_before_the_first_batch_or_while_an_operation_has_the_job(
    when: str, offer: dict[str, Any], available_bytes: int | None
) -> None:
    node = Node(when, available_bytes)
    async with node.running(**offer):
        pass
    assert node.told == []


async def test_a_job_may_have_it_by_itself_and_is_waited_for_while_an_operation_has_it() -> None:
    node = Node(BEFOREHAND)
    node.in_hand = True
    async with node.running(ready=ALWAYS):
        assert node.told == []
        node.in_hand = False
        node.supervisors.news.tell()
        node.supervisors.report("supervisor", SuperviseReport(result="done"))
        await anyio.wait_all_tasks_blocked()
        assert [order.do for order in node.told] == ["ready"]
