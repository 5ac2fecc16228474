"""The memory that a lane copies to and from, as one flat range of addresses: held video memory, or the host pool.

Either is filled through a mapping and belongs to descriptors that the daemon holds; a space that goes, by `close` or
with the process, takes nothing along. Who copies sees addresses, and the edges that no copy may cross.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from hegmd.crew import share_out
from hegmd.errors import Bug, Refused
from hegmd.helper import cuda

# Host memory is registered in pieces of this size, so that several threads can do it. No copy may cross from one to the
# next: the driver takes a range for pinned only if one registration covers it.
REGISTERED_BYTES = 1 << 30
_THREADS = 8
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap of Python knows no name for it

Contexts = Mapping[int, Any]


class Space(Protocol):
    """What can be copied to and from."""

    @property
    def context(self) -> Any:
        """Of the GPU that it is video memory of; None for host memory."""

    @property
    def edge_bytes(self) -> int | None:
        """No copy may cross a multiple of this; None where it does not matter."""

    def address(self, at: int, size_bytes: int) -> int: ...
    def close(self) -> None: ...


class VideoSpace:
    """Pieces of held video memory, one after the other in one reserved range; the first ones can be let go early."""

    edge_bytes = None

    def __init__(
        self, ordinal: int, contexts: Contexts, pieces: Sequence[tuple[int, int]], *, start: int, peer: bool
    ) -> None:
        """`pieces` are descriptors, which stay the caller's, and their sizes; `start` is where the first one begins.

        Raises CudaError, with nothing mapped then.
        """
        self.context = contexts[ordinal]
        self._sizes = [size_bytes for _, size_bytes in pieces]
        self._size_bytes = start + sum(self._sizes)
        self._gone_bytes = start
        self._undo = ExitStack()
        cuda.use(self.context)
        with ExitStack() as undo:
            self._va = cuda.reserve(self._size_bytes)
            undo.callback(cuda.free_va, self._va, self._size_bytes)
            self._mapped = undo.enter_context(ExitStack())
            at = self._va + start
            for fd, size_bytes in pieces:
                self._map(at, size_bytes, fd)
                at += size_bytes
            cuda.access(self._va + start, self._size_bytes - start, contexts if peer else [ordinal])
            self._undo = undo.pop_all()

    def _map(self, at: int, size_bytes: int, fd: int) -> None:
        handle = cuda.import_(fd)
        try:
            cuda.map_at(at, handle, size_bytes)
        finally:
            cuda.release_handle(handle)  # the mapping holds the memory
        self._mapped.callback(self._unmap, at, size_bytes)

    def _unmap(self, at: int, size_bytes: int) -> None:
        if at >= self._va + self._gone_bytes:
            cuda.unmap(at, size_bytes)

    def detach(self, pieces: int) -> int:
        """Let go of the first of those that are left; how many bytes. What is left keeps its place."""
        if pieces > len(self._sizes):
            raise Refused(
                f"{pieces} pieces of video memory were to be let go, {len(self._sizes)} are left",
                "look at the lane again",
            )
        before_bytes = self._gone_bytes
        for _ in range(pieces):
            cuda.unmap(self._va + self._gone_bytes, self._sizes[0])
            self._gone_bytes += self._sizes.pop(0)
        return self._gone_bytes - before_bytes

    def address(self, at: int, size_bytes: int) -> int:
        """Where that part is. Raises Bug outside of what is mapped: the driver would end every copy of this process."""
        if at < self._gone_bytes or at + size_bytes > self._size_bytes:
            raise _outside(at, size_bytes, self._gone_bytes, self._size_bytes)
        return self._va + at

    def close(self) -> None:
        cuda.use(self.context)
        self._undo.close()


class HostSpace:
    """A piece of the host pool, mapped here and pinned for the copy engines of every GPU."""

    context = None
    edge_bytes = REGISTERED_BYTES

    def __init__(self, context: Any, fd: int, size_bytes: int) -> None:
        """The descriptor stays the caller's. Raises CudaError or OSError, with nothing mapped then."""
        self._size_bytes = size_bytes
        self._registered_in = context
        self._registered: list[int] = []
        self._map = mmap.mmap(fd, size_bytes)
        self._anchor: Any = ctypes.c_char.from_buffer(self._map)
        self._start = ctypes.addressof(self._anchor)
        try:
            self._in_threads(self._register, range(0, size_bytes, REGISTERED_BYTES))
        except BaseException:
            self.close()
            raise

    def _register(self, at: int) -> None:
        start, size_bytes = self._start + at, min(REGISTERED_BYTES, self._size_bytes - at)
        # Page tables first: pinning fills them one page after the other. An older kernel just leaves it.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)
        cuda.register(start, size_bytes)
        self._registered.append(start)

    def address(self, at: int, size_bytes: int) -> int:
        """Where that part is. Raises Bug outside."""
        if at < 0 or at + size_bytes > self._size_bytes:
            raise _outside(at, size_bytes, 0, self._size_bytes)
        return self._start + at

    def close(self) -> None:
        registered, self._registered = self._registered, []
        try:
            self._in_threads(cuda.unregister, registered)
        finally:
            self._anchor = None  # the map cannot be closed while something points into it
            self._map.close()

    def _in_threads(self, work: Callable[[int], None], items: Sequence[int]) -> None:
        """Do it for all of them, several at once; none is under way any more at the end. Raises what failed first."""
        if items:
            threads = min(_THREADS, len(items), len(os.sched_getaffinity(0)))
            share_out(items, lambda: self._begun(work), threads=threads, name="host pages")

    def _begun(self, work: Callable[[int], None]) -> Callable[[int], None]:
        """The work, in a thread that has the context that pages are registered in."""
        cuda.use(self._registered_in)
        return work


def _outside(at: int, size_bytes: int, start: int, end: int) -> Bug:
    return Bug(
        f"a copy of {size_bytes} bytes at {at} is not within the {start} to {end} that are mapped",
        facts={"at": at, "size_bytes": size_bytes},
    )
