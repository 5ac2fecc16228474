"""Copies storages' bytes between a GPU and a descriptor with this process's own copies, if no faster carrier is
possible.

The bytes go through a ring of pinned memory (`staging`). It is unpinned before the driver's checkpoint, which pinned
memory slows down (0.8 s for 33 GiB; docs/benchmarks.md). If the driver refuses something that the ring needs, or for
less than it is worth, all is copied through buffers that are not pinned: each thread has one of one piece in host
memory, copies from the GPU into it and from there into the descriptor, and the reverse.
"""

from __future__ import annotations

import ctypes
import sys

from ..errors import HegmError
from . import copying, cuda_state
from .cache import Cache
from .cuda_driver import Copies, Driver, Stacks
from .notes import note
from .staging import Ring, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .copying import Copy, Progress, Span

    #: Copies spans through a ring.
    Through = Callable[[Ring, list[Span], Progress], None]

# Copying less through buffers that are not pinned takes as long as getting and pinning the ring's 128 MiB.
RING_FROM_BYTES = 512 * 1024 * 1024


class VideoMemory:
    """Storages on the GPUs of this process. So many bytes of one GPU, and more, go through a ring of pinned memory."""

    def __init__(self, storages: list[Any], ring_from_bytes: int = RING_FROM_BYTES) -> None:
        self._ring_from_bytes = ring_from_bytes
        self._torch: Any = sys.modules["torch"]
        self._driver = Driver()
        self._devices = [int(storage.device.index) for storage in storages]
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []
        self._cache: Cache | None = None
        self._stacks = Stacks(self._driver, self._devices, self._torch.cuda.set_device)

    @property
    def short_bytes(self) -> int:
        """Return how much cached memory the allocator could not get back."""
        return 0 if self._cache is None else self._cache.short_bytes

    @property
    def left(self) -> list[tuple[int, int]]:
        """Return what the allocator keeps while the storages are offloaded: start and size of each segment."""
        return [] if self._cache is None else self._cache.left

    def copy_out(self, fd: int, capacity_bytes: int, spans: list[Span], progress: Callable[[int], None]) -> None:
        """Copy the spans into the descriptor. Raises OSError."""
        with copying.Writing(fd, capacity_bytes) as write:

            def copy(address: int, place: int, size_bytes: int) -> None:
                with self._buffer() as host:
                    self._driver.copy_out(host, address, size_bytes)
                    write(host, place, size_bytes)

            def through(ring: Ring, some: list[Span], tell: Progress) -> None:
                ring.out(loads(some), write, tell)

            self._copy_all(copy, through, spans, progress)

    def copy_in(self, fd: int, spans: list[Span], progress: Callable[[int], None]) -> None:
        """Copy them back, into memory that has just been made. Raises OSError."""
        read = copying.reading(fd)

        def copy(address: int, place: int, size_bytes: int) -> None:
            with self._buffer() as host:
                read(host, place, size_bytes)
                self._driver.copy_in(address, host, size_bytes)

        def fill(place: int, host: int, size_bytes: int) -> None:
            read(host, place, size_bytes)

        def through(ring: Ring, some: list[Span], tell: Progress) -> None:
            ring.into(loads([(place, address, size_bytes) for address, place, size_bytes in some]), fill, tell)

        self._copy_all(copy, through, spans, progress)

    def before_freeing(self, spans: list[Span]) -> None:
        """Record what PyTorch caches, since it is returned with the storages."""
        storages = [(address, size_bytes) for address, _, size_bytes in spans]
        self._cache = Cache(self._torch, cuda_state.Segments(self._torch), self._devices, storages)

    def before_making(self) -> None:
        """Restore the stack limits."""
        self._stacks.take_back()

    def after_making(self) -> None:
        """Allocate what PyTorch had cached, while the reservation for it is this process's own."""
        if self._cache is not None:
            self._cache.take()
            self._cache.free_cached()

    def give_back(self) -> None:
        """Release the memory that PyTorch caches, and that of thread stacks."""
        self._buffers.clear()
        cuda_state.give_back(self._torch)
        if self._cache is not None:
            self._cache.note_given_back()
        self._stacks.give_back()

    def _copy_all(self, copy: Copy, through: Through, spans: list[Span], progress: Progress) -> None:
        """Copy device by device: a thread copies in the context of the device."""
        done_bytes = 0
        for device in sorted(set(self._devices)):
            self._torch.cuda.set_device(device)
            self._torch.cuda.synchronize(device)
            context = self._driver.context()
            mine = [span for span, other in zip(spans, self._devices) if other == device]

            def copy_there(address: int, place: int, size_bytes: int, context: int | None = context) -> None:
                self._driver.use(context)
                copy(address, place, size_bytes)

            def tell(so_far_bytes: int, before_bytes: int = done_bytes) -> None:
                progress(before_bytes + so_far_bytes)

            if not self._by_ring(through, mine, tell):
                copying.in_threads(copy_there, mine, tell)
            self._torch.cuda.synchronize(device)  # copies from unpinned memory may still be under way
            done_bytes += sum(span[2] for span in mine)

    def _by_ring(self, through: Through, spans: list[Span], tell: Progress) -> bool:
        """Copy the spans of the current device through pinned memory. False if they have to be copied another way.

        Raises the error of a descriptor, and what `tell` raises.
        """
        if sum([span[2] for span in spans]) < self._ring_from_bytes:
            return False
        try:
            ring = Ring(Copies())
            ring.__enter__()
        except (HegmError, AttributeError, OSError) as error:  # a driver without these calls; no host memory
            note(f"no ring to copy through: {error!r}")
            return False
        try:
            through(ring, spans, tell)
        except HegmError as error:
            if "call" not in error.facts:  # not of the driver
                raise
            note(f"the ring failed, and all is copied again without it: {error.message}")
            return False
        finally:
            ring.__exit__()
        return True

    def _buffer(self) -> _LentBuffer:
        return _LentBuffer(self._buffers)


class _LentBuffer:
    """A buffer for one piece that no thread uses now."""

    def __init__(self, buffers: list[ctypes.Array[ctypes.c_char]]) -> None:
        self._buffers = buffers

    def __enter__(self) -> int:
        try:
            self._buffer = self._buffers.pop()
        except IndexError:
            self._buffer = ctypes.create_string_buffer(copying.PIECE_BYTES)
        return ctypes.addressof(self._buffer)

    def __exit__(self, *_exc: object) -> None:
        self._buffers.append(self._buffer)
