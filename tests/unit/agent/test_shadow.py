"""How much of a GPU's free memory a shadow may have."""

from __future__ import annotations

import pytest

from hegmd.agent.copying import PAGE_BYTES, PIECE_BYTES
from hegmd.agent.state.storage.shadow import fitting_bytes

GIB = 1 << 30
PART_BYTES = PIECE_BYTES // PAGE_BYTES * (PAGE_BYTES + 8)


class Gpu:
    """The one question that is asked of the driver."""

    def __init__(self, free_gib: float) -> None:
        self._free_bytes = int(free_gib * GIB)

    def memory(self) -> tuple[int, int]:
        return self._free_bytes, 100 * GIB


@pytest.mark.parametrize(
    ("free_gib", "taken_gib", "room_gib"),
    [(40, 0, 30), (35, 0, 30), (34, 0, 17), (20, 14, 17), (8, 0, 3), (5, 0, 0), (2, 0, 0)],
)
def test_a_job_that_grows_keeps_half_of_the_memory_that_is_free(
    free_gib: float, taken_gib: float, room_gib: float
) -> None:
    """A shadow of a part took all but a twentieth: a training whose next batch was longer had no memory for it."""
    found = fitting_bytes(Gpu(free_gib), 30 * GIB, int(taken_gib * GIB))
    assert found == (30 * GIB if room_gib == 30 else int(room_gib * GIB) // PART_BYTES * PART_BYTES)
