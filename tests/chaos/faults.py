"""Faults of a worker other than a kill: its agent's socket is cut or damaged, or the process is stopped for a while.

The test takes a copy of the worker's own descriptor (pidfd_getfd), so both ends see a real break, and the kernel still
reports the peer to the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438
_FRAME_BYTES = 1000


def cut(pid: int, socket_path: Path) -> int:
    """End the agent's connections at any moment, and return their number."""
    count = 0
    for connection in _connections(pid, socket_path):
        connection.shutdown(socket.SHUT_RDWR)
        count += 1
    return count


def cut_within_a_frame(pid: int, socket_path: Path) -> int:
    """The same after the head and the first bytes of a frame from the agent."""
    count = 0
    for connection in _connections(pid, socket_path):
        connection.send(struct.pack(">I", _FRAME_BYTES) + b"\x83\xa1", socket.MSG_NOSIGNAL)
        connection.shutdown(socket.SHUT_RDWR)
        count += 1
    return count


def spoil(pid: int, socket_path: Path) -> int:
    """Have the agent say what is no message at all; the connection stays as it is."""
    count = 0
    for connection in _connections(pid, socket_path):
        connection.send(struct.pack(">I", 8) + b"\xc1" * 8, socket.MSG_NOSIGNAL)
        count += 1
    return count


def _connections(pid: int, socket_path: Path) -> Iterator[socket.socket]:
    """A copy of each descriptor of that process that is connected to the daemon."""
    pidfd = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError), _copied(pidfd, int(link.name)) as found:
                if found.getpeername() == str(socket_path):
                    yield found
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def _copied(pidfd: int, number: int) -> Iterator[socket.socket]:
    """Raises OSError for a descriptor that is no socket, or closed meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        found = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise
    with found:
        yield found
