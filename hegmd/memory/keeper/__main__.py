"""`python -m hegmd.memory.keeper STATE_DIR`: detaches, listens, and serves until it holds nothing.

The starter's command exits with status 0 as soon as a keeper listens there, a new or an existing one. The keeper then
runs in a session of its own, with no inherited descriptors: it outlives the terminal, the daemon and the daemon's
control of its children. A lock makes it the only one in the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time

from hegmd.memory.keeper.serving import Keeper
from hegmd.memory.keeper.wire import LOCK_NAME, SOCKET_NAME

FIRST_CALLER_S = 5.0
# How long the lock's holder may take to exit, if it holds nothing, or to listen.
LOCK_LIMIT_S = 10.0
_POLL_INTERVAL_S = 0.02
BACKLOG = 16


def main(folder: str) -> int:
    """Return the exit status of the command; in the keeper's own process, that of the keeper."""
    os.umask(0o077)
    # By descriptor, so that the socket's path is short even in a long directory.
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = f"/proc/self/fd/{at}/{SOCKET_NAME}"
    lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
    if not _take(lock, path):
        return 0
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=at)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(BACKLOG)
        ready, leaving = os.pipe2(os.O_CLOEXEC)
        if os.fork():
            os.close(leaving)
            os.read(ready, 1)  # to its end: the starter may end what is left of this command's group
            return 0
        os.close(ready)
        _leave()
        os.close(leaving)
        Keeper(listening).serve(FIRST_CALLER_S)
        os.unlink(SOCKET_NAME, dir_fd=at)  # still under the lock: a successor's socket is safe
    return 0


def _take(lock: int, path: str) -> bool:
    """Take the lock. Returns False if a keeper listens there. Raises TimeoutError if neither happens.

    A holder keeps the lock while it serves, and may not listen yet: so both are polled.
    """
    deadline = time.monotonic() + LOCK_LIMIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, contextlib.suppress(OSError):
            probe.connect(path)
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"whoever has the lock {LOCK_NAME} neither ended nor listened for {LOCK_LIMIT_S:g} s")
        time.sleep(_POLL_INTERVAL_S)


def _leave() -> None:
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    # The daemon's user may end it by name; nothing else that is sent to groups and terminals is meant for it.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write("hegm-keeper")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
