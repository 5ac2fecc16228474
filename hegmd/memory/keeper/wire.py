"""Messages between daemon and keeper: one datagram each way over a SOCK_SEQPACKET socket, lines of text.

A request is a verb and a name; descriptors travel with the message that names them. The greeting carries the version:
an upgrade leaves a keeper of an older release running. Standard library only.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

VERSION = 1
GREETING = f"hegm-keeper {VERSION}"
HELLO, PUT, GET, DROP, LIST = "hello", "put", "get", "drop", "list"
OK, NO = "ok", "no"

SOCKET_NAME = "keeper.sock"
LOCK_NAME = "keeper.lock"
MESSAGE_BYTES = 192 * 1024
# The kernel's SCM_MAX_FD is 253; one name has one descriptor, and a few more may come with a mistake.
MAX_FDS = 16
_FD_BYTES = array.array("i").itemsize


def send(to: socket.socket, lines: Sequence[str], fds: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    to.sendmsg(["\n".join(lines).encode()], ancillary, socket.MSG_NOSIGNAL)


def receive(source: socket.socket) -> tuple[list[str], list[int]]:
    """Return the lines of one message and its descriptors, now the caller's; no lines at the end."""
    data, ancillary, flags, _ = source.recvmsg(
        MESSAGE_BYTES, socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError(90, "a message was cut")
    return (data.decode("utf-8", "replace").split("\n") if data else []), list(fds)
