"""Video memory that the daemon holds by descriptor: room for processes that are to come, and bytes in flight.

A descriptor holds the memory whoever made it, without CUDA and without a context. So the GPU helper makes it, in pieces
of a gigabyte, and may be killed at any time after that; closing the descriptors frees it. Of one owner on one GPU the
pieces lie one after the other in a flat space; the first ones can be given back while the others are still needed.

Room costs nothing to lose: a job whose room is gone stays checkpointed until there is some again, and an operation that
a new daemon takes up holds its room anew. Bytes are another matter: before any are put into it, memory is to be `kept`,
and then a store has it too (hegmd/memory/descriptor_store.py), under a name that tells owner, GPU, place and size, from
where `adopt` takes it back. Room is not kept there: the one moment at which held memory has to be free at once is when
a process is restored into it, and then nobody else's promptness is to be relied upon.

Belongs to the event loop. Knows nothing of operations and workers but the names that it is given.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import anyio

from hegmd.errors import Bug, HegmError, Refused
from hegmd.gpu_helper.link import Answer, HelperLost
from hegmd.memory.descriptor_store import Store
from hegmd.memory.sizes import piece_bytes
from hegmd.telemetry.log import fields

logger = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30
STORE_PREFIX = "hegm-vram"
# What NVIDIA's driver gives out at the least; the helper asks it and rounds up where it is more.
UNIT_BYTES = 2 * MIB

# Starting a helper is not in these: a call's deadline begins when there is one.
_HOLD_S = 10.0
_HOLD_BYTES_PER_S = 4 * GIB

_NAME = re.compile(
    STORE_PREFIX + r"-(?P<who>.+)-(?P<gpu>GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-(?P<at>\d+)-(?P<size>\d+)"
)


class Helper(Protocol):
    """Who makes the memory: `helper.link.Link`."""

    async def call(self, op: str, args: Mapping[str, object], *, deadline_s: float) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Some video memory, and where it begins in its owner's flat space. The descriptor is the books' to close."""

    fd: int
    at: int
    size_bytes: int


class _Holding:
    """What one owner has on one GPU."""

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
    """In which pieces so much is taken: gigabytes, larger ones where these would be too many, and a smaller last."""
    each_bytes = piece_bytes(size_bytes)
    sizes = [each_bytes] * (size_bytes // each_bytes)
    if tail_bytes := size_bytes % each_bytes:
        sizes.append(-(-tail_bytes // UNIT_BYTES) * UNIT_BYTES)
    return sizes


class VideoMemory:
    """Everything that is held, by owner and by the GPU's UUID. `store` is where it outlives the daemon, if anywhere."""

    def __init__(self, helper: Helper, store: Store | None = None) -> None:
        self.store = store
        #: Asked to have given back what can be done without on that GPU, before somebody is refused; tells whether
        #: anything was, and raises nothing.
        self.free_memory: Callable[[str], Awaitable[bool]] | None = None
        self._helper = helper
        self._held: dict[Key, _Holding] = {}
        self._taking = anyio.Lock()

    # -- figures -------------------------------------------------------------------------------------------------------

    def of(self, who: str) -> Mapping[str, int]:
        """Bytes that are held for that owner, by GPU."""
        return {gpu: holding.size_bytes for (owner, gpu), holding in self._held.items() if owner == who}

    def by_owner(self) -> Mapping[Key, int]:
        """Bytes that are held, by owner and GPU."""
        return {key: holding.size_bytes for key, holding in self._held.items()}

    def pieces(self, who: str, gpu: str) -> tuple[Piece, ...]:
        """What the owner has there, in order. Raises HegmError when some of it was lost with an earlier daemon."""
        holding = self._held.get((who, gpu))
        pieces = () if holding is None else tuple(holding.pieces)
        for one, other in pairwise(pieces):
            if one.at + one.size_bytes != other.at:
                raise Refused(
                    f"of the video memory of {who} on {gpu}, what begins at {one.at + one.size_bytes} is gone",
                    "what was in it cannot be had back; see the log of the service manager around hegmd's last restart",
                    {"from_bytes": one.at + one.size_bytes, "to_bytes": other.at},
                )
        return pieces

    # -- taking and giving ---------------------------------------------------------------------------------------------

    async def reserve(self, who: str, gpu: str, size_bytes: int, *, spare: bool = False) -> None:
        """Hold at least so much there for that owner from now on, in all; what is missing is added.

        For what is `spare`, because it can be done without, nobody is asked to give anything back.
        Raises Refused when the GPU has no room, and whatever the helper fails with; then all is as it was. Cancelled,
        what was on its way is given back.
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
            holding = self._held.get((who, gpu), _Holding())  # some may have been given back meanwhile
            with answer.fds:
                added = _pieces_of(answer, holding.end)
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

    async def _made(self, args: Mapping[str, object], deadline_s: float) -> Answer:
        try:
            return await self._helper.call("hold", args, deadline_s=deadline_s)
        except HelperLost as error:  # what it may have made went with it
            logger.warning("video memory is asked for once more: %s", error.message)
            return await self._helper.call("hold", args, deadline_s=deadline_s)

    async def keep(self, who: str, gpu: str) -> bool:
        """Have it outlive the daemon from now on, before bytes are put into it; whether there is who keeps it.

        Raises HegmError when it could not be handed over: then nobody is to rely on it.
        """
        holding = self._held.get((who, gpu))
        if holding is None:
            raise Bug("video memory is to be kept that is not held", facts={"who": who, "gpu": gpu})
        holding.kept = holding.kept or await self._keep(who, gpu, holding.pieces)
        return holding.kept

    async def release(self, who: str, gpu: str) -> None:
        """Give it back to the GPU: when this returns, it is free. Fine when nothing is held.

        Raises HegmError when a store does not let go of it: then the daemon holds it no longer, and the store does.
        """
        holding = self._held.pop((who, gpu), None)
        if holding is not None:
            given, holding.pieces = holding.pieces, []
            await self._let_go(who, gpu, holding, given)

    async def give_first(self, who: str, gpu: str, count: int) -> int:
        """Give back the first pieces; how many bytes. When this returns, they are free, also where they were kept."""
        holding = self._held.get((who, gpu))
        if holding is None or count > len(holding.pieces):
            raise Bug("more pieces of video memory are given back than are held", facts={"who": who, "gpu": gpu})
        given, holding.pieces = holding.pieces[:count], holding.pieces[count:]
        if not holding.pieces:
            del self._held[who, gpu]
        await self._let_go(who, gpu, holding, given)
        return sum(piece.size_bytes for piece in given)

    async def hand_on(self, who: str, gpu: str, to: str) -> None:
        """Have what that owner has there be another's from now on; what is kept is so all the time.

        Raises HegmError when a store does not take the new names: then it is as it was. What it does not let go of of
        the old ones is held twice, and is nobody's when the next daemon finds it.
        """
        async with self._taking:
            holding = self._held.get((who, gpu))
            if holding is None or (to, gpu) in self._held:
                raise Bug("video memory is handed on that nobody has, or to who has some", facts={"who": who, "to": to})
            pieces = tuple(holding.pieces)
            if holding.kept:
                await self._keep(to, gpu, pieces)
            if self._held.get((who, gpu)) is not holding:
                if holding.kept and self.store is not None:
                    await self.store.drop(*[_store_name(to, gpu, piece) for piece in pieces])
                raise Refused(f"the video memory of {who} was given back meanwhile", "run: hegmctl adopt")
            self._held[to, gpu] = self._held.pop((who, gpu))
            if holding.kept and self.store is not None:
                with anyio.CancelScope(shield=True):
                    await self.store.drop(*[_store_name(who, gpu, piece) for piece in pieces])

    def close(self) -> None:
        """Let go of everything here; what a store has, it keeps."""
        while self._held:
            _, holding = self._held.popitem()
            for piece in holding.pieces:
                os.close(piece.fd)

    def adopt(self, name: str, fd: int) -> bool:
        """Take back what an earlier run of the daemon had kept; whether it is that. If not, it stays the caller's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return False
        holding = self._held.setdefault((found["who"], found["gpu"]), _Holding())
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

    async def _let_go(self, who: str, gpu: str, holding: _Holding, pieces: Sequence[Piece]) -> None:
        """Cancelled, it is given back all the same: nobody would know of it any more."""
        began = anyio.current_time()
        for piece in pieces:
            os.close(piece.fd)
        logger.debug("video memory: give took %.1f ms", (anyio.current_time() - began) * 1e3)
        if holding.kept and self.store is not None and pieces:
            began = anyio.current_time()
            with anyio.CancelScope(shield=True):
                await self.store.drop(*[_store_name(who, gpu, piece) for piece in pieces])
            # It had the last descriptors, so it is there that the driver frees what is kept.
            logger.debug("video memory: drop took %.1f ms", (anyio.current_time() - began) * 1e3)


def _pieces_of(answer: Answer, start: int) -> list[Piece]:
    """What the helper made, put behind one another. Raises Bug for an answer that does not fit."""
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
