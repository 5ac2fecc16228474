"""The state of a restart in the pool: its size before the boundary may be larger or smaller than at the boundary.

The restart's `state` carrier reserves by the first size, and the agent writes by the second one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.agent.state.storage import state_file
from hegmd.memory.sizes import MIB
from tests.unit.pools import KEY, found_again, keep_in, opened
from tests.wide import quick_first

SIZES = [100, MIB, 2 * MIB - 4096, 3 * MIB, 5 * MIB]


@pytest.mark.thorough
@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("reserved_bytes", quick_first(SIZES, 1))
async def test_a_state_is_read_whatever_size_was_reserved_for_it(
    tmp_path: Path, reserved_bytes: int, spilled: bool
) -> None:
    """Issue 14, row 2: an image was written with the size that was reserved and read with the other one."""
    keep = keep_in(tmp_path)
    for number, size_bytes in enumerate(SIZES):
        state = {"weights": bytes([number]) * size_bytes}
        pool = opened(keep)
        await pool.take(KEY, reserved_bytes)
        memory = await pool.to_fill(KEY)
        state_file.write(memory.fd, state)
        assert state_file.read(memory.fd) == state
        if spilled:
            await pool.spill(KEY)
            await pool.free_memory_of(KEY)
        pool.close()
        after = await found_again(keep, KEY)
        await after.fetch(KEY)
        assert state_file.read(after.memory(KEY).fd) == state, (reserved_bytes, size_bytes)
        await after.release(KEY)
        assert after.held_bytes == 0
        after.close()
