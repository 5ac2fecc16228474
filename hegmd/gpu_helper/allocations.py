"""Allocations of another process, opened by the handles that it told of, for as long as a copy takes.

Each is opened once, by whoever needs it first, and beside copies that are under way: that takes 0.1 ms alone and 1 ms
while the link is busy. The bounds are the driver's, since the other process's word on them is none.
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
#: Gives some memory back to the GPUs, for a call that has found none there; whether there was any.
Spend = Callable[[], bool]


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


class Allocations:
    """Those handles. May be used from several threads; `close` once no copy is under way any more."""

    def __init__(
        self,
        context: Any,
        handles: Sequence[bytes],
        elsewhere: Mapping[int, Any] | None = None,
        *,
        spend: Spend | None = None,
    ) -> None:
        """`context` is of the GPU that the process is on; `elsewhere` are contexts of others, by their ordinals.

        Memory of a process that was moved counts as its first GPU's for good. Opened on the GPU that it is on, it is
        read from another at a quarter of the link's speed; opened on the one that it counts as, at nearly all of it
        (580.159). So where that one is among `elsewhere`, it is opened there.
        """
        self._context = context
        self._elsewhere = elsewhere or {}
        self._handles = handles
        self._spend = spend
        self._guard = threading.Lock()
        self._opened: list[int] = []
        self._known: dict[bytes, tuple[int, int]] = {}  # where each begins here, and its bytes
        self.open_s = 0.0

    def __len__(self) -> int:
        return len(self._handles)

    def address(self, place: Place) -> int:
        """Where the place is here. Raises HegmError for what is not within its allocation, CudaError."""
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
                self._opened.append(address)  # to be closed, whatever becomes of the question
                start, size_bytes = cuda.range_of(address)
                self._known[handle] = (address, start + size_bytes - address)
                self.open_s += time.monotonic() - started
            return self._known[handle]

    def _open_here(self, handle: bytes) -> int:
        address = self._open_in(self._context, handle)
        if self._elsewhere:
            counts_as = self._elsewhere.get(cuda.ordinal_of(address))
            self._elsewhere = {}  # the process has one GPU, so the first one tells
            if counts_as is not None:
                cuda.close_ipc(address)
                self._context = counts_as
                address = self._open_in(counts_as, handle)
        return address

    def _open_in(self, context: Any, handle: bytes) -> int:
        """On a GPU without any memory for page tables, with what there is in reserve. Raises CudaError."""
        while True:
            cuda.use(context)
            try:
                return cuda.open_ipc(handle)
            except cuda.CudaError as error:
                if error.code != cuda.OUT_OF_MEMORY or self._spend is None or not self._spend():
                    raise

    def close(self) -> None:
        """Let go of all of them. Raises CudaError when one could not be, after the others."""
        cuda.use(self._context)
        opened, self._opened = self._opened, []
        with ExitStack() as all_of_them:
            for address in opened:
                all_of_them.callback(cuda.close_ipc, address)


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
        raise HegmError(BAD_REQUEST, f"{told!r} is no place within {handles} allocations", "read the agent's report")
    return Place(*told)


def _follows(last: Place, place: Place) -> bool:
    return (
        last.handle == place.handle
        and last.offset + last.size_bytes == place.offset
        and last.at + last.size_bytes == place.at
    )


def _beyond(place: Place, size_bytes: int) -> HegmError:
    return HegmError(
        BAD_REQUEST,
        f"{place.size_bytes} bytes at {place.offset} are beyond the {size_bytes} of allocation {place.handle}",
        "read the agent's report: only memory that it has exported is copied",
        {"offset": place.offset, "size_bytes": place.size_bytes, "allocation_bytes": size_bytes},
    )
