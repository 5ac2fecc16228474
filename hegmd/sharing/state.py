"""The state of GPU sharing, in memory and on disk: leases, queue, and the jobs that it suspended.

Owns when it is written: after each change, and at once before something is done that only this file explains. A job is
in the list of suspended ones before its operation begins, so a daemon killed in between finds it, or finds it running.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.sharing import state_file
from hegmd.sharing.leases import Leases, StartTicks
from hegmd.sharing.records import LeaseRecord, QueuedRecord, SharingState, SuspendedRecord
from hegmd.system.condition import Condition
from hegmd.system.state_saving import StateSaving
from hegmd.telemetry.log import limited

logger = logging.getLogger(__name__)

# How long what has to be on disk may take: a busy disk is no reason to refuse a request, a full one says so at once.
REQUIRED_WITHIN_S = 60.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharingMemory:
    """`open` it, then `run` it. `lease_ended` is called with a lease that ended by itself, and why."""

    def __init__(self, start_ticks: StartTicks, lease_ended: Callable[[LeaseRecord, str], object]) -> None:
        boot = _BOOT_ID.read_text().strip()
        self.leases = Leases(start_ticks, boot=boot, changed=self._note_change, ended=lease_ended)
        #: Jobs that asked for a GPU, and jobs that were suspended, by the number of the job.
        self.queue: dict[int, QueuedRecord] = {}
        self.suspended: dict[int, SuspendedRecord] = {}
        #: Told of each change.
        self.changed = Condition()
        self._folder: Path | None = None
        self._saving = StateSaving(self._save, self._note_trouble, name="hegmd-sharing")
        #: Why the last write failed.
        self._trouble = ""

    def open(self, folder: Path) -> None:
        """Read what the daemon before has left. Blocks. Raises HegmError if it cannot be trusted."""
        self._folder = folder
        state = state_file.load(folder)
        self.leases.enter(state.leases, state.next_lease)
        self.queue = {one.job: one for one in state.queue}
        self.suspended = {one.job: one for one in state.suspended}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the leases and write what changes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._saving.run)
            await tasks.start(self.leases.run)
            task_status.started()

    async def until_saved(self) -> None:
        """Wait until all changes are on disk, for a few seconds at most."""
        await self._saving.until_saved()

    async def require_saved(self, what: str, otherwise: str) -> None:
        """The same. Raises UNAVAILABLE, which says that `what` is not on disk and what follows, if it is not in time.

        It is written later, as soon as that succeeds.
        """
        if not await self._saving.until_saved(REQUIRED_WITHIN_S):
            why = self._trouble or "the disk is too slow"
            hint = f"free space in {self._folder}; hegmd writes it as soon as it can. Until then {otherwise}"
            raise HegmError(UNAVAILABLE, f"{what} cannot be written to disk: {why}", hint)

    def put_queued(self, record: QueuedRecord) -> None:
        """Enter or change a job that asked for a GPU."""
        self.queue[record.job] = record
        self._note_change()

    def put_suspended(self, record: SuspendedRecord) -> None:
        """Enter or change a job that is suspended for others."""
        self.suspended[record.job] = record
        self._note_change()

    def forget_suspended(self, job: int) -> None:
        """It runs again, has ended, or is its user's to resume."""
        if self.suspended.pop(job, None) is not None:
            self._note_change()

    def forget_queued(self, job: int) -> None:
        """It has ended."""
        if self.queue.pop(job, None) is not None:
            self._note_change()

    def _note_change(self) -> None:
        self._saving.put(
            SharingState(
                next_lease=self.leases.next_number,
                leases=tuple(self.leases),
                queue=tuple(self.queue.values()),
                suspended=tuple(self.suspended.values()),
            )
        )
        self.changed.notify_all()

    def _save(self, state: SharingState) -> None:
        if self._folder is not None:
            state_file.save(self._folder, state)
            self._trouble = ""

    def _note_trouble(self, why: str) -> None:
        self._trouble = why.partition(";")[0]
        limited(logger, "sharing", logging.ERROR, "leases and queue cannot be written to disk: %s", why)
