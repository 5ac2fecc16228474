"""Jobs whose next process is kept ready from their first batch on, for a restart that may come at any time.

Who wants that is told by its configuration or its user; here is when: once a job has passed a boundary, since from then
on its process has imported all that it trains with, and again after each restart. Once for each process: one that has
ended since, as where memory ran short, is not replaced before it is asked for. Nothing here is part of an operation.

A supervisor names the process that it is the parent of, and a job names its run: neither is taken at its word for
another user. Each job is asked in a task of its own, for a while only: one that is stopped keeps no other from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import anyio

from hegmd.errors import TIMEOUT, HegmError
from hegmd.methods.readying import ALWAYS, Readying
from hegmd.news import News
from hegmd.supervisors import Supervisor, Supervisors
from hegmd.workers import Worker, Workers

logger = logging.getLogger(__name__)

# A first boundary, and the end of an operation, are not told to anybody; they are looked for where they are awaited.
LOOK_AGAIN_S = 1.0
# An agent says at once what its process has imported; one that is stopped does not, and is asked again later.
ANSWERS_WITHIN_S = 15.0
ASK_AGAIN_S = 60.0


class KeptReady:
    """Looks after them. `in_hand` tells whether an operation has a process now."""

    def __init__(
        self,
        supervisors: Supervisors,
        workers: Workers,
        readying: Readying,
        *,
        in_hand: Callable[[int], bool],
        answers_within_s: float = ANSWERS_WITHIN_S,
        again_after_s: float = ASK_AGAIN_S,
    ) -> None:
        self._answers_within_s, self._again_after_s = answers_within_s, again_after_s
        self._supervisors = supervisors
        self._workers = workers
        self._readying = readying
        self._in_hand = in_hand
        #: Of each supervisor the process, and the connection to it, for which it was asked last.
        self._asked: dict[tuple[int, str], tuple[str, int]] = {}
        self._news = News()
        supervisors.listen(lambda _supervisor: self._news.tell())
        workers.listen(lambda _news, _worker: self._news.tell())

    async def run(self) -> None:
        """Ask for them as they become due, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                changed, waiting = self._news.next, False
                for supervisor, worker in self._wanting():
                    is_launched = worker.about.rank is not None
                    if not is_launched and not self._is_due(supervisor, worker):
                        waiting = True
                        continue
                    self._asked[_whose(supervisor)] = worker.name, supervisor.connection
                    if not is_launched:
                        tasks.start_soon(self._ask, supervisor, worker)
                with anyio.move_on_after(LOOK_AGAIN_S if waiting else None):
                    await changed.wait()

    def _wanting(self) -> Iterator[tuple[Supervisor, Worker]]:
        """Supervisors that want it for the very process that they have started, and have none and were not asked yet;
        and those that have one which nobody wants."""
        known = list(self._supervisors)
        there = {_whose(supervisor) for supervisor in known}
        self._asked = {whose: asked for whose, asked in self._asked.items() if whose in there}
        for supervisor in known:
            pid = supervisor.offer.pid
            is_one = supervisor.connected and supervisor.offer.python
            worker = self._workers.find(pid) if is_one and pid is not None else None
            if worker is None or self._supervisors.find(worker.identity.uid, worker.about.run) is not supervisor:
                continue
            asked = worker.name, supervisor.connection
            is_wanted = self._readying.when(supervisor) == ALWAYS
            if is_wanted and supervisor.offer.kept:
                self._asked[_whose(supervisor)] = asked  # it has one from before, when it had another connection
            if is_wanted != supervisor.offer.kept and self._asked.get(_whose(supervisor)) != asked:
                yield supervisor, worker

    def _is_due(self, supervisor: Supervisor, worker: Worker) -> bool:
        """Not before its first batch, and not beside an operation, which asks by itself."""
        is_busy = self._in_hand(worker.pid) or supervisor.offer.operation is not None
        return not is_busy and worker.connected and worker.boundary > 0

    async def _ask(self, supervisor: Supervisor, worker: Worker) -> None:
        """Ask it; once more after a while, where nobody has answered. Raises nothing."""
        asked = self._asked.get(_whose(supervisor))
        with anyio.move_on_after(self._answers_within_s):
            try:
                if self._readying.when(supervisor) == ALWAYS:
                    await self._readying.keep(supervisor, worker)
                else:
                    await supervisor.tell("unready", "")  # of a daemon that was configured otherwise
            except HegmError as error:
                logger.debug("nothing is kept ready for process %d: %s", worker.pid, error.message)
                if error.code != TIMEOUT:
                    return
            else:
                return
        logger.info("process %d does not say what its next one may import: it is asked again", worker.pid)
        await anyio.sleep(self._again_after_s)
        if self._asked.get(_whose(supervisor)) == asked:
            del self._asked[_whose(supervisor)]
            self._news.tell()


def _whose(supervisor: Supervisor) -> tuple[int, str]:
    return supervisor.uid, supervisor.run
