"""The daemon's side of the keeper: a `Store` that starts the keeper when there is something to hold.

The connection stays open as long as something is held, so that the keeper stays; with nothing held it is closed, and
the keeper ends. A keeper that ends while it holds something was killed: `run` sees that on the connection, starts
another and hands everything over again, from copies of the descriptors that are kept here for that. One request at a
time; each is one datagram and its answer, in a thread, within a limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.keeper.wire import DROP, GET, GREETING, HELLO, LIST, OK, PUT, SOCKET_NAME, receive, send

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
# A keeper may be about to end when it is called, having nothing to hold.
ATTEMPTS = 3
# After one that was killed and could not be replaced.
RETRY_S = 5.0

Start = Callable[[Path], Awaitable[None]]


class KeeperStore:
    """The keeper of one state directory. `start` starts one there and returns when it listens; it raises HegmError."""

    def __init__(self, folder: Path, start: Start) -> None:
        self._folder = folder
        self._start = start
        self._socket: socket.socket | None = None
        self._connected = anyio.Event()
        self._held: dict[str, int] = {}
        self._asking = anyio.Lock()

    async def put(self, name: str, fd: int) -> None:
        async with self._asking:
            self._held[name] = os.dup(fd)
            try:
                await self._hand_over(name)
            except BaseException:
                os.close(self._held.pop(name))
                raise

    async def drop(self, *names: str) -> None:
        async with self._asking:
            held = [name for name in names if name in self._held]
            for name in held:
                os.close(self._held.pop(name))
            try:
                for name in held:
                    await self._in_thread([f"{DROP} {name}"], [])
            except OSError as error:
                self._hang_up()
                if error.errno not in _NOBODY:  # without a keeper nothing is held
                    raise self._failed(f"does not give up {', '.join(held)}", error) from error
            if held and not self._held:
                self._hang_up()

    async def found(self) -> Sequence[tuple[str, int]]:
        async with self._asking:
            try:
                found = await anyio.to_thread.run_sync(self._fetch_all)
            except OSError as error:
                self._hang_up()
                if error.errno in _NOBODY:  # there is none, or it was killed, and what it held went with it
                    return ()
                raise self._failed("does not say what it holds", error) from error
            self._held.update({name: os.dup(fd) for name, fd in found})
            if not found:
                self._hang_up()
            return found

    async def run(self) -> None:
        """Hand everything over again when the keeper has ended, until cancelled."""
        try:
            while True:
                await self._connected.wait()
                if self._socket is not None:
                    with contextlib.suppress(anyio.ClosedResourceError):  # hung up meanwhile, by a request that failed
                        await anyio.wait_readable(self._socket)
                async with self._asking:
                    if self._has_ended():
                        self._hang_up()
                        await self._replace()
        finally:
            self.close()

    def close(self) -> None:
        """Hang up, and let go of the copies here. What it holds, the keeper goes on holding."""
        self._hang_up()
        while self._held:
            os.close(self._held.popitem()[1])

    def _hang_up(self) -> None:
        if self._socket is not None:
            anyio.notify_closing(self._socket)
            self._socket.close()
            self._socket = None
            self._connected = anyio.Event()

    # -- one after the other, under the lock ---------------------------------------------------------------------------

    async def _replace(self) -> None:
        logger.warning("the keeper in %s ended while it held something; another takes its place", self._folder)
        while self._held:
            try:
                await self._hand_over(*self._held)
                return
            except HegmError as error:
                logger.error("%s; what it held is held by hegmd alone", error.message)
                await anyio.sleep(RETRY_S)

    async def _hand_over(self, *names: str) -> None:
        for attempt in range(ATTEMPTS):
            try:
                for name in names:
                    await self._in_thread([f"{PUT} {name}"], [self._held[name]])
                return
            except OSError as error:
                self._hang_up()
                if attempt == ATTEMPTS - 1:
                    raise self._failed(f"does not take {', '.join(names)}", error) from error
                await self._start(self._folder)
                names = tuple(self._held)  # a new keeper has nothing of what the one before had

    def _has_ended(self) -> bool:
        if self._socket is None or not self._held:
            return False
        # Not `recv` alone: on a socket with a limit Python waits that long first, MSG_DONTWAIT or not.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(0):
            return False  # what was readable was an answer, and is taken
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    async def _in_thread(self, lines: Sequence[str], fds: Sequence[int]) -> None:
        try:
            await anyio.to_thread.run_sync(self._ask, lines, fds)
        finally:
            if self._socket is not None:
                self._connected.set()

    # -- in a thread ---------------------------------------------------------------------------------------------------

    def _fetch_all(self) -> Sequence[tuple[str, int]]:
        names, _ = self._ask([LIST], [])
        found: list[tuple[str, int]] = []
        for name in names:
            _, fds = self._ask([f"{GET} {name}"], [])
            found.extend((name, fd) for fd in fds)
        return found

    def _ask(self, lines: Sequence[str], fds: Sequence[int]) -> tuple[list[str], list[int]]:
        """What is answered, and the descriptors with it. Raises OSError."""
        if self._socket is None:
            self._socket = self._connect()
        return _exchange(self._socket, lines, fds)

    def _connect(self) -> socket.socket:
        # By the directory's descriptor: a socket's path ends at 107 bytes, a directory's does not.
        at = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            made.settimeout(ANSWER_S)
            made.connect(f"/proc/self/fd/{at}/{SOCKET_NAME}")
            said, _ = _exchange(made, [HELLO], [])
            if said[:1] != [GREETING]:
                raise OSError(errno.EPROTO, f"it says {said[:1]} where {GREETING!r} was expected")
        except BaseException:
            made.close()
            raise
        finally:
            os.close(at)
        return made

    def _failed(self, what: str, error: OSError) -> HegmError:
        return HegmError(
            UNAVAILABLE,
            f"the keeper in {self._folder} {what}: {error.strerror or error}",
            "see whether `hegm-keeper` runs and what the log of hegmd says of its start",
            {"errno": error.errno},
        )


_NOBODY = (errno.ENOENT, errno.ECONNREFUSED, errno.EPIPE, errno.ECONNRESET)


def _exchange(over: socket.socket, lines: Sequence[str], fds: Sequence[int]) -> tuple[list[str], list[int]]:
    send(over, lines, fds)
    said, came = receive(over)
    if said[:1] != [OK]:
        for fd in came:
            os.close(fd)
        if not said:
            raise OSError(errno.ECONNRESET, "it hung up")
        raise OSError(errno.EPROTO, " ".join(said[1:]))
    return said[1:], came
