"""Reads from CRIU's own files the rights that a restored process tree would have.

CRIU runs as root and gives each thread the users, groups and capabilities in its files. So for a caller who is not
root, these files are read before CRIU is started, and every right that the caller lacks is reported. A manifest says
less, and the caller's own process is not asked: it could be another one by then, or have just dropped the right.

Compares what a user cannot get without root: other users, other groups, and capabilities in the effective, permitted or
inheritable set (which include the ambient one). The bounding set is a limit and no right; processes of one user can
lift it for one another, so it is not compared.

The files are protobuf. Only three fields are needed, so their reader is here; it skips unknown fields and refuses
unreadable ones. Blocks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hegmd.errors import DENIED, UNAVAILABLE, HegmError
from hegmd.protocol.operations import Reason

# Since systemd 254 every user who logs in at a seat gets CAP_WAKE_ALARM: it can wake the machine, and nothing else.
BY_LOGIN = 1 << 35

_MAGIC = struct.pack("<II", 0x54564319, 0x55053847)  # an image of CRIU's; of a thread's core
_MAX_BYTES = 4 << 20
_TASK, _THREAD = 3, 5  # in core_entry
_CREDENTIALS = 10  # in thread_core_entry
_TASK_STATE = 1  # in task_core_entry
_USERS, _GROUPS_OF_ITS_OWN = (1, 3, 5, 7), (2, 4, 6, 8)
_SETS = {9: "inheritable", 10: "permitted", 11: "effective"}
_FURTHER_GROUPS = 14
_ENDED = frozenset({2, 6})  # dead, and a zombie: it comes back as that, and runs no instruction


class Credentials(NamedTuple):
    """The rights of one restored thread. Capabilities as a mask for each set."""

    name: str  # the file's
    uids: frozenset[int]
    gids: frozenset[int]  # real, effective, saved and of its files
    groups: tuple[int, ...]  # further ones, in the kernel's order
    capabilities: Mapping[str, int]


def credentials_in(dir_fd: int) -> list[Credentials]:
    """Return the rights of every thread in CRIU's directory that will run again. Raises HegmError if unreadable."""
    found: list[Credentials] = []
    for name in sorted(os.listdir(dir_fd)):
        if name.startswith("creds-"):
            raise _unread(name, "it was written by a CRIU older than 2.0")
        if name.startswith("core-"):
            try:
                read = _read(name, _content(name, dir_fd))
            except (ValueError, IndexError, struct.error) as error:
                raise _unread(name, str(error)) from error
            if read is not None:
                found.append(read)
    if not found:
        raise _unread("core-*.img", "there is none")
    return found


def beyond(found: Sequence[Credentials], uid: int, gids: frozenset[int]) -> Iterator[Reason]:
    """Yield a reason for each thread with rights that this user in these groups does not have."""
    for each in found:
        what = [f"uid {other}" for other in sorted(each.uids - {uid})]
        what += [f"group {other}" for other in sorted(each.gids.union(each.groups) - gids)]
        for name, mask in each.capabilities.items():
            if mask & ~BY_LOGIN:
                what.append(f"{name} capabilities {mask & ~BY_LOGIN:#x}")
        if what:
            yield Reason(
                code=DENIED.name,
                message=f"{each.name} of the image has {', '.join(what)}, which uid {uid} does not have",
                hint="have root restore it",
            )


def _content(name: str, dir_fd: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    with open(fd, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return data


def _read(name: str, data: bytes) -> Credentials | None:
    """Return the rights of one thread; None if it has exited. Raises ValueError, IndexError and struct.error."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("its first bytes are not those of a CRIU file")
    (size_bytes,) = struct.unpack_from("<I", data, len(_MAGIC))
    start = len(_MAGIC) + 4
    if start + size_bytes != len(data):
        raise ValueError(f"{len(data) - start} bytes are there, and {size_bytes} should be")
    core = _fields(data[start:])
    threads, tasks = core.get(_THREAD, []), core.get(_TASK, [])
    # Protobuf merges duplicate fields. CRIU writes none, so merging is not implemented.
    if len(threads) > 1 or len(tasks) > 1:
        raise ValueError("it has a field twice")
    held = _fields(_part(threads[0])).get(_CREDENTIALS, []) if threads else []
    if not held and tasks and _whole(_fields(_part(tasks[0])), _TASK_STATE) in _ENDED:
        return None
    if len(held) != 1:
        raise ValueError("it names no process")
    fields = _fields(_part(held[0]))
    return Credentials(
        name,
        frozenset(_whole(fields, number) for number in _USERS),
        frozenset(_whole(fields, number) for number in _GROUPS_OF_ITS_OWN),
        tuple(_wholes(fields.get(_FURTHER_GROUPS, []))),
        {name: _mask(_wholes(fields.get(number, []))) for number, name in _SETS.items()},
    )


def _mask(words: Sequence[int]) -> int:
    """Combine capabilities that are given as words of 32 bits."""
    return sum(word << (32 * at) for at, word in enumerate(words))


# ---- protobuf --------------------------------------------------------------------------------------------------------


def _fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Return each field's values by its number: whole numbers, and bytes. Raises ValueError and IndexError."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        else:
            size_bytes, at = {1: (8, at), 5: (4, at)}.get(kind) or (_varint(data, at) if kind == 2 else _no_kind(kind))
            value, at = data[at : at + size_bytes], at + size_bytes
        if at > len(data):
            raise ValueError("it is cut off")
        found.setdefault(key >> 3, []).append(value)
    return found


def _no_kind(kind: int) -> tuple[int, int]:
    raise ValueError(f"a field is of the unknown kind {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has no end")


def _part(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number is where a part should be")
    return value


def _whole(fields: Mapping[int, list[int | bytes]], number: int) -> int:
    values = fields.get(number, [])
    if len(values) != 1 or not isinstance(values[0], int):
        raise ValueError(f"field {number} is not there once, as a number")
    return values[0]


def _wholes(values: Sequence[int | bytes]) -> list[int]:
    """Return a repeated number, in either of protobuf's forms."""
    found: list[int] = []
    for value in values:
        at = 0
        if isinstance(value, int):
            found.append(value)
            continue
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def _unread(name: str, why: str) -> HegmError:
    return HegmError(
        UNAVAILABLE,
        f"{name} of the image does not say with which rights its processes are restored: {why}",
        "have root restore it, or write the image again",
        {"file": name},
    )
