"""The GPU's sums equal the processor's: on tensors of the CPU, for which PyTorch uses the same calls."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.agent.copying import PAGE_BYTES, PIECE_BYTES
from hegmd.agent.state.storage import checksums
from hegmd.agent.state.storage.raw_copy import MIN_BYTES, VideoSums
from tests.needs import need_torch

pytestmark = [pytest.mark.xdist_group("torch")]
torch: Any = need_torch()

SIZES = (MIN_BYTES, MIN_BYTES + 8, PIECE_BYTES - 5, PIECE_BYTES, 2 * PIECE_BYTES + 3 * PAGE_BYTES + 17)


def _raw(size_bytes: int, first: int, seed: int) -> tuple[Any, int, int, str]:
    whole = torch.randint(
        0, 256, (first + size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return whole, whole.data_ptr() + first, size_bytes, "cpu"


@pytest.mark.thorough
def test_each_part_has_the_checksum_that_reading_expects() -> None:
    raws = [_raw(size, 8 * number, number) for number, size in enumerate(SIZES)]
    places = [number << 30 for number in range(len(raws))]
    adding = VideoSums(raws, places)
    found: dict[int, int] = {}
    adding.add(found)
    assert adding.places == set(places)
    expected = {
        place + start: checksums.sum_of(address + start, min(PIECE_BYTES, size - start))
        for (_tensor, address, size, _where), place in zip(raws, places, strict=True)
        for start in range(0, size, PIECE_BYTES)
    }
    assert found == expected


def test_small_or_unaligned_parts_are_left_to_the_processor() -> None:
    raws = [_raw(MIN_BYTES - 1, 0, 1), _raw(MIN_BYTES, 4, 2), _raw(MIN_BYTES, 0, 3)]
    assert VideoSums(raws, [0, 1 << 30, 2 << 30]).places == {2 << 30}


def test_if_pytorch_cannot_add_up_no_checksum_is_claimed() -> None:
    tensor, address, size_bytes, _where = _raw(MIN_BYTES, 0, 4)
    adding = VideoSums([(tensor, address, size_bytes, "cuda:99")], [0])
    found: dict[int, int] = {}
    adding.add(found)
    assert (adding.places, found) == (set(), {})
