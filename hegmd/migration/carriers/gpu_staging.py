"""GPU memory in which the host carrier stages copies while plenty is free, and which it releases soon.

Bytes on their way to the pool pass through it on the source GPU (`staging_out_owner`), and a copy of the pool's bytes
is staged in it on the target GPU (`staging_in_owner`). So a job waits only for a copy within a GPU, and the link is
used while the driver checkpoints or restores. Other processes must not lack this memory: it is refused unless a margin
stays free, and no failure here fails an operation.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import anyio

from hegmd.errors import HegmError
from hegmd.gpu_helper.copy_client import CopyClient
from hegmd.memory.video_memory import Piece
from hegmd.migration.contracts import MigratedProcess, OverlappedCopy
from hegmd.migration.methods.gpus import Gpus, VideoMemory

logger = logging.getLogger(__name__)


class StagedBytes(NamedTuple):
    """A copy into staging memory: by which client, into which of its memories, how large, and how long it took."""

    route: CopyClient
    attached: tuple[str, int] | None
    size_bytes: int
    done: OverlappedCopy

    def is_in(self, route: CopyClient) -> bool:
        """True if this copy session has attached the memory."""
        return self.route is route and self.attached == route.attached


class StagingUse:
    """The lock on the staging memory of one process, held by the task that uses it."""

    def __init__(self, subject: MigratedProcess) -> None:
        self.subject = subject
        self.in_use = anyio.Lock()


class StagingMemory:
    """Staging memory by owner name. Every reservation and release invalidates the snapshot of the GPU."""

    def __init__(self, gpus: Gpus, memory: VideoMemory) -> None:
        self._gpus = gpus
        self._memory = memory
        self._stamps = itertools.count(1)
        self._stamp_of: dict[str, int] = {}

    def version(self, owner: str) -> tuple[str, int]:
        """Return a value that changes whenever the owner's memory is a different one, for those who have mapped it."""
        return owner, self._stamp_of.get(owner, 0)

    def held_bytes(self, owner: str) -> int:
        return sum(self._memory.of(owner).values())

    def where(self, owner: str) -> str | None:
        """The UUID of the GPU that it is held on."""
        return next(iter(self._memory.of(owner)), None)

    def pieces(self, owner: str) -> Sequence[Piece]:
        """Return the owner's memory in order. Raises HegmError if a part of it is lost."""
        where = self.where(owner)
        return () if where is None else self._memory.pieces(owner, where)

    async def take(self, owner: str, gpu: str, size_bytes: int, needed_bytes: int, *, keep: bool) -> bool:
        """Reserve that much on that GPU for the owner. Returns True if it is reserved; if `keep`, it outlives the
        daemon.

        Succeeds only if `needed_bytes` are free, including the owner's own. Call it under the GPU's lock. Raises
        nothing. If the owner's memory no longer fits, the caller has to release it.
        """
        try:
            uuid = await self._gpus.uuid_of(gpu)
            if self.where(owner) not in (None, uuid):  # left by an attempt with another target
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
            logger.info("no staging memory on %s for %s: %s", gpu, owner, error.message)
            return False
        return True

    async def fits(self, owner: str, gpu: str, needed_bytes: int) -> bool:
        """True if that much is free on the GPU now, including the owner's reservation there. Raises HegmError."""
        held_bytes = self._memory.of(owner).get(await self._gpus.uuid_of(gpu), 0)
        free_bytes = (await self._gpus.gpu(gpu)).memory_free_bytes
        return free_bytes is not None and free_bytes >= needed_bytes - held_bytes

    async def release(self, owner: str) -> None:
        """Release the owner's memory. Does nothing if there is none."""
        while (where := self.where(owner)) is not None:
            self._stamp_of.pop(owner, None)
            await self._memory.release(owner, where)
            self._gpus.changed()
