"""Names that users write: of GPUs, and words that are close to a known one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hegmd.errors import BAD_REQUEST, NOT_FOUND, HegmError
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from hegmd.protocol.agents import packed, unpacked, unpacked_spans
from hegmd.protocol.names import closest, distance, gpu_named, place_named
from hegmd.protocol.record import BadValue
from hegmd.protocol.snapshots import Gpu


@pytest.fixture
def gpus() -> Iterator[tuple[Gpu, ...]]:
    provider = SimulatedProvider(parse_topology("2x8GiB"))
    provider.open()
    yield tuple(gpu.replace(id=f"gpu{gpu.index}") for gpu in provider.snapshot().gpus)
    provider.close()


@pytest.mark.parametrize(
    ("text", "hint"), [("gpo1", "did you mean gpu1? run: hegmctl gpus"), ("tpu", "run: hegmctl gpus")]
)
def test_a_name_close_to_a_gpu_is_suggested_and_no_other(gpus: tuple[Gpu, ...], text: str, hint: str) -> None:
    with pytest.raises(HegmError) as caught:
        gpu_named(text, gpus)
    assert (caught.value.code, caught.value.hint) == (NOT_FOUND, hint)


def test_the_beginning_of_two_uuids_is_refused_with_both_ids(gpus: tuple[Gpu, ...]) -> None:
    alike = [gpu.replace(uuid=f"GPU-0a1b2c3d-{gpu.index}") for gpu in gpus]
    with pytest.raises(HegmError, match="UUIDs of gpu0, gpu1") as caught:
        gpu_named("gpu-0a1b2c3d", alike)
    assert caught.value.code == BAD_REQUEST
    assert gpu_named("gpu-0a1b2c3d-1", alike) == "gpu1"


def test_an_unknown_gpu_in_a_target_stays_for_the_planner_to_refuse(gpus: tuple[Gpu, ...]) -> None:
    assert place_named("0=gpu1, gpu9", gpus) == "gpu0=gpu1,gpu9"


def test_a_word_with_a_third_of_its_letters_wrong_is_not_close() -> None:
    assert closest("migrade", ["migrate", "top"]) == "migrate"
    assert closest("abcdef", ["abzzzz"]) is None


def test_a_swap_counts_once_only_if_both_letters_are_swapped() -> None:
    assert (distance("ab", "ba"), distance("abc", "axb"), distance("ba", "cb")) == (1, 2, 2)


def test_positions_round_trip() -> None:
    spots = [(1, 2, 3), (4, 5, 6)]
    assert unpacked(packed(spots)) == spots
    spans = [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert unpacked_spans(packed(spans)) == spans


def test_an_incomplete_span_is_refused() -> None:
    with pytest.raises(BadValue, match="17 bytes are no whole spans of"):
        unpacked_spans(bytes(17))
