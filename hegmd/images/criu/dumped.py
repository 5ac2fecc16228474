"""The users that may own an image, according to CRIU's record of each process.

A process tree can change until CRIU stops it: a process may be added, or start a program with other rights. So the dump
is checked once more, in CRIU's own files. `mm-PID.img` says whether the kernel let the process's user read its memory.
The file is two magic numbers, a length and a protobuf message (images/mm.proto of CRIU 4), of which one field is read
here. Blocks only for the disk.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Mapping

from hegmd.errors import UNAVAILABLE, HegmError

_NAME = re.compile(r"mm-(\d+)\.img")
_HEAD = struct.Struct("<III")  # magic of all images, magic of this kind, length of the message
_MAGICS = (0x54564319, 0x57492820)
_DUMPABLE = 15
_VARINT, _EIGHT, _COUNTED, _FOUR = 0, 1, 2, 5


def dumped_processes(dir_fd: int) -> dict[int, bool]:
    """Return the processes in CRIU's directory, and whether their user may read their memory. Raises HegmError."""
    found: dict[int, bool] = {}
    try:
        for name in os.listdir(dir_fd):
            if (named := _NAME.fullmatch(name)) is not None:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
                with open(fd, "rb") as file:
                    found[int(named[1])] = is_open(file.read())
    except (OSError, ValueError, IndexError, struct.error) as error:
        message = f"CRIU's image does not name the process of its memory: {error}"
        raise HegmError(
            UNAVAILABLE, message, "have root write the image, and report this with CRIU's version"
        ) from error
    return found


def strangers(dumped: Mapping[int, bool], known: Collection[int], *, may_read_all: bool) -> list[int]:
    """Return the processes in an image that were not checked before, or that its owner may not read.

    Root may read all; but a process that the manifest does not name would have no owner after a restore.
    """
    return sorted(pid for pid, is_readable in dumped.items() if pid not in known or not (is_readable or may_read_all))


def is_open(data: bytes) -> bool:
    """Return True if the kernel let a process's user read its memory, by its `mm` image. Raises ValueError."""
    *magics, size_bytes = _HEAD.unpack_from(data)
    message = data[_HEAD.size : _HEAD.size + size_bytes]
    if tuple(magics) != _MAGICS or len(message) != size_bytes:
        raise ValueError(f"it begins with {data[: _HEAD.size].hex()}")
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _field(message, at, key & 7)
        if key == _DUMPABLE << 3 | _VARINT:
            return value == 1
    return False


def _field(message: bytes, at: int, kind: int) -> tuple[int, int]:
    """Return a number's value (other fields give a useless one), and the offset of the next field."""
    if kind == _VARINT:
        return _varint(message, at)
    if kind == _COUNTED:
        size_bytes, at = _varint(message, at)
        return 0, at + size_bytes
    if kind in {_EIGHT, _FOUR}:
        return 0, at + (8 if kind == _EIGHT else 4)
    raise ValueError(f"a field of kind {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
