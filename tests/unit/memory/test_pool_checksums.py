"""Suspended bytes are compared with their checksums before a reload, and a broken page kills no process."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from hegmd.errors import REFUSED, UNAVAILABLE, HegmError
from hegmd.memory.pool import Pool
from hegmd.memory.pool_checksums import COMPARED_FOR_S, SumFolder, compare, sums_of
from hegmd.memory.pool_piece import MemoryKeeping
from hegmd.memory.spill_file import ResultUnwanted
from hegmd.system.direct_io import CHUNK_BYTES
from tests.unit.descriptor_store import DescriptorStore
from tests.unit.moving_node import Node, running
from tests.unit.pools import KEY, files_under, found_again, keep_in, opened

# The place of the flipped bit that was used silently.
PLACE = 10_003
SIZE_BYTES = 2 * CHUNK_BYTES


def flip(fd: int, place: int = PLACE) -> None:
    (byte,) = os.pread(fd, 1, place)
    os.pwrite(fd, bytes([byte ^ 4]), place)


def never() -> bool:
    return False


async def rested(keep: MemoryKeeping, clock: Callable[[], float] = time.monotonic) -> Pool:
    """A pool with the bytes of a suspended job."""
    pool = opened(keep, clock=clock)
    memory = await pool.take(KEY, SIZE_BYTES)
    os.pwrite(memory.fd, os.urandom(SIZE_BYTES), 0)
    await pool.sum_up(KEY)
    return pool


async def refusal(pool: Pool) -> HegmError:
    with pytest.raises(HegmError) as refused:
        await pool.fetch(KEY)
    return refused.value


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "chunk"), [(PLACE, 0), (CHUNK_BYTES, 1), (SIZE_BYTES - 1, 1)])
async def test_a_flipped_bit_was_used_silently(tmp_path: Path, place: int, chunk: int) -> None:
    """Issue 14, row 3."""
    pool = await rested(keep_in(tmp_path))
    flip(pool.memory(KEY).fd, place)
    for _ in range(2):
        refused = await refusal(pool)
        assert refused.code is UNAVAILABLE
        assert f"the bytes of process {KEY.worker}: chunk {chunk} of 3 has changed" in refused.message
        assert "pool.verify" in refused.hint
    assert pool.held_for(KEY) == SIZE_BYTES, "the bytes are kept as they are"
    flip(pool.memory(KEY).fd, place)
    await pool.fetch(KEY)
    pool.close()


@pytest.mark.thorough
@pytest.mark.parametrize("nameless", [False, True])
async def test_the_next_daemon_has_the_sums_too(tmp_path: Path, *, nameless: bool) -> None:
    """Issue 14, row 3. `nameless` memory comes back from a store."""
    keep = keep_in(tmp_path)
    store = DescriptorStore()
    if nameless:
        keep = MemoryKeeping((), store, keep.spill, keep.sums)
    pool = await rested(keep)
    flip(pool.memory(KEY).fd)
    pool.close()
    again = await found_again(keep, KEY)
    assert "chunk 0 of 3" in (await refusal(again)).message
    again.close()
    await store.drop(*store.kept)


@pytest.mark.thorough
async def test_chunks_that_changed_places_are_found(tmp_path: Path) -> None:
    pool = await rested(keep_in(tmp_path))
    fd = pool.memory(KEY).fd
    first, second = os.pread(fd, CHUNK_BYTES, 0), os.pread(fd, CHUNK_BYTES, CHUNK_BYTES)
    os.pwrite(fd, second + first, 0)
    assert "has changed" in (await refusal(pool)).message
    pool.close()


@pytest.mark.thorough
async def test_a_flipped_bit_is_not_written_to_disk_as_if_it_were_right(tmp_path: Path) -> None:
    """Issue 14, row 3: the file would have matched its own checksums for ever."""
    pool = await rested(keep_in(tmp_path))
    flip(pool.memory(KEY).fd)
    with pytest.raises(HegmError, match="chunk 0 of 3 has changed"):
        await pool.spill(KEY)
    assert files_under(tmp_path / "spill") == []
    assert pool.held_for(KEY) == SIZE_BYTES
    pool.close()


@pytest.mark.thorough
async def test_rewritten_bytes_are_not_compared_with_the_old_ones(tmp_path: Path) -> None:
    keep = keep_in(tmp_path)
    pool = await rested(keep)
    os.pwrite((await pool.to_fill(KEY)).fd, b"other", 0)
    await pool.fetch(KEY)
    pool.close()
    again = await found_again(keep, KEY)
    await again.fetch(KEY)
    await again.sum_up(KEY)
    flip(again.memory(KEY).fd)
    assert "has changed" in (await refusal(again)).message
    await again.release(KEY)
    assert files_under(tmp_path) == [], "what is given back has no sums any more"
    again.close()


@pytest.mark.thorough
async def test_a_piece_is_compared_again_after_each_rest_and_once_for_one(tmp_path: Path) -> None:
    """A resume asks for the bytes three times, and a job is parked meanwhile."""
    pool = await rested(keep_in(tmp_path))
    await pool.fetch(KEY)
    flip(pool.memory(KEY).fd)
    await pool.fetch(KEY)
    await pool.sum_up(KEY)  # the resume failed, and the job is suspended again
    assert "has changed" in (await refusal(pool)).message
    pool.close()


@pytest.mark.thorough
async def test_a_resume_soon_after_a_comparison_does_not_wait_for_another(tmp_path: Path) -> None:
    """With 32 GiB it waited for two seconds between two turns."""
    now = 100.0
    pool = await rested(keep_in(tmp_path), lambda: now)
    await pool.compare_ahead(KEY)
    flip(pool.memory(KEY).fd)
    await pool.fetch(KEY)
    now += COMPARED_FOR_S
    assert "has changed" in (await refusal(pool)).message, "the comparison was too long ago"
    with pytest.raises(HegmError, match="has changed"):
        await pool.compare_ahead(KEY)
    pool.close()


@pytest.mark.thorough
@pytest.mark.parametrize("harm", [lambda data: data[:-1], lambda data: data[:9] + b"x" + data[10:], lambda _: b""])
async def test_sums_that_are_damaged_themselves_keep_no_job_from_its_bytes(
    tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    keep = keep_in(tmp_path)
    (await rested(keep)).close()
    (file,) = files_under(tmp_path / "sums")
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(harm(file.read_bytes()))
    pool = await found_again(keep, KEY)
    await pool.fetch(KEY)
    pool.close()


@pytest.mark.thorough
async def test_checksums_of_missing_segments_are_dropped_by_the_next_daemon(tmp_path: Path) -> None:
    keep = keep_in(tmp_path)
    (await rested(keep)).close()
    for file in files_under(tmp_path / "memory"):
        file.unlink()
    (await found_again(keep)).close()
    assert files_under(tmp_path / "sums") == []


@pytest.mark.thorough
async def test_sums_that_cannot_be_kept_are_no_failure(tmp_path: Path) -> None:
    (tmp_path / "sums").touch()  # no directory
    pool = await rested(keep_in(tmp_path))
    flip(pool.memory(KEY).fd)
    assert "has changed" in (await refusal(pool)).message, "this daemon knows them all the same"
    pool.close()


@pytest.mark.thorough
async def test_without_a_folder_for_sums_nothing_is_compared(tmp_path: Path) -> None:
    """`pool.verify = "off"`: the way to bytes that have changed, for an owner who wants them as they are."""
    keep = keep_in(tmp_path)
    pool = await rested(keep)
    flip(pool.memory(KEY).fd)
    pool.close()
    off = await found_again(MemoryKeeping(keep.places, keep.store, keep.spill), KEY)
    await off.sum_up(KEY)
    await off.fetch(KEY)
    off.close()


async def test_a_resume_does_not_wait_for_checksums(tmp_path: Path) -> None:
    pool = opened(keep_in(tmp_path))
    await pool.take(KEY, SIZE_BYTES)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.sum_up, KEY)
        await anyio.wait_all_tasks_blocked()
        await pool.fetch(KEY)
    assert pool.memory(KEY).size_bytes > SIZE_BYTES
    pool.close()


def test_cancelled_work_ends_at_the_next_chunk() -> None:
    fd = os.memfd_create("piece")
    os.truncate(fd, SIZE_BYTES)
    with pytest.raises(ResultUnwanted):
        sums_of(fd, SIZE_BYTES, lambda: True)
    os.close(fd)


def test_memory_that_the_kernel_refuses_is_reported_and_kills_no_process() -> None:
    """Issue 14, row 3. Nothing is mapped at the beginning of a process: a read of that fails as of a broken page."""
    with open("/proc/self/mem", "rb", buffering=0) as broken:
        with pytest.raises(HegmError, match=r"cannot be read from byte 0 on: Input/output error") as refused:
            sums_of(broken.fileno(), CHUNK_BYTES, never)
        assert "dmesg" in refused.value.hint
        with pytest.raises(HegmError, match=r"the bytes of process 7: the memory with the job's bytes cannot be read"):
            compare(broken.fileno(), CHUNK_BYTES, (0,), never, "the bytes of process 7", 1)


def test_shortened_memory_is_reported_and_kills_no_process() -> None:
    fd = os.memfd_create("piece")
    os.truncate(fd, CHUNK_BYTES + 1)
    with pytest.raises(HegmError, match="were expected") as refused:
        sums_of(fd, SIZE_BYTES, never)
    assert refused.value.code is REFUSED
    os.close(fd)


def test_sums_of_another_number_of_chunks_are_of_another_piece(tmp_path: Path) -> None:
    fd = os.memfd_create("piece")
    os.truncate(fd, SIZE_BYTES)
    with pytest.raises(HegmError, match="chunk 1 of 1"):
        compare(fd, SIZE_BYTES, sums_of(fd, CHUNK_BYTES, never), never, "it", 1)
    folder = SumFolder(tmp_path / "sums")
    folder.keep("7.ab", (1, 2, 3))
    assert folder.load("7.ab") == (1, 2, 3)
    assert folder.load("8.ab") is None
    os.close(fd)


async def rest_of(node: Node, op_id: str) -> None:
    async for _ in node.moving.suspended_operations.follow(op_id):
        pass


@pytest.mark.thorough
async def test_a_resume_of_a_job_with_a_flipped_bit_is_not_done(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    """Issue 14, row 3: it stays suspended with its bytes, and resumes once they are correct again."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid, os.urandom(20_000))
        before = agent.data
        answer = await node.operations.suspend([process.pid], node.context())
        assert answer.operation is not None
        op_id = answer.operation.id
        await rest_of(node, op_id)
        (file,) = files_under(tmp_path / "memory")
        with file.open("r+b") as piece:
            flip(piece.fileno())
        answer = await node.operations.resume(process.pid, None, node.context())
        stayed = node.operations.runner.describe(op_id)
        assert stayed.phase == "suspended"
        message = repr(stayed)
        assert f"the bytes of process {process.pid}: chunk 0 of 1 has changed" in message
        assert "reload" not in agent.orders
        assert agent.data is None
        with file.open("r+b") as piece:
            flip(piece.fileno())
        await node.operations.resume(process.pid, None, node.context())
        assert agent.data == before


@pytest.mark.thorough
async def test_bytes_of_a_suspended_job_get_checksums_that_its_resume_removes(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        answer = await node.operations.suspend([process.pid], node.context())
        assert answer.operation is not None
        await rest_of(node, answer.operation.id)
        assert len(files_under(tmp_path / "sums")) == 1
        await node.operations.resume(process.pid, None, node.context())
        assert files_under(tmp_path / "sums") == []
