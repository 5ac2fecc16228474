"""The carrier of those of whom the driver carries everything: nothing is held for their bytes, and nothing is copied.

The bytes go into the process's own memory, with the driver's checkpoint, which is the method's.
"""

from __future__ import annotations

from hegmd.migration.contracts import Making, MigratedProcess, Progress
from hegmd.migration.methods.driver import NAME
from hegmd.migration.methods.immediate import AtOnce


class DriverCarrier(AtOnce):
    """There is nothing to hold and nothing to carry."""

    name = NAME

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Nothing: the bytes go into the process's own memory."""

    async def release(self, subject: MigratedProcess) -> None:
        """Nothing is held."""

    def held_bytes(self, subject: MigratedProcess) -> int:
        return 0

    async def fetch(self, subject: MigratedProcess, on_progress: Progress) -> None:
        """They are in the process."""

    async def prepare(self, subject: MigratedProcess) -> None:
        """Nothing has to be ready."""

    async def abandon(self, subject: MigratedProcess) -> None:
        """Nothing is."""

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        return 0

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        return 0
