"""Messages between the daemon and its GPU helper, and the helper's end of the socket.

    daemon   {id, op, args, fds}
    helper   {hello: {pid, ...}} once it can work, or {err: {...}} when it cannot
             {id, ok: {...}, fds, held} | {id, err: {...}, held} | {id, event: {...}}
             {beat: [[id, seconds], ...]} every `hello.beat_s` while requests are under way: which, and since when

Frames and payloads are those of `protocol`. Descriptors travel with the first byte of the frame that gives their
number. `held` counts what would be lost with the helper: at 0 the daemon may end it.

Uses no event loop: the helper has none and has to start quickly. Knows no request by name.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hegmd.errors import BAD_REQUEST, UNAVAILABLE, HegmError, PeerError, Refused, code_named
from hegmd.protocol.codec import decode, encode
from hegmd.protocol.frames import FrameReader, frame
from hegmd.system.descriptors import FD_BYTES, MAX_IN_A_MESSAGE, Descriptors, received, rights_of

MAX_FDS = MAX_IN_A_MESSAGE
BEAT_S = 1.0
# A copy of 65,536 storages, the limit of the codec, takes about 2 MB.
LIMIT_BYTES = 16 << 20
_READ_BYTES = 64 * 1024

# Driver errors with a known next step.
_HINTS = {
    2: "free GPU memory there, or choose another GPU",
    3: "run: hegmctl ps; the process uses no CUDA, or the GPU helper was not initialised",
    100: "check /dev/nvidia* and DeviceAllow= of hegmd.service: the driver shows no GPU to this process",
    304: "check that the process runs; if it belongs to another user, hegmd needs root with CAP_DAC_OVERRIDE",
    401: "run: hegmctl ps; the process is in another state than expected",
    600: "try again: the GPU kernels of the process did not finish in time, and it continues to run",
    801: "close what the driver cannot restore in the process, such as peer-to-peer NCCL communicators",
    803: "restart hegmd, or the node: the driver's library and its kernel module have different versions",
    999: "look for an Xid in `dmesg`, and check the GPU with nvidia-smi",
}
# Errors after which no thread can use the context: uncorrectable memory or links, an illegal
# address, a failed launch. Only the end of the process clears them.
RUINOUS = frozenset({214, 220, 226, 700, 702, 709, 714, 715, 716, 717, 718, 719})


def _hint(number: int | None) -> str:
    if number is None:
        return "run: hegmctl doctor; the driver or the package cuda-bindings is missing or too old"
    return _HINTS.get(number, f"look up {number} among CUDA's error codes (CUresult), and for an Xid in `dmesg`")


class DriverFailed(HegmError):
    """A driver call failed with that number. If `code` is None, the driver could not be called; `name` gives the
    reason."""

    def __init__(self, call: str, number: int | None, name: str, facts: Mapping[str, object] | None = None) -> None:
        super().__init__(
            UNAVAILABLE,
            f"{call}: {name}" if number is None else f"{call} failed with {number} ({name})",
            _hint(number),
            {**(facts or {}), "call": call, "number": number, "name": name},
        )
        self.call = call
        self.number = number
        self.name = name


class HelperReply:
    """The result of a request, and the helper that gave it. Owns the descriptors that came with it."""

    __slots__ = ("fds", "helper", "values")

    def __init__(self, values: Mapping[str, Any], fds: Descriptors | None = None, helper: int = 0) -> None:
        self.values = dict(values)
        self.fds = Descriptors([]) if fds is None else fds
        self.helper = helper


class Request:
    """A request: its arguments, the owner of its descriptors, and a callback for progress."""

    __slots__ = ("args", "fds", "tell")

    def __init__(self, args: Mapping[str, Any], fds: Descriptors, tell: Callable[[Mapping[str, object]], None]) -> None:
        self.args = args
        self.fds = fds
        self.tell = tell


Handler = Callable[[Request], HelperReply]


def packed(message: Mapping[str, object]) -> bytes:
    return frame(encode(message))


def error_to_wire(error: HegmError) -> dict[str, object]:
    driver = [error.call, error.number, error.name] if isinstance(error, DriverFailed) else None
    return {
        "code": error.code.name,
        "message": error.message,
        "hint": error.hint,
        "facts": error.facts,
        "driver": driver,
    }


def error_from_wire(failure: Any) -> HegmError:
    """Return the error of a message. Raises PeerError if it is not valid."""
    try:
        facts: dict[str, object] = dict(failure["facts"])
        if failure["driver"] is not None:
            call, number, name = failure["driver"]
            return DriverFailed(str(call), None if number is None else int(number), str(name), facts)
        code = code_named(str(failure["code"]))
        message, hint = str(failure["message"]), str(failure["hint"])
        if code.name == "refused":
            return Refused(message, hint, facts)
        return HegmError(code, message, hint, facts)
    except (KeyError, TypeError, ValueError) as error:
        raise senseless(f"a failure that lacks something: {error!r}") from error


def mapping(value: object) -> dict[str, Any]:
    """Return the value if it is a map. Raises PeerError."""
    if not isinstance(value, dict):
        raise senseless(f"{value!r:.80} where a map belongs")
    return cast("dict[str, Any]", value)  # the codec accepts text keys only


def whole(value: object) -> int:
    """Return the value if it is a whole number and not negative. Raises PeerError."""
    if type(value) is not int or value < 0:
        raise senseless(f"{value!r:.80} where a number belongs")
    return value


def senseless(what: str) -> PeerError:
    """Return the error for an invalid message: one end has another version or a bug."""
    return PeerError(
        BAD_REQUEST, f"hegmd and its GPU helper exchanged {what}", "restart hegmd; if it happens again, report it"
    )


class Channel:
    """The helper's blocking end. One thread receives, any thread sends. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._reader = FrameReader(LIMIT_BYTES)
        self._unclaimed: deque[int] = deque()
        self._sending = threading.Lock()

    def receive(self) -> tuple[dict[str, Any], Descriptors] | None:
        """Return the next message and its descriptors; None at the end of the connection. Raises PeerError."""
        while (payload := self._reader.next_payload()) is None:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(MAX_FDS * FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
            self._unclaimed.extend(received(ancillary))
            if flags & socket.MSG_CTRUNC:
                raise senseless("more descriptors than may come")
            if not data:
                return None
            self._reader.feed(data)
        message: dict[str, Any] = decode(payload)
        count = whole(message.get("fds", 0))
        if count > len(self._unclaimed):
            raise senseless(f"{len(self._unclaimed)} descriptors where {count!r} were named")
        return message, Descriptors([self._unclaimed.popleft() for _ in range(count)])

    def send(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Send a whole message. The descriptors stay the caller's. Raises OSError if the connection has ended."""
        data = memoryview(packed({**message, "fds": len(fds)} if fds else message))
        with self._sending:
            sent = self._socket.sendmsg([data], rights_of(fds), socket.MSG_NOSIGNAL)
            self._socket.sendall(data[sent:], socket.MSG_NOSIGNAL)

    def close(self) -> None:
        self._socket.close()
        Descriptors(list(self._unclaimed)).close()
        self._unclaimed.clear()
