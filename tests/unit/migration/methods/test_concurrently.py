"""A task beside a block: how either ends, and which errors are raised."""

from __future__ import annotations

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.migration.contracts import GrewBeyondPlan
from hegmd.migration.methods.concurrently import beside


class Work:
    """Continues until it is let end, and then fails if it is to."""

    def __init__(self, failure: HegmError | None = None) -> None:
        self.failure = failure
        self.go_on = anyio.Event()
        self.done = self.cut = False

    async def run(self) -> None:
        try:
            await self.go_on.wait()
        except anyio.get_cancelled_exc_class():
            self.cut = True
            raise
        if self.failure is not None:
            raise self.failure
        self.done = True


async def do(work: Work, failure: HegmError | None = None) -> None:
    """A block beside that work, which ends or fails when the work has begun."""
    async with beside(work.run):
        await anyio.wait_all_tasks_blocked()
        if failure is not None:
            raise failure
        work.go_on.set()
        assert not work.done


async def test_the_pair_ends_when_both_have_ended() -> None:
    work = Work()
    await do(work)
    assert work.done


async def test_a_failure_in_the_work_is_raised_unchanged() -> None:
    with pytest.raises(Refused, match="the copy"):
        await do(Work(Refused("the copy", "hint")))


async def test_a_failure_in_the_block_cancels_the_work_and_is_raised_first() -> None:
    work = Work(Refused("the copy", "hint"))
    with pytest.raises(Refused, match="the step"):
        await do(work, Refused("the step", "hint"))
    assert work.cut


async def test_a_retried_step_lets_the_concurrent_work_finish() -> None:
    """Bytes that were on their way to the pool for half a second went there from the first again."""
    work = Work()
    work.go_on.set()
    with pytest.raises(GrewBeyondPlan):
        await do(work, GrewBeyondPlan(1, 2, 3))
    assert work.done
