"""The host carrier: the helper copies the storages to a piece of the pool and back, through CUDA IPC, over PCIe.

What is pinned for that is in the helper and not in the process, where it would cost the driver's checkpoint a second.
"""

from __future__ import annotations

from hegmd.helper.link import Link
from hegmd.helper.route import Route
from hegmd.methods.base import Progress, Subject
from hegmd.methods.copying import CopyingCarrier
from hegmd.methods.gpus import Gpus
from hegmd.methods.pooled import key_of, source_of
from hegmd.pool import Pool

NAME = "host"


class HostCarrier(CopyingCarrier):
    """Copies in the pool's memory."""

    name = NAME

    def __init__(self, helper: Link, gpus: Gpus, pool: Pool) -> None:
        super().__init__(helper, gpus)
        self._pool = pool

    async def hold(self, subject: Subject, size_bytes: int) -> None:
        if self._pool.held_for(key_of(subject)) < size_bytes:
            await self.disarm(subject)  # a larger piece takes the place of the one that is attached
        await self._pool.take(key_of(subject), size_bytes, source_of(subject))
        await self.arm_or_give(subject)

    async def give(self, subject: Subject) -> None:
        await self.disarm(subject)
        await self._pool.give(key_of(subject))

    def held_bytes(self, subject: Subject) -> int:
        return self._pool.held_for(key_of(subject))

    async def fetch(self, subject: Subject, on_progress: Progress) -> None:
        await self._pool.fetch(key_of(subject), on_progress)

    async def take_out(self, subject: Subject, on_progress: Progress) -> int:
        await self._pool.to_fill(key_of(subject))
        return await super().take_out(subject, on_progress)

    def space_bytes(self, subject: Subject) -> int:
        return self._pool.memory(key_of(subject)).size_bytes

    async def reach(self, subject: Subject) -> list[str]:
        """Where it is and where it goes: a context is made while the process still runs."""
        names = dict.fromkeys(name for name in (subject.gpu, subject.goal) if name is not None)
        return [await self._gpus.uuid_of(name) for name in names]

    async def attach(self, subject: Subject, route: Route) -> None:
        memory = self._pool.memory(key_of(subject))
        await route.attach_host(memory.fd, memory.size_bytes)
