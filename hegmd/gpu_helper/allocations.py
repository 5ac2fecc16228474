"""Allocations of another process, opened by CUDA IPC handles for the duration of a copy.

Each handle is opened once, by the first thread that needs it, while copies run: 0.1 ms, or 1 ms on a busy link. The
driver reports the bounds of an allocation. The bounds that the other process reports are not trusted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from hegmd.errors import BAD_REQUEST, HegmError
from hegmd.gpu_helper import cuda

OUT, IN = "out", "in"
#: Release some memory on the GPUs for a call that found none. Returns False if none was left to release.
Spend = Callable[[], bool]


class MemoryRange(NamedTuple):
    """A run of bytes: by handle and offset in the process, and by its start in the address space."""

    handle: int
    offset: int
    size_bytes: int
    at: int


class CopyResult(NamedTuple):
    """How many bytes were copied, and the seconds of each part. Opening overlaps copying, so the times do not add
    up."""

    copied_bytes: int
    open_s: float
    copy_s: float
    close_s: float


class Allocations:
    """The handles of one process. Safe for several threads; call `close` after the last copy."""

    def __init__(
        self,
        context: Any,
        handles: Sequence[bytes],
        elsewhere: Mapping[int, Any] | None = None,
        *,
        spend: Spend | None = None,
    ) -> None:
        """`context` is that of the process's GPU; `elsewhere` maps ordinals of other GPUs to their contexts.

        The driver counts memory of a process that moved as memory of its first GPU. Opened on the GPU where it is, it
        is read from another GPU at a quarter of the link's speed. Opened on its first GPU, it is read at nearly full
        speed (580.159). So it is opened on its first GPU if that is among `elsewhere`.
        """
        self._context = context
        self._elsewhere = elsewhere or {}
        self._handles = handles
        self._spend = spend
        self._guard = threading.Lock()
        self._opened: list[int] = []
        self._known: dict[bytes, tuple[int, int]] = {}  # start address and size
        self.open_s = 0.0

    def __len__(self) -> int:
        return len(self._handles)

    def address(self, place: MemoryRange) -> int:
        """Return the address of `place`. Raises HegmError for a place outside its allocation, and CudaError."""
        start, size_bytes = self._open(self._handles[place.handle])
        if place.offset + place.size_bytes > size_bytes:
            raise _beyond(place, size_bytes)
        return start + place.offset

    def _open(self, handle: bytes) -> tuple[int, int]:
        known = self._known.get(handle)
        if known is not None:
            return known
        with self._guard:
            if handle not in self._known:
                started = time.monotonic()
                address = self._open_here(handle)
                self._opened.append(address)
                start, size_bytes = cuda.range_of(address)
                self._known[handle] = (address, start + size_bytes - address)
                self.open_s += time.monotonic() - started
            return self._known[handle]

    def _open_here(self, handle: bytes) -> int:
        address = self._open_in(self._context, handle)
        if self._elsewhere:
            counts_as = self._elsewhere.get(cuda.ordinal_of(address))
            self._elsewhere = {}  # one GPU per process: the first handle decides
            if counts_as is not None:
                cuda.close_ipc(address)
                self._context = counts_as
                address = self._open_in(counts_as, handle)
        return address

    def _open_in(self, context: Any, handle: bytes) -> int:
        """Open the handle. If the GPU has no memory for page tables, spend the reserve. Raises CudaError."""
        while True:
            cuda.use(context)
            try:
                return cuda.open_ipc(handle)
            except cuda.CudaError as error:
                if error.code != cuda.OUT_OF_MEMORY or self._spend is None or not self._spend():
                    raise

    def close(self) -> None:
        """Close all handles. Raises CudaError after the last one if any failed."""
        cuda.use(self._context)
        opened, self._opened = self._opened, []
        with ExitStack() as all_of_them:
            for address in opened:
                all_of_them.callback(cuda.close_ipc, address)


def joined(places: Iterable[Sequence[int]], handles: int) -> list[MemoryRange]:
    """Return the places in order of handle and offset, with adjacent ones joined. Raises HegmError for an invalid
    place."""
    found: list[MemoryRange] = []
    for place in sorted(_place(place, handles) for place in places):
        if place.size_bytes == 0:
            continue
        last = found[-1] if found else None
        if last is not None and _follows(last, place):
            found[-1] = last._replace(size_bytes=last.size_bytes + place.size_bytes)
        else:
            found.append(place)
    return found


def _place(numbers: Sequence[int], handles: int) -> MemoryRange:
    if len(numbers) != len(MemoryRange._fields) or min(numbers) < 0 or numbers[0] >= handles:
        raise HegmError(BAD_REQUEST, f"{numbers!r} is outside of {handles} allocations", "read the agent's report")
    return MemoryRange(*numbers)


def _follows(last: MemoryRange, place: MemoryRange) -> bool:
    return (
        last.handle == place.handle
        and last.offset + last.size_bytes == place.offset
        and last.at + last.size_bytes == place.at
    )


def _beyond(place: MemoryRange, size_bytes: int) -> HegmError:
    return HegmError(
        BAD_REQUEST,
        f"{place.size_bytes} bytes at {place.offset} are beyond the {size_bytes} of allocation {place.handle}",
        "read the agent's report: only memory that it has exported is copied",
        {"offset": place.offset, "size_bytes": place.size_bytes, "allocation_bytes": size_bytes},
    )
