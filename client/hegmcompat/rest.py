"""The REST interface: `POST /checkpoint` and `POST /resume` with HeGM's JSON, on the standard library's server.

Everything is limited: the number of connections, the size of a body, and the time for a whole request however slowly
its bytes come. With a token, callers need it. Without one, which is possible on loopback only, callers have to be the
server's own user or root. Requests from a browser are refused.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any, cast

from hegmcompat.control import Control
from hegmcompat.terminal import say, warn

MAX_CONNECTIONS = 16
MAX_BODY_BYTES = 64 << 10
REQUEST_LIMIT_S = 10.0
ANSWER_LIMIT_S = 10.0
_PAUSE_S = 0.1
_BUSY = (
    b'HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{"error": "busy"}'
)


class Server:
    """The interface at one address, in threads of its own."""

    def __init__(self, control: Control, host: str, port: int, token: str | None, limit_s: float) -> None:
        self._server = _BoundedServer(control, host, port, token, limit_s)
        self._thread = threading.Thread(target=self._server.listen, name="hegm-ctrl-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port, also if the kernel chose it."""
        return int(self._server.server_address[1])

    def await_end(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Stop listening; requests under way end with the process."""
        self._server.end()
        self._thread.join()
        self._server.server_close()


def serve(control: Control, host: str, port: int, token: str | None, limit_s: float = REQUEST_LIMIT_S) -> Server:
    """Start to listen. Raises OSError."""
    return Server(control, host, port, token, limit_s)


def serve_beside(control: Control, host: str, port: int, token: str | None, *, is_quiet: bool = False) -> Server | None:
    """Start to listen, and print it; None with a warning if that fails: another launcher may have the port."""
    try:
        server = serve(control, host, port, token)
    except OSError as error:
        warn(f"control API server not started (port {port}): {error}")
        return None
    if not is_quiet:
        say(f"[HeGM] control API server listening on {host}:{server.port}")
    return server


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, control: Control, host: str, port: int, token: str | None, limit_s: float) -> None:
        self.control = control
        self.token = token
        self.limit_s = limit_s
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._ending = threading.Event()
        try:
            self.address_family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
        except ValueError:
            self.address_family = socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the host's name, for which the standard server would ask a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def listen(self) -> None:
        """Serve until `end`. The standard server's loop wakes up twice a second, in a process that mostly waits."""
        while not self._ending.is_set():
            try:
                connection, address = self.socket.accept()
            except OSError:
                self._ending.wait(_PAUSE_S)  # out of descriptors, or the end
                continue
            self.process_request(connection, address)

    def end(self) -> None:
        self._ending.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in a thread of its own, if one is free."""
        if not self._free.acquire(blocking=False):
            request.setblocking(False)
            with suppress(OSError):
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection."""


class _SocketWithDeadline(io.RawIOBase):
    """A socket's bytes until a moment: what comes one by one does not extend it."""

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        self._connection = connection
        self._deadline = monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - monotonic()
        if left_s <= 0:
            raise TimeoutError("the request was not complete in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server_version = "HeGM-Ctrl/1.0"
    sys_version = ""

    @property
    def _own(self) -> _BoundedServer:
        return cast("_BoundedServer", self.server)

    def setup(self) -> None:
        """Set one deadline for all bytes together."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_SocketWithDeadline(self.connection, self._own.limit_s))

    def do_POST(self) -> None:
        """Handle a request whose body is still to be read."""
        refusal = self._refusal()
        if refusal is not None:
            self._answer(*refusal)
        elif self.path == "/checkpoint":
            control = self._own.control
            self._act("pids", control.checkpoint, control.checkpoint_all)
        elif self.path == "/resume":
            control = self._own.control
            self._act("ppids", control.resume, control.resume_all)
        else:
            self._answer(404, "not-found")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the standard library gives it
        """Log nothing: a caller's text must not get into a training's output."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the standard server's error in the form that callers parse."""
        self.close_connection = True
        self._answer(code, (message or "bad-request").lower())

    def _refusal(self) -> tuple[int, str] | None:
        if self.headers.get("Origin") is not None:
            return 403, "not-for-browsers"
        token = self._own.token
        if token is not None:
            header = (self.headers.get("Authorization") or "").encode("utf-8", "replace")
            if not hmac.compare_digest(header, f"Bearer {token}".encode()):
                return 401, "unauthorized"
        elif uid_at(self.connection) not in (0, os.geteuid()):
            return 403, "forbidden"
        return None

    def _act(
        self, name: str, act: Callable[[list[int]], dict[int, str]], act_on_all: Callable[[], dict[int, str]]
    ) -> None:
        body = self._body()
        if body is None:
            return
        values, wants_all = body.get(name), bool(body.get("all"))
        if values and wants_all:
            self._answer(400, f"specify either '{name}' or 'all', not both")
            return
        try:
            numbers = _whole_numbers(values) if values else []
        except (TypeError, ValueError, OverflowError):
            self._answer(400, f"invalid '{name}' payload")
            return
        self._send(200, {"results": act_on_all() if wants_all else act(numbers)})

    def _body(self) -> dict[str, Any] | None:
        """Return the body; None if the request was already answered."""
        try:
            size_bytes = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            size_bytes = -1
        if size_bytes < 0 or self.headers.get("Transfer-Encoding") is not None:
            self._answer(411, "content-length needed")
        elif size_bytes > MAX_BODY_BYTES:
            self._answer(413, f"more than {MAX_BODY_BYTES} bytes")
        else:
            try:
                found = json.loads(self.rfile.read(size_bytes) or b"{}")
            except TimeoutError:
                self._answer(408, "request timed out")
            except (ValueError, RecursionError):
                self._answer(400, "invalid JSON")
            else:
                if isinstance(found, dict):
                    return cast("dict[str, Any]", found)
                self._answer(400, "invalid JSON: an object is needed")
        return None

    def _answer(self, status: int, error: str) -> None:
        self._send(status, {"error": error})

    def _send(self, status: int, payload: dict[str, Any]) -> None:
        body = json.dumps(payload).encode()
        self.connection.settimeout(ANSWER_LIMIT_S)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)


def _whole_numbers(values: Sequence[Any]) -> list[int]:
    """Return a list of whole numbers, also from text. Raises TypeError, ValueError, OverflowError."""
    if not isinstance(values, list):
        raise TypeError("a list is needed")
    return [int(number) for number in values]


# The kernel's table of TCP sockets tells the user at the other end of a connection within this machine. A port on
# loopback is open to every user, while a socket in the file system has permissions. So without a token only the
# server's own user and root are accepted.
_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9
# The peer's end is open, or the peer has shut down its side for writing and still reads: FIN_WAIT1 and FIN_WAIT2.
_HOLDS = ("01", "04", "05")
# Once a process has closed its end, the table has no inode of it, and may have 0 in the place of its user.
_NO_INODE = "0"


def uid_at(connection: socket.socket) -> int | None:
    """Return the user at the other end; None if unknown.

    It is unknown for callers from elsewhere and for those that have hung up: the kernel's table then has root's number.
    """
    try:
        own, other = connection.getsockname(), connection.getpeername()
        lines = Path(_TABLES[connection.family]).read_text().splitlines()[1:]
    except (OSError, KeyError):
        return None
    # Seen from there: its own end is the other one to us.
    rows = [_as_in_table(connection.family, other), _as_in_table(connection.family, own)]
    for line in lines:
        fields = line.split()
        if [fields[_LOCAL], fields[_REMOTE]] == rows:
            is_held = fields[_STATE] in _HOLDS and fields[_INODE] != _NO_INODE
            return int(fields[_UID]) if is_held else None
    return None


def _as_in_table(family: int, address: tuple[str, int]) -> str:
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    # Words of 32 bits, each a number in the machine's own order.
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
