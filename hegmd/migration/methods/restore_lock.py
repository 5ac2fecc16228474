"""The right to go on from the state of an operation: a lock on a file, and what is noted in it.

Whoever has that file open as it was handed on (`flock`) has the right; the process that goes on inherits it, so that it
lasts as long as that lives, whoever else ends. In it those who have it leave word of how far they came, which outlives
them and the daemon. Everything in here blocks for a moment.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Container
from pathlib import Path

from hegmd.errors import Refused
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.protocol.supervision import BACK, OVER, PAST, PAST_AT

logger = logging.getLogger(__name__)


def claimed(folder: Path, operation: str) -> int:
    """The right to go on from the state of that operation. Raises Refused where a process has it."""
    own = os.open(lock_path(folder, operation), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(own, 0)
    except OSError as error:
        os.close(own)
        raise Refused(
            f"a process that was started from the state of operation {operation} is there still",
            "leave it be, it says itself when it goes on; or end it first: nobody is started from one state twice",
        ) from error
    return own


def has_come_to_its_end(folder: Path, operation: str) -> bool:
    """Whether a process has put the state of that operation back and then ended well. Blocks for a moment.

    Its supervisor has said so where the lock is: that outlives supervisor and daemon.
    """
    try:
        with lock_path(folder, operation).open("rb") as notes:
            return notes.read(len(BACK + OVER)) == BACK + OVER
    except OSError:
        return False


def has_passed(folder: Path, operation: str, rank: int) -> bool:
    """Whether that rank has trained on from its state, by its own word. Blocks for a moment."""
    try:
        with lock_path(folder, operation).open("rb") as notes:
            notes.seek(PAST_AT + rank)
            return notes.read(1) == PAST
    except OSError:
        return False


def note_passed(folder: Path, operation: str, rank: int, who: tuple[int, int]) -> bool:
    """Note in that rank's place that it has trained on from its state; whether the process lived still when that stood.

    Its supervisor reads it once the process has ended, so that of one that lived it is read in time. Blocks for a
    moment.
    """
    pid, start_ticks = who
    try:
        with lock_path(folder, operation).open("r+b", buffering=0) as notes:
            os.pwrite(notes.fileno(), PAST, PAST_AT + rank)
            if start_ticks_of(pid) == start_ticks:
                return True
            os.pwrite(notes.fileno(), bytes(len(PAST)), PAST_AT + rank)
    except OSError as error:
        logger.warning("that process %d has gone on is noted nowhere: %s", pid, error)
        return start_ticks_of(pid) == start_ticks
    return False


def lock_path(folder: Path, operation: str) -> Path:
    """The file whose lock is the right to go on from the state of that operation."""
    return folder / f"restart-{operation}.lock"


def forget_claims(folder: Path, held: Container[str]) -> None:
    """Remove the locks of operations that hold no state any more. Blocks."""
    for path in folder.glob("restart-*.lock"):
        if path.stem.removeprefix("restart-") not in held:
            path.unlink(missing_ok=True)
