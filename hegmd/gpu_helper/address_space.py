"""Reserved GPU memory that a copy session uses, as one flat range of addresses.

The daemon holds the memory by descriptors. `close`, or the end of the process, removes the mapping and frees no memory.
The mapping of the host pool is in `staging`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from hegmd.errors import Bug, Refused
from hegmd.gpu_helper import cuda

Contexts = Mapping[int, Any]


class VideoSpace:
    """Allocations of GPU memory, mapped one after the other in one reserved range. The first ones can be unmapped
    early."""

    def __init__(
        self, ordinal: int, contexts: Contexts, pieces: Sequence[tuple[int, int]], *, start: int, peer: bool
    ) -> None:
        """Map `pieces`: the caller's descriptors and their sizes, from offset `start` on. Raises CudaError, with
        nothing mapped.
        """
        self.ordinal = ordinal
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
        """Unmap the first of the remaining allocations and return its size in bytes. The others keep their
        addresses."""
        if pieces > len(self._sizes):
            raise Refused(
                f"{pieces} allocations of GPU memory were to be freed, {len(self._sizes)} are left",
                "ask for the state of the copy session again",
            )
        before_bytes = self._gone_bytes
        for _ in range(pieces):
            cuda.unmap(self._va + self._gone_bytes, self._sizes[0])
            self._gone_bytes += self._sizes.pop(0)
        return self._gone_bytes - before_bytes

    @property
    def left_bytes(self) -> int:
        return sum(self._sizes)

    def address(self, at: int, size_bytes: int) -> int:
        """Return the address of that range. Raises Bug outside the mapping: the driver would fail every copy of this
        process."""
        if at < self._gone_bytes or at + size_bytes > self._size_bytes:
            raise outside(at, size_bytes, self._gone_bytes, self._size_bytes)
        return self._va + at

    def close(self) -> None:
        cuda.use(self.context)
        self._undo.close()


def outside(at: int, size_bytes: int, start: int, end: int) -> Bug:
    """Return the Bug for a copy beyond its address space."""
    return Bug(
        f"a copy of {size_bytes} bytes at {at} is outside the mapped range {start} to {end}",
        facts={"at": at, "size_bytes": size_bytes},
    )
