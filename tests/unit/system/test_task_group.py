"""Concurrent coroutines: the first failure is raised, the others are cancelled, and progress is one number."""

from __future__ import annotations

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.system.task_group import accompanied, parts_of, run_concurrently


async def test_the_first_failure_cancels_the_others_and_is_raised_unwrapped() -> None:
    ended: list[str] = []
    begun = anyio.Event()

    async def waits() -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("waits")

    async def fails() -> None:
        await begun.wait()
        raise Refused("no", "ask again")

    with pytest.raises(Refused, match="no"):
        await run_concurrently(waits, fails)
    assert ended == ["waits"]


async def test_concurrent_work_ends_with_the_main_work() -> None:
    async def fails() -> None:
        raise Refused("no", "ask again")

    async def done() -> int:
        return 7

    assert await accompanied(done, anyio.sleep_forever) == 7
    with pytest.raises(HegmError, match="no"):
        await accompanied(fails, anyio.sleep_forever)


def test_progress_of_several_is_their_sum() -> None:
    counts: list[int] = []
    progress_of = parts_of(counts.append)
    one, other = progress_of("one"), progress_of("other")
    one(5)
    other(2)
    one(7)
    assert counts == [5, 7, 9]
