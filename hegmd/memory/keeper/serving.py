"""The keeper's loop: takes descriptors, returns them, and ends when it stores nothing.

Owns the stored descriptors, the listening socket and the connections. Serves its own user only, by the kernel's
credentials of the peer. An invalid message is answered or ends its connection; what is stored stays. Blocks only in
poll: every message is one datagram. Standard library only.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from time import monotonic

from hegmd.memory.keeper.wire import DROP, GET, GREETING, HELLO, LIST, NO, OK, PUT, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# How long it listens to nobody new when there is no descriptor to be had for a connection.
DEAF_MS = 1000.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UCRED = struct.Struct("3i")


class Keeper:
    """Everything that is stored, by name."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._held: dict[str, int] = {}
        self._has_held = False
        self._connections: dict[int, socket.socket] = {}
        self._is_deaf = False  # to callers, until somebody hangs up or a while is over
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
            if error.errno in _NO_ROOM:  # whoever calls stays there: not asked again at once, which would be for ever
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
            said, fds = answer(name, came)
            for unwanted in came:
                os.close(unwanted)
            send(connection, said, fds)
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
