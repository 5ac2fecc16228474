"""One connected Unix stream socket for the event loop: bytes and descriptors in both directions.

anyio's Unix stream leaves received descriptors open across exec (no MSG_CMSG_CLOEXEC): programs that the daemon starts
would inherit them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence

import anyio

from hegmd.errors import BAD_REQUEST, TIMEOUT, HegmError, PeerError
from hegmd.protocol.connection import MAX_FDS
from hegmd.system.descriptors import FD_BYTES, Descriptors, received, rights_of

READ_BYTES = 16 * 1024
_WRITE_BYTES = 256 * 1024


class PeerStream:
    """Owns the socket and every received descriptor that is not yet claimed. A message may carry `max_fds`."""

    def __init__(self, connection: socket.socket, max_fds: int = MAX_FDS) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._max_fds = max_fds
        self._unclaimed: deque[int] = deque()
        self._sending = anyio.Lock()
        self._closed = False

    async def receive(self) -> bytes:
        """Return the next bytes; empty at the end of the stream. Received descriptors wait for `claim`."""
        while True:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    READ_BYTES, socket.CMSG_SPACE(self._max_fds * FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            except InterruptedError:
                continue
            except ConnectionError:
                return b""
            self._unclaimed.extend(received(ancillary))
            if flags & socket.MSG_CTRUNC or len(self._unclaimed) > 2 * self._max_fds:
                raise PeerError(
                    BAD_REQUEST,
                    "more descriptors were sent than any message names",
                    f"send at most {self._max_fds} with a frame, and say how many in `fds`",
                )
            return data

    def claim(self, count: int) -> Descriptors:
        """Return the oldest `count` descriptors. Raises PeerError if fewer were received."""
        if count > len(self._unclaimed):
            raise PeerError(
                BAD_REQUEST,
                f"{count} descriptors were announced, {len(self._unclaimed)} arrived",
                "send the descriptors with the first byte of the frame that names them",
            )
        return Descriptors([self._unclaimed.popleft() for _ in range(count)])

    def close_unclaimed(self) -> None:
        """Close the unclaimed descriptors. For when no incomplete frame can name them."""
        while self._unclaimed:
            os.close(self._unclaimed.popleft())

    async def send(self, data: bytes, deadline_s: float, fds: Sequence[int] = ()) -> None:
        """Send all bytes, one caller at a time. If the peer does not read them in time, close and raise TIMEOUT.

        The descriptors go with the first byte. The caller keeps and owns them until this returns. A started frame is
        finished even if the caller is cancelled: half a frame would break the connection for other requests. Only
        `close` and the deadline interrupt it.
        """
        async with self._sending:
            sent = self._send_now(data, fds)
            if sent == len(data):
                return
            try:
                with anyio.fail_after(deadline_s, shield=True):
                    while sent < len(data):
                        await anyio.wait_writable(self._socket)
                        sent += self._send_now(data[sent : sent + _WRITE_BYTES], () if sent else fds)
            except TimeoutError:
                self.close()
                raise HegmError(
                    TIMEOUT, f"the peer did not read for {deadline_s:g} s", "read replies as they come"
                ) from None

    def _send_now(self, data: bytes, fds: Sequence[int]) -> int:
        try:
            return self._socket.sendmsg([data], rights_of(fds), socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0

    def close(self) -> None:
        """Close the socket and every unclaimed descriptor."""
        if self._closed:
            return
        self._closed = True
        self.close_unclaimed()
        with contextlib.suppress(OSError):  # wakes a task that waits in `receive`; a plain close would not
            self._socket.shutdown(socket.SHUT_RDWR)
        anyio.notify_closing(self._socket)
        self._socket.close()
