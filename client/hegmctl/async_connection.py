"""The library for anyio programs: several requests at once over one connection.

    from hegmctl.async_connection import connect_async

    async with connect_async() as hegmd:
        reply = await hegmd.gpus()
        async for event in hegmd.events(follow=True):
            print(event.message)

Deadlines are the caller's own cancel scopes. Cancelling a call cancels its request in the daemon, and the connection
stays usable. Every failure is a HegmError. `library` has the calls, `exchange` does the work.
"""

from __future__ import annotations

import socket as sockets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from hegmctl.connection import of_kind
from hegmctl.endpoint import Endpoint, find_endpoint, unreachable
from hegmctl.exchange import Exchange
from hegmctl.failures import silent
from hegmctl.library import AsyncCalls
from hegmctl.wire import Descriptors
from hegmd import __version__
from hegmd.errors import Bug
from hegmd.protocol import messages as m
from hegmd.protocol.connection import Progress
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Record
from hegmd.protocol.snapshots import Check, Event

R = TypeVar("R", bound=Record)
E = TypeVar("E", bound=Record)

CONNECT_TIMEOUT_S = 10.0
_QUEUE_PAUSE_S = 0.02


@asynccontextmanager
async def connect_async(
    socket: str | None = None, *, timeout_s: float | None = CONNECT_TIMEOUT_S, name: str = "hegmctl"
) -> AsyncGenerator[AsyncConnection, None]:
    """Connect to the daemon while the context lasts.

    `socket`, `name` and the errors are those of `hegmctl.connection.connect`; `timeout_s` limits connecting only.
    """
    endpoint = find_endpoint(socket)
    exchange = Exchange(await _open(endpoint, timeout_s), endpoint.path)
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            exchange.start(tasks)
            connection = AsyncConnection(exchange, endpoint)
            try:
                await connection.greet(name, timeout_s)
                yield connection
            except Exception as error:  # noqa: BLE001 - raised again below; a task group would wrap it in another
                failure = error
            tasks.cancel_scope.cancel()
    finally:
        exchange.close()
    if failure is not None:
        raise failure


async def _open(endpoint: Endpoint, timeout_s: float | None) -> sockets.socket:
    connecting = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        with anyio.fail_after(timeout_s):
            while True:
                try:
                    connecting.connect(endpoint.path)
                    return connecting
                except BlockingIOError:  # its queue is full, and no event reports when it has space
                    await anyio.sleep(_QUEUE_PAUSE_S)
    except TimeoutError:
        connecting.close()
        raise silent(endpoint.path, "connecting", timeout_s) from None
    except OSError as error:
        connecting.close()
        raise unreachable(endpoint, error) from error
    except BaseException:
        connecting.close()
        raise


class AsyncConnection(AsyncCalls):
    """A greeted connection to the daemon; made by `connect_async`. Any number of tasks may use it at once."""

    def __init__(self, exchange: Exchange, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._exchange = exchange

    # Requests beside those in `library`.

    def events(
        self, since: int = 0, *, follow: bool = False, kinds: Iterable[str] = (), run: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield events, oldest first; with `follow` wait for new ones until the generator is closed or cancelled.

        `run` is the `welcome.run` that `since` is from.
        """
        return self.stream(m.Events(since=since, follow=follow, kinds=tuple(kinds), run=run), Event)

    async def doctor(self, on_check: Callable[[Check], Awaitable[object]] | None = None) -> m.DoctorReply:
        """Check the node; each result is also passed to `on_check` as soon as it is known."""
        return await self.converse(m.Doctor(), Check, m.DoctorReply, on_check)

    def follow(self, op_id: str) -> AsyncGenerator[OperationProgress, None]:
        """Yield an operation's progress until it has ended; `story` returns its history."""
        return self.stream(m.Story(id=op_id, follow=True), OperationProgress)

    # Requests in general.

    @property
    def welcome(self) -> m.Welcome:
        if self._exchange.welcome is None:
            raise Bug("a connection was used before it was greeted")
        return self._exchange.welcome

    async def call(self, request: m.Request, reply: type[R], *, fds: Sequence[int] = ()) -> R:
        """Return the reply to any request. `fds` are sent with it and stay the caller's. Raises HegmError."""
        answer, descriptors = await self.call_with_descriptors(request, reply, fds=fds)
        descriptors.close()
        return answer

    async def call_with_descriptors(
        self, request: m.Request, reply: type[R], *, fds: Sequence[int] = ()
    ) -> tuple[R, Descriptors]:
        """Return the reply and the descriptors that came with it; the caller closes them."""
        waiter = self._exchange.ask(request, fds)
        try:
            while True:
                message, descriptors = await waiter.next()
                if not isinstance(message, Progress):
                    return of_kind(message.reply, reply), descriptors
                descriptors.close()
        finally:
            self._exchange.forget(waiter)

    async def stream(self, request: m.Request, event: type[E]) -> AsyncGenerator[E, None]:
        """Yield the events of a request. Closing the generator, or cancelling its reader, cancels the request."""
        waiter = self._exchange.ask(request)
        try:
            while True:
                message, descriptors = await waiter.next()
                descriptors.close()
                if not isinstance(message, Progress):
                    return
                yield of_kind(message.event, event)
        finally:
            self._exchange.forget(waiter)

    async def converse(
        self,
        request: m.Request,
        event: type[E],
        reply: type[R],
        on_event: Callable[[E], Awaitable[object]] | None,
        *,
        fds: Sequence[int] = (),
    ) -> R:
        """Return the reply to a request. `on_event` gets its events as they come. `fds` stay the caller's."""
        waiter = self._exchange.ask(request, fds)
        try:
            while True:
                message, descriptors = await waiter.next()
                descriptors.close()
                if not isinstance(message, Progress):
                    return of_kind(message.reply, reply)
                if on_event is not None:
                    await on_event(of_kind(message.event, event))
        finally:
            self._exchange.forget(waiter)

    async def greet(self, name: str, timeout_s: float | None) -> None:
        """Say hello; `connect_async` does it, once."""
        hello = m.Hello(versions=m.SUPPORTED_VERSIONS, name=name, program_version=__version__)
        try:
            with anyio.fail_after(timeout_s):
                await self.call(hello, m.Welcome)
        except TimeoutError:
            raise silent(self.endpoint.path, "hello", timeout_s) from None
