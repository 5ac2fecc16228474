"""Polls for changes that no event reports, without taking the processor from the process that makes them; and ends of
others.

A look that follows at once on the one before keeps two processes busy, who asks and who answers, beside the one that is
to get ahead. Nothing may depend on how long a pause is.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

# Before the next request of a daemon, which looks at its GPUs every quarter of a second.
REQUEST_MS = 20
# Before the next command, which is another process.
COMMAND_MS = 100


def pause(pause_ms: float = REQUEST_MS) -> None:
    """The pause between two polls."""
    select.poll().poll(pause_ms)


def still_there(processes: Iterable[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those of these that have not ended within so long.

    The kernel reports an exit at once; psutil waits until the parent has reaped the process, and the reaper of orphans
    may do that every two seconds.
    """
    deadline = monotonic() + within_s
    left: list[psutil.Process] = []
    for process in processes:
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            # Asked once the number is held: it was not another's before.
            if process.is_running() and not select.select([pidfd], [], [], max(0.0, deadline - monotonic()))[0]:
                left.append(process)
        finally:
            os.close(pidfd)
    return left
