"""Background tasks of a component: they run until the component stops.

Owns the task group. The component decides what the tasks do, and what happens while it does not run.
"""

from __future__ import annotations

import anyio
import anyio.abc

from hegmd.errors import UNAVAILABLE, Bug, HegmError


def stopping() -> HegmError:
    """Return the refusal of a request that comes while hegmd stops."""
    return HegmError(UNAVAILABLE, "hegmd is stopping", "try again when it is back")


class BackgroundTasks:
    """Base class of a component that starts tasks in `_tasks`, or in `_open_tasks()` if a request needs the task."""

    def __init__(self) -> None:
        self._group: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the tasks running until cancelled; then all of them have ended."""
        async with anyio.create_task_group() as self._group:
            self._on_start()
            task_status.started()
            await anyio.sleep_forever()

    def _on_start(self) -> None:
        """Start the first tasks. Called in the event loop; must not wait."""

    @property
    def _tasks(self) -> anyio.abc.TaskGroup | None:
        """The task group; None before the component runs and once it stops.

        anyio does not cancel a task that is started in a task group that ends: the group, and hegmd, would not end.
        """
        group = self._group
        return None if group is None or group.cancel_scope.cancel_called else group

    def _open_tasks(self) -> anyio.abc.TaskGroup:
        """Return the task group. Raises UNAVAILABLE once the component stops."""
        if self._group is None:
            raise Bug(f"{type(self).__name__} was called before run()")
        if self._tasks is None:
            raise stopping()
        return self._group
