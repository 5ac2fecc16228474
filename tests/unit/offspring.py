"""Children of this process that a test has made: it may have others, which belong to the tests around it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def children() -> set[int]:
    """Return the current children of all threads, with those that have exited and are not reaped."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has ended since it was listed
            found.update(map(int, path.read_text().split()))
    return found


def reap(pids: Iterable[int]) -> None:
    """Wait for their ends. Children that were already reaped are accepted."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
