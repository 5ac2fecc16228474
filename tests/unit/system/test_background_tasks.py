"""No component starts a task while it stops: nothing would cancel the task, and hegmd would not end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration.run.executor import EffectExecutor
from hegmd.migration.run.runner import Runner
from hegmd.operations.suspended import SuspendedOperations
from hegmd.protocol.messages import AgentAttend
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.telemetry.events import EventLog
from hegmd.workers.workers import Workers
from tests.unit.migration.operations import operation, worker
from tests.unit.model_agent import PROGRAM


@asynccontextmanager
async def stopping(component: BackgroundTasks) -> AsyncIterator[None]:
    """Stop the component. It waits for one of its tasks, which cannot be cancelled, until the block ends."""
    may_end = anyio.Event()

    async def finish() -> None:
        with anyio.CancelScope(shield=True):
            await may_end.wait()

    async with anyio.create_task_group() as tasks:
        await tasks.start(component.run)
        assert component._tasks is not None
        component._tasks.start_soon(finish)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            try:
                yield
            finally:
                may_end.set()


def executor(workers: Workers) -> EffectExecutor:
    return EffectExecutor(workers, {}, {}, start_ticks=lambda _pid: 77)


async def test_a_component_has_no_task_group_while_it_stops() -> None:
    component = BackgroundTasks()
    async with stopping(component):
        assert component._tasks is None
        with pytest.raises(HegmError) as refused:
            component._open_tasks()
    assert refused.value.code == UNAVAILABLE
    assert component._tasks is None


async def test_an_operation_that_began_while_hegmd_stopped_kept_it_from_ending(tmp_path: Path) -> None:
    runner = Runner(tmp_path, executor(Workers()), EventLog())
    runner.open()
    async with stopping(runner):
        with pytest.raises(HegmError) as refused:
            await runner.begin(operation(worker("a"), id="1"))
    assert refused.value.code == UNAVAILABLE
    assert runner.operations() == (), "the next daemon would carry out what this one refused"


async def test_spilling_that_began_while_hegmd_stopped_kept_it_from_ending() -> None:
    class NoRunner:
        def under_way(self) -> tuple[Any, ...]:
            return ()

    its = cast("Any", NoRunner())
    suspended = SuspendedOperations(cast("Workers", ()), its, its, its, EventLog())
    async with stopping(suspended):
        suspended.start_spilling_when_idle("1")
        suspended.prepare_soon("1")
    assert not suspended._spill_tasks
    assert not suspended._preparing


async def test_an_agent_that_attended_while_hegmd_stopped_kept_it_from_ending() -> None:
    workers = Workers(lambda _pid: 77)
    about = AgentAttend(token="a" * 32, python_version="3.11", framework="torch", boundary=0)

    async def send(*_: object) -> None:
        raise AssertionError("an order was sent")

    async with stopping(workers):
        with pytest.raises(HegmError) as refused:
            await workers.attend(object(), os.getpid(), 0, PROGRAM, about, send)
    assert refused.value.code == UNAVAILABLE
    assert not list(workers)
