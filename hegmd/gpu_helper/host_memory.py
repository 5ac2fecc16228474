"""Segments of the host pool in the helper: mapped for one copy session, or pinned in advance for any.

The daemon holds a segment by its descriptor: what is filled stays when this process ends. A pinned segment is known by
the inode of its file, under whatever name. The copy engines write it without the processor, so that two GPUs copy at
the full speed of their links at once. But pinning takes 1.1 s for 32 GiB, and slows a restore of the driver meanwhile,
so the daemon requests it piece by piece while no operation runs.

The engines use the pages that were pinned. A file that was cut and grown again has others: the daemon has a segment
unpinned before it cuts it, unless it is never to grow again: then its end is unpinned later. Pages of a removed file
stay until it is unpinned.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Protocol

from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.address_space import outside
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, pack_mark
from hegmd.system.descriptors import Inode, inode_of
from hegmd.system.thread_pool import share_out

_POPULATED_BYTES = 1 << 28
_POPULATING_THREADS = 24
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
#: Segments are pinned in pieces of this size, each in 17 ms; a copy must not cross from one to the next.
PIECE_BYTES = 512 << 20


def populate(at: int, size_bytes: int) -> None:
    """Populate pages and page tables without the interpreter lock. An older kernel leaves that to the first access."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)


class Pinning(NamedTuple):
    """How a segment is pinned: in pieces of this size, and pinned bytes without content for copies that only try."""

    piece_bytes: int
    trial: int


class Segment:
    """A segment at an address of this process."""

    pinning: Pinning | None = None

    def __init__(self, start: int, size_bytes: int) -> None:
        self._start, self.size_bytes = start, size_bytes

    def address(self, at: int, size_bytes: int) -> int:
        """Return the address of that range. Raises Bug outside the segment."""
        if at < 0 or at + size_bytes > self.size_bytes:
            raise outside(at, size_bytes, 0, self.size_bytes)
        return self._start + at

    def mark(self, mark: Mark | None) -> None:
        """Record at the end of the segment where its bytes are; None clears it. The first byte makes a record valid."""
        at = self.address(self.size_bytes - MARK_BYTES, MARK_BYTES)
        if mark is not None:
            written = pack_mark(mark)
            ctypes.memmove(at + 1, written[1:], MARK_BYTES - 1)
            ctypes.memmove(at, written, 1)
        else:
            ctypes.memset(at, 0, 1)

    def close(self) -> None:
        """Release it. Closing twice is fine."""


class _Mapped(Segment):
    """A segment with a mapping of its own."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """The descriptor stays the caller's. Raises OSError or ValueError; then nothing is mapped."""
        self._map = mmap.mmap(fd, size_bytes)
        self._anchor: Any = ctypes.c_char.from_buffer(self._map)
        super().__init__(ctypes.addressof(self._anchor), size_bytes)

    def close(self) -> None:
        self._anchor = None  # a map with exported pointers cannot be closed
        self._map.close()


class HostMemory(_Mapped):
    """A segment that is mapped for one session, with page tables. Needs no context."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Raises OSError or ValueError; then nothing is mapped."""
        super().__init__(fd, size_bytes)
        try:
            self._make_page_tables()
        except BaseException:
            self.close()
            raise

    def _make_page_tables(self) -> None:
        """Create all page tables now, not one page at a time during the downtime."""

        def populate_part(at: int) -> None:
            populate(self._start + at, min(_POPULATED_BYTES, self.size_bytes - at))

        threads = min(_POPULATING_THREADS, len(os.sched_getaffinity(0)))
        parts = range(0, self.size_bytes, _POPULATED_BYTES)
        share_out(parts, lambda: populate_part, threads=threads, name="page tables")


class ContextsOfGpus(Protocol):
    def hold(self, ordinals: Sequence[int]) -> Mapping[int, Any]: ...
    def release(self, ordinals: Sequence[int]) -> None: ...


class PinnedSegments:
    """The segments that are pinned in advance, with a context as long as there is one. For any thread.

    The lock is held for one piece at a time, so that a session that opens waits no longer.
    """

    def __init__(self, contexts: ContextsOfGpus, piece_bytes: int = PIECE_BYTES) -> None:
        self._contexts = contexts
        self._piece_bytes = piece_bytes
        self._guard = threading.Lock()
        self._segments: dict[Inode, _PinnedSegment] = {}
        #: Those that nothing uses any more.
        self._leaving: list[_PinnedSegment] = []
        self._pinning_context: _PinningContext | None = None

    def adjust(self, ordinal: int, wanted: Sequence[tuple[int, int]]) -> int:
        """Unpin one piece of a segment that is not wanted, or pin one more of those that are. Returns the bytes left to
        do.

        `wanted` has descriptors and sizes. Without any so far, the context is on that GPU. Raises CudaError, OSError.
        """
        files = {inode_of(fd): (fd, size_bytes) for fd, size_bytes in wanted}
        with self._guard:
            for inode, segment in list(self._segments.items()):
                if inode not in files or segment.size_bytes < files[inode][1]:
                    self._leave(self._segments.pop(inode))
                else:
                    segment.size_bytes = files[inode][1]
            if not self._unpin_piece() and not self._unpin_beyond():
                self._pin_piece(ordinal, files)
            missing_bytes = sum(self._missing_bytes(inode, size_bytes) for inode, (_, size_bytes) in files.items())
            beyond_bytes = sum(segment.beyond_bytes for segment in self._segments.values())
            return missing_bytes + beyond_bytes + sum(segment.pinned_bytes for segment in self._leaving)

    def unpin(self, inodes: Iterable[Inode]) -> None:
        """Unpin these segments, and all that are not wanted; one that a session uses is unpinned after that. No session
        gets one of these from now on. Raises CudaError."""
        with self._guard:
            for inode in inodes:
                if inode in self._segments:
                    self._leave(self._segments.pop(inode))
        self._unpin_all()

    def borrow(self, fd: int, size_bytes: int) -> Segment | None:
        """Return the segment of that file for a session, or None if it is not pinned to that size."""
        with self._guard:
            segment, pinning = self._segments.get(inode_of(fd)), self._pinning_context
            if segment is None or pinning is None or segment.pinned_bytes < size_bytes:
                return None
            segment.users += 1
            return _Borrowed(segment, size_bytes, Pinning(self._piece_bytes, pinning.trial), self._return)

    def _missing_bytes(self, inode: Inode, size_bytes: int) -> int:
        segment = self._segments.get(inode)
        return max(0, size_bytes - (0 if segment is None else segment.pinned_bytes))

    def _pin_piece(self, ordinal: int, files: Mapping[Inode, tuple[int, int]]) -> None:
        for inode, (fd, size_bytes) in files.items():
            if self._missing_bytes(inode, size_bytes):
                segment = self._segments.get(inode) or _PinnedSegment(fd, size_bytes)
                self._pinning_context = self._pinning_context or _PinningContext(self._contexts, ordinal)
                if inode not in self._segments:
                    self._segments[inode] = segment
                    self._pinning_context.segments += 1
                segment.pin_piece(self._pinning_context.context, self._piece_bytes)
                return

    def _unpin_beyond(self) -> bool:
        """Unpin one piece that goes on beyond the end of a file that was cut. False without any."""
        for segment in self._segments.values():
            if segment.beyond_bytes and self._pinning_context is not None:
                segment.unpin_piece(self._pinning_context.context)
                return True
        return False

    def _unpin_piece(self) -> bool:
        """Unpin one piece of a segment that nothing uses, and release what that was the last of. False without any."""
        if not self._leaving or self._pinning_context is None:
            return False
        self._leaving[-1].unpin_piece(self._pinning_context.context)
        if not self._leaving[-1].pinned_bytes:
            self._leaving.pop().close()
            self._pinning_context.segments -= 1
            if not self._pinning_context.segments:
                unused, self._pinning_context = self._pinning_context, None
                unused.close()
        return True

    def _unpin_all(self) -> None:
        is_more = True
        while is_more:
            with self._guard:
                is_more = self._unpin_piece()

    def _return(self, segment: _PinnedSegment) -> None:
        with self._guard:
            self._leave(segment)
        with suppress(cuda.CudaError):  # it is still to be unpinned, and the next request for that reports the error
            self._unpin_all()

    def _leave(self, segment: _PinnedSegment) -> None:
        segment.users -= 1
        if not segment.users:
            self._leaving.append(segment)


class _PinningContext:
    """The context in which segments are pinned, and a pinned page for trial copies."""

    def __init__(self, contexts: ContextsOfGpus, ordinal: int) -> None:
        """Raises CudaError; then nothing is held."""
        with ExitStack() as undo:
            self.context = contexts.hold([ordinal])[ordinal]
            undo.callback(contexts.release, [ordinal])
            page = _PinnedSegment(-1, mmap.PAGESIZE)
            page.pin_piece(self.context, mmap.PAGESIZE)
            undo.callback(page.close)
            undo.callback(page.unpin_piece, self.context)
            self.segments = 0
            self.trial = page.address(0, mmap.PAGESIZE)
            self.close = undo.pop_all().close


class _PinnedSegment(_Mapped):
    """A segment whose first bytes are pinned, in pieces."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Raises OSError or ValueError; then nothing is mapped."""
        super().__init__(fd, size_bytes)
        self.pinned_bytes = 0
        self.users = 1  # the table of segments
        self._pieces: list[tuple[int, int]] = []

    @property
    def beyond_bytes(self) -> int:
        """Return the bytes that are pinned beyond its size, if no session uses it."""
        return max(0, self.pinned_bytes - self.size_bytes) if self.users == 1 else 0

    def pin_piece(self, context: Any, piece_bytes: int) -> None:
        """Pin the next bytes. Raises CudaError."""
        size_bytes = min(piece_bytes, self.size_bytes - self.pinned_bytes)
        address = self.address(self.pinned_bytes, size_bytes)
        populate(address, size_bytes)
        cuda.use(context)
        cuda.register(address, size_bytes)
        self._pieces.append((address, size_bytes))
        self.pinned_bytes += size_bytes

    def unpin_piece(self, context: Any) -> None:
        """Unpin the last piece, if there is one. Raises CudaError; then it stays pinned."""
        if self._pieces:
            address, size_bytes = self._pieces[-1]
            cuda.use(context)
            cuda.unregister(address)
            self._pieces.pop()
            self.pinned_bytes -= size_bytes


class _Borrowed(Segment):
    """The use of a pinned segment by one session."""

    def __init__(
        self, segment: _PinnedSegment, size_bytes: int, pinning: Pinning, leave: Callable[[_PinnedSegment], None]
    ) -> None:
        super().__init__(segment.address(0, size_bytes), size_bytes)
        self.pinning = pinning
        self._undo = ExitStack()
        self._undo.callback(leave, segment)

    def close(self) -> None:
        self._undo.close()
