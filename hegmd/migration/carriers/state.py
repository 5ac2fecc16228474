"""The carrier of a restart: the agent writes its training state into pool memory, and the next process reads it.

The job keeps all its memory meanwhile. Nothing is reloaded from here: the new process gets a descriptor of the memory
from its supervisor and loads the state at its first boundary.
"""

from __future__ import annotations

from hegmd.errors import HegmError, Refused
from hegmd.memory.pool import Pool
from hegmd.migration.carriers.prestart import PrestartService
from hegmd.migration.contracts import Making, MigratedProcess, Progress
from hegmd.migration.methods.pool_keys import Pooled, key_of
from hegmd.workers.supervisors import Supervisor, Supervisors

NAME = "state"


class StateCarrier(Pooled):
    """Memory of the pool, and orders to the agent and to who started it."""

    name = NAME

    def __init__(self, pool: Pool, supervisors: Supervisors, readying: PrestartService) -> None:
        super().__init__(pool)
        self._supervisors = supervisors
        self._readying = readying

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Hold memory for the state; meanwhile the next process is prestarted."""
        await self._readying.begin(subject, size_bytes)
        try:
            await super().reserve(subject, size_bytes)
        except HegmError:
            await self._readying.end(subject)
            raise

    async def await_successor(self, subject: MigratedProcess, on_progress: Progress) -> bool:
        """Until it is ready, or known not to become so, or for a while."""
        return await self._readying.until_ready(subject, on_progress)

    def doing(self, subject: MigratedProcess) -> str | None:
        return self._readying.doing(subject)

    async def release(self, subject: MigratedProcess) -> None:
        """Release the memory: the new process has loaded the state, or none will."""
        await self._readying.end(subject)
        await super().release(subject)

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        """Make the agent save the state. Raises OrderFailed, AgentAway, SupervisorAway.

        Tells its supervisor first: from here on the command may exit, and the supervisor then waits. After a start of
        hegmd, the agent may reconnect before the supervisor.
        """
        supervisor = await self._come(subject)
        await supervisor.order("expect", subject.operation, launches=bool(subject.ranks))
        memory = await self._pool.to_fill(key_of(subject))
        report = await subject.worker.order("save", fds=[memory.fd], on_progress=on_progress)
        return report.size_bytes or 0

    async def _come(self, subject: MigratedProcess) -> Supervisor:
        def known() -> Supervisor | None:
            return self._supervisors.find(subject.uid, subject.run)

        supervisor = await self._supervisors.come(subject.uid, subject.run, known) or known()
        if supervisor is None:
            raise Refused(
                f"the `hegmctl run` that started process {subject.pid} has exited",
                "move it without a restart; the job continues",
            )
        return supervisor

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        """Return 0: the new process has loaded the state itself."""
        return 0
