"""The synchronous library: `with connect() as hegmd: hegmd.gpus()`.

    from hegmctl.connection import connect

    with connect() as hegmd:
        for gpu in hegmd.gpus().gpus:
            print(gpu.id, gpu.memory_used_bytes)

One request at a time is under way, but streams stay open beside others: you can continue to read `events` after another
call. Every failure is a HegmError with code, message and hint. A Connection belongs to one thread.

`library` has the calls, `wire` the bytes, and `hegmd.protocol.connection` the rules of the conversation.
"""

from __future__ import annotations

from time import monotonic

from hegmctl.endpoint import Endpoint, find_endpoint, unreachable
from hegmctl.failures import Stopping, broken, gone, not_offered, refused_hello, silent, with_versions
from hegmctl.library import SyncCalls
from hegmctl.wire import Descriptors, Wire
from hegmd import __version__
from hegmd.errors import BAD_REQUEST, DISCONNECTED, UNAVAILABLE, Bug, HegmError, PeerError
from hegmd.protocol.connection import ClientConnection, Failure, Progress, ProtocolBroken, Reply
from hegmd.protocol.messages import (
    SUPPORTED_VERSIONS,
    Cancel,
    Doctor,
    DoctorReply,
    Events,
    EventsReply,
    Hello,
    Request,
    Story,
    StoryReply,
    Welcome,
)
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Record
from hegmd.protocol.snapshots import Check, Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from typing import NoReturn, TypeVar

    from typing_extensions import Self

    R = TypeVar("R", bound=Record)
    E = TypeVar("E", bound=Record)
    Received = tuple[Reply | Failure | Progress, Descriptors]
    Hear = Callable[[], Reply | Failure | Progress]

TIMEOUT_S = 10.0
# How long a cancellation, or reading the daemon's last message, can delay what the caller does next.
CANCEL_LIMIT_S = 1.0
PARTING_LIMIT_S = 1.0


def connect(socket: str | None = None, *, timeout_s: float | None = TIMEOUT_S, name: str = "hegmctl") -> Connection:
    """Connect to the daemon and say hello.

    `socket` is a path; without it `endpoint` finds the daemon. `timeout_s` limits connecting, and then each call; None
    is no limit. `name` tells the daemon the calling program. Raises HegmError.
    """
    endpoint = find_endpoint(socket)
    deadline = None if timeout_s is None else monotonic() + timeout_s
    connection = Connection(_open(endpoint, timeout_s, deadline), endpoint, timeout_s, name)
    try:
        connection.greet(deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _open(endpoint: Endpoint, timeout_s: float | None, deadline: float | None) -> Wire:
    try:
        return Wire.connect(endpoint.path, deadline)
    except TimeoutError:
        raise silent(endpoint.path, "connecting", timeout_s) from None
    except OSError as error:
        raise unreachable(endpoint, error) from error


class Connection(SyncCalls):
    """A connection to the daemon, made by `connect`. A context manager; closing twice is fine.

    A restart of the daemon does not fail a request that changes nothing: the connection asks the next daemon.
    """

    def __init__(self, wire: Wire, endpoint: Endpoint, timeout_s: float | None, name: str) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._name = name
        self._wire = wire
        self._protocol = ClientConnection()
        # True if the daemon may hold something for this connection, which the next daemon would not.
        self._has_changed_state = False
        # Messages for requests that are not read now. Messages for a request that is not in here are dropped.
        self._waiting: dict[int, list[Received]] = {}

    # Requests beside those in `library`.

    def events(
        self, since: int = 0, *, follow: bool = False, kinds: Iterable[str] = (), run: str | None = None
    ) -> Generator[Event, None, EventsReply]:
        """Yield events, oldest first; with `follow` wait for new ones until the generator is closed.

        `run` is the `welcome.run` that `since` is from. Other calls are possible between two events. Closing the
        generator cancels the request.
        """
        request = Events(since=since, follow=follow, kinds=tuple(kinds), run=run)
        return self.stream(request, Event, EventsReply, patient=follow)

    def doctor(self, on_check: Callable[[Check], object] | None = None) -> DoctorReply:
        """Check the node. `on_check` gets each check as soon as it is made."""
        return self.converse(Doctor(), Check, DoctorReply, on_check)

    def follow(self, op_id: str) -> Generator[OperationProgress, None, StoryReply]:
        """Yield an operation's progress until it has ended, and return its history."""
        return self.stream(Story(id=op_id, follow=True), OperationProgress, StoryReply, patient=True)

    # Requests in general.

    @property
    def welcome(self) -> Welcome:
        if self._protocol.welcome is None:
            raise Bug("a connection was used before it was greeted")
        return self._protocol.welcome

    def fileno(self) -> int:
        """Return the socket's descriptor. A process that gets it also gets what the daemon holds for this one."""
        return self._wire.fileno()

    def call(self, request: Request, reply: type[R], *, fds: Sequence[int] = ()) -> R:
        """Return the reply to any request. `fds` are sent with it and stay the caller's. Raises HegmError."""
        answer, descriptors = self.call_with_descriptors(request, reply, fds=fds)
        descriptors.close()
        return answer

    def call_with_descriptors(
        self, request: Request, reply: type[R], *, fds: Sequence[int] = ()
    ) -> tuple[R, Descriptors]:
        """Return the reply and the descriptors that came with it; the caller closes them."""
        deadline = self._deadline()
        while True:
            try:
                return self._call_once(request, reply, fds, deadline)
            except Stopping as stopping:
                if self._has_changed_state or fds or self._waiting:
                    raise
                self._connect_to_next_daemon(stopping, deadline)
                self.greet(deadline)

    def stream(
        self,
        request: Request,
        event: type[E],
        reply: type[R],
        *,
        fds: Sequence[int] = (),
        patient: bool = False,
        take: Callable[[Descriptors], object] | None = None,
        leave: Callable[[Hear], object] | None = None,
    ) -> Generator[E, None, R]:
        """Yield the events of a request, then return its reply. `patient` sets no limit on the wait for each of them.

        `fds` are sent with the request and stay the caller's. `take` gets and owns the descriptors of an event, before
        that is yielded; without `take` they are closed. Closing the generator early cancels the request. `leave` is
        then called with a function that returns the next message for the request, until its end.
        """
        request_id = self._ask(request, fds, self._deadline())
        try:
            while True:
                message, descriptors = self._next_message(request_id, None if patient else self._deadline(), request.op)
                if take is None or not isinstance(message, Progress):
                    descriptors.close()
                else:
                    take(descriptors)
                if not isinstance(message, Progress):
                    return self._answer(message, reply)
                yield of_kind(message.event, event)
        finally:
            self._forget(request_id, leave)

    def converse(
        self,
        request: Request,
        event: type[E],
        reply: type[R],
        on_event: Callable[[E], object] | None,
        *,
        fds: Sequence[int] = (),
        patient: bool = False,
    ) -> R:
        """Return the reply to a request. `on_event` gets its events as they come; the rest is as for `stream`."""
        messages = self.stream(request, event, reply, fds=fds, patient=patient)
        while True:
            try:
                told = next(messages)
            except StopIteration as end:
                answer: R = end.value
                return answer
            if on_event is not None:
                on_event(told)

    def wait_for_its_end(self) -> NoReturn:
        """Wait until the daemon closes the connection. Raises the HegmError with the reason."""
        while True:
            message = self._next_event()
            if message is None:
                self._read(None)
            else:
                self._sort(message)

    def greet(self, deadline: float | None) -> None:
        """Say hello. If the daemon is just stopping, connect to the next one."""
        hello = Hello(versions=SUPPORTED_VERSIONS, name=self._name, program_version=__version__)
        while True:
            try:
                request_id = self._ask(hello, (), deadline)
                message, descriptors = self._next_message(request_id, deadline, "hello")
            except Stopping as stopping:
                self._waiting.clear()
                self._connect_to_next_daemon(stopping, deadline)
                continue
            descriptors.close()
            if isinstance(message, Failure):
                raise refused_hello(message.error)
            return

    def close(self) -> None:
        """Close the connection: the daemon cancels its requests and releases what it holds."""
        self._wire.close()
        waiting, self._waiting = self._waiting, {}
        for messages in waiting.values():
            for _message, descriptors in messages:
                descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _connect_to_next_daemon(self, stopping: Stopping, deadline: float | None) -> None:
        """Connect to the daemon that follows a stopping one. Without one, raise the error of the stopping one."""
        try:
            self._wire = _open(self.endpoint, self.timeout_s, deadline)
        except HegmError as error:
            raise stopping from error
        self._protocol = ClientConnection()

    def _call_once(
        self, request: Request, reply: type[R], fds: Sequence[int], deadline: float | None
    ) -> tuple[R, Descriptors]:
        request_id = self._ask(request, fds, deadline)
        try:
            while True:
                message, descriptors = self._next_message(request_id, deadline, request.op)
                if not isinstance(message, Progress):
                    return self._answer(message, reply), descriptors
                descriptors.close()
        finally:
            self._forget(request_id)

    def _deadline(self) -> float | None:
        return None if self.timeout_s is None else monotonic() + self.timeout_s

    def _ask(self, request: Request, fds: Sequence[int], deadline: float | None) -> int:
        welcome = self._protocol.welcome
        if welcome is not None and request.capability is not None and request.capability not in welcome.capabilities:
            raise not_offered(request.capability, welcome)
        if self._wire.fileno() < 0:
            raise HegmError(DISCONNECTED, "this connection is closed", "connect again")
        self._has_changed_state |= request.changes_state
        request_id, frame = self._protocol.request(request, len(fds))
        try:
            self._wire.send(frame, fds, deadline)
        except TimeoutError:
            raise silent(self.endpoint.path, request.op, self.timeout_s) from None
        except OSError as error:
            raise self._last_words() or gone(self.endpoint.path, request.op) from error
        self._waiting[request_id] = []
        return request_id

    def _last_words(self) -> HegmError | None:
        """Return the error that the daemon sent before it closed the connection, if any. Closes the connection."""
        try:
            while data := self._wire.receive(monotonic() + PARTING_LIMIT_S):
                self._protocol.feed(data)
        except OSError:
            pass  # a reset, because the daemon did not read our bytes; what came before still counts
        self.close()
        try:
            while (message := self._protocol.next_event()) is not None:
                if isinstance(message, Failure):
                    return self._ended_by(message)
        except ProtocolBroken as error:
            return broken(self.endpoint.path, error, self._protocol.welcome)
        return None

    def _ended_by(self, message: Failure) -> HegmError:
        """Return the error of a connection that the daemon closes."""
        error = message.error
        if message.id is None and error.code.name == UNAVAILABLE.name:
            return Stopping(error.code, error.message, error.hint, error.facts)
        return self._explained(error)

    def _explained(self, error: HegmError) -> HegmError:
        welcome = self._protocol.welcome
        return refused_hello(error) if welcome is None else with_versions(error, welcome)

    def _answer(self, message: Reply | Failure, reply: type[R]) -> R:
        if isinstance(message, Failure):
            raise self._explained(message.error)
        return of_kind(message.reply, reply)

    def _next_message(self, request_id: int, deadline: float | None, what: str) -> Received:
        """Return the next message for that request. Messages for others are kept for them, or dropped."""
        messages = self._waiting[request_id]
        while not messages:
            message = self._next_event()
            if message is None:
                self._read(deadline, what)
            else:
                self._sort(message)
        first = messages.pop(0)
        if not isinstance(first[0], Progress):
            del self._waiting[request_id]
        return first

    def _next_event(self) -> Reply | Failure | Progress | None:
        try:
            return self._protocol.next_event()
        except ProtocolBroken as error:
            self.close()
            raise broken(self.endpoint.path, error, self._protocol.welcome) from error

    def _sort(self, message: Reply | Failure | Progress) -> None:
        """Give a message to its request, with the descriptors that came with it."""
        if isinstance(message, Failure) and message.id is None:
            self.close()
            raise self._ended_by(message)
        fds = 0 if isinstance(message, Failure) else message.fds
        descriptors = self._wire.take(fds)
        if descriptors is None:
            self.close()
            lost = PeerError(BAD_REQUEST, f"{fds} descriptors were announced but did not arrive", "try again")
            raise broken(self.endpoint.path, lost, self._protocol.welcome)
        if message.id in self._waiting:
            self._waiting[message.id].append((message, descriptors))
        else:
            descriptors.close()

    def _read(self, deadline: float | None, what: str = "") -> None:
        try:
            data = self._wire.receive(deadline)
        except TimeoutError:
            raise silent(self.endpoint.path, what, self.timeout_s) from None
        except OSError as error:
            self.close()
            raise gone(self.endpoint.path, what) from error
        if not data:
            self.close()
            raise gone(self.endpoint.path, what)
        self._protocol.feed(data)

    def _forget(self, request_id: int, leave: Callable[[Hear], object] | None = None) -> None:
        """Stop waiting for a request, and cancel it if it is unanswered. The connection stays usable."""
        messages = self._waiting.pop(request_id, None)
        if messages is None or self._wire.fileno() < 0:
            return
        _cancel_id, frame = self._protocol.request(Cancel(request=request_id))
        try:
            self._wire.send(frame, (), monotonic() + CANCEL_LIMIT_S)
            if leave is not None:
                self._waiting[request_id] = messages
                leave(lambda: self._drain_messages(request_id))
        except OSError:
            self.close()  # the daemon has ended, so there is nothing to cancel
        finally:
            self._waiting.pop(request_id, None)
            for _message, descriptors in messages:
                descriptors.close()

    def _drain_messages(self, request_id: int) -> Reply | Failure | Progress:
        message, descriptors = self._next_message(request_id, None, "its cancellation")
        descriptors.close()
        return message


def of_kind(record: Record, kind: type[R]) -> R:
    """Return the record if it is of that class. Raises Bug."""
    if not isinstance(record, kind):
        raise Bug(f"{type(record).__name__} was read where {kind.__name__} is expected")
    return record
