"""Copies storages' bytes between a GPU and a descriptor with this process's own copies, if no faster carrier is
possible.

Each thread has a buffer of one piece in host memory, copies from the GPU into it and from there into the descriptor,
and the reverse. The buffers are not pinned, because pinned memory in the worker slows down the driver's part by far
more than it would save (0.8 s for 33 GiB; docs/benchmarks.md).
"""

from __future__ import annotations

import ctypes
import sys

from . import copying, cuda_state
from .cache import Cache
from .cuda_driver import Driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .copying import Copy, Span


class VideoMemory:
    """Storages on the GPUs of this process."""

    def __init__(self, storages: list[Any]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._driver = Driver()
        self._devices = [int(storage.device.index) for storage in storages]
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []
        self._cache: Cache | None = None

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

            self._copy_all(copy, spans, progress)

    def copy_in(self, fd: int, spans: list[Span], progress: Callable[[int], None]) -> None:
        """Copy them back, into memory that has just been made. Raises OSError."""
        read = copying.reading(fd)

        def copy(address: int, place: int, size_bytes: int) -> None:
            with self._buffer() as host:
                read(host, place, size_bytes)
                self._driver.copy_in(address, host, size_bytes)

        self._copy_all(copy, spans, progress)

    def before_freeing(self, spans: list[Span]) -> None:
        """Record what PyTorch caches, since it is returned with the storages."""
        storages = [(address, size_bytes) for address, _, size_bytes in spans]
        self._cache = Cache(self._torch, cuda_state.Segments(self._torch), self._devices, storages)

    def after_making(self) -> None:
        """Allocate what PyTorch had cached, while the reservation for it is this process's own."""
        if self._cache is not None:
            self._cache.take()
            self._cache.let_go()

    def give_back(self) -> None:
        """Let go of what PyTorch keeps for later."""
        self._buffers.clear()
        cuda_state.give_back(self._torch)
        if self._cache is not None:
            self._cache.note_given_back()

    def _copy_all(self, copy: Copy, spans: list[Span], progress: Callable[[int], None]) -> None:
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

            copying.in_threads(copy_there, mine, tell)
            self._torch.cuda.synchronize(device)  # copies from unpinned memory may still be under way
            done_bytes += sum(span[2] for span in mine)

    def _buffer(self) -> _Lent:
        return _Lent(self._buffers)


class _Lent:
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
