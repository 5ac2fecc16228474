"""Turns of equals: what is done before a turn comes."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

from hegmd.protocol import sharing as told
from hegmd.sharing import model
from hegmd.sharing.service import PREPARE_AHEAD_S
from tests.unit.sharing.shared_node import ADMIN, MIB, sharing_on

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


async def test_bytes_are_compared_with_their_checksums_before_the_turn_comes(
    tmp_path: Path, process: Child, other: Child
) -> None:
    """A job of 32 GiB waited for that for two seconds while no job trained."""
    policy = model.Rules(slices=True, min_quantum_s=PREPARE_AHEAD_S - 1, quantum_per_switch=0.0, settle_s=0.0)
    async with sharing_on(tmp_path, policy=policy) as shared:
        await shared.node.attend(process.pid, BYTES)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.until_states(j1="suspended")
        (piece,) = shared.node.moving.pool.by_owner().values()
        await shared.until(lambda: piece.sums is not None)
        assert piece.compared_at == -math.inf
        await shared.node.attend(other.pid, b"2" * len(BYTES), token="b" * 32)
        await shared.requests.release(told.Release(lease=lease.id), ADMIN)
        await shared.until_states(j1="suspended", j2="running")
        await shared.until(lambda: piece.compared_at > 0)
