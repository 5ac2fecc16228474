"""The common part of carriers with bytes in the pool: one pool segment per process, under the operation's name."""

from __future__ import annotations

from hegmd.memory.pool import Key, Pool, Source
from hegmd.migration.contracts import MigratedProcess, NoCopy, Progress


class Pooled(NoCopy):
    """Memory of the pool, without what a prestart needs."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        await self._pool.take(key_of(subject), size_bytes, source_of(subject))

    async def release(self, subject: MigratedProcess) -> None:
        await self._pool.release(key_of(subject))

    def held_bytes(self, subject: MigratedProcess) -> int:
        return self._pool.held_for(key_of(subject))

    async def fetch(self, subject: MigratedProcess, on_progress: Progress) -> None:
        await self._pool.fetch(key_of(subject), on_progress)

    async def prepare(self, subject: MigratedProcess) -> None:
        """Nothing has to be ready."""

    async def abandon(self, subject: MigratedProcess) -> None:
        """Nothing is."""


def key_of(subject: MigratedProcess) -> Key:
    return Key(subject.operation, subject.name)


def source_of(subject: MigratedProcess) -> Source | None:
    """Return the process of the bytes, as the kernel reported it; None while its agent has not connected."""
    return None if subject.agent is None else Source(subject.agent.identity.uid, subject.agent.identity.start_ticks)
