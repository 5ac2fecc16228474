"""One connection from hello to its end: reads requests, runs each in a task, and writes the answers.

A peer may be slow, hostile or disconnected. So these are limited: the time to say hello, to finish a frame and to read
answers; running requests; bytes and descriptors. No connection affects another.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
import anyio.abc
import anyio.lowlevel

from hegmd.errors import CANCELLED, DISCONNECTED, TIMEOUT, UNAVAILABLE, Bug, HegmError, PeerError
from hegmd.protocol.connection import IncomingRequest, InvalidRequest, ProtocolBroken, ServerConnection
from hegmd.protocol.messages import Cancel, CancelReply, Hello, Request
from hegmd.protocol.record import Record
from hegmd.server.auth import Peer
from hegmd.system.descriptors import Descriptors
from hegmd.system.stream import PeerStream
from hegmd.telemetry.log import limited
from hegmd.telemetry.metrics import Counters

logger = logging.getLogger(__name__)

_CLOSED = (OSError, anyio.ClosedResourceError)  # the peer vanished, or `stop` closed the stream

# After this many frames of one read, other connections get a turn.
_FRAMES_A_TURN = 16


class PeerGone(HegmError):
    """The peer has left. A normal end of a request, and no failure of its handler."""

    def __init__(self) -> None:
        super().__init__(DISCONNECTED, "the peer closed the connection, or did not read", "connect and ask again")


class SessionLimits(NamedTuple):
    """Limits of one connection."""

    frame_bytes: int
    requests_in_flight: int
    hello_deadline_s: float
    frame_deadline_s: float
    send_deadline_s: float


class Call:
    """A running request, as its handler sees it."""

    def __init__(self, session: Session, request_id: int, request: Request, fds: Descriptors) -> None:
        self.session = session
        self.id = request_id
        self.request = request
        self.fds = fds
        self.scope = anyio.CancelScope()

    @property
    def peer(self) -> Peer:
        return self.session.peer

    async def emit(self, event: Record, fds: Sequence[int] = ()) -> None:
        """Send an intermediate message. Its descriptors stay the caller's. Raises PeerGone."""
        await self.session.send(self.session.protocol.event(self.id, event, len(fds)), fds)


Answerer = Callable[[Call], Awaitable[Record]]


class Session:
    """Owns one connection. `answer` returns the reply to a request and raises HegmError only."""

    def __init__(
        self, stream: PeerStream, peer: Peer, answer: Answerer, limits: SessionLimits, counters: Counters
    ) -> None:
        self.peer = peer
        self._counters = counters
        self.limits = limits
        self.protocol = ServerConnection(frame_bytes=limits.frame_bytes, requests_in_flight=limits.requests_in_flight)
        self._at_end: dict[str, Callable[[], object]] = {}
        self._stream = stream
        self._answer = answer
        self._calls: dict[int, Call] = {}

    @property
    def hello(self) -> Hello | None:
        return self.protocol.hello

    async def serve(self) -> None:
        """Serve until the peer leaves, breaks the protocol, or `stop` is called. Raises nothing but cancellation."""
        try:
            await self._converse()
        except Exception as bug:  # the edge of a connection: its errors must not end others
            logger.error("the connection of uid %d was closed because of a bug in hegmd", self.peer.uid, exc_info=bug)
        finally:
            self._stream.close()
            for undo in self._at_end.values():
                undo()

    def at_end(self, key: str, undo: Callable[[], object]) -> None:
        """Call this function when the connection ends; once for each key."""
        self._at_end[key] = undo

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Write one frame. A peer that does not read in time loses the connection. Raises PeerGone."""
        try:
            await self._stream.send(data, self.limits.send_deadline_s, fds)
            self._counters.sent_bytes += len(data)
        except HegmError as error:
            self._note(error)
            raise PeerGone from error
        except _CLOSED as error:
            raise PeerGone from error

    async def stop(self) -> None:
        """Send the peer the error that the daemon ends, then close. Running requests are cancelled."""
        await self._part(HegmError(UNAVAILABLE, "hegmd is stopping", "connect again when it is back"))
        self._stream.close()

    async def _converse(self) -> None:
        async with anyio.create_task_group() as tasks:
            try:
                await self._read(tasks)
            except (PeerGone, *_CLOSED):
                pass
            except HegmError as error:
                self._note(error)
                await self._part(error)
            tasks.cancel_scope.cancel()

    async def _read(self, tasks: anyio.abc.TaskGroup) -> None:
        """Take requests until the stream ends."""
        hello_deadline = anyio.current_time() + self.limits.hello_deadline_s
        frame_deadline: float | None = None
        while True:
            deadline = hello_deadline if self.hello is None else frame_deadline
            data = await self._receive(deadline)
            if not data:
                return
            self._counters.received_bytes += len(data)
            self.protocol.feed(data)
            if await self._take_requests(tasks) or frame_deadline is None:
                frame_deadline = anyio.current_time() + self.limits.frame_deadline_s
            if not self.protocol.mid_frame:
                frame_deadline = None
                self._stream.close_unclaimed()  # descriptors come with the first byte of a frame: these have no frame

    async def _receive(self, deadline: float | None) -> bytes:
        if deadline is None:
            return await self._stream.receive()
        with anyio.move_on_after(max(0.0, deadline - anyio.current_time())):
            return await self._stream.receive()
        waited_for = "hello" if self.hello is None else "the rest of a frame"
        raise HegmError(TIMEOUT, f"waited too long for {waited_for}", "send whole frames, and hello at once")

    async def _take_requests(self, tasks: anyio.abc.TaskGroup) -> int:
        """Start every complete request; return how many there were."""
        taken = 0
        while (event := self.protocol.next_event()) is not None:
            taken += 1
            fds = self._stream.claim(event.fds)
            if isinstance(event, InvalidRequest):
                fds.close()
                await self.send(self.protocol.error(event.id, event.error))
            elif isinstance(event.request, Cancel):
                fds.close()
                await self._cancel(event.id, event.request)
            else:
                await self._start(tasks, event, fds)
            if taken % _FRAMES_A_TURN == 0:
                await anyio.lowlevel.checkpoint()
        return taken

    async def _start(self, tasks: anyio.abc.TaskGroup, event: IncomingRequest, fds: Descriptors) -> None:
        call = Call(self, event.id, event.request, fds)
        self._calls[event.id] = call
        if isinstance(event.request, Hello):
            await self._run(call)  # requests after hello in the same read need it accepted
        else:
            tasks.start_soon(self._run_alone, call, name=f"request {event.request.op}")

    async def _run_alone(self, call: Call) -> None:
        try:
            await self._run(call)
        except PeerGone:
            self._stream.close()  # ends reading and the session

    async def _run(self, call: Call) -> None:
        """Answer the request exactly once."""
        frame: bytes | None = None
        with call.scope, call.fds:
            try:
                frame = self.protocol.reply(call.id, await self._answer(call))
            except PeerGone:
                raise
            except HegmError as error:
                if isinstance(error, Bug):  # a bug of the reply; those of handlers are logged where they are caught
                    logger.error("%s has an answer that cannot be sent", call.request.op, exc_info=error)
                if isinstance(call.request, Hello):  # refused: the connection ends
                    raise ProtocolBroken(error, call.id) from error
                frame = self.protocol.error(call.id, error)
        del self._calls[call.id]
        if frame is None:
            cancelled = HegmError(CANCELLED, f"{call.request.op} was cancelled", "nothing needs to be done")
            frame = self.protocol.error(call.id, cancelled)
        await self.send(frame)

    async def _cancel(self, request_id: int, request: Cancel) -> None:
        call = self._calls.get(request.request)
        if call is not None:
            call.scope.cancel()
        await self.send(self.protocol.reply(request_id, CancelReply(found=call is not None)))

    def _note(self, error: HegmError) -> None:
        """Record that the connection ends without the peer's wish."""
        self._counters.dropped(error.code.name)
        if isinstance(error, PeerError):
            self._counters.bad_frame()
        kind = f"{error.code.name}-{self.peer.uid}"
        limited(logger, kind, logging.WARNING, "connection of uid %d dropped: %s", self.peer.uid, error.message)

    async def _part(self, error: HegmError) -> None:
        """Tell the peer briefly why its connection ends."""
        request_id = error.request_id if isinstance(error, ProtocolBroken) else None
        with anyio.move_on_after(1, shield=True), contextlib.suppress(OSError, anyio.ClosedResourceError, HegmError):
            await self._stream.send(self.protocol.error(request_id, error), 1)
