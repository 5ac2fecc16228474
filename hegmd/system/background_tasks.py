"""Background tasks of a component: they run until the component stops.

Owns the task group. The component decides what the tasks do, and what happens while it does not run.
"""

from __future__ import annotations

import anyio
import anyio.abc


class BackgroundTasks:
    """Base class of a component that starts tasks in `_tasks`, which is None while the component does not run."""

    def __init__(self) -> None:
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the tasks running until cancelled; then all of them have ended."""
        try:
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
