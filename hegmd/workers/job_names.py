"""Which job a pid names: any process of a job stands for it, its launcher, its supervisor and its loaders' workers too.

A user has the pid of what they started, which under `torchrun` is the launcher and with `--allow-restart` the
supervisor. Neither is on a GPU. Knows a process by its agent, by its supervisor, or by the HEGM_RUN that it was started
with, and then by the same user only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import anyio

from hegmd.errors import HegmError
from hegmd.node.processes.surroundings import variables_of
from hegmd.system.threads import run_detached
from hegmd.workers.supervisors import Supervisors
from hegmd.workers.workers import AgentConnection, Workers

RUN = "HEGM_RUN"
# Reading a process's environment waits for the lock on its memory map.
LOOK_S = 1.0

Job = tuple[int, str | None]  # uid and run


class JobNames:
    """Asked with a pid that is no process of an operation, and on no GPU."""

    def __init__(self, workers: Workers, supervisors: Supervisors) -> None:
        self._workers = workers
        self._supervisors = supervisors

    async def processes_of(self, pid: int) -> Sequence[int]:
        """The training processes of the job that this one belongs to; none if it trains itself, or has no such job."""
        worker = self._workers.find(pid)
        if worker is not None and _trains(worker):
            return ()
        job = self._known(pid, worker)
        if job is None:
            job = await _seen_from_outside(pid)
        if job is None or job[1] is None:
            return ()
        return [one.pid for one in self._workers if (one.identity.uid, one.about.run) == job and _trains(one)]

    def _known(self, pid: int, worker: AgentConnection | None) -> Job | None:
        supervisor = self._supervisors.of_pid(pid)
        if supervisor is not None:
            return supervisor.uid, supervisor.run
        return None if worker is None else (worker.identity.uid, worker.about.run)


def _trains(worker: AgentConnection) -> bool:
    return bool(worker.boundary or worker.size_bytes)


async def _seen_from_outside(pid: int) -> Job | None:
    job: Job | None = None
    with anyio.move_on_after(LOOK_S):
        try:
            job = await run_detached(lambda _: _look_at(pid), name="hegmd-job-of")
        except (OSError, HegmError):
            return None  # it has ended, or cannot be looked at now: it names nothing
    return job


def _look_at(pid: int) -> Job | None:
    """Raises OSError where it is not there."""
    uid = os.stat(f"/proc/{pid}").st_uid
    run = variables_of(pid, (RUN,)).get(RUN)
    return None if not run else (uid, run)
