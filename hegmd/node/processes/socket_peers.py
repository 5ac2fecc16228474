"""The peers of sockets, from the kernel: Unix sockets by sock_diag, TCP from /proc/PID/net.

/proc/net/unix has no peers, so the kernel is asked over netlink, which answers for the caller's network namespace. If
the kernel does not answer, nothing is known, and CRIU itself refuses.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STREAMS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
_SOCK_DIAG = 4
_BY_FAMILY = 20
_DUMP_REQUEST = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_SHOW_NAME_AND_PEER = 1 | 4
_NAME, _PEER = 0, 2
_CONNECTED = 1
_ESTABLISHED_OR_CLOSING = frozenset({"01", "02", "03", "04", "05", "08", "09", "0B"})
_ANSWER_BYTES = 1 << 16


class UnixEnd(NamedTuple):
    """One Unix socket: its type, its name, and the inode of its peer, if it has them."""

    kind: int
    is_connected: bool
    name: str | None
    peer: int | None


class TcpEnd(NamedTuple):
    """One TCP socket with a connection: its own address and the other's, as the kernel writes them."""

    local: str
    remote: str


def unix_ends() -> dict[int, UnixEnd]:
    """Return all Unix sockets of this network namespace by inode; none if the kernel does not answer."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
            request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME_AND_PEER, 0, 0)
            link.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP_REQUEST, 1, 0) + request)
            return dict(_answers(link))
    except OSError:
        return {}


def _answers(link: socket.socket) -> Iterator[tuple[int, UnixEnd]]:
    while True:
        data = link.recv(_ANSWER_BYTES)
        while len(data) >= 16:
            length, kind = struct.unpack_from("=IH", data)
            if kind in {_DONE, _ERROR} or length < 16:
                return
            yield _unix_end(data[16:length])
            data = data[(length + 3) & ~3 :]


def _unix_end(body: bytes) -> tuple[int, UnixEnd]:
    _family, kind, state, _pad, inode = struct.unpack_from("=BBBBI", body)
    name: str | None = None
    peer: int | None = None
    rest = body[16:]
    while len(rest) >= 4:
        length, attribute = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        value = rest[4:length]
        if attribute == _NAME and value:
            # An abstract name begins with a zero byte, and people write it with an @.
            name = "@" + os.fsdecode(value[1:]) if value[:1] == b"\0" else os.fsdecode(value.split(b"\0")[0])
        elif attribute == _PEER:
            (peer,) = struct.unpack_from("=I", value)
        rest = rest[(length + 3) & ~3 :]
    return inode, UnixEnd(kind=kind, is_connected=state == _CONNECTED, name=name, peer=peer or None)


def tcp_ends(process: Path) -> dict[int, TcpEnd]:
    """The connections in that process's network namespace, by inode."""
    found: dict[int, TcpEnd] = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (process / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in (line.split() for line in lines):
            if len(words) > 9 and words[3] in _ESTABLISHED_OR_CLOSING:
                found[int(words[9])] = TcpEnd(words[1], words[2])
    return found
