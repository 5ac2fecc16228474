"""The objects of one operation in the helper: contexts on its GPUs, and the address spaces of its bytes.

One space is GPU memory, the other a segment of the host pool. With both, bytes are also copied between them.

A context takes half a gigabyte on its GPU, so it exists only while a session uses the GPU. Requests to one session run
one after the other, and sessions are independent: one that copies out and one that copies in each have the link in
their direction. The bytes of a session do not depend on it: the daemon holds descriptors of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import permutations
from typing import Any

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.address_space import VideoSpace
from hegmd.gpu_helper.allocations import IN, Allocations, CopyResult, MemoryRange, joined
from hegmd.gpu_helper.copying import PACE, Copy
from hegmd.gpu_helper.host_memory import Segment
from hegmd.gpu_helper.mark import Mark
from hegmd.gpu_helper.preallocation import SessionResources
from hegmd.gpu_helper.staging import HostSpace, ReservedGpuMemory, StagedCopy, make_ring_memory
from hegmd.system.thread_pool import share_out

# CUDA's error for two GPUs without peer access. Copies between them go through the host.
_PEER_ACCESS_UNSUPPORTED = 217


#: Names of the address spaces on the wire.
VIDEO, HOST = "video", "host"


class Contexts:
    """The primary contexts that sessions use. The first user creates one, the last releases it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._users: dict[int, int] = {}

    def hold(self, ordinals: Sequence[int]) -> Mapping[int, Any]:
        """Return the contexts of these GPUs, all or none. Raises CudaError."""
        with self._guard, ExitStack() as undo:
            self._make([ordinal for ordinal in ordinals if ordinal not in self._contexts])
            for ordinal in ordinals:
                self._users[ordinal] = self._users.get(ordinal, 0) + 1
                undo.callback(self._release_one, ordinal)
            undo.pop_all()
            return {ordinal: self._contexts[ordinal] for ordinal in ordinals}

    def release(self, ordinals: Sequence[int]) -> None:
        """Release one use of these contexts."""
        with self._guard:
            for ordinal in ordinals:
                self._release_one(ordinal)

    def _make(self, ordinals: Sequence[int]) -> None:
        """Create these contexts concurrently: each takes 0.1 s, mostly waiting."""

        def make(ordinal: int) -> None:
            self._contexts[ordinal] = cuda.retain(ordinal)

        try:
            share_out(ordinals, lambda: make, threads=len(ordinals), name="contexts")
        except BaseException:
            for ordinal in ordinals:
                if self._contexts.pop(ordinal, None) is not None:
                    cuda.release(ordinal)
            raise

    def _release_one(self, ordinal: int) -> None:
        self._users[ordinal] -= 1
        if not self._users[ordinal]:
            del self._users[ordinal], self._contexts[ordinal]
            cuda.release(ordinal)


class CopySession:
    """An operation's part of the helper. Its methods may be called from any thread."""

    def __init__(
        self, contexts: Contexts, ordinals: Sequence[int], map_host: Callable[[], Segment] | None = None
    ) -> None:
        """Map the pool segment, if any, while the contexts are created. Raises CudaError, OSError; nothing is held."""
        self._guard = threading.Lock()
        self._closed = False
        self._video: VideoSpace | None = None
        self._host: HostSpace | None = None
        self._shifted: CopyResult | cuda.CudaError | HegmError | None = None
        with ExitStack() as undo:
            self._contexts, memory = _opened(contexts, ordinals, map_host, undo)
            #: True if all its GPUs access each other's memory directly.
            self.peer = self._enable_peers()
            self._provisions = SessionResources(self._contexts)
            undo.callback(self._provisions.close)
            if memory is not None:
                self._host = self._host_space(memory)
            self._undo = undo.pop_all()

    def _host_space(self, memory: Segment) -> HostSpace:
        space = HostSpace(next(iter(self._contexts.values())), memory)
        with ExitStack() as undo:
            undo.callback(space.close_ring)
            self._provisions.provide(space.pace.streams, space.trial)
            undo.pop_all()
        return space

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
        """Map GPU memory of one of its GPUs, given by descriptors and sizes. Raises CudaError, Refused."""
        self._context(ordinal)
        with self._guard:
            self._refuse_closed()
            if self._video is not None:
                raise Refused("the copy session has GPU memory already", "free all of it first")
            self._provisions.provide(PACE.streams)
            self._video = VideoSpace(ordinal, self._contexts, pieces, start=start, peer=self.peer)

    def detach(self, pieces: int | None) -> int:
        """Unmap the first allocations of GPU memory, or all of it (None). Returns the bytes."""
        with self._guard:
            if self._video is None:
                raise Refused(
                    "the copy session has no GPU memory to free", "ask for the state of the copy session again"
                )
            if pieces is not None:
                return self._video.detach(pieces)
            space, self._video = self._video, None
            size_bytes = space.left_bytes
            space.close()
            return size_bytes

    def mark(self, mark: Mark | None) -> None:
        """Record in the pool segment where its bytes are. Raises Refused."""
        with self._guard:
            self._piece().memory.mark(mark)

    def copy(
        self,
        ordinal: int,
        direction: str,
        through: str | None,
        handles: Sequence[bytes],
        places: Sequence[Sequence[int]],
        tell: Callable[[int], None],
    ) -> CopyResult:
        """Copy between a process's storages on that GPU and one address space: named, or the only one. Raises
        CudaError, Refused.
        """
        context = self._context(ordinal)

        def copy() -> CopyResult:
            space, spend = self._space(through), self._provisions.spend
            if isinstance(space, HostSpace):
                gpu_end = Allocations(context, handles, spend=spend)
                staged = StagedCopy(context, space, direction, gpu_end, self._provisions.streams(ordinal))
                return staged.run(joined(places, len(gpu_end)), tell)
            streams = self._provisions.streams(space.ordinal if direction == IN else ordinal)
            by = self._provisions.processors
            return Copy(context, space, direction, handles, streams, spend=spend, processors=by).run(places, tell)

        with self._guard:
            self._refuse_closed()
            return self._tried_again(copy)

    def copy_regions(self, direction: str, places: Sequence[Sequence[int]], tell: Callable[[int], None]) -> CopyResult:
        """Copy from GPU memory to the pool segment (`out`), or back (`in`). Raises CudaError, Refused.

        A place is (offset in GPU memory, offset in the segment, bytes).
        """
        with self._guard:
            return self._shift(direction, places, tell)

    def start_copy(self, direction: str, size_bytes: int) -> None:
        """Start a copy in the background. The next call to the session waits for its end."""
        begun = threading.Event()

        def go_on() -> None:
            with self._guard:
                begun.set()
                try:
                    self._shifted = self._shift(direction, [(0, 0, size_bytes)], lambda _: None)
                except (cuda.CudaError, HegmError) as error:
                    self._shifted = error

        with self._guard:
            self._shifted = None
        threading.Thread(target=go_on, name="shift", daemon=True).start()
        begun.wait()

    def finish_copy(self) -> CopyResult:
        """Wait for the background copy. Raises its error, and Refused if none was started."""
        with self._guard:
            if isinstance(self._shifted, Exception):
                raise self._shifted
            if self._shifted is None:
                raise Refused("the copy session has started no copy", "start one first")
            return self._shifted

    def _shift(self, direction: str, places: Sequence[Sequence[int]], tell: Callable[[int], None]) -> CopyResult:
        host, video = self._piece(), self._video
        if video is None:
            raise Refused("the copy session has no GPU memory to copy to or from", "attach it first")
        streams = self._provisions.streams(video.ordinal)

        def shift() -> CopyResult:
            copy = StagedCopy(video.context, host, direction, ReservedGpuMemory(video), streams)
            return copy.run([MemoryRange(0, there, size_bytes, here) for there, here, size_bytes in places], tell)

        return self._tried_again(shift)

    def _tried_again(self, copy: Callable[[], CopyResult]) -> CopyResult:
        """Run the copy again with a piece of the reserve, each time the driver finds no memory for itself."""
        try:
            while True:
                try:
                    return copy()
                except cuda.CudaError as error:
                    if error.code != cuda.OUT_OF_MEMORY or not self._provisions.spend():
                        raise
        finally:
            self._provisions.restock()

    def spend(self) -> bool:
        """Release a piece of the reserve on each GPU. Returns False if none was left."""
        return self._provisions.spend()

    def _space(self, through: str | None) -> VideoSpace | HostSpace:
        spaces = {name: space for name, space in ((VIDEO, self._video), (HOST, self._host)) if space is not None}
        named = spaces if through is None else {through: spaces.get(through)}
        (space, *others) = named.values() or (None,)
        if space is None or others:
            raise Refused(
                f"the copy session needs exactly one address space to copy to or from, and has: {', '.join(spaces)}",
                "name one",
            )
        return space

    def _piece(self) -> HostSpace:
        self._refuse_closed()
        if self._host is None:
            raise Refused("the copy session has no segment of the host pool", "open it with a segment")
        return self._host

    def close(self) -> None:
        """Release everything after the running copy. Closing twice is fine."""
        with self._guard:
            self._closed = True
            video, self._video = self._video, None
            host, self._host = self._host, None
            with self._undo:  # releases the contexts last
                for space in (video, host):
                    if space is not None:
                        self._undo.callback(space.close)

    def _context(self, ordinal: int) -> Any:
        if ordinal not in self._contexts:
            raise Refused(
                f"GPU {ordinal} does not belong to this copy session",
                "open the copy session with every GPU that it uses",
            )
        return self._contexts[ordinal]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Refused("the copy session is closed", "open it again")


def _call(work: Callable[[], None]) -> None:
    work()


def _opened(
    contexts: Contexts, ordinals: Sequence[int], map_host: Callable[[], Segment] | None, undo: ExitStack
) -> tuple[Mapping[int, Any], Segment | None]:
    """Create contexts and map the pool segment concurrently. If one fails, the other is undone."""
    held: dict[int, Any] = {}
    mapped: list[Segment] = []

    def hold() -> None:
        held.update(contexts.hold(ordinals))
        undo.callback(contexts.release, ordinals)

    def prepare() -> None:
        if map_host is not None:
            mapped.append(map_host())
            undo.callback(mapped[0].close)
            if mapped[0].pinning is None:
                make_ring_memory()

    works = [hold] if map_host is None else [hold, prepare]
    share_out(works, lambda: _call, threads=len(works), name="opening")
    return held, mapped[0] if mapped else None
