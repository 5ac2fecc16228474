"""Reads and writes the file of a restart's lock, which says how far the process has come that continues from the state.

Processes that have the file open use it whether or not a daemon is there. `hegmd.protocol.supervision` defines it.
"""

from __future__ import annotations

import os

from hegmd.protocol.supervision import BACK, OVER, PAST, PAST_AT


def is_back(lock: int) -> bool:
    return os.pread(lock, len(BACK), 0) == BACK


def is_past(lock: int, ranks: int = 1) -> bool:
    """Return True if the process, or each of that many ranks, has trained on from its state."""
    return os.pread(lock, ranks, PAST_AT) == PAST * ranks


def note_end(lock: int) -> None:
    os.pwrite(lock, OVER, len(BACK))


def forget(lock: int) -> None:
    """Clear the notes: another process starts from the state."""
    os.ftruncate(lock, 0)
