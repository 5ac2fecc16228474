"""The runs of video memory that an allocator has besides storages, and how they are made again: as few as can be."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from hegmd.agent.cache import MAX_RUNS, Cache, Run, most_runs, runs_between
from hegmd.agent.cuda_state import Segment, Segments, padding_bytes
from tests.cells import in_one_test
from tests.kit.caching_allocator import MIB, CachingAllocator

KIB = 1 << 10


def segment(address: int, size_bytes: int, *, stream: int = 0, device: int = 0, small: bool = False) -> Segment:
    kind = "small" if small else "large"
    fields = {"address": address, "total_size": size_bytes, "stream": stream, "device": device, "segment_type": kind}
    return Segment(fields)


def sizes(runs: list[Run]) -> list[int]:
    return [run.size_bytes for run in runs]


def test_each_gap_between_storages_is_a_run() -> None:
    held = [segment(0, 100 * MIB)]
    holes = [(10 * MIB, 20 * MIB), (40 * MIB, 50 * MIB)]
    assert sizes(runs_between(held, holes)) == [10 * MIB, 10 * MIB, 10 * MIB]
    assert sizes(runs_between(held, [])) == [100 * MIB]
    assert runs_between(held, [(0, 100 * MIB)]) == []


def test_memory_left_to_the_allocator_is_no_run_also_in_part_of_an_expandable_segment() -> None:
    held = [segment(0, 100 * MIB), segment(200 * MIB, 60 * MIB)]
    left = [(0, 40 * MIB), (200 * MIB, 60 * MIB)]
    assert sizes(runs_between(held, left)) == [60 * MIB]


def test_holes_may_touch_overlap_and_lie_elsewhere() -> None:
    held = [segment(100 * MIB, 100 * MIB), segment(300 * MIB, 100 * MIB)]
    holes = [(0, 50 * MIB), (110 * MIB, 10 * MIB), (115 * MIB, 15 * MIB), (130 * MIB, 5 * MIB), (250 * MIB, 20 * MIB)]
    assert sizes(runs_between(held, sorted(holes))) == [10 * MIB, 65 * MIB, 100 * MIB]


def test_memory_that_the_allocator_cannot_use_is_no_run() -> None:
    """Beside a large block it leaves up to 1 MiB uncut; of a small segment every block may be used."""
    assert runs_between([segment(0, 20 * MIB)], [(0, 19 * MIB)]) == []
    (run,) = runs_between([segment(0, 2 * MIB, small=True)], [(0, 2 * MIB - 512)])
    assert (run.size_bytes, run.is_small) == (512, True)


def test_padding_of_a_large_storage_returns_with_it_and_is_no_run() -> None:
    """Such a rest is usable, so it was taken a second time, and the small runs found no room."""
    held = [segment(0, 66 * MIB), segment(100 * MIB, 20 * MIB)]
    assert sizes(runs_between(held, [(0, 64 * MIB + 16 * 1024), (100 * MIB, 9 * MIB)])) == [11 * MIB]
    assert sizes(runs_between(held, [(0, 64 * MIB), (100 * MIB, 9 * MIB)])) == [2 * MIB, 11 * MIB]


def test_the_smallest_of_many_runs_are_merged_for_each_stream() -> None:
    many = [segment(number << 32, (20 + number) * MIB, stream=number % 2) for number in range(MAX_RUNS + 4)]
    runs = most_runs(runs_between(many, []))
    assert len(runs) == MAX_RUNS + 2
    assert sum(sizes(runs)) == sum(one.size_bytes for one in many)
    assert sizes(runs[-2:]) in ([(20 + 22) * MIB, (21 + 23) * MIB], [(21 + 23) * MIB, (20 + 22) * MIB])


def test_small_ones_are_made_by_the_mib_before_the_large_ones() -> None:
    held = [segment(0, 2 * MIB, small=True, stream=7), segment(8 * MIB, 2 * MIB, small=True, stream=7)]
    runs = most_runs(runs_between([*held, segment(64 * MIB, 20 * MIB)], [(0, MIB // 2)]))
    assert [(run.size_bytes, run.is_small, run.stream) for run in runs] == [*[(MIB, True, 7)] * 4, (20 * MIB, False, 0)]


@in_one_test("seed", range(20))
def test_runs_and_holes_cover_all_memory(seed: int) -> None:
    chance = Random(seed)
    held, holes, at = list[Segment](), list[tuple[int, int]](), 0
    for _ in range(20):
        held.append(segment(at, 64 * MIB, small=True))
        start = at
        while start < at + 64 * MIB:
            size_bytes = min(chance.randrange(1, 9 * MIB), at + 64 * MIB - start)
            if chance.random() < 0.5:
                holes.append((start, size_bytes))
            start += size_bytes
        at += 64 * MIB + chance.choice([0, 5 * MIB])
    taken_bytes = sum(size_bytes for _, size_bytes in holes)
    assert sum(sizes(runs_between(held, holes))) + taken_bytes == 20 * 64 * MIB


class Training:
    """Allocates like DDP and AdamW: activations, gradients, and temporary memory as large as the weights."""

    def __init__(self, layers: int, weight_bytes: int, *, has_buckets: bool = True) -> None:
        self.allocator = CachingAllocator()
        self._layers = layers
        self._sizes = [weight_bytes, 16 * KIB] * layers
        self._kept: dict[int, int] = {}
        self._keep([*self._sizes, *([weight_bytes + 16 * KIB] * layers if has_buckets else [])])
        self._gradients: list[int] = []
        self._moments: list[int] = []
        self._workspace: list[int] = []

    def _keep(self, wanted: list[int]) -> list[int]:
        made = self._make(wanted)
        self._kept.update(zip(made, wanted, strict=True))
        return made

    def _make(self, wanted: list[int]) -> list[int]:
        return [self.allocator.caching_allocator_alloc(size_bytes) for size_bytes in wanted]

    def _free(self, addresses: list[int]) -> None:
        for address in addresses:
            self._kept.pop(address, None)
            self.allocator.caching_allocator_delete(address)
        addresses.clear()

    def step(self) -> None:
        self._workspace = self._workspace or self._make([32 * MIB])
        activations = self._make([256 * KIB] * 2 * self._layers)
        self._free(self._gradients)
        self._gradients = self._keep(self._sizes[::-1])
        self._free(activations)
        self._moments = self._moments or self._keep(self._sizes * 2)
        self._free(self._make(self._sizes))

    def move(self, rounds: int) -> None:
        """Do with the allocator what the agent does: in so many rounds the storages are made again."""
        torch: Any = SimpleNamespace(cuda=self.allocator)
        storages = sorted(self._kept.items())
        cache = Cache(torch, Segments(torch), [0], storages)
        cache.forgo()
        self._free([address for address, _ in storages])
        self._free(self._workspace)
        self.allocator.empty_cache()
        cache.note_given_back()
        again: dict[int, int] = {}
        for some in batches(storages, rounds):
            again.update(zip([address for address, _ in some], self._keep([size for _, size in some]), strict=True))
            left = [size_bytes for address, size_bytes in storages if address not in again]
            cache.take({0: sum(left) + padding_bytes(left)})
        cache.free_cached()
        self._gradients = [again[address] for address in self._gradients]


def batches(storages: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    size = -(-len(storages) // count)
    return [storages[at : at + size] for at in range(0, len(storages), size)]


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("layers", "weight_bytes", "has_buckets"),
    [(70, 64 * MIB, True), (20, 64 * MIB + 700 * KIB, True), (70, 64 * MIB, False), (90, 600 * KIB, True)],
)
def test_a_training_does_not_grow_with_each_move(
    layers: int, weight_bytes: int, has_buckets: bool, rounds: int
) -> None:
    training = Training(layers, weight_bytes, has_buckets=has_buckets)
    reserved: list[int] = []
    for _ in range(4):
        training.step()
        training.step()
        reserved.append(training.allocator.reserved_bytes())
        training.move(rounds)
    assert reserved[1] <= reserved[0] + weight_bytes
    assert reserved[1:] == reserved[1:2] * 3


def test_memory_returned_to_the_driver_is_taken_again_once() -> None:
    allocator = CachingAllocator()
    torch: Any = SimpleNamespace(cuda=allocator)
    allocator.caching_allocator_delete(allocator.caching_allocator_alloc(64 * MIB))
    cache = Cache(torch, Segments(torch), [0], [])
    allocator.empty_cache()
    cache.note_given_back()
    for _ in range(2):
        cache.take()
        cache.take()
        assert allocator.reserved_bytes() == 64 * MIB
        cache.forgo()
        allocator.empty_cache()
        assert allocator.reserved_bytes() == 0
