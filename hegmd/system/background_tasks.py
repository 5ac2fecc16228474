"""Where tasks of a part live that nobody waits for: as long as that part runs.

Owns the task group and its end. What the tasks do, and what is said when the part does not run, is the part's own.
"""

from __future__ import annotations

import anyio
import anyio.abc

__all__ = ["BackgroundTasks"]


class BackgroundTasks:
    """For a part to come from, which starts its tasks in `_tasks`; that is None while it does not run."""

    def __init__(self) -> None:
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Let its tasks live, until cancelled; then all of them have ended."""
        try:
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
