"""What the kernel says of the process at the other end of a Unix socket."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

from hegmd.server.auth import Peer

SO_PEERGROUPS = 59  # Linux 4.13; Python's socket module has no name for it
_UCRED = struct.Struct("iII")
_GID = struct.Struct("I")
_SMALL_BYTES = 1024  # the most that Python's getsockopt takes: 256 groups
_LARGE_BYTES = 65_536 * _GID.size  # NGROUPS_MAX groups


def peer_of(connection: socket.socket) -> Peer:
    """Who connected. Raises OSError when the socket has no peer any more."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid=pid, uid=uid, gid=gid, groups=_groups_of(connection))


def _groups_of(connection: socket.socket) -> frozenset[int]:
    """Supplementary groups: the primary one alone would not let in a user whom an administrator added to a group.

    A kernel that cannot tell them leaves the peer with its primary group, which is the safe side.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _SMALL_BYTES)
    except OSError as error:
        raw = _many_groups_of(connection) if error.errno == errno.ERANGE else b""
    return frozenset(gid for (gid,) in _GID.iter_unpack(raw))


def _many_groups_of(connection: socket.socket) -> bytes:
    """The same, past Python's limit: users of large directories can be in more than 256 groups."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_LARGE_BYTES)
    size = ctypes.c_uint32(_LARGE_BYTES)
    option = (connection.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, buffer, ctypes.byref(size))
    if libc.getsockopt(*option) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw[: size.value]
