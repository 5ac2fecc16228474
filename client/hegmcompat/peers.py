"""Whose process is at the other end of a connection within this machine: the kernel's table of TCP sockets says so.

A port on loopback is open to every user of the machine, where a socket in the file system has permissions. So without
a token only the server's own user and root are let in.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9
# The peer's end is open, or the peer has said that it sends no more and still reads: FIN_WAIT1 and FIN_WAIT2.
_HOLDS = ("01", "04", "05")
# Once a process has closed its end, the table has no inode of it, and may have 0 in the place of its user.
_NO_INODE = "0"


def uid_at(connection: socket.socket) -> int | None:
    """The user at the other end; None where that cannot be seen.

    That is so for everybody elsewhere, and for whoever has hung up: the kernel's table gives root's number then.
    """
    try:
        own, other = connection.getsockname(), connection.getpeername()
        lines = Path(_TABLES[connection.family]).read_text().splitlines()[1:]
    except (OSError, KeyError):
        return None
    # Seen from there: its own end is the other one to us.
    wanted = [_as_in_table(connection.family, other), _as_in_table(connection.family, own)]
    for line in lines:
        fields = line.split()
        if [fields[_LOCAL], fields[_REMOTE]] == wanted:
            is_held = fields[_STATE] in _HOLDS and fields[_INODE] != _NO_INODE
            return int(fields[_UID]) if is_held else None
    return None


def _as_in_table(family: int, address: tuple[str, int]) -> str:
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    # Words of 32 bits, each a number in the machine's own order.
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
