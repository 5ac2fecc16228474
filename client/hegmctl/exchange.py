"""The conversation of an asynchronous connection: one task writes whole frames, one task reads and distributes
messages.

Sending and cancelling are plain calls that never wait: they queue a frame, and the writer sends it whole, even if the
caller is cancelled. So a cancelled task cannot cut a frame in two, and can cancel its request in the daemon without a
shielded wait. The socket is used directly, because anyio's stream leaves received descriptors open across an exec.
"""

from __future__ import annotations

import array
import fcntl
import socket as sockets
from collections import deque
from collections.abc import Sequence

import anyio
import anyio.abc

from hegmctl.failures import broken, gone, not_offered, refused_hello, with_versions
from hegmctl.wire import MAX_FDS, NO_DESCRIPTORS, RECEIVE_BYTES, Descriptors
from hegmd.errors import BAD_REQUEST, BUSY, DISCONNECTED, HegmError, PeerError
from hegmd.protocol.connection import ClientConnection, Failure, Progress, ProtocolBroken, Reply
from hegmd.protocol.messages import Cancel, Request, Welcome

Received = tuple[Reply | Progress, Descriptors]

# How many messages one request can have unread. Beyond that it fails: to stop reading would hold up other answers, for
# which the same task may wait.
MAX_UNREAD = 65_536


class Waiter:
    """A request under way, and its unread messages."""

    def __init__(self, request_id: int, op: str) -> None:
        self.id = request_id
        self.op = op
        self.message: deque[Received] = deque()
        self._failure: HegmError | None = None
        self._news = anyio.Event()

    @property
    def unread(self) -> int:
        return len(self.message)

    def put(self, message: Received) -> None:
        self.message.append(message)
        self._news.set()

    def fail(self, error: HegmError) -> None:
        """Set the final error. Earlier messages can still be read."""
        self._failure = self._failure or error
        self._news.set()

    async def next(self) -> Received:
        """Return the next message. Raises the HegmError that the request ended with."""
        while not self.message:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._news = anyio.Event()
            await self._news.wait()
        return self.message.popleft()

    def close(self) -> None:
        """Drop the unread messages."""
        for _message, descriptors in self.message:
            descriptors.close()
        self.message.clear()


class Exchange:
    """A connected socket and its requests. Belongs to one event loop."""

    def __init__(self, connected: sockets.socket, path: str) -> None:
        self.path = path
        self._socket = connected
        self._protocol = ClientConnection()
        self._waiters: dict[int, Waiter] = {}
        self._outgoing: deque[tuple[bytes, Descriptors]] = deque()
        self._to_send = anyio.Event()
        self._received: deque[int] = deque()
        self._ended: HegmError | None = None

    @property
    def welcome(self) -> Welcome | None:
        return self._protocol.welcome

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start the two tasks. They end with the connection or when they are cancelled, and raise nothing."""
        tasks.start_soon(self._read, name="hegmd reader")
        tasks.start_soon(self._write, name="hegmd writer")

    def ask(self, request: Request, fds: Sequence[int] = ()) -> Waiter:
        """Queue a request. The descriptors stay the caller's. Raises HegmError if it cannot be sent."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        welcome = self.welcome
        if welcome is not None and request.capability is not None and request.capability not in welcome.capabilities:
            raise not_offered(request.capability, welcome)
        kept = Descriptors(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in fds)
        request_id, frame = self._protocol.request(request, len(kept))
        waiter = self._waiters[request_id] = Waiter(request_id, request.op)
        self._put_in_line(frame, kept)
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Drop a request, and cancel it in the daemon if it is unanswered. Never waits."""
        waiter.close()
        self._cancel(waiter)

    def _cancel(self, waiter: Waiter) -> None:
        under_way = self._waiters.pop(waiter.id, None) is not None and self._ended is None
        if under_way and self.welcome is not None:  # an unanswered hello ends with its connection
            _cancel_id, frame = self._protocol.request(Cancel(request=waiter.id))
            self._put_in_line(frame, NO_DESCRIPTORS)

    def close(self) -> None:
        """Close the socket and all received descriptors that were not taken. The two tasks must have ended."""
        self._end(HegmError(DISCONNECTED, "this connection is closed", "connect again"))
        self._socket.close()
        for _frame, descriptors in self._outgoing:
            descriptors.close()
        self._outgoing.clear()
        Descriptors(self._received).close()
        self._received.clear()

    def _put_in_line(self, frame: bytes, descriptors: Descriptors) -> None:
        self._outgoing.append((frame, descriptors))
        self._to_send.set()

    async def _write(self) -> None:
        try:
            while True:
                while self._outgoing:
                    frame, descriptors = self._outgoing.popleft()
                    with descriptors:
                        await self._send(frame, descriptors)
                self._to_send = anyio.Event()
                await self._to_send.wait()
        except OSError:
            return  # the daemon hung up; the reader gets the reason and fails the requests

    async def _send(self, frame: bytes, descriptors: Descriptors) -> None:
        fds = array.array("i", descriptors.numbers())
        rights = [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, fds)] if fds else []
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._socket.sendmsg([rest], rights, sockets.MSG_NOSIGNAL) :]
                rights = []
            except BlockingIOError:
                await anyio.wait_writable(self._socket)

    async def _read(self) -> None:
        try:
            while data := await self._receive():
                self._protocol.feed(data)
                while (message := self._protocol.next_event()) is not None:
                    self._hand_out(message)
        except ProtocolBroken as error:
            self._end(broken(self.path, error, self.welcome))
        except OSError:
            self._end(None)
        except HegmError as error:
            self._end(error)
        else:
            self._end(None)

    async def _receive(self) -> bytes:
        while True:
            try:
                data, ancillary, _flags, _address = self._socket.recvmsg(
                    RECEIVE_BYTES, sockets.CMSG_SPACE(MAX_FDS * 4), sockets.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            for level, kind, payload in ancillary:
                if level == sockets.SOL_SOCKET and kind == sockets.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._received.extend(fds)
            return data

    def _hand_out(self, message: Reply | Failure | Progress) -> None:
        if isinstance(message, Failure):
            error = self.explained(message.error)
            if message.id is None:
                raise error
            waiter = self._waiters.pop(message.id, None)
            if waiter is not None:
                waiter.fail(error)
            return
        descriptors = self._claim(message.fds)
        waiter = self._waiters.get(message.id)
        if waiter is None:
            descriptors.close()
            return
        if isinstance(message, Reply):
            del self._waiters[message.id]
        elif waiter.unread >= MAX_UNREAD:
            self._cancel(waiter)
            waiter.fail(HegmError(BUSY, f"{MAX_UNREAD} events were not read in time", "read them as they come"))
            return
        waiter.put((message, descriptors))

    def _claim(self, count: int) -> Descriptors:
        if count == 0:
            return NO_DESCRIPTORS
        if count > len(self._received):
            raise ProtocolBroken(
                PeerError(BAD_REQUEST, f"{count} descriptors announced, {len(self._received)} arrived", "try again")
            )
        return Descriptors(self._received.popleft() for _ in range(count))

    def explained(self, error: HegmError) -> HegmError:
        """Return the daemon's error with an explanation for the caller."""
        return refused_hello(error) if self.welcome is None else with_versions(error, self.welcome)

    def _end(self, error: HegmError | None) -> None:
        """Fail all requests. Without an error, each one fails because the daemon has ended."""
        if self._ended is None:
            self._ended = error or gone(self.path, "any further request")
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.fail(error or gone(self.path, waiter.op))
