"""How much of the ring is used each way."""

from __future__ import annotations

import os

from hegmd.gpu_helper.staging import PACE, StagingSizes


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
