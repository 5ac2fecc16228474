"""The file in which jobs outlive the daemon: the records of `jobs`, complete, with a checksum.

Each change writes a new file, syncs it and renames it over the old one, so a crash leaves one or the other. A damaged
file is kept under another name, and its ids are not used again. Blocks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.protocol.jobs import DEFAULT_PRIORITY
from hegmd.protocol.record import Record, as_list, as_map, field
from hegmd.system.state_dir import replace_file
from hegmd.system.state_saving import RETRY_S, StateSaving
from hegmd.telemetry.log import limited

logger = logging.getLogger(__name__)

MAGIC = b"HEGMJOBS1"
NAME, DAMAGED_NAME = "jobs", "jobs.damaged"
_ID = re.compile(rb'"number": ?(\d{1,15})')
_NEXT = re.compile(rb'"next": ?(\d{1,15})')


class JobRecord(Record):
    """The stored facts about one job."""

    number: int = field("the number in its id; counted up from 1 and never used again")
    name: str = field("its name")
    uid: int = field("whose it is")
    runs: tuple[str, ...] = field("each `hegmctl run` of it, the latest last: the run that its agents report")
    command: str = field("its script and arguments, as they are shown")
    started_utc: float = field("when it was started")
    boot: str = field("the boot of the kernel in which its process was started")
    pid: int | None = field("its first process: what `hegmctl run` became or is", default=None)
    start_ticks: int | None = field("the start time of that process", default=None)
    is_gone: bool = field("whether that process has ended", default=True)
    status: int | None = field("its exit status, or minus its signal; nil if it is not known", default=None)
    members: tuple[str, ...] = field("its processes with an agent by the names that operations have", default=())
    has_trained: bool = field("whether it was seen to reach a batch", default=False)
    ended_utc: float | None = field("when the job ended; nil before", default=None)
    ended_boot_s: float | None = field("the same, in seconds since the node's start", default=None)
    end: str | None = field("how it ended, where that is more than a status", default=None)
    priority: int = field("its priority when GPUs are shared, 0 to 100", default=DEFAULT_PRIORITY)
    slurm_job: int | None = field("the Slurm job with which Slurm suspends and resumes it", default=None)

    @property
    def id(self) -> str:
        """The id that users type."""
        return f"j{self.number}"

    @property
    def is_alive(self) -> bool:
        """True until the job has ended."""
        return self.ended_utc is None

    def __str__(self) -> str:
        return f"{self.id} ({self.name})"


class JobFile:
    """The file of one state directory. Its calls block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> tuple[int, list[JobRecord]]:
        """Return the next number, and every job. A damaged file is kept under another name, and the log reports that.

        Raises HegmError if it cannot be read now: the next save would replace its jobs, and ids would be used again.
        """
        path = self._folder / NAME
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return 1, []
        except OSError as error:
            raise HegmError(
                UNAVAILABLE,
                f"the former jobs are unknown: {path} cannot be read: {error.strerror}",
                f"start hegmd again; if that fails too, move the file away: mv {path} {path}.unread",
                {"path": str(path)},
            ) from None
        try:
            return _read(data)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, HegmError) as error:
            numbers = [*(int(number) + 1 for number in _ID.findall(data)), *map(int, _NEXT.findall(data))]
            logger.error("%s is damaged, and kept as %s: %s; jobs get new ids", path, DAMAGED_NAME, error)
            with contextlib.suppress(OSError):
                path.replace(self._folder / DAMAGED_NAME)
            return max(numbers, default=1), []

    def save(self, next_number: int, jobs: Sequence[JobRecord]) -> None:
        """Write these to disk. Raises OSError; then the file is unchanged."""
        body = json.dumps({"next": next_number, "jobs": [job.to_plain() for job in jobs]}).encode()
        replace_file(self._folder / NAME, b"%s %08x\n" % (MAGIC, zlib.crc32(body)) + body)


#: The next number, and every job.
_State = tuple[int, Sequence[JobRecord]]


class JobSaving(StateSaving[_State]):
    """Has the newest records on disk soon after each change. `run` it."""

    def __init__(self, *, retry_s: float = RETRY_S) -> None:
        super().__init__(self._save, _report, name="hegmd-jobs", retry_s=retry_s)
        self._file: JobFile | None = None
        self.folder: Path | None = None

    def open(self, folder: Path) -> tuple[int, list[JobRecord]]:
        """Return the result of `JobFile.load`. Blocks. Raises HegmError."""
        self.folder, self._file = folder, JobFile(folder)
        return self._file.load()

    def change(self, next_number: int, jobs: Sequence[JobRecord]) -> None:
        """Save these records as the newest."""
        self.put((next_number, jobs))

    def _save(self, state: _State) -> None:
        if self._file is not None:
            self._file.save(*state)


def _report(why: str) -> None:
    limited(logger, "jobs", logging.ERROR, "the jobs cannot be recorded: %s", why)


def _read(data: bytes) -> tuple[int, list[JobRecord]]:
    """Raises ValueError and HegmError."""
    head, _, body = data.partition(b"\n")
    if head != b"%s %08x" % (MAGIC, zlib.crc32(body)):
        raise ValueError("its checksum does not match")
    plain = as_map(json.loads(body)) or {}
    jobs = [JobRecord.from_plain(job, "jobs") for job in as_list(plain.get("jobs")) or ()]
    return max([int(plain["next"]), *(job.number + 1 for job in jobs)]), jobs
