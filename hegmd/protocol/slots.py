"""The record at the end of a snapshot's slot: which step it is of, and that it is whole.

A slot is a segment of the host pool: the state of one process from its beginning, and this record in its last page. The
agent clears the record before it writes and sets it after the state, so a write that was cut short leaves none. The
state has checksums of its own, which the process that starts from it verifies. Pure: the holder of the descriptor reads
and writes the bytes.
"""

from __future__ import annotations

import struct
from binascii import crc32

from .record import Record, field

#: The last page of a slot.
RECORD_BYTES = 4096
_MAGIC, _VERSION = b"HEGMSLOT", 1
#: Magic, version, rank, ranks in all, nothing, generation, step, bytes of the state, when, and how long it took.
_FORM = struct.Struct("<8sIIIIQQQdd")
_SUM = struct.Struct("<I")


class SlotRecord(Record):
    """One whole snapshot of one process."""

    generation: int = field("counts the snapshots of the job; the same for all of its ranks")
    step: int = field("batch boundaries that the training had passed, those before a recovery included")
    rank: int = field("the rank; 0 for a job of one process")
    ranks: int = field("how many ranks the job has")
    size_bytes: int = field("bytes of the state")
    taken_utc: float = field("when, in seconds since 1970")
    took_s: float = field("how long the training stood for it")


def packed(record: SlotRecord) -> bytes:
    """Return the bytes of a record."""
    data = _FORM.pack(
        *(_MAGIC, _VERSION, record.rank, record.ranks, 0, record.generation, record.step, record.size_bytes),
        *(record.taken_utc, record.took_s),
    )
    return data + _SUM.pack(crc32(data))


def unpacked(data: bytes) -> SlotRecord | None:
    """Return the record in these bytes; None where there is none, or a damaged one."""
    if len(data) < _FORM.size + _SUM.size or data[: len(_MAGIC)] != _MAGIC:
        return None
    if _SUM.unpack_from(data, _FORM.size)[0] != crc32(data[: _FORM.size]):
        return None
    _magic, version, rank, ranks, _none, generation, step, size_bytes, taken_utc, took_s = _FORM.unpack_from(data)
    if version != _VERSION:
        return None
    return SlotRecord(
        generation=generation,
        step=step,
        rank=rank,
        ranks=ranks,
        size_bytes=size_bytes,
        taken_utc=taken_utc,
        took_s=took_s,
    )


def slot_bytes(state_bytes: int) -> int:
    """Return how large a slot has to be for such a state."""
    return state_bytes + RECORD_BYTES
