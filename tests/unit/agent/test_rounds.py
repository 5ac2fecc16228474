"""The storages that are made at a time if there is no room for all of them and their copies."""

from __future__ import annotations

import pytest

from hegmd.agent.ipc_storages import BORDER_BYTES, round_of
from hegmd.memory.sizes import PIECE_BYTES, ROUND_BYTES, piece_bytes, round_bytes, rounds_of
from tests.cells import in_one_test

MIB = 1 << 20
GIB = 1 << 30


def rounds_made(sizes: list[int], most_bytes: int) -> list[int]:
    """How many storages each has."""
    counts: list[int] = []
    while sum(counts) < len(sizes):
        counts.append(round_of(sizes[sum(counts) :], most_bytes))
    return counts


def test_a_last_round_with_one_storage_freed_all_others_before_it() -> None:
    """100 GiB of a benchmark were 21, 21, 21 and 1; memory of three rounds was freed while the job was parked."""
    assert rounds_made([1600 * MIB] * 64, 34557 * MIB) == [16] * 4
    assert rounds_made([1600 * MIB] * 64, 35581 * MIB) == [22, 21, 21]


@in_one_test(
    ("sizes", "most", "counts"),
    [
        ([3, 3, 3], 100, [3]),
        ([9, 1, 9], 10, [2, 1]),
        ([20, 1, 20], 10, [1, 1, 1]),  # at least one storage, however large
        ([1], 0, [1]),
        ([4, 4, 4, 4, 4], 10, [2, 2, 1]),
    ],
)
def test_no_round_is_larger_than_it_may_be_unless_it_is_of_one(sizes: list[int], most: int, counts: list[int]) -> None:
    assert rounds_made([size * BORDER_BYTES for size in sizes], most * BORDER_BYTES) == counts


@pytest.mark.parametrize("size_bytes", [100 * GIB, 128 * GIB, 129 * GIB, 250 * GIB])
def test_free_memory_after_each_round_suffices_for_the_next(size_bytes: int) -> None:
    """Room for a part of them; pieces that are wholly filled are free again, and these alone."""
    free_bytes = 36 * GIB + 5 * MIB
    most_bytes, each_bytes = round_bytes(free_bytes, size_bytes), piece_bytes(size_bytes)
    made_bytes = 0
    while made_bytes < size_bytes:
        given_bytes = made_bytes // each_bytes * each_bytes
        made_bytes += min(most_bytes, size_bytes - made_bytes)
        assert made_bytes <= free_bytes + given_bytes
    assert rounds_of(size_bytes, size_bytes - free_bytes) == -(-size_bytes // most_bytes)


def test_the_least_allocation_of_a_round_is_a_piece() -> None:
    assert round_bytes(0, GIB) == ROUND_BYTES >= PIECE_BYTES
