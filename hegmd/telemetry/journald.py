"""systemd's journal in its native protocol: one datagram for each record, with named fields.

Owns the form of a record and the socket. Never waits: if the journal does not keep up, the record is lost and the
caller learns it. A record too large for a datagram is sent as a sealed memory file, see
https://systemd.io/JOURNAL_NATIVE_PROTOCOL/.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterable, Mapping

SOCKET_PATH = "/run/systemd/journal/socket"
_TOO_LARGE = (errno.EMSGSIZE, errno.ENOBUFS)
_SEND_BUFFER_BYTES = 8 << 20  # as sd_journal_send requests; the kernel limits it
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def is_behind(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Return True if that descriptor leads to the journal, according to JOURNAL_STREAM."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def field_name(name: str) -> str:
    """Convert a name to the journal's form: capitals, digits and underscores, a capital first, at most 64."""
    return re.sub(r"[^A-Z0-9_]", "_", name.upper()).lstrip("_0123456789")[:64]


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Encode a record. A value of several lines is sent with its length, so that it cannot add a field."""
    parts: list[bytes] = []
    for name, value in fields:
        data = value.encode(errors="backslashreplace")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


class JournalSocket:
    """A connection to the journal. Sends by name, so that a restarted journal is found."""

    def __init__(self, path: str = SOCKET_PATH) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def write(self, record: bytes) -> bool:
        """Send one record; False if the journal is away or does not keep up: then the record is lost."""
        try:
            self._socket.sendto(record, self._path)
        except OSError as error:
            return error.errno in _TOO_LARGE and self._send_as_file(record)
        return True

    def close(self) -> None:
        self._socket.close()

    def _send_as_file(self, record: bytes) -> bool:
        try:
            descriptor = os.memfd_create("hegmd-log-record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return False
        try:
            with open(descriptor, "wb", buffering=0, closefd=False) as file:
                file.write(record)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            self._socket.sendmsg([], [rights], 0, self._path)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True
