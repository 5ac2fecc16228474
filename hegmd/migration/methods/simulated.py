"""The method of simulated GPUs: nothing of a process is on them but a line in the books, so nothing has to be moved.

Where a worker is stands in its handle, which attendance and this method write; what it holds stands in the rooms.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from hegmd.migration.contracts import Left, Made, Standing, Subject
from hegmd.migration.methods.simulated_memory import Rooms

NAME = "simulated"


class SimulatedMethod:
    """Books for GPUs that are not there."""

    name = NAME

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    async def hold_room(self, subject: Subject, gpu: str, size_bytes: int) -> None:
        self._rooms.hold(subject.who, gpu, size_bytes)

    async def give_room(self, subject: Subject, gpu: str) -> None:
        self._rooms.give(subject.who, gpu)

    def rooms(self, subject: Subject) -> Mapping[str, int]:
        return self._rooms.of(subject.who)

    def note_size(self, subject: Subject, size_bytes: int) -> None:
        if subject.worker.gpu is not None:
            self._rooms.hold_what_fits(subject.who, subject.worker.gpu, size_bytes)

    async def checkpoint(self, subject: Subject) -> Left:
        """The room there stays held, so nothing has to be taken for the way back."""
        subject.worker.gpu = None
        return Left()

    async def restore(self, subject: Subject, gpu: str) -> None:
        subject.worker.gpu = gpu

    def making(self, subject: Subject) -> AbstractAsyncContextManager[Made]:
        """The room in the books is the worker's as it stands."""
        return nullcontext(lambda: False)

    async def verify(self, subject: Subject) -> None:
        """The next boundary, which the agent tells, proves all that there is."""

    async def note_gone_on(self, subject: Subject) -> None:
        """Nothing rests on it."""

    async def inspect(self, subject: Subject) -> Standing:
        return Standing(gpu=subject.worker.gpu)
