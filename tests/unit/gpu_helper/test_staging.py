"""How much of the ring is used each way, and how copies of pinned memory are cut."""

from __future__ import annotations

import os

from hegmd.gpu_helper.allocations import MemoryRange
from hegmd.gpu_helper.host_memory import Pinning, Segment
from hegmd.gpu_helper.staging import PACE, HostSpace, StagingSizes


def test_fewer_threads_copy_inwards_and_never_more_than_the_ring_has_slots_for() -> None:
    """24 waited for one another there: 43 GB/s, where 8 and 12 had 52."""
    cores = len(os.sched_getaffinity(0))
    assert (PACE.most_strands, PACE.most_inward_strands) == (24, 8)
    assert (PACE.strands, PACE.inward_strands) == (min(24, cores), min(8, cores))
    assert (StagingSizes(most_inward_strands=1).strands, StagingSizes(most_inward_strands=1).inward_strands) == (
        min(24, cores),
        1,
    )
    one = StagingSizes(most_strands=1)
    assert (one.strands, one.inward_strands, one.ring_bytes) == (1, 1, 16 << 20)


def test_no_copy_crosses_from_one_pinned_piece_to_the_next() -> None:
    """The driver refuses a copy of which two registrations have a part each."""
    memory = Segment(0, 1000)
    memory.pinning = Pinning(100, 0)
    cut = list(HostSpace(None, memory).cut([MemoryRange(0, 7, 10, 20), MemoryRange(1, 50, 230, 90)]))
    assert cut == [
        MemoryRange(0, 7, 10, 20),
        MemoryRange(1, 50, 10, 90),
        MemoryRange(1, 60, 100, 100),
        MemoryRange(1, 160, 100, 200),
        MemoryRange(1, 260, 20, 300),
    ]
