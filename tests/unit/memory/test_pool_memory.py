"""Pages of a memfd: all there afterwards, huge where the kernel makes them, and an error where there are none."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hegmd.memory import pool_memory
from hegmd.memory.pool_places import SHARED_MEMORY
from hegmd.memory.sizes import HUGE_PAGE_BYTES
from tests.wide import quick_first

MIB = 1 << 20


def _memfd(size_bytes: int) -> int:
    fd = os.memfd_create("pages", os.MFD_CLOEXEC)
    os.truncate(fd, size_bytes)
    return fd


def _named(size_bytes: int) -> int:
    fd, path = tempfile.mkstemp(prefix="memfd:pages", dir=SHARED_MEMORY)
    os.unlink(path)
    os.truncate(fd, size_bytes)
    return fd


@pytest.mark.parametrize("size_bytes", quick_first([4096, HUGE_PAGE_BYTES, 65 * MIB, 130 * MIB + 4096], 2))
def test_every_page_is_allocated_and_zero(size_bytes: int) -> None:
    fd = _memfd(size_bytes)
    pool_memory.populate(fd, size_bytes)
    stat = os.fstat(fd)
    assert stat.st_size == size_bytes
    assert stat.st_blocks * 512 >= size_bytes
    with open(fd, "rb") as file:
        assert file.read().count(0) == size_bytes


def test_earlier_contents_stay() -> None:
    fd = _memfd(8 * MIB)
    os.pwrite(fd, b"here", 5 * MIB)
    pool_memory.populate(fd, 8 * MIB)
    assert os.pread(fd, 4, 5 * MIB) == b"here"
    os.close(fd)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [_memfd, _named], ids=["nameless", "in /dev/shm"])
def test_pages_are_huge_where_the_kernel_makes_them_on_demand(make: Callable[[int], int]) -> None:
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1):
        pytest.skip("MADV_COLLAPSE came with Linux 6.1")
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    fd = make(64 * MIB)
    pool_memory.populate(fd, 64 * MIB)
    # Touching a byte of a huge page brings the whole page; a small one would come alone.
    with pool_memory.Window(fd, 0, 64 * MIB) as address:
        ctypes.memset(address, 1, 1)
        smaps = Path("/proc/self/smaps").read_text()
    os.close(fd)
    (entry,) = (part for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps) if "memfd:pages" in part)
    resident = re.search(r"^Rss: +(\d+) kB$", entry, re.MULTILINE)
    assert resident is not None
    assert int(resident[1]) == HUGE_PAGE_BYTES >> 10, "the pages are small ones"


@pytest.mark.parametrize("size_bytes", [256 * MIB, MIB], ids=["huge pages", "small pages"])
def test_pages_that_are_not_to_be_had_are_an_error_and_no_signal(size_bytes: int) -> None:
    """A sealed file that ends too early reports an error where a full node would, and raises SIGBUS at an access."""
    fd = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size_bytes // 2)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(PermissionError):
        pool_memory.populate(fd, size_bytes)
    os.close(fd)
