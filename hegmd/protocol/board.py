"""The board: a memory that `hegmctl run --ranks` shares with its ranks, so that what a rank needs outlives it.

Each rank has a region: when it last made progress, and two records with its random state and its `extra`, labelled
with the step that they are for. Ranks differ by one step at most, so two are enough. A record has a checksum: one
that was being written when its rank was killed does not count. Pure: the owner of the memory passes it in.
"""

from __future__ import annotations

import struct
from binascii import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The most bytes of a record. Unwritten pages take no memory.
MAX_RECORD_BYTES = 1 << 20
#: When it made progress, how long it may make none, and its step.
_HEAD = struct.Struct("<ddQ")
_HEAD_BYTES = 4096
_RECORD = struct.Struct("<QIIB")
_RECORDS = 2
_RECORD_BYTES = MAX_RECORD_BYTES + 4096
_REGION_BYTES = _HEAD_BYTES + _RECORDS * _RECORD_BYTES


def board_bytes(ranks: int) -> int:
    """Return the size of the board for that many ranks."""
    return ranks * _REGION_BYTES


class Board:
    """The regions of all ranks in one writable buffer."""

    def __init__(self, memory: Any, ranks: int) -> None:
        self._memory = memory
        self.ranks = ranks

    def clear(self) -> None:
        """Forget all records."""
        for rank in range(self.ranks):
            for number in range(_RECORDS):
                at = _place(rank, number)
                self._memory[at : at + _RECORD.size] = bytes(_RECORD.size)

    def stamp(self, rank: int, at: float, limit_s: float, step: int) -> None:
        """Record that the rank makes progress now, and how long it may make none; 0 for no limit."""
        _HEAD.pack_into(self._memory, rank * _REGION_BYTES, at, limit_s, step)

    def progress(self, rank: int) -> tuple[float, float, int]:
        """Return when the rank made progress, how long it may make none, and its step."""
        at, limit_s, step = _HEAD.unpack_from(self._memory, rank * _REGION_BYTES)
        return at, limit_s, step

    def write(self, rank: int, step: int, data: bytes) -> None:
        """Record what that rank needs to begin that step. Raises ValueError if it is too much."""
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"the random state and `extra` of a rank have {len(data)} bytes of {MAX_RECORD_BYTES}")
        at = _place(rank, step % _RECORDS)
        self._memory[at : at + _RECORD.size] = bytes(_RECORD.size)
        self._memory[at + _RECORD.size : at + _RECORD.size + len(data)] = data
        _RECORD.pack_into(self._memory, at, step, len(data), crc32(data), 1)

    def read(self, rank: int, step: int) -> bytes | None:
        """Return what that rank needs to begin that step; None if it is not recorded whole."""
        at = _place(rank, step % _RECORDS)
        label, size, checksum, is_set = _RECORD.unpack_from(self._memory, at)
        if not is_set or label != step or size > MAX_RECORD_BYTES:
            return None
        data = bytes(self._memory[at + _RECORD.size : at + _RECORD.size + size])
        return data if crc32(data) == checksum else None


def _place(rank: int, number: int) -> int:
    return rank * _REGION_BYTES + _HEAD_BYTES + number * _RECORD_BYTES
