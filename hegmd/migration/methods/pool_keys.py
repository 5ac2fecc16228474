"""What carriers share whose bytes are in the pool: a piece of it for each process, under the name of the operation."""

from __future__ import annotations

from hegmd.memory.pool import Key, Pool, Source
from hegmd.migration.contracts import Progress, Subject
from hegmd.migration.methods.immediate import AtOnce

__all__ = ["Pooled", "key_of", "source_of"]


class Pooled(AtOnce):
    """Memory of the pool, and nothing that has to be ready beside it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def hold(self, subject: Subject, size_bytes: int) -> None:
        await self._pool.take(key_of(subject), size_bytes, source_of(subject))

    async def give(self, subject: Subject) -> None:
        await self._pool.give(key_of(subject))

    def held_bytes(self, subject: Subject) -> int:
        return self._pool.held_for(key_of(subject))

    async def fetch(self, subject: Subject, on_progress: Progress) -> None:
        await self._pool.fetch(key_of(subject), on_progress)

    async def arm(self, subject: Subject) -> None:
        """Nothing has to be ready."""

    async def disarm(self, subject: Subject) -> None:
        """Nothing is."""


def key_of(subject: Subject) -> Key:
    """Whose the memory in the pool is."""
    return Key(subject.operation, subject.name)


def source_of(subject: Subject) -> Source | None:
    """The process that the bytes are of, as the kernel told of it; None while its agent has not attended."""
    return None if subject.agent is None else Source(subject.agent.identity.uid, subject.agent.identity.start_ticks)
