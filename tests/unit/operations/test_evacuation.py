"""Failing GPUs: when their jobs are moved away, and what the daemon reports."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from hegmd.errors import REFUSED, HegmError
from hegmd.operations.evacuation import AGAIN_S, Evacuation
from hegmd.operations.request_context import RequestContext
from hegmd.operations.sequences import Outcome
from hegmd.protocol.operations import Reason
from hegmd.protocol.snapshots import Gpu, Health
from hegmd.telemetry.events import EventLog
from tests.patience import HANG_S
from tests.unit.moving_node import running

STAYS = Reason(code=REFUSED.name, message="no room", hint="", pid=7)


def gpu(condition: str = "failing", *causes: str, state: str = "ok") -> Gpu:
    health = Health(state="warn", condition=condition, causes=causes, reason="XID 63")
    return Gpu(id="gpu0", index=0, uuid="GPU-0", vendor="nvidia", state=state, health=health)


class Drains:
    """A drain that returns what the test sets, and a sleep that ends when the test ends it."""

    def __init__(self, *outcomes: Outcome | HegmError) -> None:
        self.outcomes = list(outcomes)
        self.gpus: list[str] = []
        self.slept: list[float] = []
        self.wake = anyio.Event()

    async def drain(self, name: str, to: Sequence[str], request: RequestContext) -> Outcome:
        assert not to
        assert request.by == "evacuation"
        self.gpus.append(name)
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome()
        if isinstance(outcome, HegmError):
            raise outcome
        return outcome

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.wake.wait()
        self.wake = anyio.Event()


@asynccontextmanager
async def evacuating(drains: Drains, *on: str) -> AsyncIterator[tuple[Evacuation, EventLog]]:
    events = EventLog()
    evacuation = Evacuation(drains.drain, events, sleep=drains.sleep)
    evacuation.on = on
    async with anyio.create_task_group() as tasks:
        await tasks.start(evacuation.run)
        yield evacuation, events
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("changed_gpu", "on"),
    [
        (gpu("failing", "rows"), ()),
        (gpu("failing", "rows"), ("link", "uncorrected")),
        (gpu("gone", "rows"), ("rows",)),
        (gpu("failing", "rows", state="lost"), ("rows",)),
        (gpu("healthy"), ("rows",)),
    ],
)
async def test_a_gpu_is_left_as_it_is_unless_a_cause_that_was_named_makes_it_fail(
    changed_gpu: Gpu, on: Sequence[str]
) -> None:
    drains = Drains()
    async with evacuating(drains, *on) as (evacuation, _):
        evacuation.see([changed_gpu])
        await anyio.wait_all_tasks_blocked()
    assert drains.gpus == []


async def test_a_failing_gpu_is_drained_again_and_each_change_is_reported_once() -> None:
    drains = Drains(Outcome(left=[STAYS]), Outcome(left=[STAYS]))
    async with evacuating(drains, "rows") as (evacuation, events):
        for _ in range(2):
            evacuation.see([gpu("failing", "link", "rows")])
            await anyio.wait_all_tasks_blocked()
            drains.wake.set()
            await anyio.wait_all_tasks_blocked()
        evacuation.see([gpu("healthy")])
        drains.wake.set()
        await anyio.wait_all_tasks_blocked()
        assert drains.gpus == ["gpu0"] * 3
        assert set(drains.slept) == {AGAIN_S}
        evacuation.see([gpu("failing", "rows")])
        await anyio.wait_all_tasks_blocked()
        assert drains.gpus == ["gpu0"] * 4
        assert events.counts == {"gpu.evacuated": 1}


async def test_changing_numbers_are_no_event_and_the_event_names_the_next_step() -> None:
    """A job that stayed was reported each minute, with the free memory of that minute."""
    stays = [
        Outcome(left=[STAYS.replace(message=f"needs 9 GiB, and {free} GiB are free", hint="suspend a job")])
        for free in (1, 2)
    ]
    member = SimpleNamespace(pid=7)
    failed = [
        Outcome(operations=[cast("Any", SimpleNamespace(id=number, phase="rolled-back", processes=(member,)))])
        for number in ("4", "5")
    ]
    drains = Drains(*stays, *failed)
    async with evacuating(drains, "rows") as (evacuation, events):
        for _ in range(4):
            evacuation.see([gpu("failing", "rows")])
            await anyio.wait_all_tasks_blocked()
            drains.wake.set()
            await anyio.wait_all_tasks_blocked()
        messages = [event.message for event in events.remembered()]
        assert len(messages) == 2, messages
        assert messages[0].endswith("process 7 stays: needs 9 GiB, and 1 GiB are free; suspend a job")
        assert messages[1].endswith("operation 4 ended rolled-back; see: hegmctl ops")


async def test_a_failed_drain_is_reported_once_and_retried() -> None:
    """It was in the log each minute, and in no event."""
    drains = Drains(*[HegmError(REFUSED, "the node cannot be inspected", "try again")] * 2)
    async with evacuating(drains, "rows") as (evacuation, events):
        evacuation.see([gpu("failing", "rows")])
        await anyio.wait_all_tasks_blocked()
        drains.wake.set()
        await anyio.wait_all_tasks_blocked()
        assert drains.gpus == ["gpu0"] * 2
        assert events.counts == {"gpu.evacuated": 1}


async def test_a_job_leaves_a_gpu_with_memory_errors_and_trains_on(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    async with running(tmp_path, "3x1GiB") as node:
        await node.attend(process.pid, gpu="gpu0")
        assert list(node.reservations(process.pid)) == ["gpu0"]
        node.simulator.set_fault("gpu0", "ecc")
        node.simulator.set_fault("gpu1", "ecc")
        node.moving.evacuation.on = ("uncorrected",)
        node.inventory.expire()
        node.moving.evacuation.see((await node.inventory.fresh(0)).gpus)
        with anyio.fail_after(HANG_S):
            while list(node.reservations(process.pid)) != ["gpu2"]:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
