"""Ready memory: filled in steps, handed out without making pages, given back when needed, found again once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import anyio
import pytest

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.memory.pool import Key, MemoryKeeping, Pool
from hegmd.memory.pool_found import find_pieces
from hegmd.memory.pool_places import PoolDirectory
from hegmd.memory.ready_memory import NodeMemory, ReadyMemory, allowed_bytes, layout, read_node_memory
from hegmd.memory.sizes import MIB, storages_in, whole_size, with_margin
from tests.patience import HANG_S
from tests.unit.descriptor_store import DescriptorStore
from tests.unit.pools import KEY, OTHER, files_under, found_again, keep_in
from tests.wide import quick_first

GIB = 1 << 30
STEP_BYTES = 4 * MIB


class Node:
    def __init__(self) -> None:
        self.memory: NodeMemory = NodeMemory(1000 * MIB, 900 * MIB)

    def __call__(self) -> NodeMemory:
        return self.memory


def ready(wanted_bytes: int, node: Node | None = None) -> ReadyMemory:
    return ReadyMemory(wanted_bytes, node_memory=node or Node(), step_bytes=STEP_BYTES)


def opened(keep: MemoryKeeping, wanted_bytes: int, budget_bytes: int = 64 * MIB, node: Node | None = None) -> Pool:
    return Pool(budget_bytes, keep=keep, ready=ready(wanted_bytes, node), huge_free_bytes=lambda: 0)


async def filled(keep: MemoryKeeping, wanted_bytes: int, budget_bytes: int = 64 * MIB) -> Pool:
    pool = opened(keep, wanted_bytes, budget_bytes)
    while await pool.adjust_ready():
        pass
    return pool


class StuckStore(DescriptorStore):
    """Does not release ready memory."""

    async def drop(self, *names: str) -> None:
        if any("-ready-" in name for name in names):
            raise HegmError(UNAVAILABLE, "the store does not answer", "ask the test")
        await super().drop(*names)


class KilledWhileStoring(DescriptorStore):
    """The daemon ends when a piece is to be stored."""

    async def put(self, name: str, fd: int) -> None:
        if "-ready-" not in name:
            raise KeyboardInterrupt
        await super().put(name, fd)


class FullDirectory(PoolDirectory):
    """Takes no file."""

    def create(self, name: str) -> int:
        raise OSError(errno.ENOSPC, "no space")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[DescriptorStore]:
    made = getattr(request, "param", DescriptorStore)()
    yield made
    for fd in made.kept.values():
        os.close(fd)


@pytest.fixture(params=["named", "nameless"])
def keep(request: pytest.FixtureRequest, tmp_path: Path, store: DescriptorStore) -> MemoryKeeping:
    return keep_in(tmp_path) if request.param == "named" else MemoryKeeping(store=store)


def held_by_node(keep: MemoryKeeping) -> int:
    """Bytes of memory that the node really has for the pool, each file or descriptor once."""
    found = [path.stat() for place in keep.places if place.folder.exists() for path in files_under(place.folder)]
    if isinstance(keep.store, DescriptorStore):
        found += [os.fstat(fd) for fd in keep.store.kept.values()]
    return sum({status.st_ino: status.st_size for status in found}.values())


def names_of(keep: MemoryKeeping) -> list[str]:
    files = [path.name for place in keep.places if place.folder.exists() for path in files_under(place.folder)]
    return files + (list(keep.store.kept) if isinstance(keep.store, DescriptorStore) else [])


# -- filling and handing out -------------------------------------------------------------------------------------------


async def test_it_grows_by_steps_to_the_wanted_size_with_pages_present(keep: MemoryKeeping) -> None:
    pool = opened(keep, 10 * MIB)
    sizes: list[int] = []
    while await pool.adjust_ready():
        sizes.append(pool.ready.size_bytes)
    assert sizes == [4 * MIB, 8 * MIB]
    assert pool.ready.size_bytes == held_by_node(keep) == 10 * MIB
    assert pool.figures() == {"memory": 0, "disk": 0, "budget": 64 * MIB, "ready": 10 * MIB}
    assert pool.free_bytes() == 64 * MIB, "ready memory is free for a job"
    pool.close()


@pytest.mark.parametrize("size_bytes", [3 * MIB, 6 * MIB, 20 * MIB], ids=["smaller", "equal", "larger"])
async def test_a_segment_made_of_it_has_its_own_size_and_every_page(keep: MemoryKeeping, size_bytes: int) -> None:
    pool = await filled(keep, 10 * MIB)
    inode = os.fstat(pool.ready.segments[0].memory.fd).st_ino
    memory = await pool.take(KEY, size_bytes)
    status = os.fstat(memory.fd)
    assert status.st_ino == inode, "pages were created again"
    assert status.st_size == memory.size_bytes == whole_size(size_bytes) == pool.held_bytes == held_by_node(keep)
    assert status.st_blocks * 512 >= memory.size_bytes, "pages are not present"
    assert os.pread(memory.fd, 8, memory.size_bytes - 8) == bytes(8)
    assert pool.ready.size_bytes == 0
    (name,) = names_of(keep)
    assert name.startswith(f"hegm-pool-{KEY.operation}-{KEY.worker}-{size_bytes}.")
    pool.close()


@pytest.mark.parametrize(
    ("step_bytes", "ready_bytes", "size_bytes"),
    [(8 * MIB, 10 * MIB, MIB), (STEP_BYTES, 40 * MIB, 3 * MIB)],
    ids=["below a step", "more than twice as large"],
)
async def test_a_small_piece_does_not_cost_the_pages_of_a_large_one(
    keep: MemoryKeeping, step_bytes: int, ready_bytes: int, size_bytes: int
) -> None:
    """A segment of 32 GiB was cut to 100 MiB for the first small request, and the next large suspend had none."""
    held = ReadyMemory(ready_bytes, node_memory=Node(), step_bytes=step_bytes)
    pool = Pool(64 * MIB, keep=keep, ready=held, huge_free_bytes=lambda: 0)
    while await pool.adjust_ready():
        pass
    await pool.take(KEY, size_bytes)
    assert (held.size_bytes, pool.held_bytes) == (ready_bytes, whole_size(size_bytes))
    pool.close()


async def test_a_nameless_segment_made_of_it_cannot_shrink_or_grow(store: DescriptorStore) -> None:
    keep = MemoryKeeping(store=store)
    pool = await filled(keep, 10 * MIB)
    memory = await pool.take(KEY, 3 * MIB)
    for size_bytes in (MIB, 2 * memory.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size_bytes)
    await pool.release(KEY)
    assert held_by_node(keep) == 0


async def test_memory_of_one_job_is_never_ready_for_another(keep: MemoryKeeping) -> None:
    pool = await filled(keep, 10 * MIB)
    memory = await pool.take(KEY, 5 * MIB)
    kept = os.dup(memory.fd)  # as the job may do
    os.pwrite(kept, b"weights", 0)
    await pool.release(KEY)
    while await pool.adjust_ready():
        pass
    assert os.fstat(kept).st_ino not in {os.fstat(segment.memory.fd).st_ino for segment in pool.ready.segments}
    assert os.pread((await pool.take(OTHER, 5 * MIB)).fd, 7, 0) == bytes(7)
    os.close(kept)
    pool.close()


async def test_every_rank_finds_its_own_segment(tmp_path: Path) -> None:
    pool = opened(keep_in(tmp_path), 32 * MIB)
    pool.ready.job_bytes = lambda: [8 * MIB, 8 * MIB]
    while await pool.adjust_ready():
        pass
    inodes = {os.fstat(segment.memory.fd).st_ino for segment in pool.ready.segments}
    for key in (KEY, OTHER):
        memory = await pool.take(key, 8 * MIB)
        assert os.fstat(memory.fd).st_ino in inodes
    pool.close()


async def test_a_job_that_comes_changes_the_sizes_and_a_smaller_change_does_not(tmp_path: Path) -> None:
    pool = await filled(keep_in(tmp_path), 32 * MIB)
    assert [one.size_bytes for one in pool.ready.segments] == [32 * MIB]
    pool.ready.job_bytes = lambda: [8 * MIB, 8 * MIB]
    while await pool.adjust_ready():
        pass
    assert pool.ready.size_bytes == 32 * MIB
    before = [segment.size_bytes for segment in pool.ready.segments]
    assert before.count(whole_size(8 * MIB)) == 2
    pool.ready.job_bytes = lambda: [9 * MIB, 8 * MIB]
    assert not await pool.adjust_ready()
    assert [one.size_bytes for one in pool.ready.segments] == before
    pool.close()


# -- giving back -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_ready_memory_is_released_for_a_segment_that_needs_the_budget(keep: MemoryKeeping) -> None:
    pool = await filled(keep, 40 * MIB)
    pool.ready.job_bytes = lambda: [16 * MIB]
    while await pool.adjust_ready():
        pass
    await pool.take(KEY, storages_in(50 * MIB))
    assert pool.held_bytes == 50 * MIB
    assert pool.held_bytes + pool.ready.size_bytes == held_by_node(keep) <= 64 * MIB
    with pytest.raises(Refused, match="may hold 64 MiB, holds 50 MiB for others"):
        await pool.take(OTHER, 20 * MIB)
    await pool.take(OTHER, storages_in(14 * MIB))
    assert pool.ready.size_bytes == 0
    assert held_by_node(keep) == 64 * MIB
    assert not await pool.adjust_ready()
    pool.close()


async def test_it_is_freed_when_memory_is_short_and_grows_only_when_memory_is_plentiful(keep: MemoryKeeping) -> None:
    node = Node()
    pool = opened(keep, 40 * MIB, node=node)
    while await pool.adjust_ready():
        pass
    node.memory = NodeMemory(1000 * MIB, 76 * MIB)  # between the bounds: nothing changes
    assert not await pool.adjust_ready()
    assert pool.ready.size_bytes == 40 * MIB
    node.memory = NodeMemory(1000 * MIB, 40 * MIB)
    assert not await pool.adjust_ready(may_grow=False)
    assert pool.ready.size_bytes == held_by_node(keep) == 0
    node.memory = NodeMemory(1000 * MIB, 104 * MIB)
    assert not await pool.adjust_ready()
    assert pool.ready.size_bytes == held_by_node(keep) == 4 * MIB
    node.memory = NodeMemory(None, None)
    assert not await pool.adjust_ready(), "it grew although the node's memory is unknown"
    pool.close()


async def test_nameless_memory_is_ready_where_no_place_takes_it(tmp_path: Path, store: DescriptorStore) -> None:
    pool = opened(MemoryKeeping([FullDirectory(tmp_path / "memory", huge=False)], store), 8 * MIB)
    while await pool.adjust_ready():
        pass
    assert pool.ready.size_bytes == 8 * MIB
    assert len(store.kept) == 1
    pool.close()


async def test_nothing_is_ready_by_default_and_the_task_ends(tmp_path: Path) -> None:
    pool = Pool(64 * MIB, keep=keep_in(tmp_path))
    with anyio.fail_after(HANG_S):
        await pool.keep_ready(lambda: False)
    assert pool.ready.size_bytes == 0
    assert files_under(tmp_path) == []


# -- beyond the daemon's end -------------------------------------------------------------------------------------------


async def test_the_next_daemon_finds_it_and_counts_it_once(keep: MemoryKeeping) -> None:
    (await filled(keep, 12 * MIB)).close()
    pool = await found_again(keep, ready=ready(12 * MIB))
    assert pool.ready.size_bytes == 8 * MIB, "the last step may lack pages"
    assert pool.unclaimed() == {}
    assert pool.held_bytes == 0
    assert await pool.adjust_ready() is False
    assert pool.ready.size_bytes == held_by_node(keep) == 12 * MIB
    assert os.fstat((await pool.take(KEY, 3 * MIB)).fd).st_blocks * 512 >= whole_size(3 * MIB)
    pool.close()


async def test_a_daemon_with_another_setting_frees_the_memory_of_its_predecessor(keep: MemoryKeeping) -> None:
    (await filled(keep, 12 * MIB)).close()
    pool = await found_again(keep, ready=ready(0))
    with anyio.fail_after(HANG_S):
        await pool.keep_ready(lambda: False)
    assert held_by_node(keep) == 0
    assert names_of(keep) == []


@pytest.mark.parametrize("store", [KilledWhileStoring], indirect=True)
async def test_a_daemon_killed_while_it_hands_out_leaves_the_memory_under_no_name(store: DescriptorStore) -> None:
    pool = await filled(MemoryKeeping(store=store), 12 * MIB)
    with pytest.raises(KeyboardInterrupt):
        await pool.take(KEY, 3 * MIB)
    assert store.kept == {}
    pool.close()


@pytest.mark.parametrize("store", [StuckStore], indirect=True)
async def test_a_store_that_does_not_release_keeps_the_segment_and_another_is_created(store: DescriptorStore) -> None:
    pool = await filled(MemoryKeeping(store=store), 12 * MIB)
    memory = await pool.take(KEY, 3 * MIB)
    assert memory.fd != pool.ready.segments[0].memory.fd
    assert pool.ready.size_bytes == 12 * MIB
    assert len(store.kept) == 2
    pool.close()


# -- rules -------------------------------------------------------------------------------------------------------------


def test_the_layout_has_one_segment_for_each_job_that_fits() -> None:
    assert layout(32 * GIB, ()) == [32 * GIB]
    assert layout(0, [GIB]) == []
    one = layout(32 * GIB, [10 * GIB])
    needed = whole_size(with_margin(10 * GIB))
    assert one == [32 * GIB - needed, needed]
    assert layout(32 * GIB, [40 * GIB, 8 * GIB]) == [32 * GIB]
    assert layout(8 * GIB, [MIB] * 50) == [8 * GIB], "small jobs need none"
    many = layout(1 << 40, [GIB] * 50)
    assert len(many) == 16
    assert sum(many) == 1 << 40


def test_unknown_memory_counts_neither_as_plenty_nor_as_none(tmp_path: Path) -> None:
    assert allowed_bytes(5 * GIB, NodeMemory(None, None)) == 5 * GIB
    assert read_node_memory(tmp_path / "none") == NodeMemory(None, None)
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable: 50 kB\n")
    assert read_node_memory(tmp_path / "meminfo") == NodeMemory(100 * 1024, 50 * 1024)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", quick_first(range(6), 1, most=3))
async def test_whatever_is_taken_given_and_killed_every_byte_is_counted_once(seed: int, keep: MemoryKeeping) -> None:
    """Daemons that end at any moment, one after the other, on a node whose memory comes and goes."""
    random, node = Random(seed), Node()
    owned: set[Key] = set()
    pool = opened(keep, 24 * MIB, node=node)
    for number in range(60):
        act = random.choice(("adjust", "adjust", "take", "release", "job", "short", "restart"))
        if act == "adjust":
            await pool.adjust_ready(may_grow=random.random() < 0.8)
        elif act == "take":
            key = Key(str(number), "4711")
            with suppress(Refused):
                await pool.take(key, random.randint(1, 20) * MIB)
                owned.add(key)
        elif act == "release" and owned:
            key = random.choice(sorted(owned, key=str))
            owned.discard(key)
            await pool.release(key)
        elif act == "job":
            sizes = [random.randint(1, 12) * MIB for _ in range(random.randint(0, 3))]
            pool.ready.job_bytes = partial(list, sizes)
        elif act == "short":
            node.memory = NodeMemory(1000 * MIB, random.choice((20, 60, 90, 120, 900)) * MIB)
        elif act == "restart":
            pool.close()
            pool = Pool(64 * MIB, keep=keep, ready=ready(24 * MIB, node), huge_free_bytes=lambda: 0)
            pool.enter((await find_pieces(keep)).pieces, owned.__contains__)
            await pool.adjust_ready(may_grow=False)  # the last step of each segment may lack pages
        assert pool.unclaimed() == {}
        assert set(pool.by_owner()) == owned
        counted_bytes = pool.held_bytes + pool.ready.size_bytes
        assert counted_bytes <= 64 * MIB
        assert held_by_node(keep) == counted_bytes
    pool.close()
