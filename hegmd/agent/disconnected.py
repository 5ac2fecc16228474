"""Stepping aside: while an image is made of the process its agent has no connection, and looks where to come back to.

Owns the meeting place, a file that the daemon made beside its socket, and what it says: empty is to stay, a path is the
socket to come back to, and without the file it is the usual one. The place is looked at and never kept open, because a
file that is open belongs to the image, and would have to be there, as large as it was, wherever that is restored. Time
is counted in looks and slept in the C library: after a restore on another node the monotonic clock is another one, and
whatever waits for an instant of the old one, as Python's own waits do when they were interrupted, may wait for days.
"""

from __future__ import annotations

import os
from time import sleep

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_EVERY_S = 0.03
LIMIT_S = 4 * 3600.0
_MAX_BYTES = 4096
# Of a file's mode, as in the module `stat`, which the agent does without.
_KIND, _REGULAR = 0o170000, 0o100000


class Aside:
    """One time of stepping aside: `path` is the meeting place, `limit_s` after what time nobody is waited for."""

    def __init__(self, path: str, limit_s: float | None) -> None:
        self._path = path
        self._looks = max(1, int((LIMIT_S if limit_s is None else limit_s) / LOOK_EVERY_S))
        self._process = started_at()
        self._sleep = _sleeper()

    def wait(self) -> str | None:
        """Until there is somebody to come back to: the path of its socket, or None for the usual one."""
        for _ in range(self._looks):
            try:
                seen = os.lstat(self._path)
            except OSError:  # it was taken away, or another node never had it
                return None
            if seen.st_size:
                return self._read()
            self._sleep()
        note(f"no daemon connected at {self._path}")
        return None

    def is_revived(self) -> bool:
        """Whether this is another process than the one that stepped aside: restored from its image."""
        return started_at() != self._process

    def _read(self) -> str | None:
        """What the place says. One that anybody else could have written says nothing."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            about = os.fstat(fd)
            if about.st_mode & _KIND != _REGULAR or about.st_uid not in (0, os.geteuid()):
                note(f"{self._path} is of uid {about.st_uid} and is not trusted")
                return None
            return os.fsdecode(os.read(fd, _MAX_BYTES)).strip() or None
        finally:
            os.close(fd)


def started_at() -> str:
    """The process's start, which with its pid tells it from every other of this boot."""
    with open("/proc/self/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[19].decode()


def _sleeper() -> Callable[[], object]:
    try:
        import ctypes

        usleep = ctypes.CDLL(None).usleep
    except (ImportError, OSError, AttributeError):  # such a Python carries nothing, so there is nothing to wait with
        return lambda: sleep(LOOK_EVERY_S)
    return lambda: usleep(int(LOOK_EVERY_S * 1e6))
