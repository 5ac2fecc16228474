"""What is noted in the file of a restart's lock, by those who have it open: how far who goes on from a state has come.

The file is there whether or not a daemon is. Its form is that of `hegmd.protocol.supervision`.
"""

from __future__ import annotations

import os

from hegmd.protocol.supervision import BACK, OVER, PAST, PAST_AT


def is_back(lock: int) -> bool:
    """Whether the process has put the state back."""
    return os.pread(lock, len(BACK), 0) == BACK


def is_past(lock: int, ranks: int = 1) -> bool:
    """Whether the process has trained on from it, or all of so many ranks have."""
    return os.pread(lock, ranks, PAST_AT) == PAST * ranks


def note_end(lock: int) -> None:
    """The process has come to its end."""
    os.pwrite(lock, OVER, len(BACK))


def forget(lock: int) -> None:
    """Another process is started from it."""
    os.ftruncate(lock, 0)
