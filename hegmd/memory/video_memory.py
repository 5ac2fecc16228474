"""GPU memory that the daemon holds by descriptor: reservations, and bytes in flight.

A descriptor holds the memory without CUDA and without a context. So the GPU helper creates it, in pieces of a gigabyte,
and may be killed afterwards; closing the descriptors frees it. The pieces of one owner on one GPU form a flat space;
the first ones can be released while others are needed.

A lost reservation costs nothing: the job stays checkpointed until memory is free, and an operation that a new daemon
resumes reserves again. Bytes are different: before any are copied into it, memory is `kept`, and a store has it too
(hegmd/memory/descriptor_store.py), under a name with owner, GPU, offset and size, from which `adopt` takes it back. A
reservation is not stored: it has to be free at once when a process is restored into it, which must not depend on
another process.

Belongs to the event loop. Knows only names of operations and workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import anyio

from hegmd.errors import Bug, HegmError, Refused
from hegmd.gpu_helper.link import HelperLost, HelperReply
from hegmd.memory.descriptor_store import Store
from hegmd.memory.sizes import piece_bytes
from hegmd.telemetry.log import fields

logger = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30
STORE_PREFIX = "hegm-vram"
# The smallest allocation of NVIDIA's driver. The helper asks the driver, and rounds up if it is larger.
UNIT_BYTES = 2 * MIB

#: Offsets in the memory for one of several devices of a process are counted from a multiple of this.
DEVICE_BYTES = 1 << 44

# Time to start a helper is not included: the deadline of a call begins when a helper runs.
_HOLD_S = 10.0
_HOLD_BYTES_PER_S = 4 * GIB

_NAME = re.compile(
    STORE_PREFIX + r"-(?P<who>.+)-(?P<gpu>GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-(?P<at>\d+)-(?P<size>\d+)"
)


class Helper(Protocol):
    """The process that creates the memory: `gpu_helper.link.Link`."""

    async def call(self, op: str, args: Mapping[str, object], *, deadline_s: float) -> HelperReply: ...


class Piece(NamedTuple):
    """Some GPU memory, and its offset in its owner's flat space. This module closes the descriptor."""

    fd: int
    at: int
    size_bytes: int


class _GpuMemory:
    """The memory of one owner on one GPU."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.kept = False

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def end(self) -> int:
        return self.pieces[-1].at + self.pieces[-1].size_bytes if self.pieces else 0


Key = tuple[str, str]


def piece_sizes(size_bytes: int) -> list[int]:
    """Return the sizes of the allocations: gigabytes, larger ones if they would be too many, a smaller last one."""
    each_bytes = piece_bytes(size_bytes)
    sizes = [each_bytes] * (size_bytes // each_bytes)
    if tail_bytes := size_bytes % each_bytes:
        sizes.append(-(-tail_bytes // UNIT_BYTES) * UNIT_BYTES)
    return sizes


class VideoMemory:
    """All reserved GPU memory, by owner and GPU UUID. `store` is where it outlives the daemon, if anywhere."""

    def __init__(self, helper: Helper, store: Store | None = None) -> None:
        self.store = store
        #: Called before a reservation is refused: frees memory on that GPU that can be spared, and returns whether it
        #: freed any. Raises nothing.
        self.free_memory: Callable[[str], Awaitable[bool]] | None = None
        self._helper = helper
        self._held: dict[Key, _GpuMemory] = {}
        self._taking = anyio.Lock()

    # -- figures -------------------------------------------------------------------------------------------------------

    def of(self, who: str) -> Mapping[str, int]:
        return {gpu: holding.size_bytes for (owner, gpu), holding in self._held.items() if owner == who}

    def by_owner(self) -> Mapping[Key, int]:
        return {key: holding.size_bytes for key, holding in self._held.items()}

    def pieces(self, who: str, gpu: str) -> tuple[Piece, ...]:
        """Return the owner's allocations there, in order. Raises HegmError if an earlier daemon lost some of them."""
        holding = self._held.get((who, gpu))
        pieces = () if holding is None else tuple(holding.pieces)
        for one, other in pairwise(pieces):
            if one.at + one.size_bytes != other.at:
                raise Refused(
                    f"of the video memory of {who} on {gpu}, what begins at {one.at + one.size_bytes} is gone",
                    "its contents are lost; see the log of the service manager around hegmd's last restart",
                    {"from_bytes": one.at + one.size_bytes, "to_bytes": other.at},
                )
        return pieces

    # -- taking and giving ---------------------------------------------------------------------------------------------

    async def reserve(self, who: str, gpu: str, size_bytes: int, *, spare: bool = False, start: int = 0) -> None:
        """Reserve at least that much there for that owner in total; only the missing part is added.

        For `spare` memory, nothing is released elsewhere first. `start` is the offset of the first piece, if the owner
        has none there. Raises Refused if the GPU lacks memory, and the
        helper's errors; then nothing changes. If cancelled, what was created is released.
        """
        async with self._taking:
            known = self._held.get((who, gpu))
            missing_bytes = size_bytes - (0 if known is None else known.size_bytes)
            if missing_bytes <= 0:
                return
            deadline_s = _HOLD_S + missing_bytes / _HOLD_BYTES_PER_S
            args: dict[str, object] = {"gpu": gpu, "sizes": piece_sizes(missing_bytes)}
            try:
                answer = await self._made(args, deadline_s)
            except Refused:
                if spare or self.free_memory is None or not await self.free_memory(gpu):
                    raise
                answer = await self._made(args, deadline_s)
            holding = self._held.get((who, gpu), _GpuMemory())  # some may have been given back meanwhile
            with answer.fds:
                added = _pieces_of(answer, holding.end or start)
                if holding.kept:
                    await self._keep(who, gpu, added)
                answer.fds.take()
            holding.pieces += added
            self._held[who, gpu] = holding
        logger.info(
            "%d MiB of video memory held for %s",
            holding.size_bytes // MIB,
            who,
            extra=fields(gpu=gpu, size_bytes=holding.size_bytes),
        )

    async def _made(self, args: Mapping[str, object], deadline_s: float) -> HelperReply:
        try:
            return await self._helper.call("hold", args, deadline_s=deadline_s)
        except HelperLost as error:  # memory that the helper may have created was freed with it
            logger.warning("GPU memory is requested again: %s", error.message)
            return await self._helper.call("hold", args, deadline_s=deadline_s)

    async def keep(self, who: str, gpu: str) -> bool:
        """Store the descriptors so that the memory outlives the daemon, before bytes are copied into it. Return False
        without a store.

        Raises HegmError if they could not be stored.
        """
        holding = self._held.get((who, gpu))
        if holding is None:
            raise Bug("video memory is to be kept that is not held", facts={"who": who, "gpu": gpu})
        holding.kept = holding.kept or await self._keep(who, gpu, holding.pieces)
        return holding.kept

    async def release(self, who: str, gpu: str) -> None:
        """Free it. When this returns, the memory is available on the GPU. Does nothing if nothing is reserved.

        Raises HegmError if a store does not drop it: then only the store still holds it.
        """
        holding = self._held.pop((who, gpu), None)
        if holding is not None:
            released, holding.pieces = holding.pieces, []
            await self._free(who, gpu, holding, released)

    async def give_first(self, who: str, gpu: str, count: int) -> int:
        """Free the first allocations and return their bytes, including stored ones."""
        holding = self._held.get((who, gpu))
        if holding is None or count > len(holding.pieces):
            raise Bug("more pieces of video memory are given back than are held", facts={"who": who, "gpu": gpu})
        released, holding.pieces = holding.pieces[:count], holding.pieces[count:]
        if not holding.pieces:
            del self._held[who, gpu]
        await self._free(who, gpu, holding, released)
        return sum(piece.size_bytes for piece in released)

    async def hand_on(self, who: str, gpu: str, to: str) -> None:
        """Pass all of that owner's memory there to another owner; stored memory stays stored.

        Raises HegmError if a store does not take the new names: then nothing changes. Old names that it does not drop
        are stored twice, and the next daemon finds them as orphans.
        """
        async with self._taking:
            holding = self._held.get((who, gpu))
            if holding is None or (to, gpu) in self._held:
                raise Bug(
                    "video memory of an owner that has none, or for one that has some", facts={"who": who, "to": to}
                )
            pieces = tuple(holding.pieces)
            if holding.kept:
                await self._keep(to, gpu, pieces)
            if self._held.get((who, gpu)) is not holding:
                if holding.kept and self.store is not None:
                    await self.store.drop(*[_store_name(to, gpu, piece) for piece in pieces])
                raise Refused(f"the video memory of {who} was released meanwhile", "run: hegmctl adopt")
            self._held[to, gpu] = self._held.pop((who, gpu))
            if holding.kept and self.store is not None:
                with anyio.CancelScope(shield=True):
                    await self.store.drop(*[_store_name(who, gpu, piece) for piece in pieces])

    def close(self) -> None:
        """Close everything here; a store keeps what it has."""
        while self._held:
            _, holding = self._held.popitem()
            for piece in holding.pieces:
                os.close(piece.fd)

    def adopt(self, name: str, fd: int) -> bool:
        """Adopt memory that an earlier daemon stored. Return False for anything else, which stays the caller's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return False
        holding = self._held.setdefault((found["who"], found["gpu"]), _GpuMemory())
        holding.kept = True
        at = int(found["at"])
        if any(piece.at == at for piece in holding.pieces):  # kept twice
            os.close(fd)
            return True
        holding.pieces.append(Piece(fd, at, int(found["size"])))
        holding.pieces.sort(key=lambda piece: piece.at)
        return True

    # -- the store ----------------------------------------------------------------------------------------------------

    async def _keep(self, who: str, gpu: str, pieces: Sequence[Piece]) -> bool:
        if self.store is None:
            return False
        handed: list[str] = []
        try:
            for piece in pieces:
                handed.append(_store_name(who, gpu, piece))
                await self.store.put(handed[-1], piece.fd)
        except BaseException:
            with anyio.CancelScope(shield=True), contextlib.suppress(HegmError):
                await self.store.drop(*handed)
            raise
        return True

    async def _free(self, who: str, gpu: str, holding: _GpuMemory, pieces: Sequence[Piece]) -> None:
        """Free it, also if cancelled: otherwise its owner would be unknown."""
        began = anyio.current_time()
        for piece in pieces:
            os.close(piece.fd)
        logger.debug("video memory: give took %.1f ms", (anyio.current_time() - began) * 1e3)
        if holding.kept and self.store is not None and pieces:
            began = anyio.current_time()
            with anyio.CancelScope(shield=True):
                await self.store.drop(*[_store_name(who, gpu, piece) for piece in pieces])
            # These were the last descriptors, so the driver frees the memory now.
            logger.debug("video memory: drop took %.1f ms", (anyio.current_time() - began) * 1e3)


def _pieces_of(answer: HelperReply, start: int) -> list[Piece]:
    """Return the helper's allocations with their offsets. Raises Bug if the answer does not fit."""
    sizes: list[int] = answer.values["sizes"]
    if len(sizes) != len(answer.fds):
        raise Bug(f"the helper sent {len(answer.fds)} descriptors for the sizes {sizes!r}")
    pieces: list[Piece] = []
    for fd, size_bytes in zip(answer.fds.view(), sizes, strict=True):
        pieces.append(Piece(fd, start, size_bytes))
        start += size_bytes
    return pieces


def _store_name(who: str, gpu: str, piece: Piece) -> str:
    return f"{STORE_PREFIX}-{who}-{gpu}-{piece.at}-{piece.size_bytes}"
