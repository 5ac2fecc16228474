"""Run coroutines concurrently. The first failure cancels the others and is raised unwrapped.

anyio's task group raises a group of errors; callers need the first one. Also sums the progress of several parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from hegmd.errors import HegmError

T = TypeVar("T")
Progress = Callable[[int], object]
Work = Callable[[], Awaitable[object]]


async def run_concurrently(*works: Work) -> None:
    """Run all of it concurrently. Raises the first HegmError once all others have ended."""
    failures: list[HegmError] = []

    async def guarded(work: Work) -> None:
        try:
            await work()
        except HegmError as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for work in works:
            tasks.start_soon(guarded, work)
    if failures:
        raise failures[0]


async def accompanied(work: Callable[[], Awaitable[T]], company: Work) -> T:
    """Return the result of `work` while endless `company` runs beside it. Raises what the work raises."""
    outcome: list[T] = []
    failures: list[HegmError] = []

    async def run_company() -> None:
        await company()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_company)
        try:
            outcome.append(await work())
        except HegmError as error:
            failures.append(error)
        tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return outcome[0]


def parts_of(on_progress: Progress) -> Callable[[str], Progress]:
    """Return a progress callback for each part by name. Their sum is passed on."""
    done: dict[str, int] = {}

    def progress_of(name: str) -> Progress:
        def add_progress(so_far_bytes: int) -> None:
            done[name] = so_far_bytes
            on_progress(sum(done.values()))

        return add_progress

    return progress_of
