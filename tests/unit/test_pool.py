"""The pool: what it takes is there, sealed, within the budget, and given back; what an earlier daemon left is found."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hegmd.errors import Refused
from hegmd.pieces import HUGE_PAGE_BYTES, MIB, whole_size
from hegmd.pool import Key, Pool, read_available_bytes, read_huge_free_bytes

KEY = Key("7", "4711")
OTHER = Key("8", "4712")


class Store:
    """What a service manager would keep."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def store(self, name: str, descriptors: Iterable[int]) -> bool:
        (fd,) = descriptors
        self.kept[name] = os.dup(fd)
        return True

    def unstore(self, name: str) -> bool:
        os.close(self.kept.pop(name))
        return True


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(64 * MIB, huge_free_bytes=lambda: 0)
    yield made
    made.close()


async def test_what_is_taken_is_there_and_cannot_be_cut_or_grown(pool: Pool) -> None:
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
    pool.give(KEY)
    await pool.take(OTHER, 40 * MIB)


async def test_a_larger_piece_takes_the_place_of_a_smaller_and_a_smaller_is_there_already(pool: Pool) -> None:
    small = await pool.take(KEY, 4 * MIB)
    assert await pool.take(KEY, 3 * MIB) is small
    large = await pool.take(KEY, 50 * MIB)  # would not fit beside the small one
    assert large is not small
    assert small.fd == -1, "the smaller one was left open"
    assert pool.held_bytes == large.size_bytes


async def test_without_a_budget_half_of_what_is_available_is_one() -> None:
    pool = Pool(available_bytes=lambda: 100 * MIB, huge_free_bytes=lambda: 0)
    assert pool.budget_bytes() == 50 * MIB
    with pytest.raises(Refused, match="free memory on the node"):
        await pool.take(KEY, 60 * MIB)
    unknown = Pool(available_bytes=lambda: None)
    with pytest.raises(Refused):
        await unknown.take(KEY, 1)


async def test_huge_pages_that_are_gone_after_all_are_done_without() -> None:
    pool = Pool(64 * MIB, huge_free_bytes=lambda: 1 << 40)
    memory = await pool.take(KEY, 5 * MIB)
    os.pwrite(memory.fd, b"x", 0) if not memory.huge else mmap.mmap(memory.fd, HUGE_PAGE_BYTES).close()
    pool.close()


async def test_what_an_earlier_daemon_stored_is_taken_back_and_what_nobody_knows_is_closed() -> None:
    store = Store()
    before = Pool(64 * MIB, store=store, huge_free_bytes=lambda: 0)
    memory = await before.take(Key("7", "4711-9"), 3 * MIB)
    os.pwrite(memory.fd, b"weights", 0)
    before.close()
    ((name, fd),) = store.kept.items()
    after = Pool(64 * MIB, store=store)
    after.adopt(name, os.dup(fd))
    found = after.memory(Key("7", "4711-9"))
    assert os.pread(found.fd, 7, 0) == b"weights"
    assert after.held_for(Key("7", "4711-9")) == 3 * MIB
    after.give(Key("7", "4711-9"))
    assert not store.kept, "given back here and kept there"
    stray = os.memfd_create("stray")
    after.adopt("hegm-pool-nonsense", stray)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(stray)


async def test_bytes_that_are_not_there_are_refused(pool: Pool) -> None:
    with pytest.raises(Refused, match="holds nothing for 4711"):
        pool.memory(KEY)


def test_the_kernels_figures_are_read_and_what_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    meminfo, free = tmp_path / "meminfo", tmp_path / "free"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   1024 kB\n")
    free.write_text("3\n")
    assert read_available_bytes(meminfo) == MIB
    assert read_huge_free_bytes(free) == 3 * HUGE_PAGE_BYTES
    assert read_available_bytes(tmp_path / "none") is None
    assert read_huge_free_bytes(tmp_path / "none") == 0
