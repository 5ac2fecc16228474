"""The Unix socket of a synchronous connection: bytes and descriptors, with deadlines.

Uses `_socket`, the C module below the standard library's `socket`, whose classes and enumerations take 7 ms to import:
most of the time that `hegmctl gpus` may take. The functions used here have not changed since Python 3.3. Raises OSError
and TimeoutError unchanged; `connection` explains them.
"""

from __future__ import annotations

import _socket
import os
import sys
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

RECEIVE_BYTES = 262_144
MAX_FDS = 16
_FD_BYTES = 4
# A signal that arrives just before the kernel's call does not interrupt it, so Ctrl-C could take effect only after the
# next message. So no call lasts longer than this, and Python handles signals in between.
LOOK_EVERY_S = 0.5


class Descriptors:
    """Received file descriptors and their owner. It closes all that are not taken out with `steal`."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds: list[int | None] = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def steal(self, index: int) -> int:
        """Return the descriptor with that number; the caller owns it from now on. Raises LookupError."""
        fd = self._fds[index]
        if fd is None:
            raise LookupError(f"descriptor {index} was taken out or closed before")
        self._fds[index] = None
        return fd

    def numbers(self) -> list[int]:
        """Return the descriptors that are left; they stay the owner's."""
        return [fd for fd in self._fds if fd is not None]

    def close(self) -> None:
        """Close the descriptors that are left. Closing twice is fine."""
        for index, fd in enumerate(self._fds):
            if fd is not None:
                self._fds[index] = None
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


#: Nearly every answer comes without descriptors. They share one object: Ctrl-C while Python finalizes an object is
#: reported and lost, and an object for each answer would be finalized after each.
NO_DESCRIPTORS = Descriptors()


class Wire:
    """A connected socket. One owner; closing twice is fine."""

    def __init__(self, connected: _socket.socket) -> None:
        self._socket = connected
        self._received: list[int] = []

    @classmethod
    def connect(cls, path: str, deadline: float | None) -> Wire:
        """Connect to the socket at that path. Raises OSError, and TimeoutError at the monotonic deadline."""
        connecting = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            # A non-blocking connect fails at once if the queue is full, so Python's timeout is of no use here. The
            # kernel's send timeout also limits the wait for a place in the queue (socket(7), SO_SNDTIMEO).
            if deadline is not None:
                patience_s = max(deadline - monotonic(), 0.001)
                connecting.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, _timeval(patience_s))
            try:
                connecting.connect(path)
            except BlockingIOError:
                raise TimeoutError(f"no place in the queue of {path}") from None
            connecting.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, _timeval(0))
        except BaseException:
            connecting.close()
            raise
        return cls(connecting)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 when closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket and all descriptors that were not taken."""
        self._socket.close()
        fds, self._received = self._received, []
        for fd in fds:
            os.close(fd)

    def send(self, data: bytes, fds: Sequence[int], deadline: float | None) -> None:
        """Send everything; the descriptors go with the first byte.

        After a deadline or a signal in the middle the stream is unusable, and it is closed. It stays open when the peer
        hung up, because the peer may have sent the reason.
        """
        try:
            self._wait_until(deadline)
            sent = self._socket.sendmsg([data], _rights(fds), _socket.MSG_NOSIGNAL) if fds else 0
            view = memoryview(data)
            while sent < len(data):
                self._wait_until(deadline)
                sent += self._socket.send(view[sent:], _socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException:
            self.close()
            raise

    def receive(self, deadline: float | None) -> bytes:
        """Return some bytes; none at the end of the stream. Descriptors that came with them wait for `take`."""
        data, ancillary, flags = self._received_by(deadline)
        for level, kind, payload in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                whole = len(payload) - len(payload) % _FD_BYTES
                fds = memoryview(payload[:whole]).cast("i").tolist()
                if flags & _socket.MSG_CTRUNC:  # some were lost: this process has reached its limit
                    Descriptors(fds).close()
                else:
                    self._received.extend(fds)
        return data

    def _received_by(self, deadline: float | None) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
        while True:
            look_at = monotonic() + LOOK_EVERY_S
            self._wait_until(look_at if deadline is None else min(deadline, look_at))
            try:
                return self._socket.recvmsg(
                    RECEIVE_BYTES, _socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), _socket.MSG_CMSG_CLOEXEC
                )[:3]
            except TimeoutError:
                if deadline is not None and monotonic() >= deadline:
                    raise

    def take(self, count: int) -> Descriptors | None:
        """Return the next descriptors in the order of their arrival; None if fewer came."""
        if count == 0:
            return NO_DESCRIPTORS
        if count > len(self._received):
            return None
        taken, self._received = self._received[:count], self._received[count:]
        return Descriptors(taken)

    def _wait_until(self, deadline: float | None) -> None:
        # Not 0: that would mean not to wait, and raise another error.
        self._socket.settimeout(None if deadline is None else max(deadline - monotonic(), 0.001))


def _rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    packed = b"".join(fd.to_bytes(_FD_BYTES, sys.byteorder) for fd in fds)
    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)]


def _timeval(seconds: float) -> bytes:
    parts = divmod(int(seconds * 1_000_000), 1_000_000)  # 0 means no limit to the kernel
    return b"".join(part.to_bytes(8, sys.byteorder) for part in parts)
