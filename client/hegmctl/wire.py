"""The Unix socket under a synchronous connection: bytes and descriptors, with deadlines.

It uses `_socket`, the C module under the standard library's `socket`: that one adds classes and enumerations that cost
7 ms to import, most of what `hegmctl gpus` may take, and nothing that is needed here. What is used of it (connect,
sendmsg, recvmsg, settimeout) has been the same since Python 3.3. Raises OSError and TimeoutError as they come;
`connection` says what they mean.
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
# A signal that comes between Python's last look for one and the kernel's call does not end that call: Ctrl-C would be
# heeded when something is heard, which may be never. So no call lasts longer than this, and Python looks in between.
LOOK_EVERY_S = 0.5


class Descriptors:
    """Received file descriptors and their one owner: whatever is not taken out by `steal` is closed with it."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds: list[int | None] = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def steal(self, index: int) -> int:
        """The descriptor of that number, which is the caller's own from now on. Raises LookupError."""
        fd = self._fds[index]
        if fd is None:
            raise LookupError(f"descriptor {index} was taken out or closed before")
        self._fds[index] = None
        return fd

    def numbers(self) -> list[int]:
        """Those that are left; they stay the owner's."""
        return [fd for fd in self._fds if fd is not None]

    def close(self) -> None:
        """Close what is left. Closing twice is fine."""
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


#: What comes with nearly every answer. One for all: Ctrl-C in the moment in which Python code finalizes an object is
#: told of and lost, and with one for each answer there was such a moment after each.
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
            # With a full queue a non-blocking connect fails at once, so Python's own timeout is of no use here; the
            # kernel's, for sending, also ends the wait for a place in the queue (socket(7), SO_SNDTIMEO).
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
        """The socket's descriptor; -1 when closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took."""
        self._socket.close()
        fds, self._received = self._received, []
        for fd in fds:
            os.close(fd)

    def send(self, data: bytes, fds: Sequence[int], deadline: float | None) -> None:
        """Send everything; the descriptors go with the first byte.

        Cut short by a deadline or a signal the stream is of no more use, and it closes. It stays open when the peer
        hung up, who may have said why.
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
        """Some bytes; none at the end of the stream. Descriptors that came with them wait for `take`."""
        data, ancillary, flags = self._received_by(deadline)
        for level, kind, payload in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                whole = len(payload) - len(payload) % _FD_BYTES
                fds = memoryview(payload[:whole]).cast("i").tolist()
                if flags & _socket.MSG_CTRUNC:  # some were lost, and which is not told: this process is at its limit
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
        """The next descriptors in the order in which they came; None when fewer came."""
        if count == 0:
            return NO_DESCRIPTORS
        if count > len(self._received):
            return None
        taken, self._received = self._received[:count], self._received[count:]
        return Descriptors(taken)

    def _wait_until(self, deadline: float | None) -> None:
        # Not 0, which would mean not to wait at all and raise another error.
        self._socket.settimeout(None if deadline is None else max(deadline - monotonic(), 0.001))


def _rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    packed = b"".join(fd.to_bytes(_FD_BYTES, sys.byteorder) for fd in fds)
    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)]


def _timeval(seconds: float) -> bytes:
    parts = divmod(int(seconds * 1_000_000), 1_000_000)  # the kernel takes 0 for "no limit"
    return b"".join(part.to_bytes(8, sys.byteorder) for part in parts)
