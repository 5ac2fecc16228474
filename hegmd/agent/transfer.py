"""Storages' bytes out of the process into a descriptor, and back: the worker's own carrier.

Owns the layout in the descriptor and the copying; whether the moment is right is `orders`' business. Everything is
copied before anything is freed, and everything is allocated before anything is copied back, so that a failure half way
leaves the process as it was.

The layout: a header, a table of places, then the bytes of each storage from a page border on. The nonce in it is drawn
for each evacuation: a descriptor with other bytes is refused by it, whatever its size.

Copies run in several threads through the C library (`pread` and `pwrite` for an ordinary memfd, which spares a page
fault a page; a mapping for one of huge pages, which knows no `pwrite`), because ctypes lets go of the interpreter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from _thread import allocate_lock, start_new_thread

from ..errors import REFUSED, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Copy = Callable[[int, int, int], None]

MAGIC = b"HEGMWRK1"
PAGE_BYTES = 4096
# Small enough to keep several threads busy to the end, large enough for the call not to count.
PIECE_BYTES = 8 * 1024 * 1024
MOST_THREADS = 8
_HEADER = struct.Struct("<8s16sQQ")
_PLACE = struct.Struct("<QQ")
_NONCE_BYTES = 16
_PROGRESS_EVERY_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.argtypes = _libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_libc.pread.restype = _libc.pwrite.restype = ctypes.c_ssize_t


def room_bytes(sizes: list[int]) -> int:
    """How large a descriptor has to be for storages of those sizes."""
    places = _places_of(sizes)
    return _up(places[-1] + sizes[-1]) if sizes else PAGE_BYTES


class Evacuated:
    """Storages whose memory is out of the process, and the descriptor that has it."""

    def __init__(self, fd: int, storages: list[Any], sizes: list[int], nonce: bytes) -> None:
        self.fd = fd
        self.size_bytes = sum(sizes)
        self.room_bytes = room_bytes(sizes)
        self._storages = storages
        self._sizes = sizes
        self._nonce = nonce

    def __len__(self) -> int:
        return len(self._storages)

    def bring_back(self, fd: int, progress: Callable[[int], None]) -> None:
        """Make the storages again from that descriptor. Raises HegmError, and leaves them out, when that cannot be."""
        _check_header(fd, self._nonce, self._sizes)
        made: list[Any] = []
        try:
            for storage, size_bytes in zip(self._storages, self._sizes):
                made.append(storage)
                storage.resize_(size_bytes)
            _copy_all(fd, self._storages, self._sizes, inwards=True, progress=progress)
        except BaseException as error:
            for storage in made:
                storage.resize_(0)
            _give_back_heap()
            if isinstance(error, HegmError):
                raise
            raise HegmError(
                REFUSED,
                f"{self.size_bytes} bytes could not be brought back into process {os.getpid()}: {error}",
                "free memory on the node, then ask again; the bytes are still held",
            ) from error

    def close(self) -> None:
        """Close the descriptor; twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def evacuate(fd: int, storages: list[Any], sizes: list[int], progress: Callable[[int], None]) -> Evacuated:
    """Copy the storages into the descriptor and free them; the descriptor then belongs to what is returned.

    Raises HegmError, with nothing changed and the descriptor still the caller's.
    """
    needed_bytes = room_bytes(sizes)
    given_bytes = os.fstat(fd).st_size
    if given_bytes < needed_bytes:
        raise HegmError(
            REFUSED,
            f"process {os.getpid()} has {needed_bytes} bytes to put out and was given room for {given_bytes}",
            "ask for a survey while the process is parked, and give it that much",
            {"needed_bytes": needed_bytes, "given_bytes": given_bytes},
        )
    nonce = os.urandom(_NONCE_BYTES)
    try:
        _write_whole(fd, _header(nonce, sizes), 0)
        _copy_all(fd, storages, sizes, inwards=False, progress=progress)
    except OSError as error:
        raise HegmError(
            REFUSED,
            f"{sum(sizes)} bytes could not be copied out of process {os.getpid()}: {error}",
            "the process still has them all; see whether the node is out of memory",
        ) from error
    evacuated = Evacuated(fd, storages, sizes, nonce)  # made first: nothing may fail once a storage is freed
    for storage in storages:
        storage.resize_(0)
    _give_back_heap()
    return evacuated


# ---- layout ---------------------------------------------------------------------------------------------------------


def _up(size_bytes: int) -> int:
    return (size_bytes + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def _places_of(sizes: list[int]) -> list[int]:
    """Where each storage begins: large ones on a page border, small ones one after the other on cache lines."""
    at = _up(_HEADER.size + _PLACE.size * len(sizes))
    places: list[int] = []
    for size_bytes in sizes:
        border = PAGE_BYTES if size_bytes >= PAGE_BYTES else 64
        at = (at + border - 1) // border * border
        places.append(at)
        at += size_bytes
    return places


def _header(nonce: bytes, sizes: list[int]) -> bytes:
    head = _HEADER.pack(MAGIC, nonce, len(sizes), sum(sizes))
    return head + b"".join(_PLACE.pack(*place) for place in zip(_places_of(sizes), sizes))


def _check_header(fd: int, nonce: bytes, sizes: list[int]) -> None:
    expected = _header(nonce, sizes)
    if _read_whole(fd, len(expected)) != expected or os.fstat(fd).st_size < room_bytes(sizes):
        raise HegmError(
            REFUSED,
            f"the descriptor does not hold the {sum(sizes)} bytes that process {os.getpid()} put out",
            "give it the descriptor of its own evacuation; the process waits with its bytes out",
        )


# ---- copying --------------------------------------------------------------------------------------------------------


def _copy_all(
    fd: int, storages: list[Any], sizes: list[int], *, inwards: bool, progress: Callable[[int], None]
) -> None:
    addresses = [storage.data_ptr() for storage in storages]
    pieces = _pieces(addresses, _places_of(sizes), sizes)
    if os.fstatvfs(fd).f_bsize > PAGE_BYTES:
        with _Mapping(fd, room_bytes(sizes)) as base:
            _in_threads(_mapped(base, inwards=inwards), pieces, progress)
    else:
        _in_threads(_called(fd, inwards=inwards), pieces, progress)


def _pieces(addresses: list[int], places: list[int], sizes: list[int]) -> list[tuple[int, int, int]]:
    """(address, place, size) of everything that is to be copied, in pieces for several threads."""
    return [
        (address + start, place + start, min(PIECE_BYTES, size_bytes - start))
        for address, place, size_bytes in zip(addresses, places, sizes)
        for start in range(0, size_bytes, PIECE_BYTES)
    ]


def _called(fd: int, *, inwards: bool) -> Copy:
    call = _libc.pread if inwards else _libc.pwrite

    def copy(address: int, place: int, size_bytes: int) -> None:
        while size_bytes:
            done = call(fd, address, size_bytes, place)
            if done <= 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number) if done < 0 else "the descriptor ends too early")
            address, place, size_bytes = address + done, place + done, size_bytes - done

    return copy


def _mapped(base: int, *, inwards: bool) -> Copy:
    def copy(address: int, place: int, size_bytes: int) -> None:
        if inwards:
            ctypes.memmove(address, base + place, size_bytes)
        else:
            ctypes.memmove(base + place, address, size_bytes)

    return copy


class _Mapping:
    """The descriptor in memory, for as long as the context lasts; gives the address."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        border = os.fstatvfs(fd).f_bsize  # a mapping of huge pages ends on one
        self._map = mmap.mmap(fd, (size_bytes + border - 1) // border * border)

    def __enter__(self) -> int:
        self._view: Any = ctypes.c_char.from_buffer(self._map)
        return ctypes.addressof(self._view)

    def __exit__(self, *_exc: object) -> None:
        del self._view
        self._map.close()


class _Crew:
    """Threads that take pieces until there are none left; what fails in one of them ends them all."""

    def __init__(self, copy: Copy, pieces: list[tuple[int, int, int]]) -> None:
        self._copy = copy
        self._left = iter(pieces)
        self._lock = allocate_lock()
        self._at_work = 0
        self.copied_bytes = 0
        self.ended = allocate_lock()
        self.failure: BaseException | None = None

    def start(self, threads: int) -> None:
        self.ended.acquire()
        self._at_work = threads
        for _ in range(threads):
            start_new_thread(self._work, ())

    def _work(self) -> None:
        try:
            while self.failure is None:
                with self._lock:
                    piece = next(self._left, None)
                if piece is None:
                    break
                self._copy(*piece)
                with self._lock:
                    self.copied_bytes += piece[2]
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits for this one
            self.failure = error
        with self._lock:
            self._at_work -= 1
            if self._at_work == 0:
                self.ended.release()


def _in_threads(copy: Copy, pieces: list[tuple[int, int, int]], progress: Callable[[int], None]) -> None:
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), len(pieces) // 2))
    crew = _Crew(copy, pieces)
    crew.start(threads)
    while not crew.ended.acquire(timeout=_PROGRESS_EVERY_S):
        try:
            progress(crew.copied_bytes)
        except BaseException as error:  # noqa: BLE001 - raised below, once nobody copies any more
            crew.failure = error
    if crew.failure is not None:
        raise crew.failure


def _write_whole(fd: int, data: bytes, place: int) -> None:
    if os.fstatvfs(fd).f_bsize > PAGE_BYTES:
        with _Mapping(fd, len(data)) as base:
            ctypes.memmove(base + place, data, len(data))
    elif os.pwrite(fd, data, place) != len(data):
        raise OSError("the descriptor is full")


def _read_whole(fd: int, size_bytes: int) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < size_bytes:
        part = os.pread(fd, size_bytes - at, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _give_back_heap() -> None:
    """Small storages lie in the heap, which glibc keeps unless told otherwise; other C libraries have no such call."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
