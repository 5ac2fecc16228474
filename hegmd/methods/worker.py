"""The worker carrier: the agent copies its own storages to the pool and back, with the process's own threads.

Needs an agent and nothing else, so it is what simulated GPUs use, and what is left where no faster way exists. The
memory is the daemon's and goes over by descriptor. Both ways the agent copies everything before it frees anything.
"""

from __future__ import annotations

from hegmd.errors import Refused
from hegmd.methods.base import Making, Progress, Subject
from hegmd.pool import Key, Memory, Pool, Source

NAME = "worker"


class WorkerCarrier:
    """Memory of the pool, and orders to the agent."""

    name = NAME

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

    async def take_out(self, subject: Subject, on_progress: Progress) -> int:
        """Raises OrderFailed, AgentAway."""
        memory = await self._pool.to_fill(key_of(subject))
        report = await subject.worker.order("evacuate", fds=[memory.fd], on_progress=on_progress)
        return report.size_bytes or 0

    async def put_back(self, subject: Subject, on_progress: Progress, making: Making) -> int:
        """Raises OrderFailed, AgentAway. The bytes stay in the memory too.

        One order makes all storages, first of all, and fills them.

        Memory that went with an earlier daemon is not needed: the agent keeps a descriptor of its own until it has
        entrusted its bytes, and by then they are on disk.
        """
        memory = self._memory(subject)
        fds = () if memory is None else [memory.fd]
        async with making():
            report = await subject.worker.order("refill", fds=fds, on_progress=on_progress)
        return report.size_bytes or 0

    def _memory(self, subject: Subject) -> Memory | None:
        try:
            return self._pool.memory(key_of(subject))
        except Refused:
            return None


def key_of(subject: Subject) -> Key:
    """Whose the memory in the pool is."""
    return Key(subject.operation, subject.name)


def source_of(subject: Subject) -> Source | None:
    """The process that the bytes are of, as the kernel told of it; None while its agent has not attended."""
    return None if subject.agent is None else Source(subject.agent.identity.uid, subject.agent.identity.start_ticks)
