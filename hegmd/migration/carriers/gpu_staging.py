"""Video memory that the host carrier takes beside everything else, as long as there is plenty, and gives back soon.

Bytes on their way to the pool pass through it on the GPU that they are on (`passing_of`), and a copy of what is in the
pool goes ahead into it on the GPU that they come to (`ahead_of`). So a job waits for a copy within a GPU, and the way
over the link is gone while the driver checkpoints or restores. Nobody is to miss what is taken for that: it is refused
where less than some calm is left to others, and nothing that goes wrong here is a failure of anything.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from hegmd.errors import HegmError
from hegmd.gpu_helper.copy_client import CopyClient
from hegmd.memory.video_memory import Piece
from hegmd.migration.contracts import MigratedProcess, OverlappedCopy
from hegmd.migration.methods.gpus import Gpus, VideoMemory

__all__ = ["Ahead", "Beside", "Near"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What goes ahead, or has: by which route into which of its memories, how far, and how long once that is known."""

    route: CopyClient
    attached: tuple[str, int] | None
    size_bytes: int
    done: OverlappedCopy

    def is_in(self, route: CopyClient) -> bool:
        """Whether it is in what this route has attached now."""
        return self.route is route and self.attached == route.attached


class Beside:
    """Of one process, whose lane the route is: who it is, and who has what is held beside it in use."""

    def __init__(self, subject: MigratedProcess) -> None:
        self.subject = subject
        self.in_use = anyio.Lock()


class Near:
    """By the owners' names. Whoever takes or gives something has the GPU looked at anew."""

    def __init__(self, gpus: Gpus, memory: VideoMemory) -> None:
        self._gpus = gpus
        self._memory = memory
        self._stamps = itertools.count(1)
        self._stamp_of: dict[str, int] = {}

    def version(self, owner: str) -> tuple[str, int]:
        """Another one whenever what is held for it is not the same memory as before: for whoever has mapped it."""
        return owner, self._stamp_of.get(owner, 0)

    def held_bytes(self, owner: str) -> int:
        """What is held for it."""
        return sum(self._memory.of(owner).values())

    def where(self, owner: str) -> str | None:
        """The UUID of the GPU that it is held on."""
        return next(iter(self._memory.of(owner)), None)

    def pieces(self, owner: str) -> Sequence[Piece]:
        """What is held for it, in order. Raises HegmError where some of it is gone."""
        where = self.where(owner)
        return () if where is None else self._memory.pieces(owner, where)

    async def take(self, owner: str, gpu: str, size_bytes: int, needed_bytes: int, *, keep: bool) -> bool:
        """Whether so much is held on that GPU for that owner, and is to outlive the daemon where it is to be kept.

        It is taken where `room_bytes` are free, its own included. In the GPU's turn. Raises nothing; what is held
        already and has too little room by now is left for the caller to give back.
        """
        try:
            uuid = await self._gpus.uuid_of(gpu)
            if self.where(owner) not in (None, uuid):  # of an attempt to go elsewhere
                await self.release(owner)
            if not await self.fits(owner, gpu, needed_bytes):
                return False
            if self._memory.of(owner).get(uuid, 0) >= size_bytes:
                return True
            self._stamp_of[owner] = next(self._stamps)
            try:
                await self._memory.reserve(owner, uuid, size_bytes, spare=True)
                if keep:
                    await self._memory.keep(owner, uuid)
            except BaseException:
                await self._memory.release(owner, uuid)
                raise
            finally:
                self._gpus.changed()
        except HegmError as error:
            logger.info("no video memory is taken on %s for %s: %s", gpu, owner, error.message)
            return False
        return True

    async def fits(self, owner: str, gpu: str, needed_bytes: int) -> bool:
        """Whether so much is free on that GPU now, what is held for that owner there included. Raises HegmError."""
        held_bytes = self._memory.of(owner).get(await self._gpus.uuid_of(gpu), 0)
        free_bytes = (await self._gpus.gpu(gpu)).memory_free_bytes
        return free_bytes is not None and free_bytes >= needed_bytes - held_bytes

    async def release(self, owner: str) -> None:
        """Nothing is held for it any more. Fine when nothing is."""
        while (where := self.where(owner)) is not None:
            self._stamp_of.pop(owner, None)
            await self._memory.release(owner, where)
            self._gpus.changed()
