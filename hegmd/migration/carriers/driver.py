"""The carrier of those of whom the driver carries everything: nothing is held for their bytes, and nothing is copied.

The bytes go into the process's own memory, with the driver's checkpoint, which is the method's.
"""

from __future__ import annotations

from hegmd.migration.contracts import Making, Progress, Subject
from hegmd.migration.methods.driver import NAME
from hegmd.migration.methods.immediate import AtOnce


class DriverCarrier(AtOnce):
    """There is nothing to hold and nothing to carry."""

    name = NAME

    async def hold(self, subject: Subject, size_bytes: int) -> None:
        """Nothing: the bytes go into the process's own memory."""

    async def give(self, subject: Subject) -> None:
        """Nothing is held."""

    def held_bytes(self, subject: Subject) -> int:
        return 0

    async def fetch(self, subject: Subject, on_progress: Progress) -> None:
        """They are in the process."""

    async def arm(self, subject: Subject) -> None:
        """Nothing has to be ready."""

    async def disarm(self, subject: Subject) -> None:
        """Nothing is."""

    async def take_out(self, subject: Subject, on_progress: Progress) -> int:
        return 0

    async def put_back(self, subject: Subject, on_progress: Progress, making: Making) -> int:
        return 0
