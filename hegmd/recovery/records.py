"""The facts about a protected job that outlive the daemon: its recoveries and their results, on disk.

One file for each job, rewritten soon after each change, in a thread: a disk that is slow or full stops nothing. It does
not list the snapshots: each slot has its own record. A file that cannot be read counts as missing: the job is protected
as a new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from hegmd.errors import HegmError
from hegmd.protocol.record import Record, field
from hegmd.protocol.recovery import RecoveryAttempt
from hegmd.recovery.policy import Budget
from hegmd.system.state_dir import replace_file
from hegmd.system.state_saving import RETRY_S, StateSaving
from hegmd.telemetry.log import limited

logger = logging.getLogger(__name__)

FOLDER = "recovery"
MAX_ATTEMPTS = 20


class JobSnapshots(Record):
    """A job that is protected, or whose state is kept."""

    job: str = field("the id of the job")
    uid: int = field("whose it is")
    ranks: int = field("how many processes a snapshot is of; 0 before the first", default=0)
    launched: bool = field("whether a launcher starts these", default=False)
    gpus: tuple[str, ...] = field("the GPUs that they were on at the last snapshot, by rank", default=())
    generation: int = field("the number of the newest snapshot that was begun", default=0)
    bad: tuple[int, ...] = field("numbers of snapshots that could not be started from", default=())
    begins_anew: tuple[str, ...] = field("variables of the script's that a recovery does not keep", default=())
    images: str | None = field("the directory of its images, if such are taken every so often", default=None)
    attempts: tuple[RecoveryAttempt, ...] = field("its recoveries, the oldest first", default=())
    recoveries: int = field("how many recoveries there were", default=0)
    fruitless: int = field("how many of the last ones brought the training no further", default=0)
    furthest_step: int | None = field("the last step that the training is known to have reached", default=None)
    longest_start_s: float = field("the longest time that it has taken from its start to a step", default=0.0)
    launcher_pid: int | None = field("the launcher whose ranks recover in process; nil without one", default=None)
    launcher_start_ticks: int | None = field("when that was started", default=None)
    unprotected: str | None = field("what prevents its ranks' snapshots", default=None)
    suspended_by: str | None = field("the operation that had it suspended when it failed", default=None)
    awaits_resume: bool = field("whether its user had suspended it, and has to resume it first", default=False)
    kept: str | None = field("why the state is kept, of a job that has ended", default=None)
    kept_boot_s: float | None = field("since when, in seconds since the node's start", default=None)

    @property
    def budget(self) -> Budget:
        """Return how often it may be recovered yet."""
        return Budget(self.recoveries, self.fruitless, self.furthest_step)

    def spending(self, budget: Budget) -> JobSnapshots:
        """Return the record with that budget."""
        return self.replace(
            recoveries=budget.recoveries, fruitless=budget.fruitless, furthest_step=budget.furthest_step
        )

    def with_attempt(self, attempt: RecoveryAttempt) -> JobSnapshots:
        """Return the record with one more recovery, or with a newer state of the last one."""
        others = [one for one in self.attempts if one.failed_utc != attempt.failed_utc]
        return self.replace(attempts=(*others, attempt)[-MAX_ATTEMPTS:])


class SnapshotFiles(StateSaving[Mapping[str, JobSnapshots]]):
    """The files of one state directory. `put` all records, by job; those that differ from their files are written."""

    def __init__(self, state_dir: Path, *, retry_s: float = RETRY_S) -> None:
        super().__init__(self.save, _report, name="hegmd-recovery", retry_s=retry_s)
        self._folder = state_dir / FOLDER
        self._on_disk: dict[str, JobSnapshots] = {}

    def load(self) -> list[JobSnapshots]:
        """Read all of them. An unreadable one is removed. Blocks."""
        self._on_disk = {record.job: record for record in self._read()}
        return list(self._on_disk.values())

    def _read(self) -> Iterator[JobSnapshots]:
        for path in sorted(self._folder.glob("j*.json")) if self._folder.is_dir() else ():
            try:
                yield JobSnapshots.from_plain(json.loads(path.read_bytes()), "recovery")
            except (OSError, ValueError, HegmError) as error:
                logger.warning("%s cannot be read, and is removed: %s", path, error)
                with contextlib.suppress(OSError):
                    path.unlink()

    def save(self, records: Mapping[str, JobSnapshots]) -> None:
        """Write the changes. Raises OSError; written records are not written again. Blocks."""
        errors: list[OSError] = []
        for job in {*self._on_disk, *records}:
            if self._on_disk.get(job) == records.get(job):
                continue
            try:
                self._save_one(job, records.get(job))
            except OSError as error:  # the files of other jobs may be writable
                errors.append(error)
        if errors:
            raise errors[0]

    def _save_one(self, job: str, record: JobSnapshots | None) -> None:
        path = self._folder / f"{job}.json"
        if record is None:
            path.unlink(missing_ok=True)
            del self._on_disk[job]
        else:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, json.dumps(record.to_plain()).encode())
            self._on_disk[job] = record


def _report(why: str) -> None:
    limited(logger, "recovery", logging.ERROR, "the recoveries of jobs cannot be recorded: %s", why)
