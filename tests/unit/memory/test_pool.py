"""The pool: what it takes is there, named, within the budget, and given back; what an earlier daemon left is found."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.memory.pool import Key, MemoryKeeping, Pool
from hegmd.memory.pool_memory import Memory, make_memory, read_available_bytes, read_huge_free_bytes
from hegmd.memory.pool_names import PieceName
from hegmd.memory.pool_places import PoolDirectory
from hegmd.memory.sizes import HUGE_PAGE_BYTES, MIB, whole_size
from tests.unit.descriptor_store import DescriptorStore
from tests.unit.pools import KEY, OTHER, files_under, found_again, keep_in, opened


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(64 * MIB, huge_free_bytes=lambda: 0)
    yield made
    made.close()


@pytest.fixture
def keep(tmp_path: Path) -> MemoryKeeping:
    return keep_in(tmp_path)


# -- taking and giving -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_an_allocated_segment_has_its_pages_and_a_nameless_one_is_sealed(pool: Pool) -> None:
    memory = await pool.take(KEY, 5 * MIB)
    assert memory.size_bytes == whole_size(5 * MIB)
    assert os.fstat(memory.fd).st_blocks * 512 >= memory.size_bytes, "pages are not present"
    for size_bytes in (MIB, 2 * memory.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size_bytes)
    assert not os.get_inheritable(memory.fd)


@pytest.mark.thorough
async def test_a_large_job_that_has_grown_a_little_keeps_its_memory() -> None:
    with contextlib.closing(Pool(1024 * MIB, huge_free_bytes=lambda: 0)) as pool:
        first = await pool.take(KEY, 256 * MIB)
        assert await pool.take(KEY, 258 * MIB) is first
        assert await pool.take(KEY, 264 * MIB) is not first


@pytest.mark.thorough
async def test_a_job_resumes_where_no_memory_is_left_for_a_margin() -> None:
    with contextlib.closing(Pool(whole_size(256 * MIB), huge_free_bytes=lambda: 0)) as pool:
        assert (await pool.take(KEY, 256 * MIB)).size_bytes == whole_size(256 * MIB)


async def test_over_the_budget_is_refused_with_numbers_and_nothing_changes(pool: Pool) -> None:
    await pool.take(KEY, 40 * MIB)
    with pytest.raises(Refused, match="may hold 64 MiB, holds 46 MiB for others") as refused:
        await pool.take(OTHER, 40 * MIB)
    assert "pool.budget_bytes" in refused.value.hint
    assert refused.value.facts["asked_bytes"] == 40 * MIB
    assert pool.held_for(OTHER) == 0
    assert pool.held_for(KEY) == 40 * MIB
    await pool.release(KEY)
    await pool.take(OTHER, 40 * MIB)


@pytest.mark.thorough
async def test_a_larger_segment_replaces_a_smaller_and_a_smaller_request_reuses_it(
    keep: MemoryKeeping, tmp_path: Path
) -> None:
    pool = opened(keep)
    small = await pool.take(KEY, 4 * MIB)
    assert await pool.take(KEY, 3 * MIB) is small
    assert await pool.take(KEY, 4 * MIB) is small, "it is as large as is wanted"
    large = await pool.take(KEY, 50 * MIB)  # would not fit beside the small one
    assert large is not small
    assert small.fd == -1, "the smaller one was left open"
    assert pool.held_bytes == large.size_bytes
    assert len(files_under(tmp_path)) == 1, "the smaller one's file was left"
    pool.close()


async def test_without_a_budget_half_of_the_available_memory_is_one() -> None:
    pool = Pool(available_bytes=lambda: 100 * MIB, huge_free_bytes=lambda: 0)
    assert pool.budget_bytes() == 50 * MIB
    with pytest.raises(Refused, match="may hold 50 MiB") as refused:
        await pool.take(KEY, 60 * MIB)
    assert "free memory on the node" in refused.value.hint
    unknown = Pool(available_bytes=lambda: None)
    with pytest.raises(Refused):
        await unknown.take(KEY, 1)


async def test_ordinary_pages_replace_huge_pages_that_are_no_longer_free() -> None:
    pool = Pool(64 * MIB, huge_free_bytes=lambda: 1 << 40)
    memory = await pool.take(KEY, 5 * MIB)
    os.pwrite(memory.fd, b"x", 0) if not memory.huge else mmap.mmap(memory.fd, HUGE_PAGE_BYTES).close()
    pool.close()


async def test_bytes_that_are_not_there_are_refused(pool: Pool) -> None:
    with pytest.raises(Refused, match="holds nothing for 4711"):
        pool.memory(KEY)


@pytest.mark.thorough
async def test_memory_is_freed_before_a_request_is_refused(keep: MemoryKeeping) -> None:
    pool = opened(keep)
    await pool.take(KEY, 40 * MIB)
    calls: list[int] = []

    async def free_memory(missing_bytes: int) -> None:
        calls.append(missing_bytes)
        await pool.release(KEY)

    pool.free_memory = free_memory
    await pool.take(OTHER, 40 * MIB)
    assert calls == [2 * whole_size(40 * MIB) - 64 * MIB]
    pool.close()


# -- beyond the daemon's end -------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_a_piece_has_a_private_file_that_goes_with_it(keep: MemoryKeeping, tmp_path: Path) -> None:
    pool = opened(keep)
    memory = await pool.take(KEY, 3 * MIB)
    (file,) = files_under(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert os.fstat(memory.fd).st_ino == file.stat().st_ino
    await pool.release(KEY)
    assert not file.parent.exists(), "something of it is left"
    await pool.release(KEY)  # twice is fine


async def test_memory_is_released_if_it_cannot_replace_the_former(keep: MemoryKeeping, tmp_path: Path) -> None:
    pool = opened(keep)
    await pool.take(KEY, 3 * MIB)
    (before,) = files_under(tmp_path)
    before.unlink()
    before.mkdir()
    with pytest.raises(HegmError, match="cannot be removed"):
        await pool.take(KEY, 5 * MIB)
    assert files_under(tmp_path) == []
    assert pool.held_bytes == whole_size(3 * MIB)
    pool.close()


async def test_a_suspended_jobs_bytes_are_found_by_the_next_daemon(keep: MemoryKeeping) -> None:
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    before.close()
    after = await found_again(keep, KEY)
    assert os.pread(after.memory(KEY).fd, 7, 0) == b"weights"
    assert after.held_for(KEY) == 3 * MIB
    await after.release(KEY)


async def test_a_daemon_that_holds_nothing_leaves_no_folder(keep: MemoryKeeping, tmp_path: Path) -> None:
    pool = opened(keep)
    await pool.take(KEY, MIB)
    await pool.release(KEY)
    for place in keep.places:
        place.folder.mkdir(mode=0o700, exist_ok=True)
    pool.close()
    assert not any(place.folder.exists() for place in keep.places)


async def test_without_a_directory_a_store_holds_it_and_drops_it_on_release() -> None:
    store = DescriptorStore()
    keep = MemoryKeeping(store=store)
    before = opened(keep)
    memory = await before.take(Key("7", "4711-9"), 3 * MIB)
    os.pwrite(memory.fd, b"weights", 0)
    before.close()
    after = await found_again(keep, Key("7", "4711-9"))
    assert os.pread(after.memory(Key("7", "4711-9")).fd, 7, 0) == b"weights"
    await after.release(Key("7", "4711-9"))
    assert not store.kept, "given back here and kept there"


async def test_claimed_bytes_without_a_name_are_in_the_store_under_their_new_owner() -> None:
    store = DescriptorStore()
    keep = MemoryKeeping(store=store)
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    before.close()
    after = await found_again(keep)
    (name,) = after.unclaimed()
    assert await after.beginning(name, 7) == b"weights"
    await after.claim(name, OTHER)
    after.close()
    again = await found_again(keep, OTHER)
    assert os.pread(again.memory(OTHER).fd, 7, 0) == b"weights"
    assert again.unclaimed() == {}
    await again.release(OTHER)


def test_memory_that_cannot_be_filled_leaves_no_descriptor_and_no_file(tmp_path: Path) -> None:
    """The test fails by what it leaves behind."""

    def fill(memory: Memory) -> None:
        raise ValueError(memory.size_bytes)

    name = PieceName(KEY, MIB, "00c0ffee")
    with pytest.raises(ValueError, match=str(MIB)):
        make_memory(name, MIB, places=[PoolDirectory(tmp_path / "memory", huge=False)], huge=False, fill=fill)
    assert files_under(tmp_path) == []


def test_memory_that_was_ready_is_filled_when_it_is_handed_over() -> None:
    filled: list[Memory] = []
    memory = Memory(os.memfd_create("ready", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), 0, huge=False)
    memory.hand_over("ready", PieceName(KEY, MIB, "00c0ffee"), whole_size(MIB), filled.append)
    assert filled == [memory]
    memory.close()


async def test_a_store_that_fails_costs_the_survival_and_not_the_move() -> None:
    store = DescriptorStore()
    store.fails = True
    pool = opened(MemoryKeeping(store=store))
    assert (await pool.take(KEY, MIB)).fd >= 0
    pool.close()


async def test_a_full_place_is_replaced_by_nameless_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = DescriptorStore()
    pool = opened(MemoryKeeping([PoolDirectory(tmp_path / "file" / "under", huge=False)], store))
    memory = await pool.take(KEY, MIB)
    assert memory.place is None
    assert len(store.kept) == 1
    await pool.release(KEY)


async def test_orphaned_segments_are_kept_apart_and_their_number_can_be_reused(keep: MemoryKeeping) -> None:
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    before.close()
    after = await found_again(keep)
    assert after.held_for(KEY) == 0
    (name,) = after.unclaimed()
    assert after.held_bytes == whole_size(3 * MIB), "it takes memory, whoever owns it"
    os.pwrite((await after.take(KEY, 3 * MIB)).fd, b"another", 0)  # an operation of the same number
    await after.claim(name, OTHER)
    assert os.pread(after.memory(OTHER).fd, 7, 0) == b"weights"
    after.close()
    again = await found_again(keep, KEY, OTHER)
    assert os.pread(again.memory(OTHER).fd, 7, 0) == b"weights"
    assert os.pread(again.memory(KEY).fd, 7, 0) == b"another"
    await again.release(KEY)
    await again.release(OTHER)


async def test_a_orphan_piece_goes_only_by_its_name(keep: MemoryKeeping, tmp_path: Path) -> None:
    before = opened(keep)
    await before.take(KEY, 3 * MIB)
    before.close()
    after = await found_again(keep)
    await after.release(KEY)
    (name,) = after.unclaimed()
    with pytest.raises(HegmError, match="no orphaned segment"):
        await after.drop_unclaimed("hegm-pool-7-4711-1")
    assert await after.drop_unclaimed(name) == whole_size(3 * MIB)
    assert files_under(tmp_path) == []
    assert after.held_bytes == 0


@pytest.mark.parametrize("first", ["claim", "drop"])
async def test_a_segment_claimed_meanwhile_was_deleted_although_it_had_a_new_owner(
    keep: MemoryKeeping, first: str
) -> None:
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    before.close()
    after = await found_again(keep)
    ((name, piece),) = after.unclaimed().items()
    refused: dict[str, str] = {}

    async def do(what: str) -> None:
        try:
            await (after.claim(name, OTHER) if what == "claim" else after.drop_unclaimed(name))
        except HegmError as error:
            refused[what] = error.code.name

    async with anyio.create_task_group() as tasks, piece.lock:  # both have seen it before either has the lock
        for what in sorted(("claim", "drop"), key=lambda one: one != first):
            tasks.start_soon(do, what)
            await anyio.wait_all_tasks_blocked()
    assert refused == {"drop" if first == "claim" else "claim": "not-found"}
    if first == "claim":
        assert os.pread(after.memory(OTHER).fd, 7, 0) == b"weights"
    else:
        assert (after.held_for(OTHER), after.held_bytes) == (0, 0)
    await after.release(OTHER)


async def test_two_segments_of_one_owner_are_both_kept(keep: MemoryKeeping) -> None:
    first, second = opened(keep), opened(keep)
    await first.take(KEY, 3 * MIB)
    await second.take(KEY, 9 * MIB)
    first.close()
    second.close()
    after = await found_again(keep, KEY)
    assert after.held_for(KEY) == 9 * MIB
    assert [piece.usable_bytes for piece in after.unclaimed().values()] == [3 * MIB]
    after.close()


# -- what the kernel says ----------------------------------------------------------------------------------------------


def test_the_kernels_figures_are_read_and_never_guessed(tmp_path: Path) -> None:
    meminfo, free = tmp_path / "meminfo", tmp_path / "free"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   1024 kB\n")
    free.write_text("3\n")
    assert read_available_bytes(meminfo) == MIB
    assert read_huge_free_bytes(free) == 3 * HUGE_PAGE_BYTES
    assert read_available_bytes(tmp_path / "none") is None
    assert read_huge_free_bytes(tmp_path / "none") == 0
