"""Copies between video memory and the host pool, by way of a little pinned memory that is used over and over.

Pinning the whole of a pool costs about as much as copying it: 1.1 s for 32 GiB, whatever the threads, 0.6 s to let go,
and the driver's own restore takes twice as long beside it. So only a ring of slots is pinned, 384 MiB of it; the copy
engine fills one slot while threads empty others into the pool, or the other way round. Two H200 gave 53 GB/s so, each
way, of the link's 55.4. The pool may be of any pages, in small ones or huge ones.

The video memory is a process's storages, or held beside them: then a copy within one GPU is all that a process waits
for, and the way over the link is gone while the driver has it in hand (`migration/carriers/host`).
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
from hegmd.gpu_helper.address_space import VideoSpace, outside
from hegmd.gpu_helper.allocations import IN, OUT, Done, Place
from hegmd.gpu_helper.copying import chunks
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, packed_mark
from hegmd.gpu_helper.preallocation import settle
from hegmd.system.thread_pool import share_out

_POPULATED_BYTES = 1 << 28
# Telling of every slot costs the copies a fifth of their speed.
_TOLD_BYTES = 1 << 30
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap of Python knows no name for it


class Pace(NamedTuple):
    """How much is pinned, and how it is shared out; a benchmark tries others."""

    #: Each copies at some 3 GB/s beside an engine that writes to the same memory: 32 GiB went out beside a checkpoint
    #: in 0.69 s with 24, in 0.87 s with 16.
    most_strands: int = 24
    slots_a_strand: int = 2
    #: Smaller slots cost more calls than they save, larger ones leave the caches (32 to 50 GB/s were seen). For the
    #: same reason a slot is filled by one call: calls of 512 KiB, which stay in a core's cache, took twice as long.
    slot_bytes: int = 8 << 20
    #: Inwards they wait for the interpreter at each call: 43 to 47 GB/s with 24, 46 to 51 with 16, 52 with 12.
    most_inward_strands: int = 12

    @property
    def strands(self) -> int:
        """How many threads copy outwards at once on this machine; the ring has slots for so many."""
        return max(1, min(self.most_strands, len(os.sched_getaffinity(0))))

    @property
    def inward_strands(self) -> int:
        """How many of these copy inwards at once."""
        return min(self.strands, self.most_inward_strands)

    @property
    def streams(self) -> int:
        """One for each slot."""
        return self.strands * self.slots_a_strand

    @property
    def ring_bytes(self) -> int:
        """What is pinned in all."""
        return self.streams * self.slot_bytes


PACE = Pace()


class Ring:
    """Pinned memory in slots, for one copy at a time; all GPUs may copy to it and from it."""

    def __init__(self, context: Any, pace: Pace) -> None:
        """Raises CudaError or OSError, with nothing held then."""
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
        """Where the slots of that thread begin."""
        first = strand * self.pace.slots_a_strand
        return [self._start + slot * self.pace.slot_bytes for slot in range(first, first + self.pace.slots_a_strand)]

    def close(self) -> None:
        cuda.use(self._context)
        try:
            cuda.unregister(self._start)
        finally:
            self._unmap()

    def _unmap(self) -> None:
        self._anchor = None  # a map cannot be closed while something points into it
        _KEPT.append(self._map)


#: Memory of rings that were closed, for the next: making its pages takes 0.1 s. As many as there were rings at once.
_KEPT: list[mmap.mmap] = []


def make_ring_memory(pace: Pace = PACE) -> None:
    """Have memory for the next ring with its pages present: this needs no context, and goes on beside making one."""
    _KEPT.append(_kept_or_new(pace.ring_bytes))


def _kept_or_new(size_bytes: int) -> mmap.mmap:
    """Memory for a ring, its pages present. Lists give up their last item to one thread alone."""
    while _KEPT:
        with suppress(IndexError):
            kept = _KEPT.pop()
            if len(kept) == size_bytes:
                return kept
            kept.close()
    made = mmap.mmap(-1, size_bytes)
    made.madvise(mmap.MADV_HUGEPAGE)
    anchor = ctypes.c_char.from_buffer(made)
    _populate(ctypes.addressof(anchor), size_bytes)
    return made


def _populate(at: int, size_bytes: int) -> None:
    """Have those pages and their tables, others running meanwhile. An older kernel leaves that to the first touch."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)


class HostMemory:
    """A piece of the host pool in this process's addresses, page tables made: for that no context is needed.

    The piece belongs to a descriptor that the daemon holds: what is filled stays, whatever becomes of this process.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """The descriptor stays the caller's. Raises OSError, with nothing mapped then."""
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)
        self._anchor: Any = ctypes.c_char.from_buffer(self._map)
        self._start = ctypes.addressof(self._anchor)
        try:
            self._make_page_tables()
        except BaseException:
            self.close()
            raise

    def _make_page_tables(self) -> None:
        """Here rather than one page after the other while a job stands."""

        def populate(at: int) -> None:
            _populate(self._start + at, min(_POPULATED_BYTES, self.size_bytes - at))

        share_out(
            range(0, self.size_bytes, _POPULATED_BYTES), lambda: populate, threads=PACE.strands, name="page tables"
        )

    def address(self, at: int, size_bytes: int) -> int:
        """Where that part is. Raises Bug outside."""
        if at < 0 or at + size_bytes > self.size_bytes:
            raise outside(at, size_bytes, 0, self.size_bytes)
        return self._start + at

    def mark(self, mark: Mark | None) -> None:
        """Say at its end where its bytes are; None for here. The first byte of a mark makes it one."""
        at = self.address(self.size_bytes - MARK_BYTES, MARK_BYTES)
        if mark is not None:
            written = packed_mark(mark)
            ctypes.memmove(at + 1, written[1:], MARK_BYTES - 1)
            ctypes.memmove(at, written, 1)
        else:
            ctypes.memset(at, 0, 1)

    def close(self) -> None:
        """Closing twice is fine."""
        self._anchor = None  # the map cannot be closed while something points into it
        self._map.close()


class HostSpace:
    """Such a piece as one flat range of addresses, and the ring that its bytes go through."""

    def __init__(self, context: Any, memory: HostMemory, pace: Pace = PACE) -> None:
        """The memory is closed with it. Raises CudaError or OSError; the memory is the caller's still then."""
        self.memory = memory
        self.ring = Ring(context, pace)

    def close(self) -> None:
        try:
            self.ring.close()
        finally:
            self.memory.close()


class Near(Protocol):
    """The video memory at one end of a copy: allocations of a process, or held memory."""

    open_s: float

    def address(self, place: Place) -> int: ...
    def close(self) -> None: ...


class NearSpace:
    """Held video memory as that end."""

    open_s = 0.0

    def __init__(self, space: VideoSpace) -> None:
        self._space = space

    def address(self, place: Place) -> int:
        return self._space.address(place.offset, place.size_bytes)

    def close(self) -> None:
        """The space is the lane's."""


class Part(NamedTuple):
    """A place and where it lies in the slot that it goes through."""

    place: Place
    within: int


def loads(places: Iterable[Place], slot_bytes: int) -> Iterator[list[Part]]:
    """The places cut and put together so that each list fills one slot as far as can be, in their order."""
    load: list[Part] = []
    filled_bytes = 0
    for piece in chunks(places, slot_bytes):
        if filled_bytes + piece.size_bytes > slot_bytes:
            yield load
            load, filled_bytes = [], 0
        load.append(Part(piece, filled_bytes))
        filled_bytes += piece.size_bytes
    if load:
        yield load


class StagedCopy:
    """One copy of many places, in one direction, between video memory on a GPU and the pool. Once."""

    def __init__(self, context: Any, host: HostSpace, direction: str, near: Near, streams: Sequence[Any]) -> None:
        """`context` is of the GPU that the video memory is on, and so are the streams, one for each slot.

        What is near is closed with the copy.
        """
        if direction not in {OUT, IN}:
            raise HegmError(BAD_REQUEST, f"{direction!r} is not a direction of a copy", "use `out` or `in`")
        self._context = context
        self._host = host
        self._direction = direction
        self._streams = streams
        self._near = near
        self._guard = threading.Lock()
        self._left: Iterator[list[Part]] = iter(())
        self._done_bytes = 0
        self._failed = False

    def run(self, places: Iterable[Place], tell: Callable[[int], None]) -> Done:
        """Copy it all; `tell` hears how many bytes are done. Raises CudaError; nothing stays open or queued then."""
        pace = self._host.ring.pace
        strands = pace.strands if self._direction == OUT else pace.inward_strands
        self._left = loads(places, pace.slot_bytes)
        with ExitStack() as undo:
            undo.callback(self._near.close)
            undo.callback(settle, self._streams)
            started = time.monotonic()
            share_out(
                range(strands),
                lambda: lambda strand: self._work(strand, tell),
                threads=strands,
                name="staging",
            )
            tell(self._done_bytes)
            copy_s = time.monotonic() - started
            started = time.monotonic()
            undo.close()
        return Done(self._done_bytes, self._near.open_s, copy_s, time.monotonic() - started)

    def _work(self, strand: int, tell: Callable[[int], None]) -> None:
        """One load after the other, in the slots of this strand by turns: one is copied while the other is moved on."""
        cuda.use(self._context)
        addresses = self._host.ring.slots(strand)
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

    def _next(self) -> list[Part] | None:
        with self._guard:
            return None if self._failed else next(self._left, None)

    def _begin(self, slot: _Slot, load: list[Part]) -> None:
        slot.load = load
        if self._direction == IN:
            self._move(slot, load)
        for part in load:
            there, here = self._near.address(part.place), slot.address + part.within
            if self._direction == OUT:
                cuda.copy_async(here, None, there, self._context, part.place.size_bytes, slot.stream)
            else:
                cuda.copy_async(there, self._context, here, None, part.place.size_bytes, slot.stream)

    def _finish(self, slot: _Slot, tell: Callable[[int], None]) -> None:
        """Wait for what is under way in the slot, and have it all where it goes."""
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

    def _move(self, slot: _Slot, load: list[Part]) -> None:
        """Between the slot and the pool. Lets go of the interpreter meanwhile."""
        for part in load:
            pool = self._host.memory.address(part.place.at, part.place.size_bytes)
            here = slot.address + part.within
            if self._direction == OUT:
                ctypes.memmove(pool, here, part.place.size_bytes)
            else:
                ctypes.memmove(here, pool, part.place.size_bytes)


class _Slot:
    """A part of the ring, with its stream and what is under way in it."""

    def __init__(self, address: int, stream: Any) -> None:
        self.address = address
        self.stream = stream
        self.load: list[Part] = []
