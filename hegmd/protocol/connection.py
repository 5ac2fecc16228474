"""Both ends of a connection: they turn bytes into typed events and back, and decide who may say what when.

No sockets, no clock. A connection starts with `hello`. After it the caller may have several requests under way. Each
gets any number of events and then exactly one reply or error. Envelopes are msgpack maps, one in a frame:

    request  {v, id, op, args}        reply  {id, ok}        error  {id, err}        event  {id, event}

`fds: n` in an envelope says that n descriptors came with the frame's bytes. The owner of the socket hands them out in
order.

A mistake of the peer raises ProtocolBroken: answer it and close the connection. A mistake of ours raises Bug. A single
request that is unknown or malformed breaks nothing: it comes out as `InvalidRequest` and gets an error as its answer.
"""

from __future__ import annotations

from ..errors import BAD_REQUEST, BUSY, INCOMPATIBLE, Bug, HegmError, PeerError, code_named
from . import codec
from .frames import FrameReader, frame
from .messages import HELLO_VERSION, REQUESTS, SUPPORTED_VERSIONS, Cancel, ErrorInfo, Hello, Request, Welcome
from .record import BadValue, Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HELLO_FRAME_BYTES = 4096
REPLY_FRAME_BYTES = 64 * 1024 * 1024
MAX_ID = 2**53 - 1  # the largest integer that every language can represent
MAX_FDS = 16


class ProtocolBroken(PeerError):
    """The peer broke the protocol. Send it the error (under `request_id`, if known) and close the connection."""

    def __init__(self, error: HegmError, request_id: int | None = None) -> None:
        super().__init__(error.code, error.message, error.hint, error.facts)
        self.request_id = request_id


class IncomingRequest:
    """A valid request; `fds` descriptors came with it."""

    __slots__ = ("fds", "id", "request")

    def __init__(self, request_id: int, request: Request, fds: int) -> None:
        self.id = request_id
        self.request = request
        self.fds = fds


class InvalidRequest:
    """An invalid request, and why. Answer it with the error and close its `fds` descriptors."""

    __slots__ = ("error", "fds", "id")

    def __init__(self, request_id: int, error: HegmError, fds: int) -> None:
        self.id = request_id
        self.error = error
        self.fds = fds


class ServerConnection:
    """The daemon's end: returns requests, encodes replies."""

    def __init__(self, *, frame_bytes: int, requests_in_flight: int) -> None:
        self._frames = FrameReader(min(HELLO_FRAME_BYTES, frame_bytes))
        self._frame_bytes = frame_bytes
        self._limit = requests_in_flight
        self._in_flight: dict[int, type[Request]] = {}
        self.hello: Hello | None = None
        self.version = HELLO_VERSION

    @property
    def mid_frame(self) -> bool:
        """Return True if the peer has sent a part of a frame only."""
        return self._frames.partial_bytes > 0

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket."""
        self._frames.feed(data)

    def next_event(self) -> IncomingRequest | InvalidRequest | None:
        """Return the next request, or None until more bytes come. Raises ProtocolBroken."""
        try:
            payload = self._frames.next_payload()
            if payload is None:
                return None
            envelope = codec.decode(payload)
        except PeerError as error:
            raise ProtocolBroken(error) from error
        request_id = self._take_id(envelope)
        fds = _fds_of(envelope, request_id)
        op = envelope.get("op")
        if self.hello is None and op != Hello.op:
            raise ProtocolBroken(_bad("the first request must be hello", "send hello first"), request_id)
        self._in_flight[request_id] = Request
        try:
            self._check_version(envelope.get("v"))
            request = self._parse(op, envelope.get("args", {}))
        except HegmError as error:
            if self.hello is None:
                raise ProtocolBroken(error, request_id) from error
            return InvalidRequest(request_id, error, fds)
        self._in_flight[request_id] = type(request)
        return IncomingRequest(request_id, request, fds)

    def _take_id(self, envelope: Mapping[str, object]) -> int:
        request_id = envelope.get("id")
        if type(request_id) is not int or not 1 <= request_id <= MAX_ID:
            raise ProtocolBroken(_bad("a request needs an id from 1 to 2^53-1", "count requests up from 1"))
        if request_id in self._in_flight:
            # Sent without an id: with this id, the error would end the earlier request.
            raise ProtocolBroken(_bad(f"request id {request_id} is still unanswered", "use each id once"))
        return request_id

    def _check_version(self, version: object) -> None:
        # Until hello is answered, every envelope has HELLO_VERSION.
        if type(version) is not int or version != self.version:
            raise HegmError(
                INCOMPATIBLE,
                f"protocol version {version!r} in a request; {self.version} is in force",
                f"send `v: {self.version}`, the version that the reply to hello names",
            )

    def _parse(self, op: object, args: object) -> Request:
        if type(op) is not str:
            raise _bad("a request needs an op", "name the operation in `op`")
        message = REQUESTS.get(op)
        if message is None:
            raise HegmError(
                INCOMPATIBLE,
                f"this daemon has no operation {op[:40]!r}",
                "`hegmctl version` compares the two versions; a newer hegmd may have it",
                {"op": op[:40]},
            )
        if message is Hello and self.hello is not None:
            raise _bad("hello was already sent", "send hello once, at the start of a connection")
        # cancelling is how a peer gets below the limit
        if message is not Cancel and len(self._in_flight) > self._limit:
            raise HegmError(
                BUSY,
                f"{self._limit} requests of this connection are unanswered, which is the limit",
                "wait for a reply before the next request",
                {"limit": self._limit},
            )
        request = message.from_plain(args, op)
        if isinstance(request, Hello):
            self._accept(request)
        return request

    def _accept(self, hello: Hello) -> None:
        common = [version for version in hello.versions if version in SUPPORTED_VERSIONS]
        if not common:
            raise HegmError(
                INCOMPATIBLE,
                f"no protocol version in common: caller {list(hello.versions)}, daemon {list(SUPPORTED_VERSIONS)}",
                "bring hegmctl and hegmd to the same release",
                {"caller": list(hello.versions), "daemon": list(SUPPORTED_VERSIONS)},
            )
        self.hello = hello
        self.version = max(common)
        self._frames.limit_bytes = self._frame_bytes

    def reply(self, request_id: int, reply: Record, fds: int = 0) -> bytes:
        """Return the frame that answers a request."""
        expected = self._message_of(request_id)
        if type(reply) is not expected.reply:
            raise Bug(f"{expected.__name__} was answered with {type(reply).__name__}")
        encoded = _envelope({"id": request_id, "ok": reply}, fds)
        # only now: if the reply cannot be encoded, an error can still answer the request
        del self._in_flight[request_id]
        return encoded

    def error(self, request_id: int | None, error: HegmError) -> bytes:
        """Return the frame that ends a request with an error. Without an id the error concerns the connection."""
        if request_id is not None:
            self._in_flight.pop(request_id, None)
        info = ErrorInfo(code=error.code.name, message=error.message, hint=error.hint, facts=error.facts)
        return _envelope({"id": request_id, "err": info}, 0)

    def event(self, request_id: int, event: Record, fds: int = 0) -> bytes:
        """Return the frame of an event of a request; `fds` descriptors go with it."""
        expected = self._message_of(request_id)
        if expected.event is None or type(event) is not expected.event:
            raise Bug(f"{expected.__name__} was sent a {type(event).__name__} in between")
        return _envelope({"id": request_id, "event": event}, fds)

    def _message_of(self, request_id: int) -> type[Request]:
        if request_id not in self._in_flight:
            raise Bug(f"request {request_id} is not under way")
        return self._in_flight[request_id]


class Reply:
    """The reply of a request that succeeded."""

    __slots__ = ("fds", "id", "reply")

    def __init__(self, request_id: int, reply: Record, fds: int) -> None:
        self.id = request_id
        self.reply = reply
        self.fds = fds


class Failure:
    """The error of a request that failed, or without an id of the connection."""

    __slots__ = ("error", "id")

    def __init__(self, request_id: int | None, error: HegmError) -> None:
        self.id = request_id
        self.error = error


class Progress:
    """An event of a request that is under way; `fds` descriptors came with it."""

    __slots__ = ("event", "fds", "id")

    def __init__(self, request_id: int, event: Record, fds: int = 0) -> None:
        self.id = request_id
        self.event = event
        self.fds = fds


class ClientConnection:
    """The caller's end: encodes requests, returns answers."""

    def __init__(self) -> None:
        self._frames = FrameReader(REPLY_FRAME_BYTES)
        self._in_flight: dict[int, type[Request]] = {}
        self._last_id = 0
        self.welcome: Welcome | None = None

    def request(self, request: Request, fds: int = 0) -> tuple[int, bytes]:
        """Return the id and the frame of a new request."""
        if (self.welcome is None) != isinstance(request, Hello):
            raise Bug("hello comes first, and once")
        self._last_id += 1
        version = HELLO_VERSION if self.welcome is None else self.welcome.version
        envelope: dict[str, object] = {"v": version, "id": self._last_id, "op": request.op, "args": request}
        self._in_flight[self._last_id] = type(request)
        return self._last_id, _envelope(envelope, fds, escaped=False)

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket."""
        self._frames.feed(data)

    def next_event(self) -> Reply | Failure | Progress | None:
        """Return the daemon's next message, or None until more bytes come. Raises ProtocolBroken."""
        try:
            payload = self._frames.next_payload()
            if payload is None:
                return None
            return self._interpret(codec.decode(payload))
        except (PeerError, BadValue) as error:
            if isinstance(error, ProtocolBroken):
                raise
            raise ProtocolBroken(error) from error

    def _interpret(self, envelope: Mapping[str, object]) -> Reply | Failure | Progress:
        request_id = envelope.get("id")
        if "err" in envelope and request_id is None:
            return Failure(None, _error_from(envelope["err"]))
        if type(request_id) is not int or request_id not in self._in_flight:
            raise ProtocolBroken(_bad(f"an answer to request {request_id!r}, which is not under way", _MATCH))
        message = self._in_flight[request_id]
        if "event" in envelope:
            if message.event is None:
                raise ProtocolBroken(_bad(f"an event in the middle of {message.op}", _MATCH))
            event = message.event.from_plain(envelope["event"], message.op)
            return Progress(request_id, event, _fds_of(envelope, request_id))
        if "err" in envelope:
            del self._in_flight[request_id]
            return Failure(request_id, _error_from(envelope["err"]))
        if "ok" not in envelope:
            raise ProtocolBroken(_bad("an answer with neither ok, err nor event", _MATCH))
        del self._in_flight[request_id]
        reply = message.reply.from_plain(envelope["ok"], message.op)
        if isinstance(reply, Welcome):
            self._enter(reply)
        return Reply(request_id, reply, _fds_of(envelope, request_id))

    def _enter(self, welcome: Welcome) -> None:
        if welcome.version not in SUPPORTED_VERSIONS:
            raise ProtocolBroken(_bad(f"the daemon chose version {welcome.version}, which was not offered", _MATCH))
        self.welcome = welcome


_MATCH = "bring hegmctl and hegmd to the same release"


def _bad(message: str, hint: str) -> PeerError:
    return PeerError(BAD_REQUEST, message, hint)


def _fds_of(envelope: Mapping[str, object], request_id: int) -> int:
    fds = envelope.get("fds", 0)
    if type(fds) is not int or not 0 <= fds <= MAX_FDS:
        raise ProtocolBroken(
            _bad(f"`fds` has to be a number from 0 to {MAX_FDS}", "send fewer descriptors"), request_id
        )
    return fds


def _envelope(envelope: dict[str, object], fds: int, *, escaped: bool = True) -> bytes:
    if fds:
        envelope["fds"] = fds
    try:
        payload = codec.encode(envelope, escaped=escaped)
    except (TypeError, ValueError, OverflowError) as error:
        raise Bug(f"a message that msgpack cannot hold was to be sent: {error}") from error
    if len(payload) > REPLY_FRAME_BYTES:
        raise Bug(f"a message of {len(payload)} bytes was to be sent", facts={"limit_bytes": REPLY_FRAME_BYTES})
    return frame(payload)


def _error_from(value: object) -> HegmError:
    info = ErrorInfo.from_plain(value, "err")
    message = info.message or "the daemon gave no reason"
    return HegmError(code_named(info.code), message, info.hint or "see the daemon's log", info.facts)
