"""The interface to images of whole jobs, for the executor.

A daemon that cannot write images has no implementation. Each call may be repeated after it succeeded and then finds its
work done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation


class Imager(Protocol):
    """Writes images of jobs that are off their GPUs and suspended."""

    async def dump(self, op: Operation, on_progress: Callable[[int], object]) -> None:
        """Write the image. Raises HegmError; then there is no image and the job is unchanged.

        If the job is to end, the image is also verified and named. If it trains on, only what must be taken while it is
        parked is written; the bytes stay in the pool for `seal`.

        Cancelling has the same effect as a failure.
        """
        ...

    async def seal(self, op: Operation, on_progress: Callable[[int], object]) -> None:
        """Write the bytes of a job that trains on to its image, verify it and name it.

        Raises HegmError; then there is no image and the job is not affected.

        When cancelled, the partial image stays for `scrap`.
        """
        ...

    async def scrap(self, op: Operation) -> None:
        """Remove an image that is no longer needed. Raises nothing."""
        ...

    async def find(self, op: Operation) -> None:
        """Check that the image is complete. Raises HegmError if not; its files are then removed."""
        ...

    async def abandon(self, op: Operation) -> None:
        """Resume the processes that were stopped for a dump that was dropped. Raises nothing.

        The process that dumped them may have been killed, or may just have finished.
        """
        ...

    async def end(self, op: Operation, member: Member) -> None:
        """End a process that is in an image with its children, and wait until they have ended. Raises HegmError."""
        ...
