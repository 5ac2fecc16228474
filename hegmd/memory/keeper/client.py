"""The daemon's side of the keeper: a `Store` that starts the keeper when there is something to store.

The connection stays open while something is stored, so that the keeper stays. A keeper that ends while it stores
something was killed: `run` sees that, starts another and sends everything again, from copies of the descriptors here.
One request at a time; each is one datagram and its answer, in a thread, within a limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.memory.keeper.wire import DROP, GET, GREETING, HELLO, LIST, OK, PUT, SOCKET_NAME, receive, send

NO_DESCRIPTORS: Sequence[int] = ()
logger = logging.getLogger(__name__)

ANSWER_S = 5.0
# A keeper may be about to end when it is called, having nothing to hold.
ATTEMPTS = 3
# How long to wait after a killed keeper could not be replaced.
RETRY_S = 5.0

Start = Callable[[Path], Awaitable[None]]


class KeeperStore:
    """The keeper of one state directory. `start` starts one, returns when it listens, and raises HegmError."""

    def __init__(self, folder: Path, start: Start, *, answer_s: float = ANSWER_S) -> None:
        self._folder = folder
        self._answer_s = answer_s
        self._start = start
        self._socket: socket.socket | None = None
        self._held: dict[str, int] = {}
        self._missing: set[str] = set()  # names that the current keeper does not store yet
        self._perhaps: set[str] = set()  # may be stored there without an owner: its put or drop had no answer
        self._asking = anyio.Lock()
        self._changed = anyio.Event()  # set by the next change; then replaced by a new event

    async def put(self, name: str, fd: int) -> None:
        async with self._asked_for():
            self._hold(name, os.dup(fd))
            self._missing.add(name)
            try:
                await self._hand_over()
            except BaseException:
                self._forget(name)
                self._perhaps.add(name)
                raise

    async def drop(self, *names: str) -> None:
        async with self._asked_for():
            known = [name for name in names if name in self._held or name in self._perhaps]
            try:
                for name in known:
                    await anyio.to_thread.run_sync(self._ask, [f"{DROP} {name}"], NO_DESCRIPTORS)
                    self._forget(name)
            except OSError as error:
                self._hang_up()
                if error.errno not in _NOBODY:
                    raise self._failed(f"does not give up {', '.join(known)}", error) from error
                for name in known:  # without a keeper nothing is held
                    self._forget(name)

    async def found(self) -> Sequence[tuple[str, int]]:
        async with self._asked_for():
            try:
                found = await anyio.to_thread.run_sync(self._fetch_all)
            except OSError as error:
                self._hang_up()
                if error.errno in _NOBODY:  # no keeper runs, or it was killed and lost its descriptors
                    return ()
                raise self._failed("does not say what it holds", error) from error
            for name, fd in found:
                self._hold(name, os.dup(fd))
            return found

    async def run(self) -> None:
        """Send everything again when the keeper has ended, until cancelled."""
        try:
            while True:
                async with self._asking:
                    in_hand = not self._has_ended() or await self._replace()
                    watched, changed = self._socket, self._changed
                if not in_hand:
                    with anyio.move_on_after(RETRY_S):  # a caller that stores something meanwhile also tries to connect
                        await changed.wait()
                elif watched is None:
                    await changed.wait()
                else:
                    with contextlib.suppress(anyio.ClosedResourceError):  # hung up meanwhile
                        await anyio.wait_readable(watched)
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect, and close the copies here. The keeper keeps what it stores."""
        self._hang_up()
        for name in tuple(self._held):
            self._forget(name)

    def _hang_up(self) -> None:
        if self._socket is not None:
            anyio.notify_closing(self._socket)
            self._socket.close()
            self._socket = None
        self._missing = set(self._held)  # the next keeper may be a new one, which has none of it

    def _hold(self, name: str, fd: int) -> None:
        self._forget(name)
        self._held[name] = fd

    def _forget(self, name: str) -> None:
        self._missing.discard(name)
        self._perhaps.discard(name)
        if name in self._held:
            os.close(self._held.pop(name))

    # -- one after the other, under the lock ---------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _asked_for(self) -> AsyncGenerator[None]:
        """Make one request. With nothing stored, disconnect; `run` checks the keeper."""
        async with self._asking:
            try:
                yield
            finally:
                if not self._held and not self._perhaps:
                    self._hang_up()
                self._changed.set()
                self._changed = anyio.Event()

    async def _replace(self) -> bool:
        """Return True if the current keeper, or a new one, stores everything."""
        self._hang_up()
        if self._missing:
            logger.warning("the keeper in %s ended while it held memory; hegmd starts a new one", self._folder)
        try:
            await self._hand_over()
        except HegmError as error:
            logger.error("%s; only hegmd holds that memory now", error.message)
            return False
        return True

    async def _hand_over(self) -> None:
        """Send everything that the keeper lacks, and drop what is no longer needed. Raises HegmError."""
        for attempt in range(ATTEMPTS):
            try:
                for name in sorted(self._missing):
                    await anyio.to_thread.run_sync(self._ask, [f"{PUT} {name}"], [self._held[name]])
                    self._missing.discard(name)
                for name in sorted(self._perhaps - self._held.keys()):
                    await anyio.to_thread.run_sync(self._ask, [f"{DROP} {name}"], NO_DESCRIPTORS)
                    self._perhaps.discard(name)
                return
            except OSError as error:
                missing = sorted(self._missing)
                self._hang_up()
                if error.errno in _NOBODY:
                    self._perhaps.clear()
                    if not self._missing:
                        return
                if attempt == ATTEMPTS - 1:
                    raise self._failed(f"does not take {', '.join(missing)}", error) from error
                await self._start(self._folder)

    def _has_ended(self) -> bool:
        """Return True unless a keeper is known to store exactly what is stored here."""
        if self._missing or self._perhaps:
            return True
        if self._socket is None:
            return False
        # Not `recv` alone: on a socket with a limit Python waits that long first, MSG_DONTWAIT or not.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(0):
            return False  # the socket was readable because of an answer, which is read now
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    # -- in a thread ---------------------------------------------------------------------------------------------------

    def _fetch_all(self) -> Sequence[tuple[str, int]]:
        names, _ = self._ask([LIST], [])
        found: list[tuple[str, int]] = []
        try:
            for name in names:
                _, fds = self._ask([f"{GET} {name}"], [])
                found.extend((name, fd) for fd in fds)
        except OSError:
            for _, fd in found:
                os.close(fd)
            raise
        return found

    def _ask(self, lines: Sequence[str], fds: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the answer and its descriptors. Raises OSError."""
        if self._socket is None:
            self._socket = self._connect()
        return _exchange(self._socket, lines, fds)

    def _connect(self) -> socket.socket:
        # A path through the directory's descriptor is short: a socket's path ends at 107 bytes, a directory's does not.
        at = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            made.settimeout(self._answer_s)
            made.connect(f"/proc/self/fd/{at}/{SOCKET_NAME}")
            reply, _ = _exchange(made, [HELLO], [])
            if reply[:1] != [GREETING]:
                raise OSError(errno.EPROTO, f"it says {reply[:1]} where {GREETING!r} was expected")
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
            "check whether `hegm-keeper` runs, and read about its start in the log of hegmd",
            {"errno": error.errno},
        )


_NOBODY = (errno.ENOENT, errno.ECONNREFUSED, errno.EPIPE, errno.ECONNRESET)


def _exchange(over: socket.socket, lines: Sequence[str], fds: Sequence[int]) -> tuple[list[str], list[int]]:
    send(over, lines, fds)
    reply, came = receive(over)
    if reply[:1] != [OK]:
        for fd in came:
            os.close(fd)
        if not reply:
            raise OSError(errno.ECONNRESET, "it closed the connection")
        raise OSError(errno.EPROTO, " ".join(reply[1:]))
    return reply[1:], came
