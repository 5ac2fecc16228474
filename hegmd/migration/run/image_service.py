"""The way of a whole job into an image, as the performer of operations calls it.

Owns the interface alone: what images and dumps are is the business of whoever is handed in here, and a daemon that can
make none has nobody. Each call may come a second time after it was done, and finds its work done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation


class Imager(Protocol):
    """Makes images of jobs that are off their GPUs and at rest."""

    async def dump(self, op: Operation, on_progress: Callable[[int], object]) -> None:
        """Have the image written. Raises HegmError; there is none then, and the job is as it was.

        Of a job that is to end it is read back too, and named. Of one that goes on only what cannot be had once it does
        is written; the bytes stay in the pool until `seal` has them.
        Cancelled, the same as failed: the job is as it was when this comes back.
        """
        ...

    async def seal(self, op: Operation, on_progress: Callable[[int], object]) -> None:
        """Have the bytes of a job that goes on in its image, all of it read back and named.

        Raises HegmError; there is none then, and nothing has become of the job.

        Cancelled, what there is of it stays for `scrap`.
        """
        ...

    async def scrap(self, op: Operation) -> None:
        """Leave nothing of an image that was written and that nobody wants any more. Raises nothing."""
        ...

    async def find(self, op: Operation) -> None:
        """See that the image is whole that was begun. Raises HegmError if not; what there was of it is gone then."""
        ...

    async def abandon(self, op: Operation) -> None:
        """See that nobody stands for an image that was given up. Raises nothing.

        Whoever was to do so may have been killed, or have been through with the dump just then.
        """
        ...

    async def end(self, op: Operation, member: Member) -> None:
        """End a process that is in an image, and all that belong to it; wait until they have. Raises HegmError."""
        ...
