"""The lock on an image: its holder alone writes, restores or removes it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable

from hegmd.errors import BUSY, HegmError

LOCKS_WITHIN_S = 0.2
_POLL_INTERVAL_S = 0.005


def lock_alone(
    fd: int,
    path: str,
    within_s: float = LOCKS_WITHIN_S,
    pause: Callable[[], object] = lambda: time.sleep(_POLL_INTERVAL_S),
) -> None:
    """Lock `fd` exclusively, with retries, since listing images locks one briefly. Raises HegmError BUSY."""
    end = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= end:
                raise HegmError(
                    BUSY,
                    f"{path} is being written, restored or removed by another process",
                    "wait until that is done; to see the operations of this node, run: hegmctl ops",
                ) from error
        pause()
