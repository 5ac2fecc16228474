"""What one operation has in the helper: contexts on its GPUs, and one space that its bytes go to and come from.

A context costs half a gigabyte on its GPU, so it is there only while some lane uses the GPU. Requests to one lane are
done one after the other, and two lanes know nothing of each other: a lane that copies out and one that copies in have
the link to themselves in their direction. Nothing here is needed to get a lane's bytes back: these belong to
descriptors that the daemon holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import permutations
from typing import Any

from hegmd.crew import share_out
from hegmd.errors import Refused
from hegmd.helper import cuda
from hegmd.helper.allocations import IN, Done
from hegmd.helper.copying import PACE, Copy
from hegmd.helper.provisions import Provisions
from hegmd.helper.spaces import VideoSpace
from hegmd.helper.staging import HostSpace, StagedCopy

# CUDA's word for two GPUs that cannot reach each other's memory; copies between them then go through the host.
_PEER_ACCESS_UNSUPPORTED = 217


Space = VideoSpace | HostSpace


class Contexts:
    """The primary contexts that lanes use, each made for the first and let go with the last."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._users: dict[int, int] = {}

    def hold(self, ordinals: Sequence[int]) -> Mapping[int, Any]:
        """The contexts of these GPUs, all or none. Raises CudaError."""
        with self._guard, ExitStack() as undo:
            self._make([ordinal for ordinal in ordinals if ordinal not in self._contexts])
            for ordinal in ordinals:
                self._users[ordinal] = self._users.get(ordinal, 0) + 1
                undo.callback(self._let_go_of, ordinal)
            undo.pop_all()
            return {ordinal: self._contexts[ordinal] for ordinal in ordinals}

    def let_go(self, ordinals: Sequence[int]) -> None:
        """They are used by one less."""
        with self._guard:
            for ordinal in ordinals:
                self._let_go_of(ordinal)

    def _make(self, ordinals: Sequence[int]) -> None:
        """Make those contexts side by side: each takes 0.1 s, most of it waiting."""

        def make(ordinal: int) -> None:
            self._contexts[ordinal] = cuda.retain(ordinal)

        try:
            share_out(ordinals, lambda: make, threads=len(ordinals), name="contexts")
        except BaseException:
            for ordinal in ordinals:
                if self._contexts.pop(ordinal, None) is not None:
                    cuda.release(ordinal)
            raise

    def _let_go_of(self, ordinal: int) -> None:
        self._users[ordinal] -= 1
        if not self._users[ordinal]:
            del self._users[ordinal], self._contexts[ordinal]
            cuda.release(ordinal)


class Lane:
    """One operation's part of the helper. Its methods may be called from any thread."""

    def __init__(self, contexts: Contexts, ordinals: Sequence[int]) -> None:
        """Raises CudaError, with nothing held then."""
        self._guard = threading.Lock()
        self._closed = False
        self._space: Space | None = None
        with ExitStack() as undo:
            self._contexts = contexts.hold(ordinals)
            undo.callback(contexts.let_go, ordinals)
            #: Whether all its GPUs reach each other's memory directly.
            self.peer = self._enable_peers()
            self._provisions = Provisions(self._contexts)
            undo.callback(self._provisions.close)
            self._undo = undo.pop_all()

    def _enable_peers(self) -> bool:
        try:
            for one, other in permutations(self._contexts, 2):
                cuda.enable_peer(self._contexts[one], self._contexts[other])
        except cuda.CudaError as error:
            if error.code != _PEER_ACCESS_UNSUPPORTED:
                raise
            return False
        return True

    def attach_video(self, ordinal: int, pieces: Sequence[tuple[int, int]], start: int = 0) -> None:
        """Have held video memory of one of its GPUs as the space, by descriptor and size. Raises CudaError, Refused."""
        self._context(ordinal)

        def make() -> VideoSpace:
            self._provisions.provide(PACE.streams)
            return VideoSpace(ordinal, self._contexts, pieces, start=start, peer=self.peer)

        self._attach(make)

    def attach_host(self, fd: int, size_bytes: int) -> None:
        """Have a piece of the host pool as the space. Raises CudaError, OSError, Refused."""

        def make() -> HostSpace:
            space = HostSpace(next(iter(self._contexts.values())), fd, size_bytes)
            with ExitStack() as undo:
                undo.callback(space.close)
                self._provisions.provide(space.ring.pace.streams, space.ring.slots(0)[0])
                undo.pop_all()
            return space

        self._attach(make)

    def _attach(self, make: Callable[[], Space]) -> None:
        with self._guard:
            self._refuse_closed()
            if self._space is not None:
                raise Refused("the lane has a space already", "let go of all of it first")
            self._space = make()

    def detach(self, pieces: int | None) -> int:
        """Let go of the first pieces of its video memory, or of the whole space (None); bytes of video memory."""
        with self._guard:
            if isinstance(self._space, VideoSpace) and pieces is not None:
                return self._space.detach(pieces)
            if pieces is not None:
                raise Refused("the lane has no video memory to let go of in pieces", "let go of all of it")
            space, self._space = self._space, None
            if space is not None:
                space.close()
            return 0

    def copy(
        self,
        ordinal: int,
        direction: str,
        handles: Sequence[bytes],
        places: Sequence[Sequence[int]],
        tell: Callable[[int], None],
    ) -> Done:
        """Copy between the storages of a process on that GPU and the space. Raises CudaError, Refused.

        Where a call of the driver found no memory for itself, all is copied once more with a piece of the reserve.
        """
        self._context(ordinal)
        with self._guard:
            self._refuse_closed()
            try:
                while True:
                    try:
                        return self._copy(ordinal, direction, handles).run(places, tell)
                    except cuda.CudaError as error:
                        if error.code != cuda.OUT_OF_MEMORY or not self._provisions.spend():
                            raise
            finally:
                self._provisions.restock()

    def _copy(self, ordinal: int, direction: str, handles: Sequence[bytes]) -> Copy | StagedCopy:
        context, spend = self._contexts[ordinal], self._provisions.spend
        if self._space is None:
            raise Refused("the lane has no space to copy to or from", "attach video or host memory first")
        if isinstance(self._space, HostSpace):
            streams = self._provisions.streams(ordinal)
            return StagedCopy(context, self._space, direction, handles, streams, spend=spend)
        streams = self._provisions.streams(self._space.ordinal if direction == IN else ordinal)
        return Copy(context, self._space, direction, handles, streams, spend=spend)

    def spend(self) -> bool:
        """Give some of what is in reserve back to each of its GPUs; whether there was any."""
        return self._provisions.spend()

    def close(self) -> None:
        """Let go of everything, after whatever is under way. Closing twice is fine."""
        with self._guard:
            self._closed = True
            space, self._space = self._space, None
            with self._undo:  # the contexts go last, and in any case
                if space is not None:
                    space.close()

    def _context(self, ordinal: int) -> Any:
        if ordinal not in self._contexts:
            raise Refused(f"GPU {ordinal} is none of this lane's", "open the lane with every GPU that it is to touch")
        return self._contexts[ordinal]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Refused("the lane is closed", "open it again")
