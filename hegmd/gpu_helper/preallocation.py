"""What copies need of the driver besides memory to copy to, had before anybody stops: streams, and a reserve.

Between taking bytes out and putting them back a GPU may be full: somebody who takes all that is free has taken it all.
The driver has no stream then for whoever has none yet, and refuses to open memory of others for want of page tables;
the bytes would wait until it gives up. So streams are made with the lane, each has copied once on every way that it
will go, and some megabytes are held on each GPU. A call that finds no memory gets a piece of these at once, in this
process, and is made again. The reserve is had as far as there is some; without it all works that worked without.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.kernel_copy import Processors, processors_of

# One piece for each call that finds nothing, and several, because somebody else may be quicker.
PIECE_BYTES = 8 << 20
PIECES = 4
# What a stream copies once, so that whatever the driver makes for that is there.
_TRIED_BYTES = 512


class Provisions:
    """Those of one lane. Streams are for one copy at a time; the reserve may be spent from any thread."""

    def __init__(self, contexts: Mapping[int, Any]) -> None:
        """Nothing is made yet: see `provide`. The contexts, by ordinal, outlast it."""
        self._contexts = contexts
        self._guard = threading.Lock()
        self._streams: dict[int, list[Any]] = {ordinal: [] for ordinal in contexts}
        self._reserve: dict[int, list[int]] = {ordinal: [] for ordinal in contexts}
        self._processors: dict[int, Processors | None] = {}

    def provide(self, streams: int, host: int | None = None) -> None:
        """Have at least so many streams on each GPU, that have copied to `host` if there is one; and the reserve.

        Raises CudaError; what was made stays until `close`. Nothing of the reserve can be spent meanwhile.
        """
        self.restock()
        with self._guard:  # to the end of what is tried: a piece that was given back may be somebody else's by then
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
        """Between pieces of the reserve, which nobody has anything in."""
        if not self._reserve[ordinal]:
            return
        own, piece = self._contexts[ordinal], self._reserve[ordinal][0] + _TRIED_BYTES
        if host is not None:
            cuda.copy_async(host, None, piece, own, _TRIED_BYTES, stream)
            cuda.copy_async(piece, own, host, None, _TRIED_BYTES, stream)
        for other, pieces in self._reserve.items():
            if pieces and (host is None or other == ordinal):  # to the pool it goes from the GPU that it is on
                cuda.copy_async(pieces[-1], self._contexts[other], piece, own, _TRIED_BYTES, stream)

    def streams(self, ordinal: int) -> Sequence[Any]:
        """Those of that GPU, idle unless a copy is under way."""
        return self._streams[ordinal]

    def processors(self, ordinal: int) -> Processors | None:
        """That GPU's, made ready when they are wanted first. The thread's context is that GPU's afterwards."""
        context = self._contexts[ordinal]
        if ordinal not in self._processors:
            self._processors[ordinal] = processors_of(ordinal, context)
        cuda.use(context)
        return self._processors[ordinal]

    def restock(self) -> None:
        """Have the whole reserve again, as far as there is memory for it."""
        for ordinal, context in self._contexts.items():
            with self._guard, suppress(cuda.CudaError):
                cuda.use(context)
                while len(self._reserve[ordinal]) < PIECES:
                    self._reserve[ordinal].append(cuda.allocate(PIECE_BYTES))

    def spend(self) -> bool:
        """Give a piece back to each GPU; whether there was any. The thread's context may be another one afterwards."""
        with self._guard:
            spent = False
            for ordinal, pieces in self._reserve.items():
                if pieces:
                    cuda.use(self._contexts[ordinal])
                    cuda.free(pieces.pop())
                    spent = True
            return spent

    def close(self) -> None:
        """Let go of all of it."""
        while self._processors:
            _, processors = self._processors.popitem()
            if processors is not None:
                with suppress(cuda.CudaError):
                    processors.close()
        for ordinal, context in self._contexts.items():
            with self._guard, suppress(cuda.CudaError):  # the context goes next, and takes along what is left
                cuda.use(context)
                while self._streams[ordinal]:
                    cuda.destroy_stream(self._streams[ordinal].pop())
                while self._reserve[ordinal]:
                    cuda.free(self._reserve[ordinal].pop())


def settle(streams: Sequence[Any]) -> None:
    """Wait until nothing is under way in them any more: after a failure something may be, and nothing is closed
    before."""
    for stream in streams:
        with suppress(cuda.CudaError):
            cuda.synchronize(stream)
