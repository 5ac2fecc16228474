"""Work that is done side by side: what fails first ends the rest, and is told as it is.

A task group of anyio's tells a failure as a group of failures, of which callers up to the operator want the one that
came first. Owns that, and one figure of progress for several parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from hegmd.errors import HegmError

__all__ = ["Progress", "accompanied", "in_concert", "parts_of"]

T = TypeVar("T")
Progress = Callable[[int], object]
Work = Callable[[], Awaitable[object]]


async def in_concert(*works: Work) -> None:
    """Do all of it at once. Raises the HegmError that came first, once all others have been cancelled and are over."""
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
    """The outcome of the work, during which there is company that never ends by itself. Raises what the work raises."""
    outcome: list[T] = []
    failures: list[HegmError] = []

    async def keep_company() -> None:
        await company()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_company)
        try:
            outcome.append(await work())
        except HegmError as error:
            failures.append(error)
        tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return outcome[0]


def parts_of(on_progress: Progress) -> Callable[[str], Progress]:
    """For each part by its name what it tells its progress; the sum of all is passed on."""
    done: dict[str, int] = {}

    def progress_of(name: str) -> Progress:
        def tell(so_far_bytes: int) -> None:
            done[name] = so_far_bytes
            on_progress(sum(done.values()))

        return tell

    return progress_of
