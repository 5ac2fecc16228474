"""A peer for the tests of the server: sends exactly the given bytes over a real socket."""

from __future__ import annotations

import array
import socket

import anyio
from typing_extensions import Self

from hegmd.protocol.connection import ClientConnection, Failure, Progress, Reply
from hegmd.protocol.messages import Hello, Request


class RawClient:
    """The client's end of a socket. Owns it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.protocol = ClientConnection()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, data: bytes, fds: list[int] | None = None) -> None:
        """Send raw bytes, the descriptors with the first of them."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while data:
            try:
                data = data[self.socket.sendmsg([data], rights) :]
                rights = []
            except BlockingIOError:
                await anyio.wait_writable(self.socket)

    async def receive(self) -> bytes:
        while True:
            try:
                return self.socket.recv(65_536)
            except BlockingIOError:
                await anyio.wait_readable(self.socket)
            except ConnectionResetError:
                return b""

    async def next(self) -> Reply | Failure | Progress | None:
        """Return the daemon's next message, or None after it closed."""
        while True:
            event = self.protocol.next_event()
            if event is not None:
                return event
            data = await self.receive()
            if not data:
                return None
            self.protocol.feed(data)

    async def ask(self, request: Request) -> Reply | Failure | Progress | None:
        _, data = self.protocol.request(request)
        await self.send(data)
        return await self.next()

    async def hello(self, role: str = "client") -> Reply | Failure | Progress | None:
        return await self.ask(Hello(versions=(2,), name="talker", role=role))
