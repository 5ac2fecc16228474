"""Checksums of raw bytes at the speed of memory.

A CRC of all bytes would take longer than copying them. So each page of 4096 bytes is summed as 64-bit words, and the
CRC covers those sums and the bytes after the last whole page. It detects a flipped bit, a page that was never written,
and swapped pages. It does not detect words that are swapped within a page, which no storage does. NumPy is the fastest
way to sum, PyTorch is about as fast, and without both Python sums word by word.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from binascii import crc32

from ...copying import PAGE_BYTES, copies_by_many

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...copying import Copy

# Stays in the cache of a core between adding up and copying.
_NEAR_BYTES = 512 * 1024
# Many threads get in one another's way at each call, which needs the interpreter: on 32 cores 16 of them wrote 8 GB/s
# of a state in blocks that small.
_FAR_BYTES = 8 * 1024 * 1024
_WORD_BYTES = 8
_PAGE_WORDS = PAGE_BYTES // _WORD_BYTES
_WORD_MASK = (1 << 64) - 1


def sum_of(address: int, size_bytes: int, before: int = 0) -> int:
    """Return the checksum of the bytes at that address. `before` is the checksum of the whole pages before them."""
    whole_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
    total, most_bytes = before, _block_bytes()
    for start in range(0, whole_bytes, most_bytes):
        block_bytes = min(most_bytes, whole_bytes - start)
        total = crc32(_page_sums(_bytes_at(address + start, block_bytes)), total)
    return _with_rest(total, address, size_bytes)


def sum_with(page_sums: memoryview, address: int, size_bytes: int) -> int:
    """Return the checksum of the bytes at that address, of whose whole pages these are the sums."""
    return _with_rest(crc32(page_sums), address, size_bytes)


def _with_rest(total: int, address: int, size_bytes: int) -> int:
    """Add the bytes after the last whole page."""
    rest_bytes = size_bytes % PAGE_BYTES
    if not rest_bytes:
        return total
    return crc32(_bytes_at(address + size_bytes - rest_bytes, rest_bytes), total)


def summing(copy: Copy, sums: dict[int, int]) -> Copy:
    """Return a copy function that also computes checksums: it stores each part's checksum under its offset."""

    most_bytes = _block_bytes()

    def copy_and_sum(address: int, place: int, size_bytes: int) -> None:
        total = 0
        for start in range(0, size_bytes, most_bytes):
            block_bytes = min(most_bytes, size_bytes - start)
            total = sum_of(address + start, block_bytes, total)
            copy(address + start, place + start, block_bytes)
        sums[place] = total

    return copy_and_sum


def _block_bytes() -> int:
    return _FAR_BYTES if copies_by_many() else _NEAR_BYTES


def _bytes_at(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size_bytes).from_address(address)


def _page_sums(pages: ctypes.Array[ctypes.c_char]) -> bytes:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "frombuffer"):
        words = numpy.frombuffer(pages, dtype="<u8").reshape(-1, _PAGE_WORDS)
        return bytes(words.sum(axis=1, dtype="<u8").tobytes())
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "frombuffer") and sys.byteorder == "little":
        signed = torch.frombuffer(pages, dtype=torch.int64).view(-1, _PAGE_WORDS)
        return _words(number & _WORD_MASK for number in signed.sum(dim=1).tolist())
    return _added_in_python(pages)


def _added_in_python(pages: ctypes.Array[ctypes.c_char]) -> bytes:
    words = array("Q", bytes(pages))
    if sys.byteorder == "big":
        words.byteswap()
    return _words(sum(words[start : start + _PAGE_WORDS]) & _WORD_MASK for start in range(0, len(words), _PAGE_WORDS))


def _words(numbers: Any) -> bytes:
    words = array("Q", numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
