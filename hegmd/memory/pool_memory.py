"""One segment of pool memory: where it is allocated, and how its pages are made present.

Tries, in this order: a file in 2 MiB pages, a file in ordinary pages, and memory without a name, which a store must
hold. Everything here blocks and is called in a thread.

The size of nameless memory is sealed. A file in memory cannot be sealed (the kernel seals memfds only), and the job
that gets its descriptor could truncate it. So the daemon maps a segment only before another process has its descriptor.
Afterwards it only reads: a read of a truncated file ends early, while access through a mapping would kill the daemon.

`populate` first reserves the pages, because a failed reservation returns an errno while touching missing pages kills
the process. Then it touches them, so that the kernel zeroes them now and not during a job's downtime. Files in memory
get small pages unless the node's setting enables huge ones, which is rare. MADV_COLLAPSE (Linux 6.1) turns them into
huge pages. Measured with 4 GiB on two virtual cores (docs/benchmarks.md): huge pages are ready in 0.26 to 0.45 s
instead of 2.7 to 4.2 s, the job maps them at once, and copies to them are three times as fast.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from hegmd.errors import Refused
from hegmd.memory.pool_names import PieceName
from hegmd.memory.pool_places import UNFINISHED, PoolDirectory
from hegmd.memory.sizes import HUGE_PAGE_BYTES, MIB
from hegmd.system.thread_pool import MAX_THREADS, share_out, threads_for

logger = logging.getLogger(__name__)

_HUGE_PAGES_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
_MEMINFO = Path("/proc/meminfo")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Puts something into fresh memory before it gets its name.
Fill = Callable[["Memory"], None]

_SLICE_BYTES = 64 << 20

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_FIXED, _MAP_RESERVED = 0x01, 0x10, 0x4022  # the last: private, of nothing, taking nothing
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for either
_MADV_COLLAPSE = 25
# After these it is not asked again: the kernel lacks this advice, or the node has no huge page left.
_NO_USE = (errno.EINVAL, errno.ENOMEM)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def read_available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Return the memory that the kernel reports as available, or None."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def read_huge_free_bytes(free: Path = _HUGE_PAGES_FREE) -> int:
    """Return the bytes in free 2 MiB pages; 0 if the kernel has none."""
    try:
        return int(free.read_text()) * HUGE_PAGE_BYTES
    except (OSError, ValueError):
        return 0


class Memory:
    """A segment of memory. Owns its descriptor and, if it has a name, its file. Closing twice is allowed."""

    def __init__(self, fd: int, size_bytes: int, *, huge: bool, place: PoolDirectory | None = None) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.huge = huge
        #: The directory of the file; None for memory that exists only through its descriptors.
        self.place = place

    def close(self) -> None:
        """Release the descriptor. A file stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def zero(self, at: int, size_bytes: int) -> None:
        """Have nothing in that part. Only before a job has a descriptor of it and could truncate it. Raises OSError."""
        if self.huge:  # such pages cannot be written with write()
            with mmap.mmap(self.fd, self.size_bytes) as mapped:
                mapped[at : at + size_bytes] = bytes(size_bytes)
        else:
            os.pwrite(self.fd, bytes(size_bytes), at)

    def remove(self, name: str) -> None:
        """Close the descriptor and remove the file. The kernel frees the memory once no process has it open."""
        if self.place is not None:
            self.place.remove(name)
        self.close()

    def resize(self, size_bytes: int, *, max_threads: int = MAX_THREADS) -> None:
        """Resize to that many bytes, in whole huge pages, with pages present. Call it only before a job has a
        descriptor.

        Raises OSError; then the size is unchanged.
        """
        had_bytes = self.size_bytes
        os.ftruncate(self.fd, size_bytes)
        try:
            populate(self.fd, size_bytes, start=min(had_bytes, size_bytes), max_threads=max_threads)
        except OSError:
            os.ftruncate(self.fd, had_bytes)
            raise
        self.size_bytes = size_bytes

    def hand_over(self, name: str, to: PieceName, whole_bytes: int, fill: Fill | None) -> None:
        """Turn ready memory into a segment of that name and size. Raises OSError, with its file removed; then the
        memory is free once the caller closes it."""
        place, new = self.place, str(to)
        try:
            if place is not None:
                place.rename(name, new + UNFINISHED)
            self.resize(whole_bytes)
            if place is None:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            if fill is not None:
                fill(self)
            if place is not None:
                place.finish(new)
        except BaseException:
            if place is not None:
                place.remove(name)
                place.abandon(new)
            raise


def make_memory(
    name: PieceName,
    whole_bytes: int,
    *,
    places: Sequence[PoolDirectory],
    huge: bool,
    fill: Fill | None = None,
    sealed: bool = True,
) -> Memory:
    """Return memory of that size with its pages present, zeroed or filled. It has the given name if one of the places
    accepts it.

    With `sealed` False, memory without a name can be resized later.

    Raises Refused with numbers if the memory is not available; then nothing remains allocated.
    """
    error = OSError("no directory can provide it")
    for attempt in _attempts(places, huge=huge, sealed=sealed):
        try:
            return attempt(str(name), whole_bytes, fill)
        except OSError as refusal:
            error = refusal
            logger.debug("%s: %s", name, refusal)
    raise Refused(
        f"the node has no {whole_bytes // MIB} MiB for {name.key.worker}: {error.strerror or error}",
        "free memory, or check the memory limit of hegmd's own control group (MemoryMax=)",
        {"needed_bytes": whole_bytes, "errno": error.errno},
    )


def _attempts(
    places: Sequence[PoolDirectory], *, huge: bool, sealed: bool
) -> Iterator[Callable[[str, int, Fill | None], Memory]]:
    # Files in huge pages first, then other files: memory with a name outlives every process.
    for place in sorted(places, key=lambda one: not one.huge):
        if huge or not place.huge:
            yield _FileMaker(place)
    if huge:
        yield _NamelessMaker(os.MFD_HUGETLB, sealed=sealed)
    yield _NamelessMaker(0, sealed=sealed)


class _FileMaker:
    """Makes memory as a file in a place. It has its name only when it is whole."""

    def __init__(self, place: PoolDirectory) -> None:
        self._place = place

    def __call__(self, name: str, whole_bytes: int, fill: Fill | None) -> Memory:
        memory = Memory(self._place.create(name), whole_bytes, huge=self._place.huge, place=self._place)
        try:
            os.ftruncate(memory.fd, whole_bytes)
            populate(memory.fd, whole_bytes)
            if fill is not None:
                fill(memory)
            self._place.finish(name)
        except BaseException:
            memory.close()
            self._place.abandon(name)
            raise
        return memory


class _NamelessMaker:
    """Makes memory that has no name, with its size sealed."""

    def __init__(self, huge_flag: int, *, sealed: bool) -> None:
        self._huge_flag = huge_flag
        self._sealed = sealed

    def __call__(self, name: str, whole_bytes: int, fill: Fill | None) -> Memory:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | self._huge_flag)
        memory = Memory(fd, whole_bytes, huge=bool(self._huge_flag))
        try:
            os.ftruncate(fd, whole_bytes)
            if self._sealed:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            populate(fd, whole_bytes)
            if fill is not None:
                fill(memory)
        except BaseException:
            memory.close()
            raise
        return memory


def populate(fd: int, size_bytes: int, *, start: int = 0, max_threads: int = MAX_THREADS) -> None:
    """Populate a file in memory from `start`, a multiple of a huge page, in threads. Blocks. Raises OSError if there is
    too little.
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
        """Turn this slice into huge pages, as far as the node has any."""
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
