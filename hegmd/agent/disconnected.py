"""The agent while it is disconnected for an image: it polls for a daemon to reconnect to.

Reads the rendezvous, a file that the daemon made beside its socket. An empty file means wait; a path is the socket to
reconnect to; without the file it is the usual one. The file is never kept open: an open file belongs to the image, and
would have to exist with the same size where the image is restored. Time is counted in polls and slept in the C library:
after a restore on another node the monotonic clock differs, and a wait for an instant of the old one could last for
days.
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
# Bits of a file's mode, as in the module `stat`, which the agent does not import.
_KIND, _REGULAR = 0o170000, 0o100000


class RendezvousWait:
    """A period without a connection: `path` is the rendezvous, `limit_s` the longest wait."""

    def __init__(self, path: str, limit_s: float | None) -> None:
        self._path = path
        self._looks = max(1, int((LIMIT_S if limit_s is None else limit_s) / LOOK_EVERY_S))
        self._process = started_at()
        self._sleep = _sleeper()

    def wait(self) -> str | None:
        """Wait for a daemon; returns the path of its socket, or None for the usual one."""
        for _ in range(self._looks):
            try:
                stat = os.lstat(self._path)
            except OSError:  # removed, or never there on another node
                return None
            if stat.st_size:
                return self._read()
            self._sleep()
        note(f"no daemon connected at {self._path}")
        return None

    def is_revived(self) -> bool:
        """Return True if this process was restored from the image."""
        return started_at() != self._process

    def _read(self) -> str | None:
        """Return the content of the file; empty if other users could have written it."""
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
    """Return the process's start time, which identifies it with its pid until the next boot."""
    with open("/proc/self/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[19].decode()


def _sleeper() -> Callable[[], object]:
    try:
        import ctypes

        usleep = ctypes.CDLL(None).usleep
    # such a Python cannot run a training, so there is nothing to wait with
    except (ImportError, OSError, AttributeError):
        return lambda: sleep(LOOK_EVERY_S)
    return lambda: usleep(int(LOOK_EVERY_S * 1e6))
