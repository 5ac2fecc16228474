"""Reads the GPU processes without exceeding the deadline, however slow /proc or a directory server is.

Owns the jobs that run the steps, and the substitute for a step that does not end. Reading and writing run one at a
time, as the roster requires. Lookups have a job of their own, which may hang while everything else continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from hegmd.node.inventory.jobs import SHORTAGE_HINT, Job, shortage
from hegmd.node.processes.lookups import LookupRequest
from hegmd.node.processes.roll import ProcessList, ProcessListBuilder, ProcessListInputs, stand_in
from hegmd.telemetry.log import limited

log = logging.getLogger(__name__)

T = TypeVar("T")

# Command lines and users' names take a millisecond or very long, so the wait for them is short.
LOOKUP_LIMIT_S = 0.2


class ProcessListWatch:
    """Reads the processes and keeps the last result. Belongs to the event loop."""

    def __init__(self, roster: ProcessListBuilder, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._roster = roster
        self._monotonic = monotonic
        self._step_job: Job[Any] | None = None
        self._lookup_job: Job[None] | None = None
        self.roll = ProcessList()
        #: True if the last read failed and the result before it is used.
        self.late = False

    async def update(self, call: ProcessListInputs, limit_s: float) -> None:
        """Read the processes; after the deadline, use what is known."""
        roll: ProcessList | None = None
        with anyio.move_on_after(limit_s):
            roll = await self._call(call, min(LOOKUP_LIMIT_S, limit_s / 2))
        self.late = roll is None
        self.roll = stand_in(call, self.roll) if roll is None else roll

    async def close(self, limit_s: float) -> None:
        """Release all processes. A step that hangs is abandoned with its descriptors."""
        if self._lookup_job is not None:
            self._lookup_job.abandon()
            self._lookup_job = None
        with anyio.move_on_after(limit_s):
            if await self._finish_step():
                self._roster.close()
        if self._step_job is not None:
            self._step_job.abandon()
            self._step_job = None

    async def _call(self, call: ProcessListInputs, lookup_limit_s: float) -> ProcessList | None:
        """Return one whole result; None if a step failed, which is logged."""
        await self._finish_step()
        readings = await self._step("look", lambda: self._roster.read(call))
        if readings is None:
            return None
        await self._look_up(readings.lookups, lookup_limit_s)
        return await self._step("write", lambda: self._roster.write(call, readings))

    async def _step(self, name: str, work: Callable[[], T]) -> T | None:
        job = Job(work, name=f"hegmd-processes-{name}", monotonic=self._monotonic)
        self._step_job = job
        await job.wait()
        self._step_job = None
        try:
            return job.result()
        except Exception as error:  # noqa: BLE001 - what cannot be read now is read again later
            _tell("the processes on the GPUs could not be read", error)
            return None

    async def _finish_step(self) -> bool:
        """Wait for a step that was left running, and drop its result: it belongs to an earlier moment."""
        if self._step_job is not None:
            await self._step_job.wait()
            self._step_job.abandon()
            self._step_job = None
        return True

    async def _look_up(self, request: LookupRequest, limit_s: float) -> None:
        """Start lookups, and wait briefly if their result is needed. One that hangs is abandoned."""
        if not self._end_look_up() or not (request.commands or request.uids):
            return
        work = partial(self._roster.lookups.read, request)
        self._lookup_job = job = Job(work, name="hegmd-processes-lookups", monotonic=self._monotonic)
        if request.urgent:
            with anyio.move_on_after(limit_s):
                await job.wait()
            self._end_look_up()

    def _end_look_up(self) -> bool:
        """Take the result of the last lookup; False if it still runs."""
        job = self._lookup_job
        if job is None:
            return True
        if not job.done:
            return False
        self._lookup_job = None
        try:
            job.result()
        except Exception as error:  # noqa: BLE001 - what cannot be read now is read again later
            _tell("command lines and users could not be read", error)
        return True


def _tell(what: str, error: Exception) -> None:
    missing = shortage(error)
    if missing is None:
        log.error(what, exc_info=error)
    else:
        limited(log, "shortage", logging.WARNING, "%s: %s; %s", what, missing, SHORTAGE_HINT)
