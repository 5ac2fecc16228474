"""`python -m hegmd.memory.keeper STATE_DIR`: detaches, listens, and serves until it holds nothing.

The starter's command exits with status 0 as soon as a keeper listens there, a new or an existing one. The keeper then
runs in a session of its own, with no inherited descriptors: it outlives the terminal, the daemon and the daemon's
control of its children. A lock makes it the only one in the directory.

The keeper serves its own user only, by the kernel's credentials of the peer. It answers an invalid message, or ends its
connection, and keeps what it stores. It blocks in poll alone, since every message is one datagram. Standard library
only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time
from time import monotonic

from hegmd.memory.keeper.wire import (
    DROP,
    GET,
    GREETING,
    HELLO,
    LIST,
    LOCK_NAME,
    NO,
    OK,
    PUT,
    SOCKET_NAME,
    receive,
    send,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


FIRST_CALLER_S = 5.0
# How long the lock's holder may take to exit, if it holds nothing, or to listen.
LOCK_LIMIT_S = 10.0
_POLL_INTERVAL_S = 0.02
BACKLOG = 16

# How long the keeper accepts no connections when the process has no free descriptors.
DEAF_MS = 1000.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UCRED = struct.Struct("3i")


def main(folder: str) -> int:
    """Return the exit status of the command; in the keeper's own process, that of the keeper."""
    os.umask(0o077)
    # A path through the descriptor keeps the socket's path short even in a long directory.
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = f"/proc/self/fd/{at}/{SOCKET_NAME}"
    lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
    if not _take(lock, path):
        return 0
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=at)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(BACKLOG)
        ready, leaving = os.pipe2(os.O_CLOEXEC)
        if os.fork():
            os.close(leaving)
            # read until the pipe closes: the starter may kill the rest of this command's process group
            os.read(ready, 1)
            return 0
        os.close(ready)
        _leave()
        os.close(leaving)
        Keeper(listening).serve(FIRST_CALLER_S)
        os.unlink(SOCKET_NAME, dir_fd=at)  # still under the lock: a successor's socket is safe
    return 0


def _take(lock: int, path: str) -> bool:
    """Take the lock. Returns False if a keeper listens there. Raises TimeoutError if neither happens.

    A holder keeps the lock while it serves, and may not listen yet: so both are polled.
    """
    deadline = time.monotonic() + LOCK_LIMIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, contextlib.suppress(OSError):
            probe.connect(path)
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"the holder of {LOCK_NAME} neither exited nor listened within {LOCK_LIMIT_S:g} s")
        time.sleep(_POLL_INTERVAL_S)


def _leave() -> None:
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    # The daemon's user can end the keeper with SIGTERM. Signals to process groups and terminals are ignored.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write("hegm-keeper")


class Keeper:
    """Everything that is stored, by name."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._held: dict[str, int] = {}
        self._has_held = False
        self._connections: dict[int, socket.socket] = {}
        self._is_deaf = False  # no connections are accepted until a client disconnects or DEAF_MS have passed
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)
        self._answers: dict[str, Callable[[str, list[int]], tuple[list[str], list[int]]]] = {
            HELLO: self._hello,
            PUT: self._put,
            GET: self._get,
            DROP: self._drop,
            LIST: self._list,
        }

    def serve(self, first_caller_s: float) -> None:
        """Serve until nothing is stored and no client is connected. A first client has some time to connect."""
        until = monotonic() + first_caller_s
        while True:
            idle = not self._held and not self._connections
            left_s = max(0.0, until - monotonic())
            if idle and (self._has_held or not left_s):
                return
            wait_ms = [left_s * 1000 + 1] if idle else []
            if self._is_deaf:
                wait_ms.append(DEAF_MS)
            events = self._poll.poll(min(wait_ms, default=None))
            if self._is_deaf:
                self._is_deaf = False
                self._poll.register(self._listening, select.POLLIN)
            for number, _ in events:
                if number == self._listening.fileno():
                    self._admit()
                else:
                    self._answer(number)

    def _admit(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:  # the caller stays in the queue: accepting again at once would loop forever
                self._is_deaf = True
                self._poll.unregister(self._listening)
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        if _UCRED.unpack(credentials)[1] not in (0, os.geteuid()):
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _answer(self, number: int) -> None:
        connection = self._connections[number]
        try:
            lines, came = receive(connection)
            if not lines:
                self._hang_up(number)
                return
            verb, _, name = lines[0].partition(" ")
            answer = self._answers.get(verb, self._unknown)
            reply, fds = answer(name, came)
            for unwanted in came:
                os.close(unwanted)
            send(connection, reply, fds)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        self._poll.unregister(number)
        self._connections.pop(number).close()

    def _hello(self, _: str, __: list[int]) -> tuple[list[str], list[int]]:
        return [OK, GREETING, str(os.getpid())], []

    def _put(self, name: str, came: list[int]) -> tuple[list[str], list[int]]:
        if not name or len(came) != 1:
            return [NO, f"put takes a name and one descriptor, not {len(came)}"], []
        before = self._held.get(name)
        self._held[name] = came.pop()
        self._has_held = True
        if before is not None:
            os.close(before)
        return [OK], []

    def _get(self, name: str, _: list[int]) -> tuple[list[str], list[int]]:
        held = self._held.get(name)
        return ([NO, f"nothing is held under {name}"], []) if held is None else ([OK], [held])

    def _drop(self, name: str, _: list[int]) -> tuple[list[str], list[int]]:
        held = self._held.pop(name, None)
        if held is not None:
            os.close(held)
        return [OK], []

    def _list(self, _: str, __: list[int]) -> tuple[list[str], list[int]]:
        return [OK, *self._held], []

    def _unknown(self, _: str, __: list[int]) -> tuple[list[str], list[int]]:
        return [NO, f"{GREETING} does not know that"], []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
