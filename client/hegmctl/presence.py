"""Whether a daemon runs where none can be reached: one whose socket file was deleted is there, and binds it again.

Loaded only when a connection has failed. Looks at what the kernel says of sockets, and at the lock that a daemon holds
on its state directory; waits for nothing and takes no lock for longer than the look.
"""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LISTENS = 0x10000  # __SO_ACCEPTCON: net/unix/af_unix.c shows it in /proc/net/unix
LOCK_NAME = "lock"  # as in hegmd/system/state_dir.py


def is_listened_at(path: str, sockets: str = "/proc/net/unix") -> bool:
    """Whether a socket that was bound to that path listens, be its file there or not."""
    wanted = os.fsencode(path)
    try:
        with open(sockets, "rb") as lines:
            next(lines, b"")
            for line in lines:
                fields = line.rstrip(b"\n").split(None, 7)
                if len(fields) == 8 and fields[7] == wanted and int(fields[3], 16) & _LISTENS:
                    return True
    except (OSError, ValueError):
        pass  # it is not known, as in a container without /proc
    return False


def holder(folders: Iterable[str]) -> str | None:
    """The pid of the daemon that holds the first of these state directories that one holds; None if none is seen to."""
    for folder in folders:
        try:
            fd = os.open(f"{folder}/{LOCK_NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        except OSError:
            continue
        finally:
            os.close(fd)
    return None


def state_folders(path: str, system_socket: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the default state directory of the daemon at that socket."""
    own = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    started_by_run = f"{path}.state"
    return ("/var/lib/hegm",) if path == system_socket else (started_by_run, f"{own}/hegm")
