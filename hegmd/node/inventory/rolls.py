"""Calling the roll of GPU processes without ever waiting longer than told, whatever /proc or a directory server does.

Owns the jobs that the steps of a roll run in, and what stands in for a step that does not end. Looking and writing
are one at a time, as the roster demands; looking things up has a job of its own, which may hang for as long as it
likes while everything else goes on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from hegmd.node.inventory.jobs import SHORTAGE_HINT, Job, shortage
from hegmd.node.processes.lookups import Wanted
from hegmd.node.processes.roll import Roll, RollCall, Roster, stand_in
from hegmd.telemetry.log import limited

__all__ = ["RollWatch"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Command lines and users' names come in a millisecond or not for a long time; nobody waits long to find out which.
LOOKUP_LIMIT_S = 0.2


class RollWatch:
    """Calls the roll and keeps the last one. Belongs to the event loop."""

    def __init__(self, roster: Roster, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._roster = roster
        self._monotonic = monotonic
        self._step_job: Job[Any] | None = None
        self._lookup_job: Job[None] | None = None
        self.roll = Roll()
        #: Whether the last roll was called in vain and what was known before stands in for it.
        self.late = False

    async def update(self, call: RollCall, limit_s: float) -> None:
        """Call the roll, and if it takes longer than that, make do with what is known."""
        roll: Roll | None = None
        with anyio.move_on_after(limit_s):
            roll = await self._call(call, min(LOOKUP_LIMIT_S, limit_s / 2))
        self.late = roll is None
        self.roll = stand_in(call, self.roll) if roll is None else roll

    async def close(self, limit_s: float) -> None:
        """Let go of all processes. A step that hangs is left to itself, with the descriptors that it may be using."""
        if self._lookup_job is not None:
            self._lookup_job.let_go()
            self._lookup_job = None
        with anyio.move_on_after(limit_s):
            if await self._finish_step():
                self._roster.close()
        if self._step_job is not None:
            self._step_job.let_go()
            self._step_job = None

    async def _call(self, call: RollCall, lookup_limit_s: float) -> Roll | None:
        """One whole roll; None if a step failed, which the log then tells of."""
        await self._finish_step()
        seen = await self._step("look", lambda: self._roster.look(call))
        if seen is None:
            return None
        await self._look_up(seen.wanted, lookup_limit_s)
        return await self._step("write", lambda: self._roster.write(call, seen))

    async def _step(self, name: str, work: Callable[[], T]) -> T | None:
        job = Job(work, name=f"hegmd-processes-{name}", monotonic=self._monotonic)
        self._step_job = job
        await job.wait()
        self._step_job = None
        try:
            return job.result()
        except Exception as error:  # noqa: BLE001 - what cannot be seen now is looked at again
            _tell("the processes on the GPUs could not be read", error)
            return None

    async def _finish_step(self) -> bool:
        """Wait for a step that somebody left running, and drop what it came to: it was called for another moment."""
        if self._step_job is not None:
            await self._step_job.wait()
            self._step_job.let_go()
            self._step_job = None
        return True

    async def _look_up(self, wanted: Wanted, limit_s: float) -> None:
        """Have it looked up, and wait a little if somebody would miss it. One that hangs is left alone."""
        if not self._end_look_up() or not (wanted.commands or wanted.uids):
            return
        work = partial(self._roster.lookups.read, wanted)
        self._lookup_job = job = Job(work, name="hegmd-processes-lookups", monotonic=self._monotonic)
        if wanted.urgent:
            with anyio.move_on_after(limit_s):
                await job.wait()
            self._end_look_up()

    def _end_look_up(self) -> bool:
        """Take the end of the last look-up; false if it is still running."""
        job = self._lookup_job
        if job is None:
            return True
        if not job.done:
            return False
        self._lookup_job = None
        try:
            job.result()
        except Exception as error:  # noqa: BLE001 - what cannot be seen now is looked at again
            _tell("command lines and users could not be read", error)
        return True


def _tell(what: str, error: Exception) -> None:
    missing = shortage(error)
    if missing is None:
        log.error(what, exc_info=error)
    else:
        limited(log, "shortage", logging.WARNING, "%s: %s; %s", what, missing, SHORTAGE_HINT)
