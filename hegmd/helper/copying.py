"""Copies between a process's storages and a lane's space: many at once, on the copy engines, with one wait.

The process tells of its allocations by IPC handle, and of its storages as places in them. Each handle is opened once,
while the copies out of those before it are already under way. Neighbours that are neighbours on both sides are one
copy, and large ones are cut, so that all streams have something to do. The streams take turns in two groups: one is
filled while the other works, and whenever a group is done it is known how far things are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from hegmd.errors import BAD_REQUEST, HegmError
from hegmd.helper import cuda
from hegmd.helper.spaces import Space

OUT, IN = "out", "in"


class Pace(NamedTuple):
    """How copies are cut and spread; a benchmark tries others."""

    #: One copy of this size takes 0.7 ms over NVLink and 5 ms over PCIe: what queueing it costs does not matter then.
    chunk_bytes: int = 256 << 20
    #: As much is queued before the group before is waited for: 0.08 s over PCIe.
    batch_bytes: int = 4 << 30
    streams_a_group: int = 2


PACE = Pace()


class Place(NamedTuple):
    """A run of bytes: in the process by handle and offset, in the space by where it starts."""

    handle: int
    offset: int
    size_bytes: int
    at: int


class Done(NamedTuple):
    """What was copied, and what took how long. Opening goes on beside copying, so the two are not to be added up."""

    copied_bytes: int
    open_s: float
    copy_s: float
    close_s: float


def joined(places: Iterable[Sequence[int]], handles: int) -> list[Place]:
    """The places in order of handle and offset, neighbours on both sides joined. Raises HegmError for what is none."""
    found: list[Place] = []
    for place in sorted(_place(place, handles) for place in places):
        if place.size_bytes == 0:
            continue
        last = found[-1] if found else None
        if last is not None and _follows(last, place):
            found[-1] = last._replace(size_bytes=last.size_bytes + place.size_bytes)
        else:
            found.append(place)
    return found


def _place(told: Sequence[int], handles: int) -> Place:
    if len(told) != len(Place._fields) or min(told) < 0 or told[0] >= handles:
        raise HegmError(BAD_REQUEST, f"{told!r} is no place within {handles} allocations", "look at the agent's report")
    return Place(*told)


def _follows(last: Place, place: Place) -> bool:
    return (
        last.handle == place.handle
        and last.offset + last.size_bytes == place.offset
        and last.at + last.size_bytes == place.at
    )


def chunks(places: Iterable[Place], edge_bytes: int | None, chunk_bytes: int) -> Iterator[Place]:
    """The places cut so that none is larger than a chunk, and none crosses an edge of the space."""
    for place in places:
        done_bytes = 0
        while done_bytes < place.size_bytes:
            at = place.at + done_bytes
            size_bytes = min(chunk_bytes, place.size_bytes - done_bytes)
            if edge_bytes is not None:
                size_bytes = min(size_bytes, edge_bytes - at % edge_bytes)
            yield Place(place.handle, place.offset + done_bytes, size_bytes, at)
            done_bytes += size_bytes


def batches(pieces: Iterable[Place], batch_bytes: int) -> Iterator[list[Place]]:
    """The pieces in groups of at least so many bytes; the last may be smaller."""
    batch: list[Place] = []
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
    """One copy of many places, in one direction, between the process on a GPU and a space. For one thread, once."""

    def __init__(self, context: Any, space: Space, direction: str, handles: Sequence[bytes], pace: Pace = PACE) -> None:
        if direction not in {OUT, IN}:
            raise HegmError(BAD_REQUEST, f"{direction!r} is no direction of a copy", "it is `out` or `in`")
        self._context = context  # of the GPU that the process is on
        self._space = space
        self._direction = direction
        self._handles = handles
        self._pace = pace
        self._opened: dict[bytes, tuple[int, int]] = {}  # where each begins here, and its bytes
        self._open_s = 0.0

    def run(self, places: Iterable[Sequence[int]], tell: Callable[[int], None]) -> Done:
        """Copy it all; `tell` hears how many bytes are done. Raises CudaError; nothing stays open or queued then."""
        wanted = joined(places, len(self._handles))
        with ExitStack() as undo:
            undo.callback(self._close)
            started = time.monotonic()
            copied_bytes = self._copy(wanted, undo, tell)
            copy_s = time.monotonic() - started
            started = time.monotonic()
            undo.close()
        return Done(copied_bytes, self._open_s, copy_s, time.monotonic() - started)

    def _copy(self, wanted: Iterable[Place], undo: ExitStack, tell: Callable[[int], None]) -> int:
        # Queued from where the bytes are: the copy engine then writes over the link.
        source = self._space.context if self._direction == IN and self._space.context is not None else self._context
        groups = [_Group(source, self._pace.streams_a_group, undo) for _ in range(2)]
        done_bytes = queued_bytes = 0
        waiting = [0, 0]
        pieces = chunks(wanted, self._space.edge_bytes, self._pace.chunk_bytes)
        for turn, batch in enumerate(batches(pieces, self._pace.batch_bytes)):
            group = groups[turn % 2]
            if waiting[turn % 2]:
                group.wait()
                done_bytes += waiting[turn % 2]
                tell(done_bytes)
            for piece in batch:
                self._queue(piece, group.next_stream())
            waiting[turn % 2] = sum(piece.size_bytes for piece in batch)
            queued_bytes += waiting[turn % 2]
        for group in groups:
            group.wait()
        tell(queued_bytes)
        return queued_bytes

    def _queue(self, piece: Place, stream: Any) -> None:
        start, size_bytes = self._open(self._handles[piece.handle])
        if piece.offset + piece.size_bytes > size_bytes:
            raise _beyond(piece, size_bytes)
        there = start + piece.offset
        here = self._space.address(piece.at, piece.size_bytes)
        if self._direction == OUT:
            cuda.copy_async(here, self._space.context, there, self._context, piece.size_bytes, stream)
        else:
            cuda.copy_async(there, self._context, here, self._space.context, piece.size_bytes, stream)

    def _open(self, handle: bytes) -> tuple[int, int]:
        """Where it begins, and how many bytes of it the driver vouches for: the agent's word on that is none."""
        known = self._opened.get(handle)
        if known is None:
            started = time.monotonic()
            cuda.use(self._context)
            address = cuda.open_ipc(handle)
            self._opened[handle] = (address, 0)  # to be closed, whatever becomes of the question
            start, size_bytes = cuda.range_of(address)
            known = self._opened[handle] = (address, start + size_bytes - address)
            self._open_s += time.monotonic() - started
        return known

    def _close(self) -> None:
        cuda.use(self._context)
        opened, self._opened = self._opened, {}
        with ExitStack() as all_of_them:
            for address, _ in opened.values():
                all_of_them.callback(cuda.close_ipc, address)


def _beyond(piece: Place, size_bytes: int) -> HegmError:
    return HegmError(
        BAD_REQUEST,
        f"{piece.size_bytes} bytes at {piece.offset} are beyond the {size_bytes} of allocation {piece.handle}",
        "look at the agent's report: nothing outside of what it has shown is copied",
        {"offset": piece.offset, "size_bytes": piece.size_bytes, "allocation_bytes": size_bytes},
    )


class _Group:
    """Some streams of one context that are filled in turn and waited for together."""

    def __init__(self, context: Any, streams: int, undo: ExitStack) -> None:
        cuda.use(context)
        self._streams: list[Any] = []
        for _ in range(streams):
            stream = cuda.create_stream()
            undo.callback(_end_stream, stream)
            self._streams.append(stream)
        self._turn = 0

    def next_stream(self) -> Any:
        self._turn += 1
        return self._streams[self._turn % len(self._streams)]

    def wait(self) -> None:
        for stream in self._streams:
            cuda.synchronize(stream)


def _end_stream(stream: Any) -> None:
    # After a failure something may still be under way in it, and nothing may be closed before that is over.
    with suppress(cuda.CudaError):
        cuda.synchronize(stream)
    cuda.destroy_stream(stream)
