"""The driver objects that copies need besides their target memory, allocated before a job is quiesced: streams and a
reserve.

Between offload and reload another process may fill the GPU. The driver then cannot create streams or page tables, and
the bytes could not be copied. So streams are created with the session, each has copied once in every direction that it
serves, and a few megabytes are reserved on each GPU. A call that finds no memory frees a piece of the reserve in this
process and is repeated. The reserve is best effort.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.kernel_copy import KernelCopier, processors_of

# Several pieces: another process may take a freed piece first.
PIECE_BYTES = 8 << 20
PIECES = 4
# Bytes that each stream copies once, so that the driver allocates what it needs.
_TRIED_BYTES = 512


class SessionResources:
    """Streams and reserve of one session. Streams serve one copy at a time; any thread may spend the reserve."""

    def __init__(self, contexts: Mapping[int, Any]) -> None:
        """Allocates nothing yet: see `provide`. The contexts, by ordinal, outlive it."""
        self._contexts = contexts
        self._guard = threading.Lock()
        self._streams: dict[int, list[Any]] = {ordinal: [] for ordinal in contexts}
        self._reserve: dict[int, list[int]] = {ordinal: [] for ordinal in contexts}
        self._processors: dict[int, KernelCopier | None] = {}

    def provide(self, streams: int, host: int | None = None) -> None:
        """Create so many streams on each GPU, let each copy to `host` if there is one, and fill the reserve.

        Raises CudaError; `close` releases what was created. The reserve cannot be spent meanwhile.
        """
        self.restock()
        with self._guard:  # held throughout: another process may take a freed piece
            try:
                for ordinal, context in self._contexts.items():
                    cuda.use(context)
                    while len(self._streams[ordinal]) < streams:
                        self._streams[ordinal].append(cuda.create_stream())
                        self._try(ordinal, self._streams[ordinal][-1], host)
                for ordinal in self._contexts:
                    for stream in self._streams[ordinal]:
                        cuda.synchronize(stream)
            except BaseException:
                for ordinal in self._contexts:
                    settle(self._streams[ordinal])
                raise

    def _try(self, ordinal: int, stream: Any, host: int | None) -> None:
        """Copy once between pieces of the reserve, which are empty."""
        if not self._reserve[ordinal]:
            return
        own, piece = self._contexts[ordinal], self._reserve[ordinal][0] + _TRIED_BYTES
        if host is not None:
            cuda.copy_async(host, None, piece, own, _TRIED_BYTES, stream)
            cuda.copy_async(piece, own, host, None, _TRIED_BYTES, stream)
        for other, pieces in self._reserve.items():
            if pieces and (host is None or other == ordinal):  # a stream copies to the pool from its own GPU only
                cuda.copy_async(pieces[-1], self._contexts[other], piece, own, _TRIED_BYTES, stream)

    def streams(self, ordinal: int) -> Sequence[Any]:
        """Return the streams of that GPU. They are idle unless a copy runs."""
        return self._streams[ordinal]

    def processors(self, ordinal: int) -> KernelCopier | None:
        """Return the kernel copies of that GPU, loaded on first use. The thread's context is that GPU's afterwards."""
        context = self._contexts[ordinal]
        if ordinal not in self._processors:
            self._processors[ordinal] = processors_of(ordinal, context)
        cuda.use(context)
        return self._processors[ordinal]

    def restock(self) -> None:
        """Fill the reserve again, as far as there is memory."""
        for ordinal, context in self._contexts.items():
            with self._guard, suppress(cuda.CudaError):
                cuda.use(context)
                while len(self._reserve[ordinal]) < PIECES:
                    self._reserve[ordinal].append(cuda.allocate(PIECE_BYTES))

    def spend(self) -> bool:
        """Free a piece on each GPU. Returns False if none was left. May change the thread's context."""
        with self._guard:
            spent = False
            for ordinal, pieces in self._reserve.items():
                if pieces:
                    cuda.use(self._contexts[ordinal])
                    cuda.free(pieces.pop())
                    spent = True
            return spent

    def close(self) -> None:
        while self._processors:
            _, processors = self._processors.popitem()
            if processors is not None:
                with suppress(cuda.CudaError):
                    processors.close()
        for ordinal, context in self._contexts.items():
            with self._guard, suppress(cuda.CudaError):  # the context is destroyed next, with what is left
                cuda.use(context)
                while self._streams[ordinal]:
                    cuda.destroy_stream(self._streams[ordinal].pop())
                while self._reserve[ordinal]:
                    cuda.free(self._reserve[ordinal].pop())


def settle(streams: Sequence[Any]) -> None:
    """Wait until all streams are idle: after a failure one may still copy, and nothing may be closed before."""
    for stream in streams:
        with suppress(cuda.CudaError):
            cuda.synchronize(stream)
