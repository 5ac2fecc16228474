"""Watches a driver call on a process and returns once the call makes no progress, with the reason.

`progress_probe` owns the criteria. A caller of the helper passes this as the watcher of its request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread

from hegmd.gpu_helper.link import Stuck
from hegmd.migration.methods.progress_probe import ProgressLimits, WatchedCall, look_at


async def no_progress_expected() -> int | None:
    """For calls in which no bytes move."""
    return None


async def watch(
    op: str,
    pid: int,
    patience: ProgressLimits,
    *,
    expected_s: float = 0.0,
    free_bytes: Callable[[], Awaitable[int | None]] = no_progress_expected,
) -> Stuck:
    """Wait until the call is stuck and return the reason. The caller cancels this when it has an answer."""
    work = WatchedCall(op, pid, expected_s, patience, anyio.current_time())
    while True:
        await anyio.sleep(patience.look_s)
        free = await free_bytes()
        sample = await anyio.to_thread.run_sync(look_at, pid, free, abandon_on_cancel=True)
        stuck = work.judge(sample, anyio.current_time())
        if stuck is not None:
            return stuck
