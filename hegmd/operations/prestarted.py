"""Jobs whose successor is prestarted from their first batch on, for a restart at any time.

The configuration or the user requests that; this module decides when: once a job has passed a boundary, since its
process has then imported all that it trains with, and again after each restart. A prestarted process that exits, as
when memory runs short, is replaced soon, and later after each further exit. One that waits for long is checked at
intervals: its files may have changed, and the job may have imported more. No operation depends on this.

A supervisor names the process that it is the parent of, and a job names its run; neither is trusted for another user.
Each job is asked in a task of its own with a time limit, so a stopped one delays no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from hegmd.errors import DISCONNECTED, TIMEOUT, HegmError
from hegmd.migration.carriers.prestart import ALWAYS, PrestartService
from hegmd.system.condition import Condition
from hegmd.telemetry.events import EventLog
from hegmd.workers.supervisors import Supervisor, Supervisors
from hegmd.workers.workers import AgentConnection, Workers

logger = logging.getLogger(__name__)

# First boundaries and ends of operations are not announced, so they are polled for.
POLL_INTERVAL_S = 1.0
# An agent reports its imports at once; a stopped one does not, and is asked again later.
ANSWERS_WITHIN_S = 15.0


class RetryDelays(NamedTuple):
    """The delay before a retry, which doubles with each failure, and before a prestarted process is checked again."""

    first_s: float = 10.0
    longest_s: float = 600.0

    def after(self, fallen: int) -> float:
        """Return the delay after that many failures in a row."""
        return min(self.first_s * 2.0 ** min(max(fallen - 1, 0), 30), self.longest_s)


@dataclass(slots=True, eq=False, repr=False)
class _PrestartRequest:
    """The latest request to a supervisor: for which process, on which connection, when, and the failures in a row."""

    origin: tuple[str, int]
    at: float
    fallen: int = 0
    #: When it is to be asked again; None while it is being asked, and where none is wanted.
    again_at: float | None = None
    #: True if that time counts from the last failure.
    has_fallen: bool = False

    def fall(self, now: float, patience: RetryDelays) -> float:
        """Record a failure. Returns the delay in seconds before the retry."""
        self.fallen, self.has_fallen = self.fallen + 1, True
        wait_s = patience.after(self.fallen)
        self.again_at = now + wait_s
        return wait_s


class PrestartedJobs:
    """Keeps successors prestarted. `in_hand` returns whether an operation has a process now."""

    def __init__(
        self,
        supervisors: Supervisors,
        workers: Workers,
        readying: PrestartService,
        events: EventLog,
        *,
        in_hand: Callable[[int], bool],
        patience: RetryDelays | None = None,
    ) -> None:
        self._patience = patience or RetryDelays()
        self._supervisors = supervisors
        self._workers = workers
        self._readying = readying
        self._events = events
        self._in_hand = in_hand
        self._kept: dict[tuple[int, str], _PrestartRequest] = {}
        self._news = Condition()
        supervisors.listen(lambda _supervisor: self._news.notify_all())
        workers.listen(lambda _news, _worker: self._news.notify_all())

    async def run(self) -> None:
        """Ask for them as they become due, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                changed = self._news.next
                next_look = float("inf")
                for supervisor, worker in self._wanting():
                    due = self._due(supervisor, worker)
                    if due > anyio.current_time():
                        next_look = min(next_look, due)
                    elif worker.about.rank is not None:  # started by a launcher, for which no process can be prestarted
                        self._note_asked(supervisor, worker)
                    elif not self._may_be_asked(supervisor, worker):
                        next_look = min(next_look, anyio.current_time() + POLL_INTERVAL_S)
                    else:
                        tasks.start_soon(self._ask, supervisor, worker, self._note_asked(supervisor, worker))
                with anyio.move_on_at(next_look):
                    await changed.wait()

    def _wanting(self) -> Iterator[tuple[Supervisor, AgentConnection]]:
        """Yield supervisors that want a prestart for the process they started, or no longer want theirs."""
        known = list(self._supervisors)
        there = {_whose(supervisor) for supervisor in known}
        self._kept = {whose: kept for whose, kept in self._kept.items() if whose in there}
        for supervisor in known:
            pid = supervisor.offer.pid
            is_one = supervisor.connected and supervisor.offer.python
            worker = self._workers.find(pid) if is_one and pid is not None else None
            if worker is None or self._supervisors.find(worker.identity.uid, worker.about.run) is not supervisor:
                continue
            if self._is_wanted(supervisor) or supervisor.offer.kept:
                yield supervisor, worker

    def _is_wanted(self, supervisor: Supervisor) -> bool:
        return self._readying.when(supervisor) == ALWAYS

    def _due(self, supervisor: Supervisor, worker: AgentConnection) -> float:
        """Return when the supervisor is to be asked; records the exit of a prestarted process."""
        kept = self._kept.get(_whose(supervisor))
        if kept is None or kept.origin != (worker.name, supervisor.connection):
            if not (self._is_wanted(supervisor) and supervisor.offer.kept):
                return 0.0
            # It has one from before, when it had another connection.
            kept = self._note_asked(supervisor, worker)
            kept.again_at = kept.at + self._patience.longest_s
        if supervisor.lacks_kept and kept.again_at is not None:
            supervisor.lacks_kept = False
            self._note_exited(kept, worker)
        return float("inf") if kept.again_at is None else kept.again_at

    def _note_asked(self, supervisor: Supervisor, worker: AgentConnection) -> _PrestartRequest:
        """Record a request. Failures for the same process keep counting, unless the last prestart survived."""
        origin, before = (worker.name, supervisor.connection), self._kept.get(_whose(supervisor))
        counts = before is not None and before.origin == origin and before.has_fallen
        fallen = before.fallen if before is not None and counts else 0
        kept = self._kept[_whose(supervisor)] = _PrestartRequest(origin, anyio.current_time(), fallen)
        return kept

    def _note_exited(self, kept: _PrestartRequest, worker: AgentConnection) -> None:
        """Record that a prestarted process has exited, or could not be started."""
        wait_s = kept.fall(anyio.current_time(), self._patience)
        message = f"no Python is prestarted for process {worker.pid}: hegmd retries in {wait_s:g} s"
        facts = {"fallen": kept.fallen, "wait_s": wait_s}
        self._events.record("process.next-fell", "warning", message, pid=worker.pid, facts=facts)

    def _may_be_asked(self, supervisor: Supervisor, worker: AgentConnection) -> bool:
        """False before its first batch, and while an operation includes the job, which prestarts by itself."""
        is_busy = self._in_hand(worker.pid) or supervisor.offer.operation is not None
        return not is_busy and worker.connected and worker.boundary > 0

    async def _ask(self, supervisor: Supervisor, worker: AgentConnection, kept: _PrestartRequest) -> None:
        """Ask the supervisor, and again after a while if it did not answer. Raises nothing."""
        with anyio.move_on_after(ANSWERS_WITHIN_S):
            try:
                if not self._is_wanted(supervisor):
                    await supervisor.tell("unready", "")  # left by a daemon with another configuration
                elif await self._readying.keep(supervisor, worker):
                    kept.again_at = kept.at + self._patience.longest_s
                else:
                    self._note_exited(kept, worker)
            except HegmError as error:
                logger.debug("no Python is prestarted for process %d: %s", worker.pid, error.message)
                if error.code not in (DISCONNECTED, TIMEOUT):  # the agent refuses it, as one of an earlier release
                    return
            else:
                self._news.notify_all()
                return
        logger.info("process %d does not report what its successor may import: hegmd asks again", worker.pid)
        kept.fall(anyio.current_time(), self._patience)
        self._news.notify_all()


def _whose(supervisor: Supervisor) -> tuple[int, str]:
    return supervisor.uid, supervisor.run
