"""A shadow of a state's video memory: copied within the GPU in milliseconds, and copied to the host while the training
continues.

Owns that memory. It is the driver's own: PyTorch's allocator does not know it, so it splits none of the job's blocks,
and is in no graph's pool. It is allocated only if the GPU has much more free memory than it needs, and freed as soon as
it was copied to the host. If the job uses so much memory meanwhile that little is left, the copying ends at once with
`CopyStopped`: then there is no snapshot, and the next one is taken without a shadow.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from _thread import allocate_lock
from functools import partial
from time import monotonic

from ....errors import HegmError
from ... import copying, pinned_buffers
from ...copying import PAGE_BYTES, round_up
from ...crew import EarlyWork
from ...cuda_driver import OverlappingCopies
from ...notes import note
from ...staging import Ring, loads
from . import checksums

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ...copying import Copy, Span
    from .tensors import Raw

#: `off` has the training wait until all is fetched.
SWITCH = "HEGM_SNAPSHOT_SHADOW"
# This share of the GPU's memory stays free for the job. If less than half of it is left, the shadow is abandoned.
SHARE_LEFT_FREE = 0.05
# Each copy has the interpreter for a moment, which the training needs: more threads would be quicker, and slow it down.
THREADS = 4
# Pieces in host memory up to this size in all are copied within it, which takes 6 ms at the most.
MAX_HOST_BYTES = 64 << 20
# PyTorch adds up so many in one call: 1 GiB.
_PAGES_AT_ONCE = 1 << 18
_WORD_BYTES = 8


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


class _Words:
    """GPU memory that PyTorch can use as a tensor of 64-bit words, and does not own."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i8", "data": data, "strides": None, "version": 2}


class _Shadow:
    """On one GPU: the pieces, each from a page on, and then the sum of each page."""

    def __init__(self, driver: OverlappingCopies, where: str, address: int, pages: int) -> None:
        self.context = driver.context()
        self.where = where
        self.address = address
        self.pages = pages
        self.spans: list[Span] = []
        #: The stream of its copies and sums, until these have ended; 0 without.
        self.stream = 0
        #: Whether the GPU adds up.
        self.has_sums = False

    def storing(self, sums: memoryview, found: dict[int, int], write: Copy) -> Copy:
        """Return a copy function that also stores each part's checksum, from the sums of the pages."""
        words = {
            place + start: (address + start - self.address) // PAGE_BYTES * _WORD_BYTES
            for address, place, size_bytes in self.spans
            for start in range(0, size_bytes, copying.PIECE_BYTES)
        }

        def copy(host: int, place: int, size_bytes: int) -> None:
            first = words[place]
            of_pages = sums[first : first + size_bytes // PAGE_BYTES * _WORD_BYTES]
            found[place] = checksums.sum_with(of_pages, host, size_bytes)
            write(host, place, size_bytes)

        return copy


#: The size of the last shadow in each context.
_last_sizes: dict[int | None, int] = {}
#: Address and size by context, of memory for the next shadows.
_ahead: EarlyWork | None = None


def prepare() -> None:
    """Start a thread that allocates as much as the last shadows took. Raises nothing."""
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
    """Allocate in each context, as far as its GPU has memory. Raises HegmError if there is no driver."""
    driver = OverlappingCopies()
    taken: dict[int | None, tuple[int, int]] = {}
    for context, size_bytes in sizes.items():
        try:
            driver.use(context)
            address = _taken(driver, size_bytes)
        except HegmError as error:
            note(f"snapshot: no memory was allocated ahead: {error.message}")
            continue
        if address is not None:
            taken[context] = address, size_bytes
    return taken


def _taken_ahead(context: int | None, size_bytes: int) -> int | None:
    """Return the memory that was allocated for this context, if it is large enough."""
    wait_for_memory()
    taken: dict[int | None, tuple[int, int]] = {} if _ahead is None else _ahead.result or {}
    address, found_bytes = taken.get(context, (None, 0))
    if found_bytes < size_bytes:
        return None
    del taken[context]
    return address


def _taken(driver: OverlappingCopies, size_bytes: int) -> int | None:
    """Allocate in this thread's context; None if the GPU lacks memory. Raises HegmError."""
    free_bytes, total_bytes = driver.memory()
    if free_bytes - size_bytes < total_bytes * SHARE_LEFT_FREE:
        note(f"snapshot: not enough memory for a shadow of {size_bytes} bytes: {free_bytes} are free")
        return None
    try:
        return driver.take(size_bytes)
    except HegmError as error:
        note(f"snapshot: no shadow: {error.message}")
        return None


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

    def add(self, where: str, pairs: list[tuple[Raw, int]]) -> bool:
        """Begin to copy these, which are on the GPU of this thread; False if it lacks memory for them.

        Raises HegmError.
        """
        sizes = [round_up(raw[2]) for raw, _place in pairs]
        pages = sum(sizes) // PAGE_BYTES
        needed_bytes = pages * (PAGE_BYTES + _WORD_BYTES)
        context, began = self._driver.context(), monotonic()
        address = _taken_ahead(context, needed_bytes)
        if address is None:
            drop()
            address = _taken(self._driver, needed_bytes)
        if address is None:
            return False
        self._memory_s += monotonic() - began
        _last_sizes[context] = needed_bytes
        made = _Shadow(self._driver, where, address, pages)
        self._made.append(made)
        made.stream = self._driver.make_stream() or 0
        for (raw, place), size_bytes in zip(pairs, sizes):
            self._driver.begin_within(address, raw[1], raw[2], made.stream)
            made.spans.append((address, place, raw[2]))
            address += size_bytes
        return True

    def add_host(self, spans: list[Span]) -> bool:
        """Copy these, which are in host memory; False if that takes longer than writing them at once."""
        size_bytes = sum(span[2] for span in spans)
        if size_bytes > MAX_HOST_BYTES:
            return False
        memory = (ctypes.c_char * size_bytes)()
        at = ctypes.addressof(memory)
        for address, place, piece_bytes in spans:
            ctypes.memmove(at, address, piece_bytes)
            self._host.append((at, place, piece_bytes))
            at += piece_bytes
        self._host_memory.append(memory)
        return True

    def wait(self) -> None:
        """Wait for the copies, then have each GPU add up. Raises HegmError."""
        began = monotonic()
        for made in self._made:
            with self._driver.within(made.context):
                self._driver.wait(made.stream)
                _add_up(made)
        note(f"snapshot: waited {self._memory_s:.4f} s for memory, {monotonic() - began:.4f} s for the shadow's copy")

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
            summing = checksums.summing(write, found)
            copying.in_threads(summing, self._host, copying.ignore, THREADS)
            while self._made:
                made = self._made[-1]
                self._driver.use(made.context)
                sums = self._sums_of(made)
                copy = summing if sums is None else made.storing(sums, found, write)

                def move(host: int, place: int, size_bytes: int, copy: Copy = copy) -> None:
                    if _ending.has_come or is_over():
                        raise CopyStopped
                    copy(host, place, size_bytes)

                with Ring(self._driver, THREADS) as ring:
                    ring.out(loads(made.spans), move, self._look)
                self._give_back()

    def _sums_of(self, made: _Shadow) -> memoryview | None:
        """Return the sum of each page, once the GPU has them; None if it cannot add up. Raises HegmError."""
        if not made.has_sums:
            return None
        sums = (ctypes.c_char * (made.pages * _WORD_BYTES))()
        end = made.address + made.pages * PAGE_BYTES
        self._driver.begin_out(ctypes.addressof(sums), end, len(sums), made.stream)
        self._driver.wait(made.stream)
        return memoryview(sums).cast("B")

    def _look(self, _so_far_bytes: int) -> None:
        """End it where the job needs the memory."""
        global _was_squeezed  # noqa: PLW0603 - one process
        free_bytes, total_bytes = self._driver.memory()
        if free_bytes < total_bytes * SHARE_LEFT_FREE / 2:
            note(f"snapshot: the shadow is given up, {free_bytes} bytes are free")
            _was_squeezed = True
            raise CopyStopped

    def _give_back(self) -> None:
        made = self._made.pop()
        try:
            if made.stream:
                with self._driver.within(made.context):
                    self._driver.wait(made.stream)
                    self._driver.end_stream(made.stream)
        except HegmError as error:
            note(f"snapshot: the stream of a shadow failed: {error.message}")
        _freed(self._driver, made.context, made.address)

    def close(self) -> None:
        """Give all of it back that is not fetched. Closing twice is fine."""
        self._host_memory.clear()
        while self._made:
            self._give_back()


def _add_up(made: _Shadow) -> None:
    """Have the GPU add up all pages, and do not wait for it. Without sums, the processor adds up."""
    torch: Any = sys.modules["torch"]
    sums = made.address + made.pages * PAGE_BYTES
    try:
        stream = torch.cuda.ExternalStream(made.stream, device=made.where)
        with torch.cuda.stream(stream), torch.inference_mode():
            for first in range(0, made.pages, _PAGES_AT_ONCE):
                count = min(_PAGES_AT_ONCE, made.pages - first)
                words = _Words(made.address + first * PAGE_BYTES, (count, PAGE_BYTES // _WORD_BYTES))
                added = torch.as_tensor(_Words(sums + first * _WORD_BYTES, (count,)), device=made.where)
                torch.sum(torch.as_tensor(words, device=made.where), dim=1, out=added)
        made.has_sums = True
    except Exception as error:  # noqa: BLE001 - of PyTorch or CUDA
        note(f"the GPU does not add up, the processor does: {error!r}")
