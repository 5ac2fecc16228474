"""A daemon for the tests of the client: the real protocol over a real socket in a thread, with prepared answers.

It uses hegmd's own `ServerConnection`, so a test of the client is also a test of both ends together. A table of
functions has the answers; the daemon keeps all requests. A test can make it misbehave: hang up, send raw bytes, or
stay silent.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from typing_extensions import Self

from hegmd.errors import CANCELLED, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.connection import IncomingRequest, InvalidRequest, ProtocolBroken, ServerConnection
from hegmd.protocol.record import Record
from hegmd.protocol.snapshots import Event
from tests.patience import HANG_S

WAIT_S = HANG_S


class Caller:
    """One connection, as the answer functions see it."""

    def __init__(self, daemon: FakeDaemon, connection: socket.socket) -> None:
        self.daemon = daemon
        self.socket = connection
        self.protocol = ServerConnection(frame_bytes=262_144, requests_in_flight=32)
        self.sending = threading.Lock()
        self.fds: list[int] = []
        self.unanswered: set[int] = set()

    def send(self, data: bytes, fds: Iterable[int] = ()) -> None:
        """Send bytes, the descriptors with the first of them."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self.sending:
            sent = self.socket.sendmsg([data], rights)
            if sent < len(data):  # sending to a client that has left is an error too
                self.socket.sendall(data[sent:])

    def event(self, request_id: int, event: Record) -> None:
        """Say something in the middle of a request."""
        self.send(self.protocol.event(request_id, event))

    def reply(self, request_id: int, reply: Record, fds: Iterable[int] = ()) -> None:
        """Answer a request."""
        fds = list(fds)
        self.unanswered.discard(request_id)
        self.send(self.protocol.reply(request_id, reply, len(fds)), fds)


# None leaves the request unanswered; the test can answer it later.
Answerer = Callable[[Caller, IncomingRequest], Record | None]


class FakeDaemon:
    """Listens while the context lasts."""

    def __init__(
        self, path: Path, answers: dict[type[m.Request], Answerer], *, first_words: bytes | None = None
    ) -> None:
        self.path = path
        self.answers: dict[type[m.Request], Answerer] = {m.RegisterJob: registering, **answers}
        self.first_words = first_words
        self.requests: list[m.Request] = []
        self.callers: list[Caller] = []
        self.news = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def __enter__(self) -> Self:
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every connection and listen no more. Stopping twice is fine."""
        if self._stopping:
            return
        self._stopping = True
        self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts; closing alone does not
        self.hang_up()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def hang_up(self) -> None:
        """End every connection."""
        for caller in list(self.callers):
            with contextlib.suppress(OSError):  # it has hung up first
                caller.socket.shutdown(socket.SHUT_RDWR)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a request, a new connection or a disconnection makes the condition true."""
        with self.news:
            if not self.news.wait_for(condition, WAIT_S):
                raise AssertionError(f"waited in vain; asked so far: {self.requests}")

    def wait_for(self, kind: type[m.Request], times: int = 1) -> m.Request:
        """The request of that kind, once it was made so many times."""
        self.wait_until(lambda: sum(isinstance(request, kind) for request in self.requests) >= times)
        return [request for request in self.requests if isinstance(request, kind)][times - 1]

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _address = self._listener.accept()
            except OSError:
                return
            caller = Caller(self, connection)
            self.callers.append(caller)
            self._spawn(self._serve, caller)

    def _serve(self, caller: Caller) -> None:
        with caller.socket:
            try:
                if self.first_words is not None:
                    caller.send(self.first_words)
                    return
                self._converse(caller)
            except OSError:
                pass  # the client has gone, which is its right
            finally:
                for fd in caller.fds:
                    os.close(fd)
                with self.news:
                    self.callers.remove(caller)
                    self.news.notify_all()

    def _converse(self, caller: Caller) -> None:
        while True:
            data, fds, _flags, _address = socket.recv_fds(caller.socket, 65_536, 16)
            caller.fds += fds
            if not data:
                return
            caller.protocol.feed(data)
            try:
                while (request := caller.protocol.next_event()) is not None:
                    self._answer(caller, request)
            except ProtocolBroken as error:
                caller.send(caller.protocol.error(error.request_id, error))
                return

    def _answer(self, caller: Caller, request: IncomingRequest | InvalidRequest) -> None:
        if isinstance(request, InvalidRequest):
            caller.send(caller.protocol.error(request.id, request.error))
            return
        caller.unanswered.add(request.id)
        try:
            answer = self.answers.get(type(request.request), unanswered)(caller, request)
        except HegmError as error:
            caller.send(caller.protocol.error(request.id, error))
            caller.unanswered.discard(request.id)
        else:
            if answer is not None:
                caller.reply(request.id, answer)
        with self.news:
            self.requests.append(request.request)
            self.news.notify_all()


def unanswered(_caller: Caller, _asked: IncomingRequest) -> None:
    """Say nothing."""


def registering(_caller: Caller, request: IncomingRequest) -> m.JobRegistered:
    """The registration reply that `hegmctl run` gets for its job."""
    assert isinstance(request.request, m.RegisterJob)
    return m.JobRegistered(id="j1", name=request.request.name or "job")


def saying(reply: Record) -> Answerer:
    """Answer with that record."""
    return lambda _caller, _asked: reply


def failing(error: HegmError) -> Answerer:
    """Answer with that error."""

    def answer(_caller: Caller, _asked: IncomingRequest) -> None:
        raise error

    return answer


def cancelling(caller: Caller, request: IncomingRequest) -> m.CancelReply:
    """Answer a cancellation as hegmd does: the request that it names ends with an error."""
    assert isinstance(request.request, m.Cancel)
    found = request.request.request in caller.unanswered
    if found:
        cancelled = HegmError(CANCELLED, "cancelled", "nothing needs to be done")
        caller.send(caller.protocol.error(request.request.request, cancelled))
        caller.unanswered.discard(request.request.request)
    return m.CancelReply(found=found)


def remembering(events: Iterable[Event], *, then: Callable[[Caller], object] | None = None) -> Answerer:
    """Send those events; then answer, or with `follow` call `then` and leave the request open."""

    def answer(caller: Caller, request: IncomingRequest) -> m.EventsReply | None:
        assert isinstance(request.request, m.Events)
        wanted = [event for event in events if event.seq >= request.request.since]
        for event in wanted:
            caller.event(request.id, event)
        if not request.request.follow:
            return m.EventsReply(next_seq=wanted[-1].seq + 1 if wanted else 1)
        if then is not None:
            then(caller)
        return None

    return answer
