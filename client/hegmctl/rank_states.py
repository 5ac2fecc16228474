"""Gives the states of several ranks to each of them, from a process that is not their parent.

A launcher such as torchrun starts its ranks without the descriptors that it inherited. So a supervisor listens at one
abstract address for each rank as long as the launcher lives. A process of this user that connects gets that rank's
state and the right to continue from it. Once the operation has ended, or all ranks continue without a daemon, it
replies that there is none: if the launcher restarts its ranks later by itself, they begin as they would without hegmd.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

from hegmctl import claim_notes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# For the agents of ranks: the number of ranks with states, and the addresses without the rank's number.
STATES = "HEGM_STATES"
STATE, OVER = b"state", b"over"
_CREDENTIALS = struct.Struct("3i")


class RankStates:
    """The listening sockets of the ranks, one each. Owns `states` and `lock`. Closing twice is fine.

    A connection raises SIGIO in this process, and the next `serve` handles it. Raises OSError.
    """

    def __init__(self, states: Mapping[int, int], lock: int) -> None:
        self._states = dict(states)
        self._lock: int | None = lock
        self._name = f"hegm-states-{os.urandom(16).hex()}"
        self._doors: dict[int, socket.socket] = {}
        try:
            for rank in self._states:
                self._doors[rank] = _listening(f"\0{self._name}-{rank}")
        except OSError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Return the value of STATES for the launcher's environment."""
        return f"{len(self._doors)}:{self._name}"

    @property
    def lock(self) -> int | None:
        """Return the right to continue from the states; None once they are over."""
        return self._lock

    @property
    def are_past(self) -> bool:
        """Return True if all ranks have noted that they have trained on from their states."""
        return self._lock is not None and claim_notes.is_past(self._lock, len(self._doors))

    def serve(self) -> None:
        """Serve all ranks that have connected, without waiting."""
        for rank, door in self._doors.items():
            while (connected := _next(door)) is not None:
                with connected, suppress(OSError):  # the rank may have ended
                    self._hand_over(rank, connected)

    def _hand_over(self, rank: int, connected: socket.socket) -> None:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            return
        if self._lock is None or self.are_past:
            connected.send(OVER, socket.MSG_NOSIGNAL)
        else:
            fds = struct.pack("2i", self._states[rank], self._lock)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            connected.sendmsg([STATE], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def end(self) -> None:
        """Close the states. Ranks that ask get the reply that there are none."""
        held, self._states = list(self._states.values()), {}
        held += [] if self._lock is None else [self._lock]
        self._lock = None
        for fd in held:
            os.close(fd)

    def close(self) -> None:
        self.end()
        for door in self._doors.values():
            door.close()
        self._doors.clear()


def _listening(address: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.setblocking(False)
        door.bind(address)
        fcntl.fcntl(door.fileno(), fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(door.fileno(), fcntl.F_SETFL, fcntl.fcntl(door.fileno(), fcntl.F_GETFL) | fcntl.FASYNC)
        door.listen(16)
    except BaseException:
        door.close()
        raise
    return door


def _next(door: socket.socket) -> socket.socket | None:
    try:
        return door.accept()[0]
    except OSError:  # no rank has connected, or it has disconnected again
        return None
