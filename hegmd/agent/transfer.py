"""Copies storages' bytes from the process into a descriptor and back: the carrier `worker`.

Defines the layout in the descriptor and the order of steps. `orders` decides when, and `copying` copies the bytes.
Everything is copied before anything is freed, and everything is allocated before anything is copied back, so a failure
in between leaves the process unchanged.

The layout: a header, a table of offsets, then the bytes of the storages, large ones aligned to pages. Each offload
draws a nonce for the header, so a descriptor with other bytes is refused, whatever its size.
"""

from __future__ import annotations

import ctypes
import os
import struct

from ..errors import REFUSED, HegmError
from . import copying
from .copying import PAGE_BYTES, round_up
from .notes import note
from .refusals import not_made

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .copying import Span
    from .video_memory import VideoMemory

MAGIC = b"HEGMWRK1"
_HEADER = struct.Struct("<8s16sQQ")
_PLACE = struct.Struct("<QQ")
_NONCE_BYTES = 16


def required_bytes(sizes: list[int]) -> int:
    """Return the size of the descriptor for storages of those sizes."""
    places = _places_of(sizes)
    return round_up(places[-1] + sizes[-1]) if sizes else PAGE_BYTES


class Offloaded:
    """Offloaded storages, and the descriptor with their bytes."""

    def __init__(
        self, fd: int, storages: list[Any], sizes: list[int], nonce: bytes, medium: HostMemory | VideoMemory
    ) -> None:
        self.fd = fd
        self._medium = medium
        self.size_bytes = sum(sizes)
        self.required_bytes = required_bytes(sizes)
        self._storages = storages
        self._sizes = sizes
        self.nonce = nonce

    def __len__(self) -> int:
        return len(self._storages)

    @property
    def short_bytes(self) -> int:
        """Return how much cached memory could not be allocated again with the storages."""
        return self._medium.short_bytes

    @property
    def left(self) -> list[tuple[int, int]]:
        """Return what stays on its GPUs while they are offloaded: start and size of each piece."""
        return self._medium.left

    def bring_back(self, fd: int, progress: Callable[[int], None]) -> None:
        """Make the storages again from that descriptor. Raises HegmError, and leaves them out, when that cannot be."""
        _check_header(fd, self.nonce, self._sizes)
        made: list[Any] = []
        try:
            self._medium.before_making()
            for storage, size_bytes in zip(self._storages, self._sizes):
                made.append(storage)
                if storage.nbytes() != size_bytes:  # it has its memory when it could not be freed
                    storage.resize_(size_bytes)
            self._medium.after_making()
            self._medium.copy_in(fd, _spans(self._storages, self._sizes), progress)
        except BaseException as error:
            for storage in made:
                storage.resize_(0)
            _give_back(self._medium)
            if isinstance(error, HegmError):
                raise
            on_gpu = bool(self._storages) and self._storages[0].device.type == "cuda"
            raise not_made(self.size_bytes, error, on_gpu=on_gpu) from error

    def close(self) -> None:
        """Close the descriptor; twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def offload(fd: int, storages: list[Any], sizes: list[int], progress: Callable[[int], None]) -> Offloaded:
    """Copy the storages into the descriptor and free them. The result owns the descriptor.

    Raises HegmError, with nothing changed and the descriptor still the caller's.
    """
    needed_bytes = required_bytes(sizes)
    given_bytes = os.fstat(fd).st_size
    if given_bytes < needed_bytes:
        raise HegmError(
            REFUSED,
            f"process {os.getpid()} has {needed_bytes} bytes to offload, but memory for {given_bytes} was given",
            "survey the parked process, and give it as much memory",
            {"needed_bytes": needed_bytes, "given_bytes": given_bytes},
        )
    nonce = os.urandom(_NONCE_BYTES)
    header = ctypes.create_string_buffer(_header(nonce, sizes))
    spans = _spans(storages, sizes)
    medium = _medium(storages)
    try:
        copying.copy_out(fd, needed_bytes, [(ctypes.addressof(header), 0, len(header) - 1)], copying.ignore)
        medium.copy_out(fd, needed_bytes, spans, progress)
    except OSError as error:
        raise HegmError(
            REFUSED,
            f"{sum(sizes)} bytes could not be copied out of process {os.getpid()}: {error}",
            "check whether the node is out of memory; the process still has all bytes",
        ) from error
    offloaded = Offloaded(fd, storages, sizes, nonce, medium)
    try:
        medium.before_freeing(spans)
        for storage in storages:
            storage.resize_(0)
    except Exception as error:  # noqa: BLE001 - whatever it is, the bytes are in the descriptor and go back
        return _stay_out_or_undo(offloaded, error)
    _give_back(medium)
    return offloaded


def _give_back(medium: HostMemory | VideoMemory) -> None:
    """Return cached memory to the driver. Never raises: the caller has to learn first that storages are offloaded."""
    try:
        medium.give_back()
    except Exception as error:  # noqa: BLE001 - memory that is kept is wasted, but no bytes are lost
        note(f"cached memory besides the storages stays in the process: {error!r}")


def _stay_out_or_undo(offloaded: Offloaded, error: Exception) -> Offloaded:
    """Handle a storage that could not be freed: undo all, or without memory for that, keep all offloaded."""
    note(f"a storage could not be freed: {error!r}")
    try:
        offloaded.bring_back(offloaded.fd, copying.ignore)
    except HegmError as undoing:
        note(f"{undoing.message}; the bytes of the process stay offloaded")
        return offloaded
    raise HegmError(
        REFUSED,
        f"a storage of process {os.getpid()} could not be freed: {error}",
        "start the process with HEGM_AGENT_DEBUG=FILE to log more; it has all its bytes again",
    ) from error


def _medium(storages: list[Any]) -> HostMemory | VideoMemory:
    """Return the kind of memory of the storages; all are of one kind."""
    if storages and storages[0].device.type == "cuda":
        from .video_memory import VideoMemory

        return VideoMemory(storages)
    return HostMemory()


class HostMemory:
    """Storages in the process's own memory."""

    short_bytes = 0
    left: list[tuple[int, int]] = []  # noqa: RUF012 - never changed

    def copy_out(self, fd: int, required_bytes: int, spans: list[Span], progress: Callable[[int], None]) -> None:
        """Copy the spans into the descriptor. Raises OSError."""
        copying.copy_out(fd, required_bytes, spans, progress)

    def copy_in(self, fd: int, spans: list[Span], progress: Callable[[int], None]) -> None:
        """Copy them back, into memory that has just been made. Raises OSError."""
        copying.prefer_huge_pages(spans)
        copying.copy_in(fd, spans, progress)

    def before_freeing(self, spans: list[Span]) -> None:
        """Free the pages, so that freeing the memory is quick."""
        copying.free_pages(spans)

    def before_making(self) -> None:
        """Do nothing: the process keeps its stacks."""

    def after_making(self) -> None:
        """Do nothing: there is no cached memory to allocate."""

    def give_back(self) -> None:
        """Return unused heap memory to the node."""
        copying.give_back_heap()


# ---- layout ---------------------------------------------------------------------------------------------------------


def _places_of(sizes: list[int]) -> list[int]:
    """Return the offset of each storage: large ones are aligned to pages, small ones to cache lines."""
    at = round_up(_HEADER.size + _PLACE.size * len(sizes))
    places: list[int] = []
    for size_bytes in sizes:
        border = PAGE_BYTES if size_bytes >= PAGE_BYTES else 64
        at = round_up(at, border)
        places.append(at)
        at += size_bytes
    return places


def _spans(storages: list[Any], sizes: list[int]) -> list[Span]:
    """Return address, offset in the descriptor and size of each storage."""
    addresses = [storage.data_ptr() for storage in storages]
    return list(zip(addresses, _places_of(sizes), sizes))


def _header(nonce: bytes, sizes: list[int]) -> bytes:
    head = _HEADER.pack(MAGIC, nonce, len(sizes), sum(sizes))
    return head + b"".join(_PLACE.pack(*place) for place in zip(_places_of(sizes), sizes))


def _check_header(fd: int, nonce: bytes, sizes: list[int]) -> None:
    expected = _header(nonce, sizes)
    if _read_whole(fd, len(expected)) != expected or os.fstat(fd).st_size < required_bytes(sizes):
        raise HegmError(
            REFUSED,
            f"the descriptor does not hold the {sum(sizes)} bytes that process {os.getpid()} offloaded",
            "give it the descriptor of its own offload; its bytes stay offloaded until then",
        )


def _read_whole(fd: int, size_bytes: int) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < size_bytes:
        part = os.pread(fd, size_bytes - at, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return b"".join(parts)
