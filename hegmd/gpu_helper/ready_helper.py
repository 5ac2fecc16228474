"""Keeps the GPU helper ready for the next copy, in addition to ready host memory (`pool.ready_helper`).

A helper that is started for a suspend needs at least 0.5 s before it can copy: its start, the driver's `cuInit`, a
context on the GPU and pinned memory. `started` keeps a helper that has called `cuInit`, which takes no GPU memory.
`contexts` also keeps a context on each GPU with a job (about 0.5 GiB there) and the pages of the pinned ring. `pinned`
also pins the ready memory, and the bytes of suspended jobs: a piece at a time, while no operation runs. While a helper
runs, the driver's device files are open, so the driver cannot be unloaded and no GPU can be reset.

Uses its own copy session, which belongs to no operation. A lost helper is started again at the next check.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, NoReturn

import anyio

from hegmd.errors import HegmError
from hegmd.gpu_helper.copy_client import CopyClient
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link
from hegmd.system.descriptors import Descriptors, Inode, inode_of

logger = logging.getLogger(__name__)

OFF, STARTED, CONTEXTS, PINNED = "off", "started", "contexts", "pinned"
LOOK_S = 2.0
RETRY_S = 30.0
#: Sessions of operations have the operation's number in their names.
_LANES, _RING_LANE = ("ready", "ready-too"), "ready-ring"
# A session creates a ring only for a pool segment.
_RING_PIECE_BYTES = 2 << 20
#: Of the largest segments so many are pinned, in pieces that take 17 ms each.
_MAX_PINNED = 32
_PIN_S = 20.0
_PIECE_S = 1.0
# The driver's call that releases pinned memory. If it fails, only the end of the helper frees the pages.
_UNPINNING = "cuMemHostUnregister"

#: Calls a function with descriptors and sizes of memory that is not resized during the call.
WithMemory = Callable[[Callable[[Sequence[tuple[int, int]]], Awaitable[bool]]], Awaitable[bool]]


async def _without_memory(_: Callable[[Sequence[tuple[int, int]]], Awaitable[bool]]) -> bool:
    return False


class Pinning:
    """Memory of the pool that is pinned: none, without a helper that is kept ready."""

    def unpin_later(self, fd: int) -> None:
        """Note that this file is removed."""

    async def unpin(self, fd: int | None = None) -> None:
        """Have no page pinned of this file, which is cut, nor of those that were removed. Raises nothing."""


class Pins(NamedTuple):
    """The helper that pins memory, by its pid; the sizes of that memory by inode; and how much is left to do."""

    helper: int | None
    wanted: dict[Inode, int]
    left_bytes: int

    @property
    def pinned_bytes(self) -> int:
        return max(0, sum(self.wanted.values()) - self.left_bytes)


class Held(NamedTuple):
    """The helper with contexts, by its pid; on which GPUs; and the session that has them."""

    helper: int | None
    gpus: tuple[str, ...]
    session: CopyClient


class ReadyHelper(Pinning):
    """Looks again and again. `gpus` returns the UUIDs of the GPUs with jobs; it is only called for `contexts` and
    `pinned`.
    """

    def __init__(
        self,
        link: Link,
        how: str,
        gpus: Callable[[], Sequence[str]],
        with_memory: WithMemory = _without_memory,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = link
        self._how = how
        self._gpus = gpus
        self._with_memory = with_memory
        self._is_busy = is_busy
        self._held: Held | None = None
        #: Why the last check failed; empty if it did not.
        self._why_not = ""
        #: The GPU of the last context, which pins memory while all jobs are suspended.
        self._last_gpu: str | None = None
        self._pins = Pins(None, {}, 0)
        #: Files that may be pinned still and were removed.
        self._removed: set[Inode] = set()

    @property
    def keeps_contexts(self) -> bool:
        """True if the helper has contexts on GPUs also while it copies nothing."""
        return self._how in (CONTEXTS, PINNED)

    @property
    def pinned_bytes(self) -> int:
        """Return how much memory of the pool is pinned."""
        return self._pins.pinned_bytes if self._pins.helper == self._link.pid else 0

    async def run(self) -> None:
        """Keep it ready until cancelled; ends at once if it is not to be."""
        while self._how != OFF:
            pause_s = await self.look()
            await anyio.sleep(pause_s)

    async def look(self) -> float:
        """Check it once, and return the pause until the next time. Logs a reason that stays the same only once."""
        try:
            await self.check()
        except (HegmError, OSError) as error:
            before, self._why_not = self._why_not, str(error)
            if self._why_not != before:
                logger.warning("the GPU helper is not as ready as pool.ready_helper requests: %s", error)
            return RETRY_S
        self._why_not = ""
        return LOOK_S

    async def check(self) -> None:
        """Have a helper, and with `contexts` its contexts, unless it has them. Raises HegmError, OSError.

        Without a context on one GPU, it has those on the others, pins memory, and raises the reason then.
        """
        gpus = self._wanted_gpus()
        failed: HegmError | None = None
        if self._held is None or self._held.helper != self._link.pid or self._held.gpus != gpus:
            failed = await self._hold(gpus)
        has = self._held.gpus if self._held is not None else ()
        self._last_gpu = has[0] if has else self._last_gpu
        if self._how == PINNED and self._last_gpu is not None:
            while not self._is_busy() and await self._with_memory(self._pin):
                pass
        if failed is not None:
            raise failed

    def _wanted_gpus(self) -> tuple[str, ...]:
        """The GPUs with jobs. While memory is pinned, also those that had one: for a new context, a resume would wait
        0.02 s for each pinned gigabyte.
        """
        if not self.keeps_contexts:
            return ()
        had = self._held.gpus if self._held is not None and self.pinned_bytes else ()
        return tuple(sorted({*self._gpus(), *had}))

    async def _hold(self, gpus: tuple[str, ...]) -> HegmError | None:
        """Have contexts on these GPUs, without destroying one that stays. Returns why one of them has none.

        Raises HegmError, OSError.
        """
        former = self._held
        lane = _LANES[former is not None and former.session.lane == _LANES[0]]
        failed: HegmError | None = None
        try:
            session = await CopyClient.open(self._link, lane, gpus)
        except HelperLost:
            raise
        except HegmError:
            gpus, failed = await self._able(lane, gpus)
            if former is not None and (former.helper, former.gpus) == (self._link.pid, gpus):
                return failed
            session = await CopyClient.open(self._link, lane, gpus)
        self._held = Held(self._link.pid, gpus, session)
        if former is not None:
            await former.session.close()
        if gpus:
            await self._make_ring(gpus)
        return failed

    async def _able(self, lane: str, gpus: tuple[str, ...]) -> tuple[tuple[str, ...], HegmError | None]:
        """Return those GPUs that can have a context, tried one by one, and why the last other one cannot."""
        able: list[str] = []
        failed: HegmError | None = None
        for gpu in gpus:
            try:
                session = await CopyClient.open(self._link, lane, [gpu])
            except HelperLost:
                raise
            except HegmError as error:
                message = error.message if gpu in error.message else f"{gpu}: {error.message}"
                failed = HegmError(error.code, message, error.hint, error.facts)
            else:
                await session.close()
                able.append(gpu)
        return tuple(able), failed

    async def _pin(self, memory: Sequence[tuple[int, int]]) -> bool:
        """Pin one more piece of that memory, or unpin one of what is not in it. Returns True if more is left."""
        largest = sorted(memory, key=lambda one: -one[1])[:_MAX_PINNED]
        wanted = {inode_of(fd): size_bytes for fd, size_bytes in largest}
        if self._pins == Pins(self._link.pid, wanted, 0):
            return False
        args = {"gpu": self._last_gpu, "sizes": [size_bytes for _, size_bytes in largest]}
        with Descriptors([]) as own:
            for fd, _ in largest:
                own.add(os.dup(fd))
            # Until it answers, it may still have pinned what it had before.
            had = self._pins.wanted if self._pins.helper == self._link.pid else {}
            both = {**had, **wanted}
            self._pins = Pins(self._link.pid, both, sum(both.values()) - self.pinned_bytes)
            try:
                answer = await self._link.call("pin", args, deadline_s=_PIN_S, fds=own.view(), watch=self._end_if_slow)
            except DriverFailed as error:
                if error.call == _UNPINNING and not self._is_busy():
                    self._link.kill(f"it cannot release memory that is pinned: {error.message}")
                raise
        left_bytes = int(answer.values["left_bytes"])
        self._pins = Pins(self._link.pid, wanted, left_bytes)
        if not left_bytes:
            self._removed &= wanted.keys()
        return left_bytes > 0

    async def _end_if_slow(self) -> NoReturn:
        """End the helper if a piece takes long and an operation runs: it may need the pool or a session, which both
        wait for the piece. Is cancelled with the piece.
        """
        while True:
            await anyio.sleep(_PIECE_S)
            if self._is_busy():
                self._link.kill("it is still pinning memory, and an operation may wait for that")

    def unpin_later(self, fd: int) -> None:
        """Have that file unpinned soon: it is removed now, and its pages are free only then."""
        inode = inode_of(fd)
        if inode in self._pins.wanted:
            self._removed.add(inode)

    async def unpin(self, fd: int | None = None) -> None:
        """Have no page of that file pinned, which is cut, nor of those removed before. Raises nothing.

        A file that is cut and grows again has other pages than those that are pinned. So without an answer the helper
        ends.
        """
        gone = set(self._removed)
        if fd is not None and inode_of(fd) in self._pins.wanted:
            gone.add(inode_of(fd))
        helper = self._pins.helper
        if not gone or helper is None or helper != self._link.pid:
            return
        with anyio.CancelScope(shield=True):
            try:
                await self._link.call("unpin", {"inodes": [list(inode) for inode in gone]}, deadline_s=_PIN_S)
            except HegmError as error:
                if self._link.pid == helper:
                    self._link.kill(f"it has memory pinned that it has to release: {error.message}")
        self._removed -= gone
        left = {inode: size_bytes for inode, size_bytes in self._pins.wanted.items() if inode not in gone}
        self._pins = Pins(self._pins.helper, left, min(self._pins.left_bytes, sum(left.values())))

    async def _make_ring(self, gpus: Sequence[str]) -> None:
        """Have the helper make the memory of a ring, which it keeps for the next session."""
        fd = os.memfd_create("hegm-ready-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _RING_PIECE_BYTES)
            session = await CopyClient.open(self._link, _RING_LANE, gpus[:1], fd, _RING_PIECE_BYTES)
            await session.close()
        finally:
            os.close(fd)
