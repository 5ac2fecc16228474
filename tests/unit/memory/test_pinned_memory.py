"""Pool memory that is pinned: which memory may be, and what is unpinned before it changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from hegmd.gpu_helper.ready_helper import Pinning
from hegmd.memory.pool import Key, Pool
from hegmd.memory.pool_places import PoolDirectory
from hegmd.memory.ready_memory import NodeMemory, ReadyMemory
from hegmd.memory.sizes import MIB
from tests.patience import HANG_S
from tests.unit.pools import KEY, files_under, keep_in

STEP_BYTES = 4 * MIB


class Pins(Pinning):
    """Notes what is to be unpinned, with the size of the file at that moment."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.has_removed = False

    def unpin_later(self, fd: int) -> None:
        self.has_removed = True
        self.seen.append(("later", os.fstat(fd).st_size))

    async def unpin(self, fd: int | None = None) -> None:
        if fd is not None:
            self.seen.append(("now", os.fstat(fd).st_size))
        elif self.has_removed:
            self.seen.append(("removed", 0))
        self.has_removed = False


async def test_memory_is_unpinned_before_it_is_cut_or_removed_and_pinned_only_once_it_has_its_size(
    tmp_path: Path,
) -> None:
    """The copy engines would use the pages that a file had before it was cut and grew again."""
    keep = keep_in(tmp_path)
    node = NodeMemory(1000 * MIB, 900 * MIB)
    ready = ReadyMemory(3 * STEP_BYTES, node_memory=lambda: node, step_bytes=STEP_BYTES)
    pool = Pool(64 * MIB, keep=keep, ready=ready)
    pool.ready.pinning = pins = Pins()

    async def listed(*at_rest: Key) -> list[int]:
        sizes: list[int] = []

        async def use(memory: Sequence[tuple[int, int]]) -> bool:
            assert all(os.fstat(fd).st_size == size_bytes for fd, size_bytes in memory)
            sizes.extend(size_bytes for _, size_bytes in memory)
            return False

        await pool.with_memory_at_rest(at_rest.__contains__, use)
        return sizes

    assert await pool.adjust_ready()
    assert await listed() == []
    while await pool.adjust_ready():
        pass
    assert await listed() == [3 * STEP_BYTES]
    memory = await pool.take(KEY, 2 * STEP_BYTES)
    assert (await listed(), await listed(KEY)) == ([], [memory.size_bytes])
    assert pins.seen == []
    await pool.release(KEY)
    assert pins.seen == [("later", memory.size_bytes)]
    while await pool.adjust_ready():
        assert pins.seen[1:] == [("removed", 0)], "memory was made before the removed memory was free"
    await pool.ready.give_back(pool.ready.size_bytes, keep)
    assert pins.seen[2:] == [("now", 3 * STEP_BYTES)]
    await pool.take(KEY, MIB)
    await pool.release(KEY)
    await pool.take(KEY, MIB)
    assert [what for what, _ in pins.seen[3:]] == ["later", "removed"]
    pool.close()


async def test_ready_memory_that_could_not_be_used_stayed_pinned_while_other_memory_was_made(tmp_path: Path) -> None:
    """A suspend was refused for want of the pages that the memory still had."""
    keep = keep_in(tmp_path)
    node = NodeMemory(1000 * MIB, 900 * MIB)
    ready = ReadyMemory(2 * STEP_BYTES, node_memory=lambda: node, step_bytes=STEP_BYTES)
    pool = Pool(64 * MIB, keep=keep, ready=ready)
    pool.ready.pinning = pins = Pins()
    while await pool.adjust_ready():
        pass
    for path in files_under(tmp_path / "memory"):
        path.unlink()
    await pool.take(KEY, 2 * STEP_BYTES)
    assert pins.seen == [("later", 2 * STEP_BYTES), ("removed", 0)]
    pool.close()


class SlowDirectory(PoolDirectory):
    """Removes a file, in the thread of the caller, only once it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, huge=False)
        self.removing, self.may_remove = threading.Event(), threading.Event()

    def remove(self, name: str) -> None:
        self.removing.set()
        self.may_remove.wait(HANG_S)
        super().remove(name)


async def test_memory_that_a_thread_frees_is_not_pinned(tmp_path: Path) -> None:
    """Its descriptor may be closed by then, and its number be that of another file."""
    place = SlowDirectory(tmp_path / "slow")
    pool = Pool(64 * MIB, keep=keep_in(tmp_path)._replace(places=[place]))
    await pool.adjust_ready()
    await pool.take(KEY, MIB)
    seen: list[int] = []

    async def use(memory: Sequence[tuple[int, int]]) -> bool:
        seen.append(len(memory))
        return False

    await pool.with_memory_at_rest(lambda _: True, use)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.release, KEY)
        await anyio.to_thread.run_sync(place.removing.wait, HANG_S)
        await pool.with_memory_at_rest(lambda _: True, use)
        place.may_remove.set()
    assert seen == [1, 0]
    pool.close()
