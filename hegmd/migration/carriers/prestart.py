"""The prestarted process of a restart: when it is requested, and when withdrawn.

It is not a step of the operation: nothing depends on it, and a start without it is an ordinary start. But for a while
the job is not parked before it is ready, and trains instead. It costs memory for as long as the operation takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio

from hegmd.memory.pool import read_available_bytes
from hegmd.migration.contracts import MigratedProcess, Progress
from hegmd.workers.supervisors import Supervisor, SupervisorAway, Supervisors
from hegmd.workers.workers import AgentConnection

logger = logging.getLogger(__name__)

# A Python with PyTorch takes a fifth of that; the rest stays free for other processes.
MIN_AVAILABLE_BYTES = 2 << 30
# The time to import PyTorch and its compiler on a slow node; it takes 6 s on a node with an H200.
READY_WITHIN_S = 15.0
# How often the wait is reported to clients.
_TELLS_AFTER_S = 1.0
# When the next process imports what takes long: in its turn, once a restart was asked for, or from the first batch on.
IN_TURN, BEFOREHAND, ALWAYS = "in-turn", "beforehand", "always"
WHENS = (IN_TURN, BEFOREHAND, ALWAYS)
# Variables that select the Python and load the agent. If a restart changes them, prestarting is not attempted.
_DECISIVE, _DECISIVE_NAMES = ("PYTHON", "LD_"), frozenset(("PATH", "HOME"))


class PrestartPolicy(NamedTuple):
    """When the next process imports what takes long, and how long a job trains on for that at most."""

    when: str = BEFOREHAND
    within_s: float = READY_WITHIN_S


@dataclass(slots=True, eq=False, repr=False)
class _RequestedPrestart:
    """A prestart that was requested for an operation, and whether the operation waits for it now."""

    supervisor: Supervisor
    since: float
    is_awaited: bool = False


class PrestartService:
    """Asked while reserving. `surroundings` is what differs for a process that is started in the place of that one."""

    def __init__(
        self,
        supervisors: Supervisors,
        surroundings: Callable[[MigratedProcess, str], Mapping[str, Any]],
        ready: PrestartPolicy | None = None,
        *,
        available_bytes: Callable[[], int | None] = read_available_bytes,
    ) -> None:
        self._supervisors = supervisors
        self._surroundings = surroundings
        self._ready = ready or PrestartPolicy()
        self._available_bytes = available_bytes
        self._prestarts: dict[str, _RequestedPrestart] = {}

    async def begin(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Prestart it, if that is possible and the node has memory for it besides a state of that size."""
        supervisor = self._supervisors.find(subject.uid, subject.run)
        if (
            supervisor is None
            or subject.operation in self._prestarts
            or not self._is_fit(subject, supervisor, size_bytes)
        ):
            return
        worker, place = subject.worker, subject.target_gpu or ""
        surroundings = self._surroundings(subject, place)
        try:
            await supervisor.tell("ready", subject.operation, imports=worker.imports, path=worker.path, **surroundings)
        except SupervisorAway as error:
            logger.debug("nothing is made ready for operation %s: %s", subject.operation, error.message)
        else:
            self._prestarts[subject.operation] = _RequestedPrestart(supervisor, anyio.current_time())
            logger.debug(
                "operation %s has the next process made ready: %d modules", subject.operation, len(worker.imports)
            )

    def when(self, supervisor: Supervisor) -> str:
        """When that one's next process is to be made ready: as its user or the configuration says."""
        return supervisor.offer.ready if supervisor.offer.ready in WHENS else self._ready.when

    async def keep(self, supervisor: Supervisor, worker: AgentConnection) -> bool:
        """Have a process prestarted for any later restart, with the present environment of the job.

        One that is already prestarted checks its files again and imports what the job has imported since. Returns False
        if there is none and the node lacks the memory. Raises HegmError if the agent or the supervisor cannot be
        reached.
        """
        await worker.order("beforehand")
        available_bytes = self._available_bytes()
        if available_bytes is not None and available_bytes < MIN_AVAILABLE_BYTES and not supervisor.keeps:
            return False
        if worker.imports:
            await supervisor.tell("ready", "", imports=worker.imports, path=worker.path)
            logger.debug("the successor of process %d is prestarted: %d modules", worker.pid, len(worker.imports))
        return True

    async def until_ready(self, subject: MigratedProcess, on_progress: Progress) -> bool:
        """Until it is, or it is known that it will not be, or for a while; whether it is."""
        prestart = self._prestarts.get(subject.operation)
        if prestart is None:
            return False
        prestart.is_awaited = True
        try:
            with anyio.move_on_after(max(0.0, prestart.since + self._ready.within_s - anyio.current_time())):
                while not prestart.supervisor.readied.is_set():
                    with anyio.move_on_after(_TELLS_AFTER_S):
                        await prestart.supervisor.readied.wait()
                    on_progress(0)
        finally:
            prestart.is_awaited = False
        took_s = anyio.current_time() - prestart.since
        is_ready = prestart.supervisor.readied.is_set() and prestart.supervisor.ready_pid is not None
        logger.debug("operation %s: ready is %s after %.1f s", subject.operation, is_ready, took_s)
        return is_ready

    def doing(self, subject: MigratedProcess) -> str | None:
        """Return what the operation waits for, and for how long so far; None if nothing is."""
        prestart = self._prestarts.get(subject.operation)
        if prestart is None or not prestart.is_awaited:
            return None
        return f"it trains on until the next Python is ready: {anyio.current_time() - prestart.since:.0f} s"

    async def end(self, subject: MigratedProcess) -> None:
        """Withdraw the prestart. Does nothing if there is none."""
        prestart = self._prestarts.pop(subject.operation, None)
        if prestart is not None:
            with suppress(SupervisorAway):  # the supervisor ends it with the connection
                await prestart.supervisor.tell("unready", subject.operation)

    def _is_fit(self, subject: MigratedProcess, supervisor: Supervisor, size_bytes: int) -> bool:
        worker, respawn = subject.agent, subject.respawn
        if (
            self.when(supervisor) == IN_TURN
            or subject.ranks
            or worker is None
            or not worker.imports
            or subject.target_gpu is None
        ):
            return False
        if supervisor.offer.pid != subject.pid or not supervisor.offer.python:
            return False  # a launcher, a shell or another program is between them
        if respawn.python is not None or any(_is_decisive(name) for name in (*respawn.set, *respawn.unset)):
            return False
        available_bytes = self._available_bytes()
        return available_bytes is None or available_bytes >= MIN_AVAILABLE_BYTES + size_bytes


def _is_decisive(name: str) -> bool:
    return name.startswith(_DECISIVE) or name in _DECISIVE_NAMES
