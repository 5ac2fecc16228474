"""A reusable condition for tasks of the event loop: `wait` returns at the next `notify_all`.

An `anyio.Event` can be set only once. Waiting tasks check for themselves what has changed.
"""

from __future__ import annotations

import anyio


class Condition:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        #: Set at the next `notify_all`. A task that takes it before it checks misses no change.
        self.next = anyio.Event()

    def notify_all(self) -> None:
        self.next.set()
        self.next = anyio.Event()

    async def wait(self) -> None:
        await self.next.wait()
