"""Checksums of raw bytes at the speed of memory.

A CRC of all bytes would take longer than copying them. So each page of 4096 bytes is summed as 64-bit words, and the
CRC covers those sums and the bytes after the last whole page. It detects a flipped bit, a page that was never written,
and swapped pages. It does not detect words that are swapped within a page, which no storage does. NumPy is the fastest
way to sum, PyTorch is about as fast, and without both Python sums word by word.

A GPU sums the pages of its own memory in no time (`GpuSums`), before they are copied out. A processor adds up as fast
as it copies, but cannot do both at once: that would halve the rate of the copy.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from binascii import crc32

from ... import copying
from ...copying import PAGE_BYTES, PIECE_BYTES, copies_by_many, round_up
from ...notes import note
from ...staging import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ...copying import Copy, Span
    from ...staging import Ring

# Stays in the cache of a core between adding up and copying.
_NEAR_BYTES = 512 * 1024
# Many threads get in one another's way at each call, which needs the interpreter: on 32 cores 16 of them wrote 8 GB/s
# of a state in blocks that small.
_FAR_BYTES = 8 * 1024 * 1024
WORD_BYTES = 8
# The processor adds up less than this in GPU memory: each call of PyTorch takes as long.
MIN_BYTES = 1 << 20
# PyTorch adds up so many pages in one call: 1 GiB.
_PAGES_AT_ONCE = 1 << 18
_PAGE_WORDS = PAGE_BYTES // WORD_BYTES
_WORD_MASK = (1 << 64) - 1


def sum_of(address: int, size_bytes: int, before: int = 0) -> int:
    """Return the checksum of the bytes at that address. `before` is the checksum of the whole pages before them."""
    whole_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
    total, most_bytes = before, _block_bytes()
    for start in range(0, whole_bytes, most_bytes):
        block_bytes = min(most_bytes, whole_bytes - start)
        total = crc32(_page_sums(_bytes_at(address + start, block_bytes)), total)
    return _with_rest(total, address, size_bytes)


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


# ---- added up by a GPU ----------------------------------------------------------------------------------------------


class GpuSums:
    """The sums of the pages of spans in one GPU's memory, which this GPU adds up into other memory of its own."""

    def __init__(self, spans: Iterable[Span], *, is_paged: bool = False) -> None:
        """`is_paged`: each span has whole pages for itself, so that the GPU adds up the last one as well."""
        #: The number of the first page of each part, by its place.
        self._firsts: dict[int, int] = {}
        #: Address and number of pages: adjacent spans are added up together.
        self._runs: list[list[int]] = []
        self._sums_at: int | None = None
        total = end = 0
        for address, place, size_bytes in sorted(spans):
            if not is_paged and (size_bytes < MIN_BYTES or address % WORD_BYTES):
                continue
            pages = (round_up(size_bytes) if is_paged else size_bytes) // PAGE_BYTES
            for start in range(0, size_bytes, PIECE_BYTES):
                self._firsts[place + start] = total + start // PAGE_BYTES
            if address != end:
                self._runs.append([address, 0])
            self._runs[-1][1] += pages
            total, end = total + pages, address + pages * PAGE_BYTES
        #: How much memory the sums need.
        self.size_bytes = total * WORD_BYTES

    def begin(self, where: str, stream: int, sums_at: int) -> None:
        """Have the GPU add up in that stream, and do not wait for it. If it cannot, the processor adds up."""
        torch: Any = sys.modules["torch"]
        at = sums_at
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=where)), torch.inference_mode():
                for address, pages in self._runs:
                    for first in range(0, pages, _PAGES_AT_ONCE):
                        count = min(_PAGES_AT_ONCE, pages - first)
                        words = _Words(address + first * PAGE_BYTES, (count, _PAGE_WORDS))
                        added = torch.as_tensor(_Words(at, (count,)), device=where)
                        torch.sum(torch.as_tensor(words, device=where), dim=1, out=added)
                        at += count * WORD_BYTES
            self._sums_at = sums_at
        except Exception as error:  # noqa: BLE001 - of PyTorch or CUDA
            note(f"the GPU does not add up, the processor does: {error!r}")

    def storing(self, ring: Ring, write: Copy, found: dict[int, int]) -> Copy:
        """Return a copy function that also stores each part's checksum. The stream of `begin` has been waited for.

        Raises HegmError.
        """
        by_processor = summing(write, found)
        if self._sums_at is None:
            return by_processor
        memory = (ctypes.c_char * self.size_bytes)()
        ring.out(loads([(self._sums_at, ctypes.addressof(memory), self.size_bytes)]), move, copying.ignore)
        sums = memoryview(memory).cast("B")

        def copy(address: int, place: int, size_bytes: int) -> None:
            first = self._firsts.get(place)
            if first is None:
                by_processor(address, place, size_bytes)
                return
            of_pages = sums[first * WORD_BYTES : (first + size_bytes // PAGE_BYTES) * WORD_BYTES]
            found[place] = _with_rest(crc32(of_pages), address, size_bytes)
            write(address, place, size_bytes)

        return copy


class _Words:
    """GPU memory that PyTorch can use as a tensor of 64-bit words, and does not own."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i8", "data": data, "strides": None, "version": 2}


def move(source: int, target: int, size_bytes: int) -> None:
    """Copy within this process's memory."""
    ctypes.memmove(target, source, size_bytes)
