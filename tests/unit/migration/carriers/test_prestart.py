"""When a prestart is requested, and that none is requested without need."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from hegmd.migration.carriers.prestart import BEFOREHAND, IN_TURN, MIN_AVAILABLE_BYTES, PrestartPolicy, PrestartService
from hegmd.migration.contracts import MigratedProcess, Rank, Respawn
from hegmd.protocol.agents import AgentAttend
from hegmd.protocol.messages import Supervise, SuperviseReport, SupervisorOrder
from hegmd.protocol.snapshots import AgentInfo
from hegmd.workers.supervisors import Supervisors
from hegmd.workers.workers import AgentConnection, Identity

UID, TICKS, PID, STATE_BYTES = 1000, 7, 4711, 1 << 20


def subject(**different: Any) -> MigratedProcess:
    about = AgentAttend(token="token", python_version="3.11", boundary=5, run="run-1")
    worker = AgentConnection(Identity(PID, TICKS, UID), AgentInfo(name="agent", version="1"), about)
    worker.imports, worker.path = ("torch",), ("/lib",)
    known = MigratedProcess(
        "4", "a", PID, TICKS, gpu="gpu0", target_gpu="gpu1", previous_gpu=None, uid=UID, run="run-1", agent=worker
    )
    return replace(known, **different)


def without_imports() -> MigratedProcess:
    known = subject()
    known.worker.imports = ()
    return known


@asynccontextmanager
async def supervised(orders: list[SupervisorOrder], **offer: Any) -> AsyncIterator[Supervisors]:
    """A supervisor in this process, and the orders that it receives."""
    supervisors = Supervisors(lambda _pid: TICKS)

    async def send(order: SupervisorOrder, _fds: Sequence[int]) -> None:
        orders.append(order)

    offered = Supervise(**{"run": "run-1", "pid": PID, "python": True, **offer})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisors.attend, "key", os.getpid(), UID, offered, send)
        await anyio.wait_all_tasks_blocked()
        yield supervisors
        tasks.cancel_scope.cancel()
    supervisors.close()


def ignore(_bytes: int) -> None:
    """Discard the progress."""


def surroundings(known: MigratedProcess, place: str) -> Mapping[str, Any]:
    return {"set": {"HEGM_GPU": place, **known.respawn.set}, "unset": ("ROCR_VISIBLE_DEVICES",), "python": None}


async def test_it_is_requested_once_with_the_environment_of_its_start_and_released_once() -> None:
    orders: list[SupervisorOrder] = []
    known = subject(respawn=Respawn({"EXTRA": "1"}))
    async with supervised(orders) as supervisors:
        readying = PrestartService(supervisors, surroundings, available_bytes=lambda: MIN_AVAILABLE_BYTES + STATE_BYTES)
        for _ in range(2):
            await readying.begin(known, STATE_BYTES)
        for _ in range(2):
            await readying.end(known)
    assert [(order.do, order.operation) for order in orders] == [("ready", "4"), ("unready", "4")]
    assert (orders[0].imports, orders[0].path, orders[0].unset) == (("torch",), ("/lib",), ("ROCR_VISIBLE_DEVICES",))
    assert dict(orders[0].set) == {"HEGM_GPU": "gpu1", "EXTRA": "1"}


@pytest.mark.parametrize("pid", [PID + 1, None], ids=["it waits", "it never will"])
async def test_the_job_trains_on_until_it_is_ready_or_known_not_to_become_so(pid: int | None) -> None:
    """The job was parked for the 4 s in which another process imported PyTorch."""
    async with supervised([]) as supervisors:
        readying = PrestartService(supervisors, surroundings, available_bytes=lambda: None)
        await readying.begin(subject(), STATE_BYTES)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(readying.until_ready, subject(), ignore)
            await anyio.wait_all_tasks_blocked()
            assert str(readying.doing(subject())).startswith("it trains on until the next Python is ready: 0 s")
            supervisors.report("key", SuperviseReport(result="ready", pid=pid))
        assert await readying.until_ready(subject(), ignore) is (pid is not None)
        assert readying.doing(subject()) is None


async def test_a_prestart_whose_supervisor_has_ended_is_not_waited_for() -> None:
    async with supervised([]) as supervisors:
        readying = PrestartService(supervisors, surroundings, available_bytes=lambda: None)
        assert not await readying.until_ready(subject(), ignore)
        await readying.begin(subject(), STATE_BYTES)
    assert not await readying.until_ready(subject(), ignore)


async def test_a_prestart_that_does_not_become_ready_is_abandoned() -> None:
    async with supervised([]) as supervisors:
        readying = PrestartService(
            supervisors, surroundings, PrestartPolicy(within_s=0.0), available_bytes=lambda: None
        )
        await readying.begin(subject(), STATE_BYTES)
        assert not await readying.until_ready(subject(), ignore)


@pytest.mark.parametrize(
    "known",
    [
        without_imports(),
        subject(target_gpu=None),
        subject(agent=None),
        subject(respawn=Respawn(python="/opt/python")),
        subject(respawn=Respawn({"PYTHONPATH": "/elsewhere"})),
        subject(respawn=Respawn(unset=("LD_PRELOAD",))),
        subject(ranks=(Rank("a", 0, "gpu1"), Rank("b", 1, "gpu1"))),
        subject(run="another"),
    ],
)
async def test_a_job_that_could_notice_a_prestart_is_started_in_turn(known: MigratedProcess) -> None:
    orders: list[SupervisorOrder] = []
    async with supervised(orders) as supervisors:
        await PrestartService(supervisors, surroundings, available_bytes=lambda: None).begin(known, STATE_BYTES)
    assert orders == []


@pytest.mark.parametrize(
    ("offer", "when", "available_bytes"),
    [
        ({"pid": PID + 1}, BEFOREHAND, None),
        ({"python": False}, BEFOREHAND, None),
        ({}, IN_TURN, None),
        ({}, BEFOREHAND, MIN_AVAILABLE_BYTES + STATE_BYTES - 1),
    ],
)
async def test_nothing_is_made_ready_behind_a_launcher_against_the_settings_or_without_the_memory(
    offer: dict[str, Any], when: str, available_bytes: int | None
) -> None:
    orders: list[SupervisorOrder] = []
    async with supervised(orders, **offer) as supervisors:
        readying = PrestartService(
            supervisors, surroundings, PrestartPolicy(when), available_bytes=lambda: available_bytes
        )
        await readying.begin(subject(), STATE_BYTES)
        await readying.end(subject())
    assert orders == []
