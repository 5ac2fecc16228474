"""What carriers are whose bytes have come where they may stay as soon as they are out of the process."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

from hegmd.migration.contracts import Meanwhile, Progress, Subject

__all__ = ["AtOnce"]


class AtOnce:
    """Nothing of such a carrier goes on beside the driver's steps."""

    async def await_next(self, subject: Subject, on_progress: Progress) -> bool:
        """Nobody else is to go on."""
        return False

    def doing(self, subject: Subject) -> str | None:
        return None

    def is_passing(self, subject: Subject) -> bool:
        return False

    def near(self, subject: Subject) -> Meanwhile | None:
        return None

    async def gone_on(self, subject: Subject) -> None:
        """Nothing is held beside it."""

    def settling(self, subject: Subject) -> AbstractAsyncContextManager[Meanwhile]:
        """They are where they may stay."""
        return nullcontext(Meanwhile())

    def nearing(self, subject: Subject) -> AbstractAsyncContextManager[Meanwhile]:
        """They are where they are carried from."""
        return nullcontext(Meanwhile())
