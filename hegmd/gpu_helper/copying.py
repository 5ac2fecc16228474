"""Copies between a process's storages and reserved GPU memory: many at once on the copy engines, with one wait.

Places that are adjacent on both sides are one copy. Large ones are cut, so that all streams are busy. Streams form two
groups: one is filled while the other copies. Progress is known after each group. `staging` copies to and from host
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from hegmd.errors import BAD_REQUEST, HegmError
from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.address_space import VideoSpace
from hegmd.gpu_helper.allocations import IN, OUT, Allocations, CopyResult, MemoryRange, Spend, joined
from hegmd.gpu_helper.kernel_copy import KernelCopier, counts_as
from hegmd.gpu_helper.preallocation import settle

# One is filled while the other copies.
_GROUPS = 2


class CopySizes(NamedTuple):
    """The sizes by which copies are cut and distributed. A benchmark tries other values."""

    #: A copy of this size takes 0.7 ms over NVLink, far more than queueing it.
    chunk_bytes: int = 256 << 20
    #: Bytes to queue before waiting for the other group.
    batch_bytes: int = 4 << 30
    streams_a_group: int = 2

    @property
    def streams(self) -> int:
        return _GROUPS * self.streams_a_group


PACE = CopySizes()


def chunks(places: Iterable[MemoryRange], chunk_bytes: int) -> Iterator[MemoryRange]:
    """Return the places, cut to the size of a chunk."""
    for place in places:
        for done_bytes in range(0, place.size_bytes, chunk_bytes):
            size_bytes = min(chunk_bytes, place.size_bytes - done_bytes)
            yield MemoryRange(place.handle, place.offset + done_bytes, size_bytes, place.at + done_bytes)


def batches(pieces: Iterable[MemoryRange], batch_bytes: int) -> Iterator[list[MemoryRange]]:
    """Return the chunks in groups of at least so many bytes; the last may be smaller."""
    batch: list[MemoryRange] = []
    held_bytes = 0
    for piece in pieces:
        batch.append(piece)
        held_bytes += piece.size_bytes
        if held_bytes >= batch_bytes:
            yield batch
            batch, held_bytes = [], 0
    if batch:
        yield batch


class Copy:
    """A copy of many places in one direction, between the process on a GPU and an address space. For one thread,
    once."""

    def __init__(
        self,
        context: Any,
        space: VideoSpace,
        direction: str,
        handles: Sequence[bytes],
        streams: Sequence[Any],
        *,
        spend: Spend | None = None,
        pace: CopySizes = PACE,
        processors: Callable[[int], KernelCopier | None] = lambda _: None,
    ) -> None:
        """`context` is that of the process's GPU, `streams` of the GPU with the bytes; `processors` copy by kernel."""
        if direction not in {OUT, IN}:
            raise HegmError(BAD_REQUEST, f"{direction!r} is not a direction of a copy", "use `out` or `in`")
        self._context = context
        self._space = space
        self._direction = direction
        # On one GPU it is fastest to open them there, whatever GPU the driver counts them to.
        far = {space.ordinal: space.context} if space.context is not context else {}
        self._allocations = Allocations(context, handles, far, spend=spend)
        self._streams = streams[: pace.streams]
        self._pace = pace
        self._processors_of = processors
        self._processors: KernelCopier | None = None
        self._is_settled = False

    def run(self, places: Iterable[Sequence[int]], on_progress: Callable[[int], None]) -> CopyResult:
        """Copy all places. `tell` receives the bytes done. Raises CudaError; then nothing stays open or queued."""
        ranges = joined(places, len(self._allocations))
        with ExitStack() as undo:
            undo.callback(self._allocations.close)
            undo.callback(settle, self._streams)
            started = time.monotonic()
            copied_bytes = self._copy(ranges, on_progress)
            copy_s = time.monotonic() - started
            started = time.monotonic()
            undo.close()
        return CopyResult(copied_bytes, self._allocations.open_s, copy_s, time.monotonic() - started)

    def _copy(self, ranges: Iterable[MemoryRange], on_progress: Callable[[int], None]) -> int:
        # Queued on the GPU of the bytes, so that its copy engine writes over the link.
        cuda.use(self._space.context if self._direction == IN else self._context)
        groups = [_Group(self._streams[turn::_GROUPS]) for turn in range(_GROUPS)]
        done_bytes = queued_bytes = 0
        waiting = [0, 0]
        pieces = chunks(ranges, self._pace.chunk_bytes)
        for turn, batch in enumerate(batches(pieces, self._pace.batch_bytes)):
            group = groups[turn % 2]
            if waiting[turn % 2]:
                group.wait()
                done_bytes += waiting[turn % 2]
                on_progress(done_bytes)
            for piece in batch:
                self._queue(piece, group.next_stream())
            waiting[turn % 2] = sum(piece.size_bytes for piece in batch)
            queued_bytes += waiting[turn % 2]
        for group in groups:
            group.wait()
        on_progress(queued_bytes)
        return queued_bytes

    def _queue(self, piece: MemoryRange, stream: Any) -> None:
        there = self._allocations.address(piece)
        here = self._space.address(piece.at, piece.size_bytes)
        self._choose_copier(there)
        target, source = (here, there) if self._direction == OUT else (there, here)
        if self._is_copied_by_processors(target, source, piece.size_bytes, stream):
            return
        if self._direction == OUT:
            cuda.copy_async(target, self._space.context, source, self._context, piece.size_bytes, stream)
        else:
            cuda.copy_async(target, self._context, source, self._space.context, piece.size_bytes, stream)

    def _is_copied_by_processors(self, target: int, source: int, size_bytes: int, stream: Any) -> bool:
        """Queue the chunk as a kernel copy. If the driver cannot run the kernel, use the copy engines from now on."""
        if self._processors is None:
            return False
        try:
            self._processors.copy_async(target, source, size_bytes, stream)
        except cuda.CudaError:
            self._processors = None
        return self._processors is not None

    def _choose_copier(self, there: int) -> None:
        """Choose kernel copies for memory that counts as another GPU's. The first address decides: a process has one
        GPU."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._space.context is self._context and not counts_as(there, self._space.ordinal):
            self._processors = self._processors_of(self._space.ordinal)


class _Group:
    """Streams of one context that are filled in turn and waited for together."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        self._turn = 0

    def next_stream(self) -> Any:
        self._turn += 1
        return self._streams[self._turn % len(self._streams)]

    def wait(self) -> None:
        for stream in self._streams:
            cuda.synchronize(stream)
