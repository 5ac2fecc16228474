"""The right to continue from the state of an operation: a lock on a file, and what is recorded in it.

The holder of the right is the process with the open file description (`flock`). The new process inherits it, so the
lock lasts as long as that process. Its holders record their progress in the file, which outlives them and the daemon.
Every function here blocks briefly.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Container
from pathlib import Path

from hegmd.errors import Refused
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.protocol.supervision import BACK, DAMAGED, EDITED, OVER, PAST, PAST_AT

logger = logging.getLogger(__name__)

_NAME = re.compile(r"restart-j?[0-9]+\.lock")


def claimed(folder: Path, operation: str) -> int:
    """Take the lock for that operation's state and return its descriptor. Raises Refused if a process holds it."""
    own = os.open(lock_path(folder, operation), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(own, 0)
    except OSError as error:
        os.close(own)
        raise Refused(
            f"a process that was started from the state of operation {operation} is still running",
            "wait until it reports its first boundary, or end it: a saved state can be used once at a time",
        ) from error
    return own


def has_finished(folder: Path, operation: str) -> bool:
    """Return True if a process has put the state of that operation back and then ended well. Blocks for a moment.

    Its supervisor has recorded that in the lock's file: that outlives supervisor and daemon.
    """
    return _has(folder, operation, BACK + OVER)


def was_restored(folder: Path, operation: str) -> bool:
    """Return True if a process has reported that it restored that state. Blocks for a moment. Ranks do not say so."""
    return _has(folder, operation, BACK)


def was_edited(folder: Path, operation: str) -> bool:
    """Return True if a process has reported that its script was edited after it saved that state. Blocks briefly."""
    return _has(folder, operation, EDITED)


def was_damaged(folder: Path, operation: str) -> bool:
    """Return True if a process has reported that the state does not match its checksums. Blocks briefly."""
    return _has(folder, operation, DAMAGED, len(BACK))


def has_passed(folder: Path, operation: str, rank: int) -> bool:
    """Return True if that rank has reported that it trained from its state. Blocks for a moment."""
    return _has(folder, operation, PAST, PAST_AT + rank)


def _has(folder: Path, operation: str, words: bytes, at: int = 0) -> bool:
    try:
        with lock_path(folder, operation).open("rb") as notes:
            notes.seek(at)
            return notes.read(len(words)) == words
    except OSError:
        return False


def note_passed(folder: Path, operation: str, rank: int, who: tuple[int, int]) -> bool:
    """Record that the rank has trained from its state. Returns True if the process was alive after that was written.

    Its supervisor reads the record once the process has exited, so a record of a living process is read in time. Blocks
    briefly.
    """
    pid, start_ticks = who
    try:
        with lock_path(folder, operation).open("r+b", buffering=0) as notes:
            os.pwrite(notes.fileno(), PAST, PAST_AT + rank)
            if start_ticks_of(pid) == start_ticks:
                return True
            os.pwrite(notes.fileno(), bytes(len(PAST)), PAST_AT + rank)
    except OSError as error:
        logger.warning("hegmd could not record that process %d has resumed: %s", pid, error)
        return start_ticks_of(pid) == start_ticks
    return False


def lock_path(folder: Path, operation: str) -> Path:
    """Return the path of the lock file for that operation's state."""
    return folder / f"restart-{operation}.lock"


def is_lock_name(name: str) -> bool:
    """Return True if a lock file has such a name: that of an operation or of a job."""
    return _NAME.fullmatch(name) is not None


def forget_claims(folder: Path, held: Container[str]) -> None:
    """Remove the locks of operations that hold no state. Blocks."""
    for path in folder.glob("restart-*.lock"):
        if path.stem.removeprefix("restart-") not in held:
            path.unlink(missing_ok=True)
