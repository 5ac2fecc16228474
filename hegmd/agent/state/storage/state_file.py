"""The file of a training's state: a typed tree and raw bytes, with checksums of everything.

Defines the file's layout and the order of writes; `encoder` and `decoder` define the values. Everything is
little-endian:

* a header of 64 bytes: magic, version, sizes, and checksums of itself, of the tree and of the table;
* the tree;
* the table: the size of each piece of raw bytes, then the checksum of each part of 8 MiB of them;
* the pieces, in order: large ones start at a page, small ones follow each other on cache lines.

Offsets follow from the sizes and are not in the file, so pieces cannot overlap. The header is written last: a file
whose writing was interrupted has none. Reading returns nothing before all checksums are verified.
"""

from __future__ import annotations

import ctypes
import os
import struct
from binascii import crc32

from ... import copying
from ...copying import PAGE_BYTES, PIECE_BYTES, round_up
from . import checksums, decoder, shadow
from .encoder import Tree
from .errors import DamagedStateFile, UnsupportedValue
from .raw_copy import copy_pieces_out
from .shadow import CopyStopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .shadow import Shadows

    Progress = Callable[[int], None]

__all__ = [
    "DamagedStateFile",
    "CopyStopped",
    "UnsupportedValue",
    "UnwrittenRest",
    "State",
    "read",
    "size_bytes",
    "write",
]

MAGIC = b"HEGMSTAT"
VERSION = 1
#: Magic, version, unused, bytes of the tree, pieces, bytes in all, checksums of the tree and of the table.
_HEADER = struct.Struct("<8sIIQQQII")
HEADER_BYTES = 64
_BORDER_BYTES = 64
CHECKING_THREADS = 24


def size_bytes(value: Any) -> int:
    """Return the size of the file for that value. Raises UnsupportedValue."""
    return State(value).size_bytes


def write(fd: int, value: Any, progress: Progress | None = None) -> int:
    """Write the value to the start of a descriptor. Return the number of bytes. Raises UnsupportedValue, OSError."""
    return State(value).write(fd, progress)


class State:
    """A value prepared for writing: its size is known before there is a descriptor. Its bytes must not change."""

    def __init__(self, value: Any) -> None:
        """Raises UnsupportedValue."""
        self._tree = Tree(value)
        self._sizes = [raw[2] for raw in self._tree.raws]
        self._places, self.size_bytes = _layout(HEADER_BYTES + len(self._tree.data), self._sizes)

    def write(self, fd: int, progress: Progress | None = None) -> int:
        """Write it; a descriptor that is too small is made larger. Raises OSError."""
        self._begin(fd, progress or copying.ignore, with_shadow=False)
        return self.size_bytes

    def begin(self, fd: int) -> UnwrittenRest | None:
        """Write it, except for what there is room to write later, when it may have changed. None if all is written.

        Raises OSError, HegmError.
        """
        return self._begin(fd, copying.ignore, with_shadow=shadow.is_wanted())

    def _begin(self, fd: int, progress: Progress, *, with_shadow: bool) -> UnwrittenRest | None:
        if os.fstat(fd).st_size < self.size_bytes:
            os.ftruncate(fd, self.size_bytes)
        copying.write_small(fd, 0, bytes(HEADER_BYTES))
        found: dict[int, int] = {}
        shadows = copy_pieces_out(
            fd, self.size_bytes, self._tree.raws, self._places, found, progress, with_shadow=with_shadow
        )
        if shadows is not None:
            return UnwrittenRest(shadows, self._tree.data, self._sizes, self.size_bytes, found)
        _seal(fd, self._tree.data, self._sizes, found)
        return None


class UnwrittenRest:
    """The rest of a value that must still be written, and may have changed. Keeps nothing of the value alive."""

    def __init__(self, shadows: Shadows, tree: bytes, sizes: list[int], size_bytes: int, found: dict[int, int]) -> None:
        self._shadows = shadows
        self._tree = tree
        self._sizes = sizes
        self._found = found
        self.size_bytes = size_bytes

    def write(self, fd: int, is_over: Callable[[], bool]) -> None:
        """Write it in any thread, and free its memory anyway. Raises CopyStopped once `is_over`, OSError, HegmError."""
        self._shadows.fetch(fd, self.size_bytes, self._found, is_over)
        _seal(fd, self._tree, self._sizes, self._found)


def _seal(fd: int, tree: bytes, sizes: list[int], found: dict[int, int]) -> None:
    """Write all but the pieces, the header last. Raises OSError."""
    places, size_bytes = _layout(HEADER_BYTES + len(tree), sizes)
    parts = [found[place] for place in _parts(places, sizes)]
    table = struct.pack(f"<{len(sizes)}Q{len(parts)}I", *sizes, *parts)
    copying.write_small(fd, HEADER_BYTES, tree + table)
    copying.write_small(fd, 0, _header(tree, table, len(sizes), size_bytes))


def read(fd: int) -> Any:
    """Return the value in the file. Its tensors and arrays are in a private mapping of the descriptor.

    Raises DamagedStateFile with the reason, or OSError if the descriptor cannot be mapped.
    """
    given_bytes = os.fstat(fd).st_size
    tree_bytes, pieces, total_bytes, sum_of_tree, sum_of_table = _read_header(fd, given_bytes)
    mapped_bytes = min(round_up(total_bytes, os.fstatvfs(fd).f_bsize), given_bytes)
    mapping = copying.private_view(fd, mapped_bytes)
    front_bytes = HEADER_BYTES + tree_bytes + 12 * pieces + 4 * (total_bytes // PIECE_BYTES)  # all but the pieces
    copying.fetch_pages(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), min(front_bytes, mapped_bytes))
    tree = bytes(mapping[HEADER_BYTES : HEADER_BYTES + tree_bytes])
    if crc32(tree) != sum_of_tree:
        raise DamagedStateFile("its tree does not match its checksum")
    places, sizes = _read_table(mapping, HEADER_BYTES + tree_bytes, pieces, total_bytes, sum_of_table)
    return decoder.value_of(tree, mapping, list(zip(places, sizes)))


# ---- header and table -----------------------------------------------------------------------------------------------


def _header(tree: bytes, table: bytes, pieces: int, total_bytes: int) -> bytes:
    head = _HEADER.pack(MAGIC, VERSION, 0, len(tree), pieces, total_bytes, crc32(tree), crc32(table))
    head = head.ljust(HEADER_BYTES - 4, b"\0")
    return head + struct.pack("<I", crc32(head))


def _read_header(fd: int, given_bytes: int) -> tuple[int, int, int, int, int]:
    head = os.pread(fd, HEADER_BYTES, 0)
    if head[: len(MAGIC)] != MAGIC:
        raise DamagedStateFile("it is not a state file, or it is incomplete")
    if len(head) < HEADER_BYTES:
        raise DamagedStateFile(f"it ends after {len(head)} bytes")
    _magic, version, _none, tree_bytes, pieces, total_bytes, sum_of_tree, sum_of_table = _HEADER.unpack_from(head)
    if struct.unpack_from("<I", head, HEADER_BYTES - 4)[0] != crc32(head[: HEADER_BYTES - 4]):
        raise DamagedStateFile("its header does not match its checksum")
    if version != VERSION:
        raise DamagedStateFile(f"it is of version {version}, and this hegmd reads version {VERSION}")
    if total_bytes > given_bytes:
        raise DamagedStateFile(f"it was of {total_bytes} bytes and has {given_bytes}")
    if HEADER_BYTES + tree_bytes + 8 * pieces > total_bytes:
        raise DamagedStateFile(
            f"its header announces {tree_bytes} bytes and {pieces} pieces within {total_bytes} bytes"
        )
    return tree_bytes, pieces, total_bytes, sum_of_tree, sum_of_table


def _read_table(
    mapping: memoryview, table_at: int, pieces: int, total_bytes: int, sum_of_table: int
) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of the pieces, after all checksums were verified. Raises DamagedStateFile."""
    sizes = list(struct.unpack_from(f"<{pieces}Q", mapping, table_at))
    if sum(sizes) > total_bytes:
        raise DamagedStateFile(f"its table announces {sum(sizes)} bytes within {total_bytes}")
    places, needed_bytes = _layout(table_at, sizes)
    if needed_bytes != total_bytes:
        raise DamagedStateFile(f"its pieces take {needed_bytes} bytes, and its header announces {total_bytes}")
    parts = _parts(places, sizes)
    table_bytes = 8 * pieces + 4 * len(parts)
    if crc32(mapping[table_at : table_at + table_bytes]) != sum_of_table:
        raise DamagedStateFile("its table does not match its checksum")
    expected = struct.unpack_from(f"<{len(parts)}I", mapping, table_at + 8 * pieces)
    _check(mapping, places, sizes, dict(zip(parts, expected)))
    return places, sizes


def _check(mapping: memoryview, places: list[int], sizes: list[int], expected: dict[int, int]) -> None:
    """Hold every part against its checksum, by several threads. Raises DamagedStateFile."""
    first = ctypes.c_char.from_buffer(mapping)
    base = ctypes.addressof(first)
    wrong: list[int] = []

    def check(address: int, place: int, part_bytes: int) -> None:
        copying.fetch_pages(address, part_bytes)
        if checksums.sum_of(address, part_bytes) != expected[place]:
            wrong.append(place)

    spans = [(base + place, place, size) for place, size in zip(places, sizes)]
    copying.in_threads(check, spans, copying.ignore, CHECKING_THREADS)
    if wrong:
        total = len(expected)
        raise DamagedStateFile(
            f"{len(wrong)} of {total} parts do not match their checksums, the first at byte {min(wrong)}"
        )


# ---- layout ---------------------------------------------------------------------------------------------------------


def _layout(table_at: int, sizes: list[int]) -> tuple[list[int], int]:
    """Return the offset of each piece, and the size of the file."""
    at = table_at + 8 * len(sizes) + 4 * sum(map(_count_parts, sizes))
    places: list[int] = []
    for size in sizes:
        at = round_up(at, PAGE_BYTES if size >= PAGE_BYTES else _BORDER_BYTES)
        places.append(at)
        at += size
    return places, round_up(at)


def _count_parts(size: int) -> int:
    return (size + PIECE_BYTES - 1) // PIECE_BYTES


def _parts(places: list[int], sizes: list[int]) -> list[int]:
    """Return the offset of each part that has a checksum."""
    return [place + start for place, size in zip(places, sizes) for start in range(0, size, PIECE_BYTES)]
