"""Base class of carriers whose bytes are in their final place as soon as they have left the process."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

from hegmd.migration.contracts import MigratedProcess, OverlappedCopy, Progress


class NoCopy:
    """A carrier that copies nothing while the driver checkpoints or restores."""

    async def await_successor(self, subject: MigratedProcess, on_progress: Progress) -> bool:
        """Return False: there is no successor."""
        return False

    def doing(self, subject: MigratedProcess) -> str | None:
        return None

    def is_staged(self, subject: MigratedProcess) -> bool:
        return False

    def staged(self, subject: MigratedProcess) -> OverlappedCopy | None:
        return None

    async def resumed(self, subject: MigratedProcess) -> None:
        """Nothing is held besides it."""

    def overlap_checkpoint(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """They are where they may stay."""
        return nullcontext(OverlappedCopy())

    def overlap_restore(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """They are where they are carried from."""
        return nullcontext(OverlappedCopy())
