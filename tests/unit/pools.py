"""Pools in ordinary directories, for tests that read their files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hegmd.memory.pool import Key, MemoryKeeping, Pool
from hegmd.memory.pool_checksums import SumFolder
from hegmd.memory.pool_found import find_pieces
from hegmd.memory.pool_places import PoolDirectory
from hegmd.memory.ready_memory import ReadyMemory
from hegmd.memory.sizes import MIB
from hegmd.memory.spill_file import SpillFolder
from tests.unit.descriptor_store import DescriptorStore

KEY = Key("7", "4711")
OTHER = Key("8", "4712")


def keep_in(folder: Path, store: DescriptorStore | None = None) -> MemoryKeeping:
    """Places in an ordinary directory: the pool asks nothing of them that a disk does not have."""
    return MemoryKeeping(
        [PoolDirectory(folder / "memory", huge=False)],
        store,
        SpillFolder(folder / "spill", spare_bytes=0),
        SumFolder(folder / "sums"),
    )


def opened(keep: MemoryKeeping, ready: ReadyMemory | None = None, clock: Callable[[], float] = time.monotonic) -> Pool:
    return Pool(64 * MIB, keep=keep, ready=ready, huge_free_bytes=lambda: 0, clock=clock)


async def found_again(keep: MemoryKeeping, *owned: Key, ready: ReadyMemory | None = None) -> Pool:
    pool = opened(keep, ready)
    pool.enter((await find_pieces(keep)).pieces, lambda key: key in owned)
    return pool


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
