"""The carrier of processes without an agent: the driver moves all bytes, so nothing is reserved and nothing is copied.

The method's checkpoint moves the bytes into the process's own memory.
"""

from __future__ import annotations

from hegmd.migration.contracts import Making, MigratedProcess, NoCopy, Progress
from hegmd.migration.methods.driver import NAME


class DriverCarrier(NoCopy):
    """Reserves nothing and copies nothing."""

    name = NAME

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Do nothing: the bytes go into the process's own memory."""

    async def release(self, subject: MigratedProcess) -> None:
        """Do nothing: nothing is reserved."""

    def held_bytes(self, subject: MigratedProcess) -> int:
        return 0

    async def fetch(self, subject: MigratedProcess, on_progress: Progress) -> None:
        """Do nothing: the bytes are in the process."""

    async def prepare(self, subject: MigratedProcess) -> None:
        """Do nothing: no copy has to be prepared."""

    async def abandon(self, subject: MigratedProcess) -> None:
        """Do nothing: nothing was prepared."""

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        return 0

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        return 0
