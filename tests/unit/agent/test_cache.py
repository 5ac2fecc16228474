"""Which runs of video memory an allocator has besides storages, and how they are made again: as few as can be."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

from hegmd.agent.cache import MAX_RUNS, Cache, Run, most_runs, runs_between
from hegmd.agent.cuda_state import Segment
from tests.cells import in_one_test

MIB = 1 << 20


def segment(address: int, size_bytes: int, *, stream: int = 0, device: int = 0, small: bool = False) -> Segment:
    kind = "small" if small else "large"
    told = {"address": address, "total_size": size_bytes, "stream": stream, "device": device, "segment_type": kind}
    return Segment(told)


def sizes(runs: list[Run]) -> list[int]:
    return [run.size_bytes for run in runs]


def test_what_lies_between_storages_is_a_run_each() -> None:
    held = [segment(0, 100 * MIB)]
    holes = [(10 * MIB, 20 * MIB), (40 * MIB, 50 * MIB)]
    assert sizes(runs_between(held, holes)) == [10 * MIB, 10 * MIB, 10 * MIB]
    assert sizes(runs_between(held, [])) == [100 * MIB]
    assert runs_between(held, [(0, 100 * MIB)]) == []


def test_what_is_left_with_the_allocator_is_no_run_though_only_a_part_of_an_expandable_segment_is() -> None:
    held = [segment(0, 100 * MIB), segment(200 * MIB, 60 * MIB)]
    left = [(0, 40 * MIB), (200 * MIB, 60 * MIB)]
    assert sizes(runs_between(held, left)) == [60 * MIB]


def test_holes_may_touch_overlap_and_lie_elsewhere() -> None:
    held = [segment(100 * MIB, 100 * MIB), segment(300 * MIB, 100 * MIB)]
    holes = [(0, 50 * MIB), (110 * MIB, 10 * MIB), (115 * MIB, 15 * MIB), (130 * MIB, 5 * MIB), (250 * MIB, 20 * MIB)]
    assert sizes(runs_between(held, sorted(holes))) == [10 * MIB, 65 * MIB, 100 * MIB]


def test_what_the_allocator_could_not_use_is_no_run() -> None:
    """Beside a large block it leaves up to 1 MiB uncut; of a small segment every block may be used."""
    assert runs_between([segment(0, 20 * MIB)], [(0, 19 * MIB)]) == []
    (run,) = runs_between([segment(0, 2 * MIB, small=True)], [(0, 2 * MIB - 512)])
    assert (run.size_bytes, run.is_small) == (512, True)


def test_what_the_allocator_adds_to_a_large_storage_comes_back_with_it_and_is_no_run() -> None:
    """Such a rest is usable, so it was taken a second time, and the small runs found no room."""
    held = [segment(0, 66 * MIB), segment(100 * MIB, 20 * MIB)]
    assert sizes(runs_between(held, [(0, 64 * MIB + 16 * 1024), (100 * MIB, 9 * MIB)])) == [11 * MIB]
    assert sizes(runs_between(held, [(0, 64 * MIB), (100 * MIB, 9 * MIB)])) == [2 * MIB, 11 * MIB]


def test_of_very_many_runs_the_smallest_are_made_as_one_for_each_stream() -> None:
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
def test_runs_and_holes_are_all_there_is(seed: int) -> None:
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


class Allocator:
    """What of `torch.cuda` the cache uses, on one GPU with plenty of memory."""

    def __init__(self, reserved_bytes: int) -> None:
        self.reserved_bytes = reserved_bytes
        self.held: dict[int, int] = {}

    def memory_stats_as_nested_dict(self, _device: int) -> dict[str, Any]:
        return {"reserved_bytes": {"all": {"current": self.reserved_bytes + sum(self.held.values())}}}

    def mem_get_info(self, _device: int) -> tuple[int, int]:
        return 1024 * MIB, 2048 * MIB

    def caching_allocator_alloc(self, size_bytes: int, **_: int) -> int:
        address = len(self.held) + 1
        self.held[address] = size_bytes
        return address

    def caching_allocator_delete(self, address: int) -> None:
        del self.held[address]


def test_memory_returned_to_the_driver_is_taken_again_once() -> None:
    allocator = Allocator(64 * MIB)
    segments: Any = SimpleNamespace(all=[])
    cache = Cache(SimpleNamespace(cuda=allocator), segments, [0], [])
    allocator.reserved_bytes = 0
    for _ in range(2):
        cache.take()
        cache.take()
        assert list(allocator.held.values()) == [64 * MIB]
        cache.forgo()
        assert allocator.held == {}
