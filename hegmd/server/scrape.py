"""Metrics over HTTP on the loopback addresses, for Prometheus on the same node or behind a proxy.

One GET or HEAD of /metrics for each connection, within limits of time, size and number. Every local user can connect,
so it serves only what `hegmctl metrics` shows, and idle connections give way to new ones. A request
that two programs could read differently is refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from typing import NamedTuple

import anyio
import anyio.abc
import anyio.lowlevel

from hegmd.errors import REFUSED, HegmError
from hegmd.telemetry.log import error_ref, fields, limited
from hegmd.telemetry.metrics import CONTENT_TYPE

PATH = "/metrics"
PLAIN = "text/plain; charset=utf-8"
END_OF_HEAD = b"\r\n\r\n"

_WORD = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rf"({_WORD}) (?:http://[^/?#\s]+)?(/[!-~]*|\*) HTTP/(\d)\.\d")
_HEADER = re.compile(rf"({_WORD}):[ \t]*([\t -~\x80-\xff]*)")


class Response(NamedTuple):
    status: str
    body: bytes
    content_type: str = PLAIN
    headers: tuple[str, ...] = ()
    with_body: bool = True

    def encode(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Connection: close",
            *self.headers,
        )
        return "\r\n".join((*head, "", "")).encode("latin-1") + (self.body if self.with_body else b"")


class Refusal(Exception):
    """A request that gets another answer than metrics."""

    def __init__(self, status: str, why: str, *headers: str, with_body: bool = True) -> None:
        self.response = Response(status, f"{why}\n".encode(), headers=headers, with_body=with_body)


def method_of(head: bytes) -> str:
    """Return the method, GET or HEAD, of a request for the metrics. Raises Refusal for any other request."""
    first, *rest = head.decode("latin-1").split("\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise Refusal("400 Bad Request", "this port speaks HTTP/1.1")
    if line[3] != "1":
        raise Refusal("505 HTTP Version Not Supported", "this port speaks HTTP/1.1")
    names: list[str] = []
    for each in rest:
        header = _HEADER.fullmatch(each)
        if header is None:
            raise Refusal("400 Bad Request", "a header is not well formed")
        names.append(header[1].lower())
        if names[-1] == "transfer-encoding" or (names[-1] == "content-length" and header[2].strip() != "0"):
            raise Refusal("400 Bad Request", "a request for metrics has no body")
    if names.count("host") > 1 or ("host" not in names and first.endswith("1.1")):
        raise Refusal("400 Bad Request", "one Host header is needed")
    if line[1] not in ("GET", "HEAD"):
        raise Refusal("405 Method Not Allowed", "metrics can be read with GET", "Allow: GET, HEAD")
    if line[2].partition("?")[0] != PATH:
        raise Refusal("404 Not Found", f"metrics are at {PATH}", with_body=line[1] == "GET")
    return line[1]


logger = logging.getLogger(__name__)

_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_NO_SUCH_ADDRESS = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_BACKLOG = 32
_READ_BYTES = 4096
_PRESSED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PRESSED_PAUSE_S = 0.1


class HttpLimits(NamedTuple):
    """Limits of one connection, and of all together."""

    connections: int = 32
    head_bytes: int = 8192
    head_deadline_s: float = 5.0
    send_deadline_s: float = 10.0
    close_deadline_s: float = 1.0


def bind_loopback(port: int) -> list[socket.socket]:
    """Return sockets that listen on that port of each loopback address. Raises HegmError if one is in use."""
    sockets: list[socket.socket] = []
    try:
        for family, address in _LOOPBACK:
            try:
                sockets.append(_listen(family, address, port))
            except OSError as error:
                if not (family == socket.AF_INET6 and error.errno in _NO_SUCH_ADDRESS):
                    raise
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise HegmError(
            REFUSED,
            f"metrics cannot be served at port {port}: {error.strerror}",
            f"set metrics.port to another port; `ss -ltnp sport = :{port}` shows the process that uses this one",
        ) from error
    return sockets


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart does not wait for old connections
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


class ScrapePort:
    """Answers on listening sockets, which it owns from `run` on."""

    def __init__(
        self, sockets: Sequence[socket.socket], render: Callable[[], Awaitable[str]], limits: HttpLimits | None = None
    ) -> None:
        self._sockets = sockets
        self._render = render
        self._limits = limits or HttpLimits()
        self._open = 0
        self._asking: dict[socket.socket, anyio.CancelScope] = {}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with contextlib.ExitStack() as held:
            for listening in self._sockets:
                held.enter_context(listening)
            async with anyio.create_task_group() as tasks:
                for listening in self._sockets:
                    tasks.start_soon(self._accept, listening, tasks)
                task_status.started()

    async def _accept(self, listening: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                await anyio.wait_readable(listening)
            except OSError as error:
                if error.errno not in _PRESSED:
                    raise
                limited(logger, "accept", logging.ERROR, "cannot accept connections: %s", error.strerror)
                await anyio.sleep(_PRESSED_PAUSE_S)
            else:
                connection.setblocking(False)
                self._admit(connection, tasks)
                await anyio.lowlevel.checkpoint()

    def _admit(self, connection: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        """Accept a connection. At the limit it replaces the oldest idle one, or is refused."""
        if self._open >= self._limits.connections:
            oldest = next(iter(self._asking), None)
            if oldest is None:
                connection.close()
                return
            self._asking.pop(oldest).cancel()
        self._open += 1
        scope = anyio.CancelScope()
        self._asking[connection] = scope
        tasks.start_soon(self._serve, connection, scope)

    async def _serve(self, connection: socket.socket, asking: anyio.CancelScope) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                response = await self._answer(connection, asking)
                if response is not None:
                    await self._send(connection, response.encode())
        finally:
            self._open -= 1

    async def _answer(self, connection: socket.socket, asking: anyio.CancelScope) -> Response | None:
        """Return the response; None if the peer left or gave way first."""
        try:
            head: bytes | None = None
            try:
                with asking:
                    head = await self._read_head(connection)
            finally:
                self._asking.pop(connection, None)
            if head is None:
                return None
            method = method_of(head)
            text = await self._render()
            return Response("200 OK", text.encode(), CONTENT_TYPE, with_body=method == "GET")
        except Refusal as refusal:
            return refusal.response
        except HegmError as error:
            return Response("503 Service Unavailable", f"{error}\n".encode())
        except OSError:
            raise
        except Exception as unexpected:  # the edge where a bug becomes an answer
            reference = error_ref()
            logger.error("metrics failed [%s]", reference, exc_info=unexpected, extra=fields(error_ref=reference))
            return Response("500 Internal Server Error", f"a bug in hegmd; its log has {reference}\n".encode())

    async def _read_head(self, connection: socket.socket) -> bytes | None:
        """Return the request up to its empty line; None if the peer leaves first. Raises Refusal for an invalid
        request."""
        data = b""
        with anyio.move_on_after(self._limits.head_deadline_s):
            while END_OF_HEAD not in data:
                if len(data) > self._limits.head_bytes:
                    raise Refusal("431 Request Header Fields Too Large", "the request is too large")
                received = await _receive(connection)
                if not received:
                    return None
                data += received
                if not data[:1].isalpha():  # for example a TLS hello, whose sender would wait
                    raise Refusal("400 Bad Request", "this port speaks HTTP/1.1, without encryption")
            return data.partition(END_OF_HEAD)[0]
        raise Refusal("408 Request Timeout", "no complete request arrived in time")

    async def _send(self, connection: socket.socket, data: bytes) -> None:
        """Send everything, then wait for the peer to close: closing with unread input would drop the answer."""
        rest = memoryview(data)
        with anyio.move_on_after(self._limits.send_deadline_s) as limit:
            while rest:
                try:
                    rest = rest[connection.send(rest) :]
                except BlockingIOError:
                    await anyio.wait_writable(connection)
        if limit.cancelled_caught:
            return
        connection.shutdown(socket.SHUT_WR)
        with anyio.move_on_after(self._limits.close_deadline_s):
            while await _receive(connection):
                pass


async def _receive(connection: socket.socket) -> bytes:
    """Return the next bytes, empty at the end. Always yields to other tasks."""
    while True:
        await anyio.lowlevel.checkpoint()
        try:
            return connection.recv(_READ_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(connection)
