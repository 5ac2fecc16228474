"""Checksums of what lies in video memory, added up by the GPU itself while the bytes are on their way out.

The processor adds up as fast as it copies, and does one of both at a time: it would halve the rate of the copies. The
GPU reads its own memory a hundred times faster than the link. Its sums are those of `sums`: of the words of each page,
and the CRC over them is made here. Where the GPU cannot do it, the processor does, as for small pieces, for which the
calls cost more than they save.
"""

from __future__ import annotations

import ctypes
import sys
from binascii import crc32

from ...copying import PAGE_BYTES, PIECE_BYTES
from ...notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .tensors import Raw

MIN_BYTES = 1 << 20
_WORD_BYTES = 8


class VideoSums:
    """The checksums of some of these raws, which are all on one GPU; `added` has those that are there."""

    def __init__(self, raws: list[Raw], places: list[int]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._mine = [(raw, place) for raw, place in zip(raws, places) if self._is_mine(raw)]
        self.places: set[int] = {place for _raw, place in self._mine}

    def _is_mine(self, raw: Raw) -> bool:
        tensor, address, size_bytes, _where = raw
        if size_bytes < MIN_BYTES or address % _WORD_BYTES or sys.byteorder != "little":
            return False
        return hasattr(self._torch, "sum") and not (address - tensor.untyped_storage().data_ptr()) % _WORD_BYTES

    def add(self, found: dict[int, int]) -> None:
        """Put the checksum of each part of them under its place. Where that cannot be, `places` is empty then."""
        if not self._mine:
            return
        try:
            sums, rests = self._added()
        except Exception as error:  # noqa: BLE001 - of PyTorch or CUDA, such as no memory left for the sums
            note(f"the GPU does not add up, the processor does: {error!r}")
            self.places = set()
            return
        at = 0
        for index, ((_tensor, _address, size_bytes, _where), place) in enumerate(self._mine):
            words = size_bytes // PAGE_BYTES * _WORD_BYTES
            step = PIECE_BYTES // PAGE_BYTES * _WORD_BYTES
            for part, start in enumerate(range(0, words, step)):
                found[place + part * PIECE_BYTES] = crc32(sums[at + start : at + min(start + step, words)])
            tail_bytes = size_bytes % PAGE_BYTES
            if tail_bytes:
                last = place + size_bytes // PIECE_BYTES * PIECE_BYTES
                rest = rests[index * PAGE_BYTES : index * PAGE_BYTES + tail_bytes]
                found[last] = crc32(rest, found.get(last, 0))
            at += words

    def _added(self) -> tuple[memoryview, memoryview]:
        """The sums of all their pages, and a page for each with the bytes after its last whole one."""
        torch = self._torch
        where = self._mine[0][0][3]
        count = sum(raw[2] // PAGE_BYTES for raw, _place in self._mine)
        with torch.inference_mode():
            sums = torch.empty(count, dtype=torch.int64, device=where)
            rests = torch.empty(len(self._mine) * PAGE_BYTES, dtype=torch.uint8, device=where)
            at = 0
            for index, ((tensor, address, size_bytes, _where), _place) in enumerate(self._mine):
                storage = tensor.untyped_storage()
                first = address - storage.data_ptr()
                pages, tail_bytes = divmod(size_bytes, PAGE_BYTES)
                words = torch.empty(0, dtype=torch.int64, device=where)
                words.set_(
                    storage, first // _WORD_BYTES, (pages, PAGE_BYTES // _WORD_BYTES), (PAGE_BYTES // _WORD_BYTES, 1)
                )
                torch.sum(words, dim=1, out=sums[at : at + pages])
                at += pages
                if tail_bytes:
                    rest = torch.empty(0, dtype=torch.uint8, device=where)
                    rest.set_(storage, first + pages * PAGE_BYTES, (tail_bytes,), (1,))
                    rests[index * PAGE_BYTES : index * PAGE_BYTES + tail_bytes].copy_(rest)
            return _in_memory(sums), _in_memory(rests)


def _in_memory(tensor: Any) -> memoryview:
    """Its bytes, in this process's own memory."""
    here = tensor.cpu()
    view = (ctypes.c_char * (here.numel() * here.element_size())).from_address(here.data_ptr())
    view.tensor = here  # which owns the memory
    return memoryview(view).cast("B")
