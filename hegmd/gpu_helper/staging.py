"""Copies between GPU memory and the host pool through a small ring of pinned memory.

Pinning a whole pool costs about as much as copying it: 1.1 s for 32 GiB with any number of threads, 0.6 s to unpin, and
the driver's restore takes twice as long meanwhile. So only a ring of slots is pinned, 384 MiB in all. The copy engine
fills one slot while threads empty others into the pool, or the other way round. Two H200 reached 53 GB/s in each
direction of the link's 55.4. The pool may use small or huge pages. A segment that was pinned in advance needs no ring
(`host_memory`): the copy engine writes and reads it.

The GPU memory is a process's storages, or a staging copy on the same GPU. With a staging copy the process waits only
for a copy within its GPU, and the copy over the link overlaps the driver's checkpoint (`migration/carriers/host`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Protocol

from hegmd.errors import BAD_REQUEST, HegmError
from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.address_space import VideoSpace
from hegmd.gpu_helper.allocations import IN, OUT, CopyResult, MemoryRange
from hegmd.gpu_helper.copying import chunks
from hegmd.gpu_helper.host_memory import Segment, populate
from hegmd.gpu_helper.preallocation import settle
from hegmd.system.thread_pool import share_out

# Reporting every slot would cost a fifth of the speed.
_TOLD_BYTES = 1 << 30


class StagingSizes(NamedTuple):
    """The amount of pinned memory and its division. A benchmark tries other values."""

    #: Each copies about 3 GB/s while an engine writes to the same memory: 32 GiB were offloaded during a checkpoint
    #: in 0.69 s with 24, in 0.87 s with 16.
    most_strands: int = 24
    slots_a_strand: int = 2
    #: Smaller slots need more calls, larger ones leave the caches (32 to 50 GB/s were measured). For the
    #: same reason a slot is filled by one call: calls of 512 KiB, which stay in a core's cache, took twice as long.
    slot_bytes: int = 8 << 20
    #: Inwards, threads wait for the interpreter at each call. Copies onto two GPUs at once reached 17 GB/s each with 12
    #: threads and 4 MiB, 29 with 12 and 8 MiB, 33 with 8 and 8 MiB; one alone reaches 46 to 52 with all of these.
    most_inward_strands: int = 8
    #: The bytes that a thread copies into a slot at once. Inwards that is too little to write past the cache (`link`):
    #: the copy engine reads a slot faster while it is in the cache.
    most_inward_bytes: int = (8 << 20) - 4096

    @property
    def strands(self) -> int:
        """Return how many threads copy outwards on this machine. The ring has slots for as many."""
        return max(1, min(self.most_strands, len(os.sched_getaffinity(0))))

    @property
    def inward_strands(self) -> int:
        """Return how many of them copy inwards."""
        return min(self.strands, self.most_inward_strands)

    @property
    def streams(self) -> int:
        return self.strands * self.slots_a_strand

    def load_bytes(self, direction: str) -> int:
        """Return the most bytes that a slot gets at once in that direction."""
        return self.slot_bytes if direction == OUT else min(self.slot_bytes, self.most_inward_bytes)

    @property
    def ring_bytes(self) -> int:
        return self.streams * self.slot_bytes


PACE = StagingSizes()
#: For a segment that is pinned itself: two threads, which only queue copies and wait. The driver's own copies queue
#: behind these: with 32 MiB its restores took 1.09 s beside a copy of 40 GiB, with 8 MiB 0.99 s.
PINNED_PACE = StagingSizes(2, 2, 8 << 20, 2, 8 << 20)


class Ring:
    """Pinned memory in slots, for one copy at a time, usable by all GPUs."""

    def __init__(self, context: Any, pace: StagingSizes) -> None:
        """Raises CudaError or OSError; then nothing is held."""
        self._context = context
        self.pace = pace
        self._map = _kept_or_new(pace.ring_bytes)
        self._anchor: Any = ctypes.c_char.from_buffer(self._map)
        self._start = ctypes.addressof(self._anchor)
        cuda.use(context)
        try:
            cuda.register(self._start, pace.ring_bytes)
        except BaseException:
            self._unmap()
            raise

    def slots(self, strand: int) -> list[int]:
        """Return the offsets of that thread's slots."""
        first = strand * self.pace.slots_a_strand
        return [self._start + slot * self.pace.slot_bytes for slot in range(first, first + self.pace.slots_a_strand)]

    def close(self) -> None:
        cuda.use(self._context)
        try:
            cuda.unregister(self._start)
        finally:
            self._unmap()

    def _unmap(self) -> None:
        self._anchor = None  # a map with exported pointers cannot be closed
        _KEPT.append(self._map)


#: Memory of closed rings, for reuse: populating its pages takes 0.1 s.
_KEPT: list[mmap.mmap] = []


def make_ring_memory() -> None:
    """Prepare memory for the next ring with its pages present. Needs no context and overlaps creating one."""
    _KEPT.append(_kept_or_new(PACE.ring_bytes))


def _kept_or_new(size_bytes: int) -> mmap.mmap:
    """Return memory for a ring with its pages present. list.pop is atomic, so threads need no lock."""
    while _KEPT:
        with suppress(IndexError):
            kept = _KEPT.pop()
            if len(kept) == size_bytes:
                return kept
            kept.close()
    made = mmap.mmap(-1, size_bytes)
    made.madvise(mmap.MADV_HUGEPAGE)
    anchor = ctypes.c_char.from_buffer(made)
    populate(ctypes.addressof(anchor), size_bytes)
    return made


class HostSpace:
    """A pool segment as one flat range of addresses, and the ring for its copies, unless it is pinned itself."""

    def __init__(self, context: Any, memory: Segment, pace: StagingSizes = PACE) -> None:
        """The memory is closed with it. Raises CudaError or OSError; then the memory stays the caller's."""
        self.memory = memory
        self.pinning = memory.pinning
        self.pace = pace if self.pinning is None else PINNED_PACE
        self._ring = Ring(context, pace) if self.pinning is None else None

    @property
    def trial(self) -> int:
        """Return the address of some pinned bytes without content."""
        return self.slots(0)[0] if self.pinning is None else self.pinning.trial

    def slots(self, strand: int) -> list[int]:
        """Return the addresses of that thread's slots. Those of a pinned segment have none: they are its places."""
        return [0] * self.pace.slots_a_strand if self._ring is None else self._ring.slots(strand)

    def cut(self, places: Iterable[MemoryRange]) -> Iterable[MemoryRange]:
        """Return the places, cut where one copy may not go on."""
        return places if self.pinning is None else _cut_at(places, self.pinning.piece_bytes)

    def close_ring(self) -> None:
        """Release the ring. Closing twice is fine."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def close(self) -> None:
        try:
            self.close_ring()
        finally:
            self.memory.close()


def _cut_at(places: Iterable[MemoryRange], piece_bytes: int) -> Iterator[MemoryRange]:
    """Return the places, cut at multiples of a size in the segment."""
    for place in places:
        done_bytes = 0
        while done_bytes < place.size_bytes:
            at = place.at + done_bytes
            size_bytes = min(piece_bytes - at % piece_bytes, place.size_bytes - done_bytes)
            yield MemoryRange(place.handle, place.offset + done_bytes, size_bytes, at)
            done_bytes += size_bytes


class GpuEnd(Protocol):
    """The GPU memory of a copy: allocations of a process, or reserved memory."""

    open_s: float

    def address(self, place: MemoryRange) -> int: ...
    def close(self) -> None: ...


class ReservedGpuMemory:
    open_s = 0.0

    def __init__(self, space: VideoSpace) -> None:
        self._space = space

    def address(self, place: MemoryRange) -> int:
        return self._space.address(place.offset, place.size_bytes)

    def close(self) -> None:
        """Does nothing: the session closes the space."""


class SlotPart(NamedTuple):
    """A place, and its offset in the slot that it uses."""

    place: MemoryRange
    within: int


def loads(places: Iterable[MemoryRange], slot_bytes: int) -> Iterator[list[SlotPart]]:
    """Cut and group the places, in order, so that each list fills one slot as far as possible."""
    load: list[SlotPart] = []
    filled_bytes = 0
    for piece in chunks(places, slot_bytes):
        if filled_bytes + piece.size_bytes > slot_bytes:
            yield load
            load, filled_bytes = [], 0
        load.append(SlotPart(piece, filled_bytes))
        filled_bytes += piece.size_bytes
    if load:
        yield load


class StagedCopy:
    """A copy of many places in one direction, between GPU memory and the pool. Used once."""

    def __init__(self, context: Any, host: HostSpace, direction: str, gpu_end: GpuEnd, streams: Sequence[Any]) -> None:
        """`context` and the streams, one for each slot, are those of the memory's GPU. The copy closes that memory."""
        if direction not in {OUT, IN}:
            raise HegmError(BAD_REQUEST, f"{direction!r} is not a direction of a copy", "use `out` or `in`")
        self._context = context
        self._host = host
        self._direction = direction
        self._streams = streams
        self._gpu_end = gpu_end
        self._guard = threading.Lock()
        self._left: Iterator[list[SlotPart]] = iter(())
        self._done_bytes = 0
        self._failed = False

    def run(self, places: Iterable[MemoryRange], tell: Callable[[int], None]) -> CopyResult:
        """Copy all places. `tell` receives the bytes done. Raises CudaError; then nothing stays open or queued."""
        pace = self._host.pace
        strands = pace.strands if self._direction == OUT else pace.inward_strands
        self._left = loads(self._host.cut(places), pace.load_bytes(self._direction))
        with ExitStack() as undo:
            undo.callback(self._gpu_end.close)
            undo.callback(settle, self._streams)
            started = time.monotonic()
            share_out(range(strands), lambda: lambda strand: self._work(strand, tell), threads=strands, name="staging")
            tell(self._done_bytes)
            copy_s = time.monotonic() - started
            started = time.monotonic()
            undo.close()
        return CopyResult(self._done_bytes, self._gpu_end.open_s, copy_s, time.monotonic() - started)

    def _work(self, strand: int, tell: Callable[[int], None]) -> None:
        """Copy the loads in the slots of this thread in turn: one is copied while the other is moved on."""
        cuda.use(self._context)
        addresses = self._host.slots(strand)
        streams = self._streams[strand * len(addresses) : (strand + 1) * len(addresses)]
        slots = [_Slot(address, stream) for address, stream in zip(addresses, streams, strict=True)]
        try:
            turn = 0
            while (load := self._next()) is not None:
                self._finish(slots[turn], tell)
                self._begin(slots[turn], load)
                turn = (turn + 1) % len(slots)
            for slot in (*slots[turn:], *slots[:turn]):
                self._finish(slot, tell)
        except BaseException:
            self._failed = True
            raise

    def _next(self) -> list[SlotPart] | None:
        with self._guard:
            return None if self._failed else next(self._left, None)

    def _begin(self, slot: _Slot, load: list[SlotPart]) -> None:
        slot.load = load
        if self._direction == IN:
            self._move(slot, load)
        for part in load:
            there, here = self._gpu_end.address(part.place), self._here(slot, part)
            if self._direction == OUT:
                cuda.copy_async(here, None, there, self._context, part.place.size_bytes, slot.stream)
            else:
                cuda.copy_async(there, self._context, here, None, part.place.size_bytes, slot.stream)

    def _finish(self, slot: _Slot, tell: Callable[[int], None]) -> None:
        """Wait for the work of the slot, and move its bytes to their target."""
        if not slot.load:
            return
        cuda.synchronize(slot.stream)
        if self._direction == OUT:
            self._move(slot, slot.load)
        size_bytes = sum(part.place.size_bytes for part in slot.load)
        slot.load = []
        with self._guard:
            before_bytes, self._done_bytes = self._done_bytes, self._done_bytes + size_bytes
            if self._done_bytes // _TOLD_BYTES > before_bytes // _TOLD_BYTES:
                tell(self._done_bytes)

    def _here(self, slot: _Slot, part: SlotPart) -> int:
        """Return where the copy engine writes or reads that part."""
        if self._host.pinning is None:
            return slot.address + part.within
        return self._host.memory.address(part.place.at, part.place.size_bytes)

    def _move(self, slot: _Slot, load: list[SlotPart]) -> None:
        """Copy between the slot and the pool without the interpreter lock; not if the segment is pinned itself."""
        if self._host.pinning is not None:
            return
        for part in load:
            pool = self._host.memory.address(part.place.at, part.place.size_bytes)
            here = slot.address + part.within
            if self._direction == OUT:
                ctypes.memmove(pool, here, part.place.size_bytes)
            else:
                ctypes.memmove(here, pool, part.place.size_bytes)


class _Slot:
    """A part of the ring, with its stream and its current load."""

    def __init__(self, address: int, stream: Any) -> None:
        self.address = address
        self.stream = stream
        self.load: list[SlotPart] = []
