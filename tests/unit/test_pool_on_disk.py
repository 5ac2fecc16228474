"""The pool's bytes on disk: they take no memory, come back checked, and are found by the next daemon."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.memory.pool import MemoryKeeping
from hegmd.memory.pool_places import PoolDirectory
from hegmd.memory.sizes import MIB, whole_size
from hegmd.memory.spill_file import SpillFolder
from tests.unit.pools import KEY, OTHER, files_under, found_again, keep_in, opened


@pytest.fixture
def keep(tmp_path: Path) -> MemoryKeeping:
    return keep_in(tmp_path)


@pytest.mark.thorough
async def test_spilled_bytes_take_no_memory_and_are_checked_on_return(keep: MemoryKeeping, tmp_path: Path) -> None:
    pool = opened(keep)
    size_bytes = whole_size(10 * MIB)
    data = os.urandom(size_bytes)
    os.pwrite((await pool.take(KEY, 10 * MIB)).fd, data, 0)
    observed: list[int] = []
    await pool.spill(KEY, observed.append)
    await pool.free_memory_of(KEY)
    assert (pool.held_bytes, pool.spilled_bytes, pool.held_for(KEY)) == (0, size_bytes, 10 * MIB)
    with pytest.raises(Refused, match="on disk"):
        pool.memory(KEY)
    await pool.fetch(KEY)
    assert os.pread(pool.memory(KEY).fd, size_bytes, 0) == data
    await pool.release(KEY)
    assert files_under(tmp_path) == []


@pytest.mark.thorough
async def test_spilled_bytes_are_found_by_the_next_daemon(keep: MemoryKeeping) -> None:
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    await before.spill(KEY)
    await before.free_memory_of(KEY)
    before.close()
    after = await found_again(keep, KEY)
    assert after.held_bytes == 0
    await after.fetch(KEY)
    assert os.pread(after.memory(KEY).fd, 7, 0) == b"weights"
    await after.release(KEY)


@pytest.mark.thorough
async def test_the_start_of_orphaned_bytes_is_read_from_disk(keep: MemoryKeeping) -> None:
    before = opened(keep)
    os.pwrite((await before.take(KEY, 3 * MIB)).fd, b"weights", 0)
    await before.spill(KEY)
    await before.free_memory_of(KEY)
    before.close()
    after = await found_again(keep)
    (name,) = after.unclaimed()
    assert await after.beginning(name, 7) == b"weights"
    await after.claim(name, OTHER)
    await after.fetch(OTHER)
    assert os.pread(after.memory(OTHER).fd, 7, 0) == b"weights"
    await after.release(OTHER)


async def test_both_copies_are_one_piece_for_the_next_daemon(keep: MemoryKeeping, tmp_path: Path) -> None:
    before = opened(keep)
    await before.take(KEY, 3 * MIB)
    await before.spill(KEY)
    before.close()
    after = await found_again(keep, KEY)
    assert not after.unclaimed()
    await after.release(KEY)
    assert files_under(tmp_path) == []


@pytest.mark.thorough
async def test_memory_to_be_written_has_no_old_copy_on_disk(keep: MemoryKeeping) -> None:
    """After a resume that was turned back, other bytes go to the same memory: the file would be of another state."""
    pool = opened(keep)
    os.pwrite((await pool.take(KEY, 3 * MIB)).fd, b"old", 0)
    await pool.spill(KEY)
    memory = await pool.to_fill(KEY)
    os.pwrite(memory.fd, b"new", 0)
    assert pool.spilled_bytes == 0
    await pool.spill(KEY)
    await pool.free_memory_of(KEY)
    await pool.fetch(KEY)
    assert os.pread(pool.memory(KEY).fd, 3, 0) == b"new"
    await pool.release(KEY)


async def test_the_file_of_a_cancelled_copy_counted_as_complete_after_a_restart(
    keep: MemoryKeeping, tmp_path: Path
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
    keep.spill.write(name, memory.fd, memory.size_bytes, lambda: False, lambda _: None)  # as that thread does
    os.pwrite((await before.to_fill(KEY)).fd, b"new", 0)
    assert not keep.spill.path(name).exists(), "the bytes of before are the copy on disk"
    before.close()
    after = await found_again(keep, KEY)
    assert after.spilled_bytes == 0
    await after.release(KEY)
    assert files_under(tmp_path) == []


async def test_a_spill_without_descriptors_is_a_reported_error(keep: MemoryKeeping) -> None:
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
    await pool.release(KEY)


async def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    keep = MemoryKeeping(
        [PoolDirectory(tmp_path / "memory", huge=False)], None, SpillFolder(tmp_path / "spill", spare_bytes=1 << 60)
    )
    pool = opened(keep)
    os.pwrite((await pool.take(KEY, 3 * MIB)).fd, b"weights", 0)
    with pytest.raises(Refused, match="MiB free") as refused:
        await pool.spill(KEY)
    assert "pool.spill_dir" in refused.value.hint
    await pool.free_memory_of(KEY)
    assert os.pread(pool.memory(KEY).fd, 7, 0) == b"weights", "given back without a copy"
    assert len(files_under(tmp_path)) == 1
    await pool.release(KEY)


async def test_a_damaged_file_is_reported_and_kept(keep: MemoryKeeping, tmp_path: Path) -> None:
    pool = opened(keep)
    await pool.take(KEY, 3 * MIB)
    await pool.spill(KEY)
    await pool.free_memory_of(KEY)
    (file,) = files_under(tmp_path)
    with file.open("r+b") as stream:
        stream.seek(1 << 20)
        stream.write(b"!")
    with pytest.raises(HegmError, match="does not match its checksum"):
        await pool.fetch(KEY)
    assert files_under(tmp_path) == [file]
    assert pool.held_bytes == 0, "half of it stayed in memory"
    await pool.release(KEY)


@pytest.mark.thorough
async def test_without_free_memory_spilled_bytes_stay_on_disk(keep: MemoryKeeping) -> None:
    pool = opened(keep)
    await pool.take(KEY, 30 * MIB)
    await pool.spill(KEY)
    await pool.free_memory_of(KEY)
    await pool.take(OTHER, 40 * MIB)
    with pytest.raises(Refused, match=r"may hold 64 MiB, .* and [0-9]+ MiB are needed \(refused\)"):
        await pool.fetch(KEY)
    await pool.release(OTHER)
    await pool.fetch(KEY)
    await pool.release(KEY)


@pytest.mark.thorough
async def test_releasing_ends_a_running_spill_and_leaves_no_file(keep: MemoryKeeping, tmp_path: Path) -> None:
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
        await pool.release(KEY)
    assert outcomes in (["cancelled"], ["whole"])
    assert files_under(tmp_path) == []
