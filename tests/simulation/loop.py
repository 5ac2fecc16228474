"""An event loop for lives: its clock is the life's, it never blocks, and it has no outside events.

`settle` runs all tasks until each waits for something that the life has not let happen yet. So the
real, asynchronous parts of the product run inside a life that is drawn from a seed, one step after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.node import Violation

MAX_TURNS = 1000


class _EmptySelector:
    """In the place of a selector: no descriptor is ever ready, and who would wait has settled."""

    def __init__(self, loop: asyncio.BaseEventLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[object]:
        if timeout_s is None or timeout_s > 0:
            self._loop.stop()
        return []


class StillLoop(asyncio.BaseEventLoop):
    """The loop of one daemon's life."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._selector = _EmptySelector(self)
        self.tasks: set[asyncio.Task[Any]] = set()
        self._broken: list[BaseException] = []

    def time(self) -> float:
        return self._clock()

    def _process_events(self, event_list: list[object]) -> None:
        """No event comes from outside."""

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done, from the next `settle` on."""
        task = self.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken.append(error)

    def settle(self) -> None:
        """Until no task can continue. An unexpected error of a part is raised."""
        self.run_forever()
        if self._broken:
            raise self._broken.pop()

    def end(self) -> None:
        """As a process ends: whatever those who clean up ask for, they are ended too, and whom they wait for."""
        for _ in range(MAX_TURNS):
            if not self.tasks:
                break
            for task in asyncio.all_tasks(self):
                task.cancel()
            self.settle()
        else:
            raise Violation(f"tasks that do not end with the daemon: {self.tasks}")
        self.close()
