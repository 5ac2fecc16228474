"""Descriptors received over a socket and their owner, and a look at one descriptor.

Code that reads such a socket gives the descriptors an owner before it looks at anything else. Uses no event loop: the
daemon and the GPU helper share it, and the helper has to start quickly.
"""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

# The kernel's SCM_MAX_FD: no message carries more.
MAX_IN_A_MESSAGE = 253
FD_BYTES = array.array("i").itemsize

Inode = tuple[int, int]


def inode_of(fd: int) -> Inode:
    """Return what a file is known by, whatever its name. Raises OSError."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def is_readable(fd: int, within_s: float = 0.0) -> bool:
    """Return True if that descriptor is readable within that time, or its peer has gone. Blocks so long."""
    poll = select.poll()  # `select` cannot handle descriptors above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


class Descriptors:
    """Received descriptors with an owner: those that are not taken are closed. Closing twice is fine."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def __len__(self) -> int:
        return len(self._fds)

    def take(self) -> list[int]:
        """Return all of them; the caller closes them."""
        fds, self._fds = self._fds, []
        return fds

    def add(self, fd: int) -> None:
        self._fds.append(fd)

    def view(self) -> tuple[int, ...]:
        """Return their numbers, valid as long as this owner has them."""
        return tuple(self._fds)

    def close(self) -> None:
        for fd in self.take():
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def rights_of(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    """Return the ancillary data for `sendmsg` that carries these descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def received(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that `recvmsg` received, in order. The caller closes them."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(data[: len(data) - len(data) % FD_BYTES])
            found.extend(fds)
    return found
