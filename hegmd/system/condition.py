"""News that several wait for, again and again.

An `anyio.Event` can be set once. Owns that there is always one for the next time; what the news is, the waiting look
for themselves.
"""

from __future__ import annotations

import anyio

__all__ = ["Condition"]


class Condition:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        #: Set when something is told next. Whoever takes it before looking misses nothing while looking.
        self.next = anyio.Event()

    def notify_all(self) -> None:
        """Wake all who wait."""
        self.next.set()
        self.next = anyio.Event()

    async def wait(self) -> None:
        """Wait until something is told."""
        await self.next.wait()
