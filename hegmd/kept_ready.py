"""Jobs whose next process is kept ready from their first batch on, for a restart that may come at any time.

Who wants that is told by its configuration or its user; here is when: once a job has passed a boundary, since from then
on its process has imported all that it trains with, and again after each restart. Once for each process: one that has
ended since, as where memory ran short, is not replaced before it is asked for. Nothing here is part of an operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import anyio

from hegmd.errors import HegmError
from hegmd.methods.readying import ALWAYS, Readying
from hegmd.news import News
from hegmd.supervisors import Supervisor, Supervisors
from hegmd.workers import Worker, Workers

logger = logging.getLogger(__name__)

# A first boundary, and the end of an operation, are not told to anybody; they are looked for where they are awaited.
LOOK_AGAIN_S = 1.0


class KeptReady:
    """Looks after them. `in_hand` tells whether an operation has a process now."""

    def __init__(
        self, supervisors: Supervisors, workers: Workers, readying: Readying, *, in_hand: Callable[[int], bool]
    ) -> None:
        self._supervisors = supervisors
        self._workers = workers
        self._readying = readying
        self._in_hand = in_hand
        #: Of each supervisor the process, and the connection to it, for which it was asked last.
        self._asked: dict[str, tuple[str, int]] = {}
        self._news = News()
        supervisors.listen(lambda _supervisor: self._news.tell())
        workers.listen(lambda _news, _worker: self._news.tell())

    async def run(self) -> None:
        """Ask for them as they become due, until cancelled."""
        while True:
            changed = self._news.next
            waiting = [found for found in self._wanting() if not await self._ask(*found)]
            with anyio.move_on_after(LOOK_AGAIN_S if waiting else None):
                await changed.wait()

    def _wanting(self) -> Iterator[tuple[Supervisor, Worker]]:
        known = list(self._supervisors)
        self._asked = {run: asked for run, asked in self._asked.items() if any(one.run == run for one in known)}
        for supervisor in known:
            pid = supervisor.offer.pid
            is_one = supervisor.connected and supervisor.offer.python and self._readying.when(supervisor) == ALWAYS
            worker = self._workers.find(pid) if is_one and pid is not None else None
            asked = self._asked.get(supervisor.run)
            is_its_own = worker is not None and worker.about.run == supervisor.run
            if worker is not None and is_its_own and asked != (worker.name, supervisor.connection):
                yield supervisor, worker

    async def _ask(self, supervisor: Supervisor, worker: Worker) -> bool:
        """Whether it was; not before its first batch, and not beside an operation, which asks by itself."""
        is_launched = worker.about.rank is not None
        is_busy = self._in_hand(worker.pid) or supervisor.offer.operation is not None
        if not is_launched and (is_busy or not worker.connected or not worker.boundary):
            return False
        self._asked[supervisor.run] = worker.name, supervisor.connection
        if not is_launched:
            try:
                await self._readying.keep(supervisor, worker)
            except HegmError as error:
                logger.debug("nothing is kept ready for process %d: %s", worker.pid, error.message)
        return True
