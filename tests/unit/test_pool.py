"""The pool: what it takes is there, named, within the budget, and given back; what an earlier daemon left is found.

Longer than 400 lines because it is a flat list of checks of one class.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.pieces import HUGE_PAGE_BYTES, MIB, whole_size
from hegmd.pool import Keep, Key, Pool
from hegmd.pool_found import find_pieces
from hegmd.pool_memory import read_available_bytes, read_huge_free_bytes
from hegmd.pool_places import Place
from hegmd.spill_file import SpillFolder
from tests.unit.descriptor_store import DescriptorStore

KEY = Key("7", "4711")
OTHER = Key("8", "4712")


def keep_in(folder: Path, store: DescriptorStore | None = None) -> Keep:
    """Places in an ordinary directory: the pool asks nothing of them that a disk does not have."""
    return Keep([Place(folder / "memory", huge=False)], store, SpillFolder(folder / "spill", spare_bytes=0))


def opened(keep: Keep) -> Pool:
    return Pool(64 * MIB, keep=keep, huge_free_bytes=lambda: 0)


async def found_again(keep: Keep, *owned: Key) -> Pool:
    pool = opened(keep)
    pool.enter((await find_pieces(keep)).pieces, lambda key: key in owned)
    return pool


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(64 * MIB, huge_free_bytes=lambda: 0)
    yield made
    made.close()


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    return keep_in(tmp_path)


# -- taking and giving -------------------------------------------------------------------------------------------------


async def test_what_is_taken_is_there_and_without_a_name_cannot_be_cut_or_grown(pool: Pool) -> None:
    memory = await pool.take(KEY, 5 * MIB)
    assert memory.size_bytes == whole_size(5 * MIB)
    assert os.fstat(memory.fd).st_blocks * 512 >= memory.size_bytes, "pages are not present"
    for size_bytes in (MIB, 2 * memory.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size_bytes)
    assert not os.get_inheritable(memory.fd)


async def test_over_the_budget_is_refused_with_numbers_and_nothing_changes(pool: Pool) -> None:
    await pool.take(KEY, 40 * MIB)
    with pytest.raises(Refused, match="may hold 64 MiB, holds 46 MiB for others") as refused:
        await pool.take(OTHER, 40 * MIB)
    assert "pool.budget_bytes" in refused.value.hint
    assert refused.value.facts["asked_bytes"] == 40 * MIB
    assert pool.held_for(OTHER) == 0
    assert pool.held_for(KEY) == 40 * MIB
    await pool.give(KEY)
    await pool.take(OTHER, 40 * MIB)


async def test_a_larger_piece_takes_the_place_of_a_smaller_and_a_smaller_is_there_already(
    keep: Keep, tmp_path: Path
) -> None:
    pool = opened(keep)
    small = await pool.take(KEY, 4 * MIB)
    assert await pool.take(KEY, 3 * MIB) is small
    large = await pool.take(KEY, 50 * MIB)  # would not fit beside the small one
    assert large is not small
    assert small.fd == -1, "the smaller one was left open"
    assert pool.held_bytes == large.size_bytes
    assert len(files_under(tmp_path)) == 1, "the smaller one's file was left"
    pool.close()


async def test_without_a_budget_half_of_what_is_available_is_one() -> None:
    pool = Pool(available_bytes=lambda: 100 * MIB, huge_free_bytes=lambda: 0)
    assert pool.budget_bytes() == 50 * MIB
    with pytest.raises(Refused, match="may hold 50 MiB") as refused:
        await pool.take(KEY, 60 * MIB)
    assert "free memory on the node" in refused.value.hint
    unknown = Pool(available_bytes=lambda: None)
    with pytest.raises(Refused):
        await unknown.take(KEY, 1)


async def test_huge_pages_that_are_gone_after_all_are_done_without() -> None:
    pool = Pool(64 * MIB, huge_free_bytes=lambda: 1 << 40)
    memory = await pool.take(KEY, 5 * MIB)
    os.pwrite(memory.fd, b"x", 0) if not memory.huge else mmap.mmap(memory.fd, HUGE_PAGE_BYTES).close()
    pool.close()


async def test_bytes_that_are_not_there_are_refused(pool: Pool) -> None:
    with pytest.raises(Refused, match="holds nothing for 4711"):
        pool.memory(KEY)


async def test_room_is_made_before_somebody_is_refused(keep: Keep) -> None:
    pool = opened(keep)
    await pool.take(KEY, 40 * MIB)
    asked: list[int] = []

    async def make_room(missing_bytes: int) -> None:
        asked.append(missing_bytes)
        await pool.give(KEY)

    pool.make_room = make_room
    await pool.take(OTHER, 40 * MIB)
    assert asked == [2 * whole_size(40 * MIB) - 64 * MIB]
    pool.close()


# -- beyond the daemon's end -------------------------------------------------------------------------------------------


async def test_a_piece_has_a_private_file_that_goes_with_it(keep: Keep, tmp_path: Path) -> None:
    pool = opened(keep)
    memory = await pool.take(KEY, 3 * MIB)
    (file,) = files_under(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert os.fstat(memory.fd).st_ino == file.stat().st_ino
    await pool.give(KEY)
    assert not file.parent.exists(), "something of it is left"
    await pool.give(KEY)  # twice is fine


async def test_a_suspended_jobs_bytes_are_found_by_the_next_daemon(keep: Keep) -> None:
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    before.close()
    after = await found_again(keep, KEY)
    assert os.pread(after.memory(KEY).fd, 7, 0) == b"weights"
    assert after.held_for(KEY) == 3 * MIB
    await after.give(KEY)


async def test_without_a_place_a_store_holds_it_and_is_told_when_it_is_given_back() -> None:
    store = DescriptorStore()
    keep = Keep(store=store)
    before = opened(keep)
    memory = await before.take(Key("7", "4711-9"), 3 * MIB)
    os.pwrite(memory.fd, b"weights", 0)
    before.close()
    after = await found_again(keep, Key("7", "4711-9"))
    assert os.pread(after.memory(Key("7", "4711-9")).fd, 7, 0) == b"weights"
    await after.give(Key("7", "4711-9"))
    assert not store.kept, "given back here and kept there"


async def test_a_store_that_fails_costs_the_survival_and_not_the_move() -> None:
    store = DescriptorStore()
    store.fails = True
    pool = opened(Keep(store=store))
    assert (await pool.take(KEY, MIB)).fd >= 0
    pool.close()


async def test_a_place_that_is_full_is_passed_over_for_nameless_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = DescriptorStore()
    pool = opened(Keep([Place(tmp_path / "file" / "under", huge=False)], store))
    memory = await pool.take(KEY, MIB)
    assert memory.place is None
    assert len(store.kept) == 1
    await pool.give(KEY)


async def test_what_no_operation_owns_is_kept_apart_and_its_number_can_be_used_again(keep: Keep) -> None:
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
    await again.give(KEY)
    await again.give(OTHER)


async def test_a_stray_piece_goes_only_by_its_name(keep: Keep, tmp_path: Path) -> None:
    before = opened(keep)
    await before.take(KEY, 3 * MIB)
    before.close()
    after = await found_again(keep)
    await after.give(KEY)
    (name,) = after.unclaimed()
    with pytest.raises(HegmError, match="no stray piece"):
        await after.drop_unclaimed("hegm-pool-7-4711-1")
    assert await after.drop_unclaimed(name) == whole_size(3 * MIB)
    assert files_under(tmp_path) == []
    assert after.held_bytes == 0


@pytest.mark.parametrize("first", ["claim", "drop"])
async def test_a_piece_that_was_claimed_meanwhile_was_deleted_under_its_new_owner(keep: Keep, first: str) -> None:
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
    await after.give(OTHER)


async def test_of_two_pieces_of_one_owner_neither_is_lost(keep: Keep) -> None:
    first, second = opened(keep), opened(keep)
    await first.take(KEY, 3 * MIB)
    await second.take(KEY, 9 * MIB)
    first.close()
    second.close()
    after = await found_again(keep, KEY)
    assert after.held_for(KEY) == 9 * MIB
    assert [piece.usable_bytes for piece in after.unclaimed().values()] == [3 * MIB]
    after.close()


# -- on disk -----------------------------------------------------------------------------------------------------------


async def test_spilled_bytes_take_no_memory_and_come_back_checked(keep: Keep, tmp_path: Path) -> None:
    pool = opened(keep)
    size_bytes = whole_size(10 * MIB)
    data = os.urandom(size_bytes)
    os.pwrite((await pool.take(KEY, 10 * MIB)).fd, data, 0)
    seen: list[int] = []
    await pool.spill(KEY, seen.append)
    await pool.let_go(KEY)
    assert (pool.held_bytes, pool.spilled_bytes, pool.held_for(KEY)) == (0, size_bytes, 10 * MIB)
    with pytest.raises(Refused, match="on disk"):
        pool.memory(KEY)
    await pool.fetch(KEY)
    assert os.pread(pool.memory(KEY).fd, size_bytes, 0) == data
    await pool.give(KEY)
    assert files_under(tmp_path) == []


async def test_spilled_bytes_are_found_by_the_next_daemon(keep: Keep) -> None:
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    await before.spill(KEY)
    await before.let_go(KEY)
    before.close()
    after = await found_again(keep, KEY)
    assert after.held_bytes == 0
    await after.fetch(KEY)
    assert os.pread(after.memory(KEY).fd, 7, 0) == b"weights"
    await after.give(KEY)


async def test_both_copies_are_one_piece_for_the_next_daemon(keep: Keep, tmp_path: Path) -> None:
    before = opened(keep)
    await before.take(KEY, 3 * MIB)
    await before.spill(KEY)
    before.close()
    after = await found_again(keep, KEY)
    assert not after.unclaimed()
    await after.give(KEY)
    assert files_under(tmp_path) == []


async def test_memory_that_is_to_be_written_has_no_old_copy_on_disk(keep: Keep) -> None:
    """After a resume that was turned back, other bytes go to the same memory: the file would be of another state."""
    pool = opened(keep)
    os.pwrite((await pool.take(KEY, 3 * MIB)).fd, b"old", 0)
    await pool.spill(KEY)
    memory = await pool.to_fill(KEY)
    os.pwrite(memory.fd, b"new", 0)
    assert pool.spilled_bytes == 0
    await pool.spill(KEY)
    await pool.let_go(KEY)
    await pool.fetch(KEY)
    assert os.pread(pool.memory(KEY).fd, 3, 0) == b"new"
    await pool.give(KEY)


async def test_a_file_of_a_copy_that_was_given_up_counted_as_the_copy_after_a_restart(
    keep: Keep, tmp_path: Path
) -> None:
    """A thread that is left behind may name its file late; it was only taken away where a copy was known of."""
    assert keep.spill is not None
    before = opened(keep)
    memory = await before.take(KEY, 3 * MIB)
    os.pwrite(memory.fd, b"old", 0)
    keep.spill.folder.mkdir(mode=0o700)
    keep.spill.folder.chmod(0o777)
    with pytest.raises(Refused, match="written by others"):
        await before.spill(KEY)
    keep.spill.folder.chmod(0o700)
    name = str(before.by_owner()[KEY].name)
    keep.spill.write(name, memory.fd, memory.size_bytes, lambda: False, lambda _: None)  # as by that thread
    os.pwrite((await before.to_fill(KEY)).fd, b"new", 0)
    assert not keep.spill.path(name).exists(), "the bytes of before are the copy on disk"
    before.close()
    after = await found_again(keep, KEY)
    assert after.spilled_bytes == 0
    await after.give(KEY)
    assert files_under(tmp_path) == []


async def test_without_a_descriptor_to_spare_a_spill_is_an_error_that_is_told(keep: Keep) -> None:
    """EMFILE left the loop as a group of exceptions, and ended all tasks of the daemon."""
    pool = opened(keep)
    os.pwrite((await pool.take(KEY, 3 * MIB)).fd, b"weights", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await pool.spill(KEY)  # once, so that every thread and loop that is needed is there
    await pool.to_fill(KEY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(HegmError):
            await pool.spill(KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await pool.spill(KEY)
    await pool.give(KEY)


async def test_a_disk_that_is_full_leaves_everything_as_it_was(tmp_path: Path) -> None:
    keep = Keep([Place(tmp_path / "memory", huge=False)], None, SpillFolder(tmp_path / "spill", spare_bytes=1 << 60))
    pool = opened(keep)
    os.pwrite((await pool.take(KEY, 3 * MIB)).fd, b"weights", 0)
    with pytest.raises(Refused, match="MiB free") as refused:
        await pool.spill(KEY)
    assert "pool.spill_dir" in refused.value.hint
    await pool.let_go(KEY)
    assert os.pread(pool.memory(KEY).fd, 7, 0) == b"weights", "given back without a copy"
    assert len(files_under(tmp_path)) == 1
    await pool.give(KEY)


async def test_a_damaged_file_is_told_of_and_stays(keep: Keep, tmp_path: Path) -> None:
    pool = opened(keep)
    await pool.take(KEY, 3 * MIB)
    await pool.spill(KEY)
    await pool.let_go(KEY)
    (file,) = files_under(tmp_path)
    with file.open("r+b") as stream:
        stream.seek(1 << 20)
        stream.write(b"!")
    with pytest.raises(HegmError, match="does not fit its checksum"):
        await pool.fetch(KEY)
    assert files_under(tmp_path) == [file]
    assert pool.held_bytes == 0, "half of it stayed in memory"
    await pool.give(KEY)


async def test_no_room_in_memory_leaves_spilled_bytes_on_disk(keep: Keep) -> None:
    pool = opened(keep)
    await pool.take(KEY, 30 * MIB)
    await pool.spill(KEY)
    await pool.let_go(KEY)
    await pool.take(OTHER, 40 * MIB)
    with pytest.raises(Refused, match="may hold 64 MiB"):
        await pool.fetch(KEY)
    await pool.give(OTHER)
    await pool.fetch(KEY)
    await pool.give(KEY)


async def test_giving_ends_a_spill_that_is_under_way_and_leaves_no_file(keep: Keep, tmp_path: Path) -> None:
    pool = opened(keep)
    await pool.take(KEY, 40 * MIB)
    outcomes: list[str] = []

    async def spill() -> None:
        try:
            await pool.spill(KEY)
            outcomes.append("whole")
        except HegmError as error:
            outcomes.append(error.code.name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(spill)
        await anyio.wait_all_tasks_blocked()
        await pool.give(KEY)
    assert outcomes in (["cancelled"], ["whole"])
    assert files_under(tmp_path) == []


# -- what the kernel says ----------------------------------------------------------------------------------------------


def test_the_kernels_figures_are_read_and_what_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    meminfo, free = tmp_path / "meminfo", tmp_path / "free"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   1024 kB\n")
    free.write_text("3\n")
    assert read_available_bytes(meminfo) == MIB
    assert read_huge_free_bytes(free) == 3 * HUGE_PAGE_BYTES
    assert read_available_bytes(tmp_path / "none") is None
    assert read_huge_free_bytes(tmp_path / "none") == 0
