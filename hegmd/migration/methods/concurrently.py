"""Runs a coroutine concurrently with a block, which ends when both have ended.

For driver calls that take as long as a copy. A failure of either is raised unwrapped; that of the block comes first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from hegmd.errors import HegmError
from hegmd.migration.contracts import GrewBeyondPlan


@asynccontextmanager
async def beside(work: Callable[[], Awaitable[object]]) -> AsyncGenerator[None]:
    """Run `work` during the block. A failed block cancels `work`, unless it is to be retried."""
    of_block: HegmError | None = None
    of_work: HegmError | None = None

    async def go_on() -> None:
        nonlocal of_work
        try:
            await work()
        except HegmError as error:
            of_work = error

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on)
        try:
            yield
        except HegmError as error:  # past the group, which would put it into another
            of_block = error
            if not isinstance(error, GrewBeyondPlan):
                tasks.cancel_scope.cancel()
    failure = of_block or of_work
    if failure is not None:
        raise failure
