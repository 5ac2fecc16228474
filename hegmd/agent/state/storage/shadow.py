"""A shadow of a state's video memory: copied within the GPU in milliseconds, and copied to the host while the training
continues.

Owns that memory. It is the driver's own: PyTorch's allocator does not know it, so it splits none of the job's blocks,
and is in no graph's pool. A part of the GPU's memory stays free for the job, which may grow: a twentieth if all of the
state fits into the rest, otherwise half of what is free. Then a shadow has the smallest pieces, because the largest are
the quickest to copy to the host while the training waits. The memory is freed as soon as it was copied to the host. If
the job leaves little memory free during the copy, the copy ends at once with `CopyStopped`: then there is no snapshot,
and the next one is taken without a shadow.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from _thread import allocate_lock
from functools import partial
from time import monotonic

from ....errors import HegmError
from ... import copying, pinned_buffers
from ...copying import PAGE_BYTES, PIECE_BYTES, round_up
from ...crew import EarlyWork
from ...cuda_driver import OverlappingCopies
from ...notes import note
from ...staging import Ring, loads
from . import checksums

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from ...copying import Copy, Span

    class HasMemory(Protocol):
        def memory(self) -> tuple[int, int]: ...


#: `off` has the training wait until all is fetched.
SWITCH = "HEGM_SNAPSHOT_SHADOW"
# At least this share of the GPU's memory stays free for the job. If less than half of it is left, the shadow is
# abandoned.
SHARE_LEFT_FREE = 0.05
# Each copy has the interpreter for a moment, which the training needs: more threads would be quicker, and slow it down.
THREADS = 4
# Pieces in host memory up to this size in all are copied within it, which takes 6 ms at the most.
MAX_HOST_BYTES = 64 << 20
# A page and its sum; and as much for a part, so that a shadow with room for one has one.
_PAGE_AND_SUM_BYTES = PAGE_BYTES + checksums.WORD_BYTES
_PART_AND_SUMS_BYTES = PIECE_BYTES // PAGE_BYTES * _PAGE_AND_SUM_BYTES


class CopyStopped(Exception):
    """The copying was stopped: the snapshot is no longer needed, or the job needs the memory."""


#: Whether the job needed the memory of the last one.
_was_squeezed = False


def is_wanted() -> bool:
    """Return True if the next snapshot may have a shadow."""
    global _was_squeezed
    was_squeezed, _was_squeezed = _was_squeezed, False
    return not was_squeezed and os.environ.get(SWITCH, "") not in ("off", "0")


class _InterpreterExit:
    """The end of the interpreter, after which CUDA must not be used: running copies end before it."""

    def __init__(self) -> None:
        self.has_come = False
        self.under_way = allocate_lock()
        self._is_awaited = False

    def expect(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            atexit.register(self._come)
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child, which lacks the threads that would release the locks."""
        global _ahead
        self.under_way, _ahead = allocate_lock(), None

    def _come(self) -> None:
        self.has_come = True
        with self.under_way:
            pass


_ending = _InterpreterExit()


class _Shadow:
    """On one GPU: copies of spans, each from a page on, and then the sum of each page."""

    def __init__(self, driver: OverlappingCopies, where: str, address: int) -> None:
        self.context = driver.context()
        self.where = where
        self.address = address
        self.spans: list[Span] = []
        #: The stream of its copies and sums, until these have ended.
        self.stream = usable_stream(driver)

    def begin_copy(self, driver: OverlappingCopies, spans: list[Span]) -> None:
        at = self.address
        for video, place, size_bytes in spans:
            driver.begin_within(at, video, size_bytes, self.stream)
            self.spans.append((at, place, size_bytes))
            at += round_up(size_bytes)
        self._sums_at = at

    def begin_sums(self) -> None:
        self.sums = checksums.GpuSums(self.spans, is_paged=True)
        self.sums.begin(self.where, self.stream, self._sums_at)


def usable_stream(driver: OverlappingCopies) -> int:
    """Return a new stream, or 0: then the default stream does the work."""
    try:
        return driver.make_stream() or 0
    except HegmError as error:
        note(f"the default stream copies: {error.message}")
        return 0


#: How much memory a shadow of the last state would have taken in each context.
_last_sizes: dict[int | None, int] = {}
#: Address and size by context, of memory for the next shadows.
_ahead: EarlyWork | None = None


def prepare() -> None:
    """Start a thread that allocates memory for shadows of the last state, as far as the GPU has it. Raises nothing."""
    global _ahead  # noqa: PLW0603 - one process
    if _ahead is not None or _was_squeezed or not _last_sizes:
        return
    _ending.expect()
    ahead = EarlyWork(partial(_taken_in_all, dict(_last_sizes)), "snapshot: no memory was allocated ahead")
    if ahead.start():
        _ahead = ahead


def wait_for_memory() -> None:
    if _ahead is not None:
        _ahead.wait()


def drop() -> None:
    """Free what was allocated and not used."""
    global _ahead
    wait_for_memory()
    ahead, _ahead = _ahead, None
    if ahead is None or not ahead.result:
        return
    driver = OverlappingCopies()
    for context, (address, _size_bytes) in ahead.result.items():
        _freed(driver, context, address)


def _taken_in_all(sizes: dict[int | None, int]) -> dict[int | None, tuple[int, int]]:
    """Allocate in each context. Raises HegmError if there is no driver."""
    driver = OverlappingCopies()
    taken: dict[int | None, tuple[int, int]] = {}
    for context, wanted_bytes in sizes.items():
        try:
            driver.use(context)
            found = _taken(driver, wanted_bytes)
        except HegmError as error:
            note(f"snapshot: no memory was allocated ahead: {error.message}")
            continue
        if found is not None:
            taken[context] = found
    return taken


def _taken_for(driver: OverlappingCopies, wanted_bytes: int) -> tuple[int, int] | None:
    """Return address and size of memory in this thread's context, of what was allocated ahead if the GPU has no more.

    None if it lacks memory. Raises HegmError.
    """
    context = driver.context()
    _last_sizes[context] = wanted_bytes
    wait_for_memory()
    ahead: dict[int | None, tuple[int, int]] = {} if _ahead is None else _ahead.result or {}
    found = ahead.pop(context, None)
    if found is not None and found[1] < fitting_bytes(driver, wanted_bytes, found[1]):
        _freed(driver, context, found[0])
        found = None
    return found or _taken(driver, wanted_bytes)


def fitting_bytes(driver: HasMemory, wanted_bytes: int, taken_bytes: int = 0) -> int:
    """Return how large a shadow may be on this thread's GPU; it has `taken_bytes` already. Raises HegmError."""
    free_bytes, total_bytes = driver.memory()
    free_bytes += taken_bytes
    room_bytes = free_bytes - int(total_bytes * SHARE_LEFT_FREE)
    if room_bytes >= wanted_bytes:
        return wanted_bytes
    return max(0, min(room_bytes, free_bytes // 2) // _PART_AND_SUMS_BYTES * _PART_AND_SUMS_BYTES)


def _is_scarce(driver: OverlappingCopies) -> bool:
    """Return True if the job has so little memory left that no shadow may keep any. Raises HegmError."""
    free_bytes, total_bytes = driver.memory()
    return free_bytes < int(total_bytes * SHARE_LEFT_FREE / 2)


def _taken(driver: OverlappingCopies, wanted_bytes: int) -> tuple[int, int] | None:
    """Allocate that much, or what the GPU has room for; address and size. None if it lacks memory. Raises HegmError."""
    size_bytes = fitting_bytes(driver, wanted_bytes)
    if size_bytes < wanted_bytes:
        note(f"snapshot: a shadow has {size_bytes} bytes of {wanted_bytes}: there is no more memory for it")
    if not size_bytes:
        return None
    try:
        address = driver.take(size_bytes)
    except HegmError as error:
        note(f"snapshot: no shadow: {error.message}")
        return None
    if _is_scarce(driver):  # another process has allocated memory at the same time
        note("snapshot: no shadow: another process needs the memory")
        _freed(driver, driver.context(), address)
        return None
    return address, size_bytes


def release(driver: OverlappingCopies, context: int | None, stream: int, address: int | None) -> None:
    """Free the memory once the work in that stream has ended, and the stream. 0 is the default stream, which stays."""
    try:
        if stream:
            with driver.within(context):
                driver.wait(stream)
                driver.end_stream(stream)
    except HegmError as error:
        note(f"snapshot: a stream failed: {error.message}")
    if address is not None:
        _freed(driver, context, address)


def _freed(driver: OverlappingCopies, context: int | None, address: int) -> None:
    try:
        with driver.within(context):
            driver.give_back(address)
    except HegmError as error:
        note(f"snapshot: memory of a shadow stays: {error.message}")


class Shadows:
    """The shadows on all GPUs, and of the host's pieces. Our threads that fetch them use no memory of the job."""

    def __init__(self, driver: OverlappingCopies) -> None:
        self._driver = driver
        self._made: list[_Shadow] = []
        self._host: list[Span] = []
        self._host_memory: list[Any] = []
        self._memory_s = 0.0

    def add(self, where: str, spans: list[Span]) -> list[Span]:
        """Begin to copy as many of these as the GPU of this thread has memory for. Return the others.

        Raises HegmError.
        """
        began = monotonic()
        pages = sum(round_up(span[2]) for span in spans) // PAGE_BYTES
        found = _taken_for(self._driver, pages * _PAGE_AND_SUM_BYTES)
        self._memory_s += monotonic() - began
        if found is None:
            return spans
        address, size_bytes = found
        made = _Shadow(self._driver, where, address)
        self._made.append(made)
        kept, left = _parted(spans, size_bytes // _PAGE_AND_SUM_BYTES)
        made.begin_copy(self._driver, kept)
        return left

    def add_host(self, spans: list[Span]) -> bool:
        """Copy these, which are in host memory; False if they are to be written at once."""
        size_bytes = sum(span[2] for span in spans)
        if not self._made or size_bytes > MAX_HOST_BYTES:
            return False
        memory = (ctypes.c_char * size_bytes)()
        at = ctypes.addressof(memory)
        for address, place, piece_bytes in spans:
            ctypes.memmove(at, address, piece_bytes)
            self._host.append((at, place, piece_bytes))
            at += piece_bytes
        self._host_memory.append(memory)
        return True

    def wait(self) -> bool:
        """Wait for the copies, then have each GPU add up. Return False if there are none. Raises HegmError."""
        began = monotonic()
        for made in self._made:
            with self._driver.within(made.context):
                self._driver.wait(made.stream)
                made.begin_sums()
        if not self._made:
            return False
        note(f"snapshot: waited {self._memory_s:.4f} s for memory, {monotonic() - began:.4f} s for the shadow's copy")
        return True

    def fetch(self, fd: int, capacity_bytes: int, found: dict[int, int], is_over: Callable[[], bool]) -> None:
        """Write them to the descriptor, and free their memory in any case, before the interpreter ends. In any thread.

        Raises CopyStopped, OSError, HegmError.
        """
        _ending.expect()
        with _ending.under_way:
            if _ending.has_come:
                self._made.clear()
                raise CopyStopped
            try:
                self._fetch(fd, capacity_bytes, found, is_over)
            finally:
                self.close()
                pinned_buffers.drop()  # prepared for this fetch, which may have failed before it took that memory

    def _fetch(self, fd: int, capacity_bytes: int, found: dict[int, int], is_over: Callable[[], bool]) -> None:
        with copying.Writing(fd, capacity_bytes) as write:
            copying.in_threads(checksums.summing(write, found), self._host, copying.ignore, THREADS)
            while self._made:
                made = self._made[-1]
                self._driver.use(made.context)
                self._driver.wait(made.stream)
                with Ring(self._driver, THREADS) as ring:
                    copy = made.sums.storing(ring, write, found)

                    def move(host: int, place: int, size_bytes: int, copy: Copy = copy) -> None:
                        if _ending.has_come or is_over():
                            raise CopyStopped
                        copy(host, place, size_bytes)

                    ring.out(loads(made.spans), move, self._look)
                self._made.pop()
                release(self._driver, made.context, made.stream, made.address)

    def _look(self, _so_far_bytes: int) -> None:
        """End it where the job needs the memory."""
        global _was_squeezed  # noqa: PLW0603 - one process
        if _is_scarce(self._driver):
            note("snapshot: the shadow is given up, because the job needs the memory")
            _was_squeezed = True
            raise CopyStopped

    def close(self) -> None:
        """Give all of it back that is not fetched. Closing twice is fine."""
        self._host_memory.clear()
        while self._made:
            made = self._made.pop()
            release(self._driver, made.context, made.stream, made.address)


def _parted(spans: list[Span], pages: int) -> tuple[list[Span], list[Span]]:
    """Return spans that fit into so many pages, each from a page on, and the others: the largest, in whole parts."""
    kept: list[Span] = []
    left: list[Span] = []
    for address, place, size_bytes in sorted(spans, key=lambda span: span[2]):
        fitting_bytes = size_bytes
        if size_bytes > pages * PAGE_BYTES:
            fitting_bytes = pages * PAGE_BYTES // PIECE_BYTES * PIECE_BYTES
        if fitting_bytes:
            kept.append((address, place, fitting_bytes))
            pages -= round_up(fitting_bytes) // PAGE_BYTES
        if fitting_bytes < size_bytes:
            left.append((address + fitting_bytes, place + fitting_bytes, size_bytes - fitting_bytes))
    return kept, left
