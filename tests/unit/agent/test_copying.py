"""Bytes that are copied out and in again are equal, whatever the descriptor is of, and no other bytes change."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.agent import copying
from hegmd.memory import pool_memory
from tests.huge import huge_memory

ROOT = Path(__file__).parents[3]
ROOM_BYTES = 48 << 20
# Around the borders of pages and pieces, and from addresses on no border at all.
SIZES = (1, 63, 4095, 4096, 4097, copying.PIECE_BYTES - 1, copying.PIECE_BYTES + 1, copying.LARGE_BYTES, 20_000_003)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Block:
    """Memory of this process with random bytes in it, from that offset to the page on."""

    def __init__(self, size_bytes: int, seed: int, offset: int = 0) -> None:
        self._map = mmap.mmap(-1, size_bytes + offset + copying.PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._view) + offset
        self.size_bytes = size_bytes
        self.fill(random.Random(seed).randbytes(size_bytes))

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size_bytes)

    def close(self) -> None:
        del self._view
        self._map.close()


def _small_pages() -> int:
    fd = os.memfd_create("small", os.MFD_CLOEXEC)
    os.truncate(fd, ROOM_BYTES)
    return fd


def _sealed() -> int:
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, ROOM_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def _file() -> int:
    """A file in memory that cannot be sealed, like most pool segments."""
    fd, path = tempfile.mkstemp(dir="/dev/shm", prefix="hegm-test-")
    os.unlink(path)
    os.truncate(fd, ROOM_BYTES)
    pool_memory.populate(fd, ROOM_BYTES)
    return fd


def _huge_pages() -> int:
    fd = _sealed()
    pool_memory.populate(fd, ROOM_BYTES)
    return fd


def _hugetlb() -> int:
    with huge_memory(ROOM_BYTES) as fd:
        return os.dup(fd)


@pytest.fixture(params=[_small_pages, _sealed, _file, _huge_pages, _hugetlb], ids=lambda make: make.__name__)
def room(request: pytest.FixtureRequest) -> Iterator[int]:
    fd: int = request.param()
    yield fd
    os.close(fd)


def _ignore(_copied_bytes: int) -> None:
    pass


@pytest.mark.thorough
def test_bytes_are_equal_after_the_round_trip_and_no_others_change(room: int) -> None:
    blocks = [Block(size_bytes, seed=size_bytes, offset=size_bytes % 977) for size_bytes in SIZES]
    before = [block.read() for block in blocks]
    place, spans = 0, []
    for block in blocks:
        spans.append((block.address, place, block.size_bytes))
        place = copying.round_up(place + block.size_bytes, 64)
    copying.copy_out(room, place, spans, _ignore)
    for (_, at, size_bytes), expected in zip(spans, before, strict=True):
        assert os.pread(room, size_bytes, at) == expected
    copying.free_pages(spans)
    for block in blocks:
        block.fill(bytes(block.size_bytes))
    copying.prefer_huge_pages(spans)
    copying.copy_in(room, spans, _ignore)
    assert [block.read() for block in blocks] == before
    for block in blocks:
        block.close()


def test_freed_are_only_the_pages_that_lie_wholly_inside() -> None:
    block = Block(3 * copying.LARGE_BYTES, seed=1)
    before = block.read()
    start, size_bytes = 5000, copying.LARGE_BYTES + 1
    copying.free_pages([(block.address + start, 0, size_bytes)])
    after = block.read()
    first, last = copying.round_up(start), (start + size_bytes) // copying.PAGE_BYTES * copying.PAGE_BYTES
    assert after[:first] == before[:first]
    assert after[last:] == before[last:]
    assert after[first:last] == bytes(last - first), "the pages inside are still there"
    block.close()


def test_little_is_left_to_the_c_library() -> None:
    block = Block(copying.LARGE_BYTES - 1, seed=2)
    before = block.read()
    copying.free_pages([(block.address, 0, block.size_bytes)])
    assert block.read() == before
    block.close()


def _is_in_huge_pages(fd: int) -> bool:
    with pool_memory.Window(fd, 0, ROOM_BYTES) as address:
        ctypes.c_char.from_address(address).value = b"\1"
        smaps = Path("/proc/self/smaps").read_text()
    mapping = smaps[smaps.index(f"\n{address:x}-") :]
    counted = re.search(r"^ShmemPmdMapped: +(\d+) kB", mapping, re.MULTILINE)
    return counted is not None and counted[1] != "0"


@pytest.mark.thorough
def test_a_file_in_memory_was_written_to_page_by_page() -> None:
    """The way through a mapping was for sealed memory alone, when the pool's pieces had become files: a third of the
    speed. A limit on what may be written shows the way: it holds for `pwrite` only.
    """
    fd = _file()
    is_huge = _is_in_huge_pages(fd)
    os.close(fd)
    if not is_huge:
        pytest.skip("the node gives no huge pages to files in memory")
    script = f"""
import os, resource, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.unit.agent import test_copying as here
fd = here._file()
block = here.Block(20_000_003, seed=6)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
here.copying.copy_out(fd, here.ROOM_BYTES, [(block.address, 4096, block.size_bytes)], here._ignore)
assert os.pread(fd, block.size_bytes, 4096) == block.read()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["_huge_pages", "_file"])
def test_a_descriptor_with_missing_pages_is_an_error_and_no_signal(kind: str) -> None:
    """A memcpy into a mapping beyond the end of its file is a SIGBUS, which would be the end of the job."""
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.unit.agent import test_copying as here
fd = here.{kind}()
block = here.Block(16 << 20, seed=3)
try:
    here.copying.copy_out(fd, here.ROOM_BYTES + (16 << 20), [(block.address, here.ROOM_BYTES - 4096, 16 << 20)], print)
except OSError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:")


@pytest.mark.thorough
def test_without_threads_to_be_had_everything_is_copied_all_the_same() -> None:
    """Threads that had been started continued copying into memory that was dropped when a later one could not start."""
    script = f"""
import _thread, os, resource, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.unit.agent import test_copying as here
fd, block = here._small_pages(), here.Block(40 << 20, seed=4)
before = block.read()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (256 << 20),) * 2)
_thread.stack_size(1 << 30)
try:
    _thread.start_new_thread(print, ())
    sys.exit("a thread started: the limit does not hold")
except RuntimeError:
    pass
here.copying.copy_out(fd, here.ROOM_BYTES, [(block.address, 0, block.size_bytes)], here._ignore)
block.fill(bytes(block.size_bytes))
here.copying.copy_in(fd, [(block.address, 0, block.size_bytes)], here._ignore)
assert block.read() == before
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
def test_a_failure_in_one_thread_ends_the_copy_and_is_reported() -> None:
    fd, block = _small_pages(), Block(32 << 20, seed=5)
    os.truncate(fd, 20 << 20)
    with pytest.raises(OSError, match="ends too early"):
        copying.copy_in(fd, [(block.address, 0, block.size_bytes)], _ignore)
    os.close(fd)
    block.close()


def test_a_file_in_huge_pages_was_read_by_pages_of_4096_bytes_as_it_lay_on_no_border_of_theirs() -> None:
    fd = os.memfd_create("state", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, 3 * copying.HUGE_PAGE_BYTES)
        os.pwrite(fd, b"written", copying.HUGE_PAGE_BYTES - 3)
        view = copying.private_view(fd, 2 * copying.HUGE_PAGE_BYTES + 5)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert address % copying.HUGE_PAGE_BYTES == 0
        assert len(view) == 2 * copying.HUGE_PAGE_BYTES + 5
        assert bytes(view[copying.HUGE_PAGE_BYTES - 3 :][:7]) == b"written"
        view[copying.HUGE_PAGE_BYTES - 3] = 0
        assert os.pread(fd, 7, copying.HUGE_PAGE_BYTES - 3) == b"written", "the file is another's"
    finally:
        os.close(fd)


def test_a_page_that_cannot_be_read_would_have_ended_a_training_by_a_signal() -> None:
    """Issue 14, row 3. The kernel says the same of a broken page: reading it would be a SIGBUS."""
    fd = os.memfd_create("state", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, 2 * copying.PAGE_BYTES)
        view = copying.private_view(fd, 2 * copying.PAGE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        copying.fetch_pages(address, 2 * copying.PAGE_BYTES)
        os.truncate(fd, copying.PAGE_BYTES)
        copying.fetch_pages(address, copying.PAGE_BYTES)
        with pytest.raises(OSError, match="memory cannot be read: Bad address"):
            copying.fetch_pages(address, 2 * copying.PAGE_BYTES)
    finally:
        os.close(fd)
