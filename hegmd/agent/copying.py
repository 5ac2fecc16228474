"""Copies bytes between this process's memory and a descriptor in several threads, and frees the pages of the memory.

`transfer` decides which bytes, and where in the descriptor. The calls release the interpreter (ctypes does), so threads
copy in parallel. No code touches memory of the descriptor that may be missing, because that would kill the job with a
signal where a call only fails. So the pages of each piece are requested just before the copy, which fails with an
error. Only owners of the descriptor could remove them in between: the daemon, which never truncates a file that it has
handed out, and this process.

Measured on two virtual cores with 4 GiB (kernel 6.18; docs/benchmarks.md):

* Out uses a mapping if it has huge pages: memcpy runs at the speed of the memory, `pwrite` at a third of it, one small
  page after another. With small pages a mapping costs more than it saves while few threads copy: the kernel lets one
  thread at a time write to a file, so 16 threads got 5.5 GB/s from `pwrite` on 32 cores.
* In uses `pread`, as fast as memcpy, into huge pages if the node allows them: small pages cost three to six times the
  copy in page faults, and as much as the copy when they are freed.
* Threads free pages too. Freeing each piece right after its copy was no faster than copying all first.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from .crew import share_out

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Copy = Callable[[int, int, int], None]
    Progress = Callable[[int], None]
    #: Address, place in the descriptor, and size.
    Span = tuple[int, int, int]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 1024 * 1024
# Small enough to keep several threads busy to the end, large enough for the call not to count.
PIECE_BYTES = 8 * 1024 * 1024
MAX_THREADS = 8
# Less is freed as quickly by the C library alone; less than this holds no huge page for certain.
LARGE_BYTES = 4 * 1024 * 1024
# This many threads or more hinder each other in `pwrite`, and copy through a mapping of any page size.
_MANY_THREADS = 4
# A process may have 65,530 mappings, and advice on a part of one can make three of it: the job needs the rest.
MAX_ADVISED = 4096

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_NO_RESERVE, _MAP_RESERVED = 0x4000, 0x4022  # the last: private, of nothing, taking nothing
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 4, 14, 22, 23
_PAGEMAP_ENTRY_BYTES = 8
# The first field of `struct statfs`, which is smaller than this, for tmpfs and hugetlbfs.
_STATFS_LONGS, _IN_MEMORY = 32, (0x01021994, 0x958458F6)
_EINVAL = 22
# EFAULT and EHWPOISON, with which the kernel says that touching those pages would be a SIGBUS.
_NO_PAGE = (14, 133)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.argtypes = _libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_libc.pread.restype = _libc.pwrite.restype = ctypes.c_ssize_t
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def copies_by_many() -> bool:
    """Return True if so many threads copy here that they hinder each other."""
    return len(os.sched_getaffinity(0)) >= _MANY_THREADS


def round_up(size_bytes: int, border_bytes: int = PAGE_BYTES) -> int:
    return (size_bytes + border_bytes - 1) // border_bytes * border_bytes


def copy_out(fd: int, capacity_bytes: int, spans: Iterable[Span], progress: Progress) -> None:
    """Copy the spans into the descriptor, which is large enough. Raises OSError."""
    with Writing(fd, capacity_bytes) as write:
        in_threads(write, spans, progress)


def copy_in(fd: int, spans: Iterable[Span], progress: Progress) -> None:
    """Copy the spans out of the descriptor into memory. Raises OSError."""
    in_threads(reading(fd), spans, progress)


class Writing:
    """The quickest way to copy from memory into a descriptor of that size, while the context lasts."""

    def __init__(self, fd: int, capacity_bytes: int) -> None:
        self._fd = fd
        self._page_bytes = os.fstatvfs(fd).f_bsize
        self._mapping = _Mapping(fd, capacity_bytes, self._page_bytes)

    def __enter__(self) -> Copy:
        base = self._mapping.base
        if base and (self._page_bytes > PAGE_BYTES or self._is_for_many(base) or _comes_in_huge_pages(base)):
            return _mapped(base)
        return _called(self._fd, _libc.pwrite)

    def _is_for_many(self, base: int) -> bool:
        """Return True if many threads write, to memory whose pages are requested before they are touched.

        On a full disk, and on a kernel before 5.14, touching them would raise a signal that ends the job.
        """
        return (
            copies_by_many() and _is_in_memory(self._fd) and not _libc.madvise(base, PAGE_BYTES, _MADV_POPULATE_WRITE)
        )

    def __exit__(self, *_exc: object) -> None:
        self._mapping.close()


def write_small(fd: int, place: int, data: bytes) -> None:
    """Write a little to a descriptor that is large enough; hugetlbfs takes no `write`. Raises OSError."""
    page_bytes = os.fstatvfs(fd).f_bsize
    if page_bytes <= PAGE_BYTES:
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, place)
            view, place = view[done:], place + done
        return
    start = place // page_bytes * page_bytes
    with mmap.mmap(fd, round_up(place + len(data), page_bytes) - start, offset=start) as mapped:
        mapped[place - start : place - start + len(data)] = data


def reading(fd: int) -> Copy:
    """Return the function that copies from a descriptor into memory."""
    return _called(fd, _libc.pread)


def free_pages(spans: Iterable[Span]) -> None:
    """Return the whole pages in large spans to the node. Their bytes are lost; the addresses stay valid.

    The owner of the memory frees it afterwards, which is quick without pages. Pages that cannot be returned like this,
    such as locked ones, are freed then.
    """

    def free(address: int, _place: int, size_bytes: int) -> None:
        start, end = round_up(address), (address + size_bytes) // PAGE_BYTES * PAGE_BYTES
        if start < end:
            _libc.madvise(start, end - start, _MADV_DONTNEED)

    in_threads(free, (span for span in spans if span[2] >= LARGE_BYTES), ignore)


def prefer_huge_pages(spans: Iterable[Span]) -> None:
    """Ask for huge pages under large spans, for when they are first written; a node that has them off stays without."""
    large = sorted((span for span in spans if span[2] >= LARGE_BYTES), key=_size_of, reverse=True)
    for address, _place, size_bytes in large[:MAX_ADVISED]:
        # Outwards to whole pages: that is just the mapping that the C library made for it, and splits none.
        start = address // PAGE_BYTES * PAGE_BYTES
        _libc.madvise(start, round_up(address + size_bytes) - start, _MADV_HUGEPAGE)


def fetch_pages(address: int, size_bytes: int) -> None:
    """Have a mapping's pages present for reading, in one call; a kernel without it has them come one by one.

    Raises OSError where reading them would end this process by SIGBUS: a page that is broken, or that was cut off.
    """
    start = address // PAGE_BYTES * PAGE_BYTES
    if _libc.madvise(start, round_up(address + size_bytes) - start, _MADV_POPULATE_READ):
        number = ctypes.get_errno()
        if number in _NO_PAGE:
            raise OSError(number, f"memory cannot be read: {os.strerror(number)}")


def _size_of(span: Span) -> int:
    return span[2]


# ---- one piece ------------------------------------------------------------------------------------------------------


def pieces(spans: Iterable[Span]) -> list[Span]:
    """Split the spans into pieces for several threads; none is of two spans."""
    return [
        (address + start, place + start, min(PIECE_BYTES, size_bytes - start))
        for address, place, size_bytes in spans
        for start in range(0, size_bytes, PIECE_BYTES)
    ]


def _called(fd: int, call: Callable[[int, int, int, int], int]) -> Copy:
    def copy(address: int, place: int, size_bytes: int) -> None:
        while size_bytes:
            done = call(fd, address, size_bytes, place)
            if done <= 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number) if done < 0 else "the descriptor ends too early")
            address, place, size_bytes = address + done, place + done, size_bytes - done

    return copy


def _mapped(base: int) -> Copy:
    def copy(address: int, place: int, size_bytes: int) -> None:
        have_pages(base + place, size_bytes)
        ctypes.memmove(base + place, address, size_bytes)

    return copy


def have_pages(address: int, size_bytes: int) -> None:
    """Have a mapping's pages present, or fail with an error where touching them would be a signal. Raises OSError."""
    start = address // PAGE_BYTES * PAGE_BYTES
    if _libc.madvise(start, round_up(address + size_bytes) - start, _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        # Before 5.14 the kernel does not know the question. Those of hugetlbfs are ours since they were mapped, and no
        # others get here then.
        if number != _EINVAL:
            raise OSError(number, f"the descriptor's pages cannot be allocated: {os.strerror(number)}")


def _is_in_memory(fd: int) -> bool:
    """Return True for a memfd, or a file in tmpfs or hugetlbfs."""
    statfs = (ctypes.c_long * _STATFS_LONGS)()
    return _libc.fstatfs(fd, statfs) == 0 and statfs[0] in _IN_MEMORY


# ---- the descriptor in memory ---------------------------------------------------------------------------------------


class _Mapping:
    """A mapping of the descriptor, aligned to huge pages. `base` is 0 if there is no address space for it."""

    def __init__(self, fd: int, size_bytes: int, page_bytes: int) -> None:
        border_bytes = max(HUGE_PAGE_BYTES, page_bytes)
        length_bytes = round_up(size_bytes, page_bytes)
        self._reserved_bytes = length_bytes + border_bytes
        self._reserved = _libc.mmap(None, self._reserved_bytes, _PROT_NONE, _MAP_RESERVED, -1, 0)
        self.base = 0
        if self._reserved == _MAP_FAILED:
            return
        base = round_up(self._reserved, border_bytes)
        if _libc.mmap(base, length_bytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd, 0) == base:
            self.base = base

    def close(self) -> None:
        if self._reserved != _MAP_FAILED:
            _libc.munmap(self._reserved, self._reserved_bytes)
            self._reserved = _MAP_FAILED


def private_view(fd: int, size_bytes: int) -> memoryview:
    """Return a private mapping of the descriptor for reading. A writer gets its own copy of a page.

    The mapping is aligned to huge pages: then those of the file are mapped whole and not by 4096 bytes, which takes as
    long as summing the bytes. Raises OSError.
    """
    border_bytes = max(HUGE_PAGE_BYTES, os.fstatvfs(fd).f_bsize)
    reserved_bytes = round_up(size_bytes, border_bytes) + border_bytes
    whole = mmap.mmap(-1, reserved_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NO_RESERVE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    base = round_up(start, border_bytes)
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_NO_RESERVE
    if _libc.mmap(base, size_bytes, _PROT_READ_WRITE, flags, fd, 0) != base:
        number = ctypes.get_errno()
        raise OSError(number, f"{size_bytes} bytes cannot be mapped: {os.strerror(number)}")
    return memoryview(whole)[base - start : base - start + size_bytes]


def _comes_in_huge_pages(base: int) -> bool:
    """Return True if the first page is part of a huge page: touching it makes the middle of that present too."""
    if _libc.madvise(base, PAGE_BYTES, _MADV_POPULATE_WRITE):
        return False
    middle = (base + HUGE_PAGE_BYTES // 2) // PAGE_BYTES
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        entry = os.pread(pagemap, _PAGEMAP_ENTRY_BYTES, middle * _PAGEMAP_ENTRY_BYTES)
    except OSError:
        return False
    finally:
        os.close(pagemap)
    return len(entry) == _PAGEMAP_ENTRY_BYTES and entry[-1] & 0x80 != 0  # the highest bit: present


# ---- threads --------------------------------------------------------------------------------------------------------


def in_threads(copy: Copy, spans: Iterable[Span], progress: Progress, most: int = MAX_THREADS) -> None:
    """Copy all spans, piece by piece, in as many threads as are useful. Raises the first error of a copy."""

    def work(take: Callable[[], Span | None], tell: Progress) -> None:
        while (piece := take()) is not None:
            copy(*piece)
            tell(piece[2])

    items = pieces(spans)
    if sum([piece[2] for piece in items]) < PIECE_BYTES:  # threads would get in one another's way
        most = 1
    share_out(work, items, progress, most)


def ignore(_copied_bytes: int) -> None:
    """Ignore progress."""


def give_back_heap() -> None:
    """Trim the heap, where small storages are: glibc keeps freed memory. Other C libraries have no such call."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
