"""The copies that are made of many places: as few as can be, none too large."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.errors import HegmError
from hegmd.gpu_helper.allocations import MemoryRange, joined
from hegmd.gpu_helper.copying import batches, chunks
from hegmd.gpu_helper.staging import loads
from tests.cells import in_one_test

UNIT = 512


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert joined([[0, 512, 512, 1024], [0, 0, 512, 512]], 1) == [MemoryRange(0, 0, 1024, 512)]


@pytest.mark.parametrize(
    "second",
    [[1, 512, 512, 512], [0, 1024, 512, 512], [0, 512, 512, 1024]],
    ids=["another-allocation", "a-gap-in-the-process", "a-gap-in-the-space"],
)
def test_ranges_separate_on_either_side_are_copied_separately(second: list[int]) -> None:
    assert len(joined([[0, 0, 512, 0], second], 2)) == 2


def test_a_gap_equal_on_both_sides_is_not_written() -> None:
    """Other memory may be in the gap of the process when the bytes return."""
    places = joined([[0, 0, 500, 0], [0, 512, 500, 512]], 1)
    assert places == [MemoryRange(0, 0, 500, 0), MemoryRange(0, 512, 500, 512)]


def test_empty_storages_cost_nothing() -> None:
    assert joined([[0, 0, 0, 0], [0, 0, 0, 512]], 1) == []


@in_one_test("place", [[1, 0, 1, 0], [-1, 0, 1, 0], [0, -1, 1, 0], [0, 0, -1, 0], [0, 0, 1, -1]])
def test_invalid_places_are_refused(place: list[int]) -> None:
    with pytest.raises(HegmError, match="is outside of"):
        joined([place], 1)


def test_no_copy_is_larger_than_a_chunk() -> None:
    cut = list(chunks([MemoryRange(0, 10, 500, 250)], chunk_bytes=200))
    assert cut == [MemoryRange(0, 10, 200, 250), MemoryRange(0, 210, 200, 450), MemoryRange(0, 410, 100, 650)]


def test_small_places_share_a_slot_and_large_ones_are_cut() -> None:
    places = [
        MemoryRange(0, 0, 30, 0),
        MemoryRange(1, 0, 50, 512),
        MemoryRange(2, 0, 250, 1024),
        MemoryRange(3, 0, 10, 2048),
    ]
    shares = [[(part.place.handle, part.within, part.place.size_bytes) for part in load] for load in loads(places, 100)]
    assert shares == [[(0, 0, 30), (1, 30, 50)], [(2, 0, 100)], [(2, 0, 100)], [(2, 0, 50), (3, 50, 10)]]


@pytest.mark.thorough
@given(
    sizes=st.lists(st.integers(0, 5 * UNIT), max_size=30),
    handles=st.integers(1, 4),
    chunk=st.integers(1, 2000),
    batch=st.integers(1, 5000),
    order=st.randoms(use_true_random=False),
)
def test_every_byte_is_copied_once_and_to_its_place(
    sizes: list[int], handles: int, chunk: int, batch: int, order: Random
) -> None:
    places: list[list[int]] = []
    at = 0
    ends = [0] * handles
    for size in sizes:
        handle = order.randrange(handles)
        ends[handle] += order.choice([0, 0, 64])
        places.append([handle, ends[handle], size, at])
        ends[handle] += size
        at += size + order.choice([0, 0, 32])
    wanted = {(place[0], place[1] + i): place[3] + i for place in places for i in range(place[2])}
    order.shuffle(places)
    copied: dict[tuple[int, int], int] = {}
    for group in batches(chunks(joined(places, handles), chunk), batch):
        assert group
        for piece in group:
            assert 0 < piece.size_bytes <= chunk
            for i in range(piece.size_bytes):
                assert (piece.handle, piece.offset + i) not in copied
                copied[piece.handle, piece.offset + i] = piece.at + i
    assert copied == wanted
