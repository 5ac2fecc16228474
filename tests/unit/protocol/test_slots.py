"""The record at the end of a slot: whole, or none."""

from __future__ import annotations

import pytest

from hegmd.protocol.slots import RECORD_BYTES, SlotRecord, packed, slot_bytes, unpacked
from tests.cells import in_one_test

RECORD = SlotRecord(generation=7, step=1200, rank=3, ranks=8, size_bytes=12_900_000_000, taken_utc=1.5e9, took_s=0.7)


def test_a_packed_record_is_unpacked() -> None:
    data = packed(RECORD)
    assert len(data) <= RECORD_BYTES
    assert unpacked(data.ljust(RECORD_BYTES, b"\0")) == RECORD


@in_one_test("place", range(len(packed(RECORD))))
def test_a_record_with_a_flipped_bit_is_ignored(place: int) -> None:
    data = bytearray(packed(RECORD))
    data[place] ^= 4
    assert unpacked(bytes(data)) is None


@pytest.mark.parametrize("size", [0, 8, 40, len(packed(RECORD)) - 1])
def test_a_truncated_record_is_ignored(size: int) -> None:
    assert unpacked(packed(RECORD)[:size]) is None


def test_a_slot_fits_the_state_and_the_record() -> None:
    assert slot_bytes(1000) >= 1000 + len(packed(RECORD))
