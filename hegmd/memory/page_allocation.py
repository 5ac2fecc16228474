"""Populates the pages of a file in memory before they are needed, with huge pages if the node has free ones.

Pages are first reserved, which fails with an errno where touching them would kill; then they are touched, which zeroes
them now and not during a job's downtime. `pool` knows budgets and owners.

Ordinary files in memory, in /dev/shm or without a name, get small pages unless the node's setting says otherwise, and
it mostly says never. MADV_COLLAPSE (Linux 6.1) makes huge pages of them anyway. Measured with 4 GiB on two virtual
cores (docs/benchmarks.md): they are ready sooner (0.26 to 0.45 s against 2.7 to 4.2 s), are mapped at once by the job
that copies to them, and are copied to three times as fast. Without it the pages are small.
"""

from __future__ import annotations

import ctypes
import errno
import os
from types import TracebackType

from hegmd.memory.sizes import HUGE_PAGE_BYTES
from hegmd.system.thread_pool import MAX_THREADS, share_out, threads_for

_SLICE_BYTES = 64 << 20

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_FIXED, _MAP_RESERVED = 0x01, 0x10, 0x4022  # the last: private, of nothing, taking nothing
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap of Python knows no name for either
_MADV_COLLAPSE = 25
# After these it is not asked again: the kernel knows no such advice, or the node has no huge page left.
_NO_USE = (errno.EINVAL, errno.ENOMEM)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def populate(fd: int, size_bytes: int, *, start: int = 0, max_threads: int = MAX_THREADS) -> None:
    """Populate all pages of a file in memory from `start`, a multiple of a huge page, in threads. Blocks.

    Raises OSError if the node lacks memory.
    """
    population = _Population(fd, size_bytes)
    starts = range(start, size_bytes, _SLICE_BYTES)
    threads = min(max_threads, threads_for(len(starts)))
    share_out(starts, lambda: population.work, threads=threads, name="pool pages")


class _Population:
    """The slices of one file, and whether huge pages are still tried."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._collapses = os.fstatvfs(fd).f_bsize < HUGE_PAGE_BYTES

    def work(self, start: int) -> None:
        """Populate the slice that starts there."""
        self._populate(start, min(_SLICE_BYTES, self._size_bytes - start))

    def _populate(self, start: int, size_bytes: int) -> None:
        with Window(self._fd, start, size_bytes) as address:
            if self._collapses:
                self._collapse(address, start, size_bytes)
            os.posix_fallocate(self._fd, start, size_bytes)
            _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE)  # an older kernel just leaves it

    def _collapse(self, address: int, start: int, size_bytes: int) -> None:
        """Turn this slice into huge pages, as far as there are any."""
        whole_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for place in range(start, start + whole_bytes, HUGE_PAGE_BYTES):
            os.pwrite(self._fd, b"\0", place)  # of nothing at all the kernel makes no huge page
        if whole_bytes and _libc.madvise(address, whole_bytes, _MADV_COLLAPSE) and ctypes.get_errno() in _NO_USE:
            self._collapses = False


class Window:
    """A slice of the memfd, mapped where its huge pages may lie, during the context."""

    def __init__(self, fd: int, start: int, size_bytes: int) -> None:
        page_bytes = max(HUGE_PAGE_BYTES, os.fstatvfs(fd).f_bsize)
        length_bytes = (size_bytes + page_bytes - 1) // page_bytes * page_bytes
        self._reserved_bytes = length_bytes + page_bytes
        self._reserved = _mapped(None, self._reserved_bytes, _PROT_NONE, _MAP_RESERVED, -1, 0)
        base = (self._reserved + page_bytes - 1) // page_bytes * page_bytes
        try:
            self._address = _mapped(base, length_bytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd, start)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap it; twice is fine."""
        reserved_bytes, self._reserved_bytes = self._reserved_bytes, 0
        if reserved_bytes:
            _libc.munmap(self._reserved, reserved_bytes)

    def __enter__(self) -> int:
        return self._address

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _mapped(address: int | None, size_bytes: int, protection: int, flags: int, fd: int, start: int) -> int:
    got: int = _libc.mmap(address, size_bytes, protection, flags, fd, start)
    if got == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{size_bytes} bytes cannot be mapped: {os.strerror(number)}")
    return got
