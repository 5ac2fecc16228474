"""The worker carrier: the agent copies its own storages to the pool and back, with the process's own threads.

Needs only an agent, so simulated GPUs use it, and so does every process without a faster carrier. The memory belongs to
the daemon; the agent gets a descriptor. In both directions the agent copies everything before it frees anything.
"""

from __future__ import annotations

from hegmd.errors import Refused
from hegmd.memory.pool import Memory
from hegmd.migration.carriers.copying import note_short
from hegmd.migration.contracts import Making, MigratedProcess, Progress
from hegmd.migration.methods.pool_keys import Pooled, key_of
from hegmd.protocol.operations import WORKER


class WorkerCarrier(Pooled):
    """Memory of the pool, and orders to the agent."""

    name = WORKER

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        """Raises OrderFailed, AgentAway."""
        memory = await self._pool.to_fill(key_of(subject))
        report = await subject.worker.order("offload", fds=[memory.fd], on_progress=on_progress)
        return report.size_bytes or 0

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        """Reload the bytes, and return their number. Raises OrderFailed, AgentAway. The memory keeps the bytes too.

        One order first allocates all storages and then fills them.

        Memory of an earlier daemon is not needed: the agent keeps its own descriptor until its bytes are on disk.
        """
        memory = self._memory(subject)
        fds = () if memory is None else [memory.fd]
        async with making():
            report = await subject.worker.order("reload", fds=fds, on_progress=on_progress)
        note_short(subject, report)
        return report.size_bytes or 0

    def _memory(self, subject: MigratedProcess) -> Memory | None:
        try:
            return self._pool.memory(key_of(subject))
        except Refused:
            return None
