"""The file in which jobs outlive the daemon: the records of `jobs`, whole, with a checksum.

It is written anew at each change: beside the old one, synced, and then put in its place, so that a crash leaves the one
or the other. A file that cannot be believed is kept under another name, and no id of it is used again. Blocks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import anyio

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.protocol.record import Record, as_list, as_map, field
from hegmd.system.condition import Condition
from hegmd.system.state_dir import replace_file
from hegmd.system.threads import run_detached
from hegmd.telemetry.log import limited

logger = logging.getLogger(__name__)

MAGIC = b"HEGMJOBS1"
NAME, DAMAGED_NAME = "jobs", "jobs.damaged"
# How long a registration waits for the disk.
SAVED_WITHIN_S = 5.0
# How long until the records are written again that could not be written, unless they change before.
RETRY_S = 5.0
_ID = re.compile(rb'"number": ?(\d{1,15})')
_NEXT = re.compile(rb'"next": ?(\d{1,15})')


class JobRecord(Record):
    """What is known of a job for as long as it is remembered."""

    number: int = field("the number in its id; counted up from 1 and never used again")
    name: str = field("its name")
    uid: int = field("whose it is")
    runs: tuple[str, ...] = field("each `hegmctl run` of it, the latest last: what its agents say as their run")
    command: str = field("its script and arguments, as they are shown")
    started_utc: float = field("when it was started")
    boot: str = field("the boot of the kernel in which its process was started")
    pid: int | None = field("its first process: what `hegmctl run` became or is", default=None)
    start_ticks: int | None = field("the start time of that process", default=None)
    is_gone: bool = field("whether that process has ended", default=True)
    status: int | None = field("its exit status, or minus its signal; nil if it is not known", default=None)
    members: tuple[str, ...] = field("its processes with an agent by the names that operations have", default=())
    has_trained: bool = field("whether it was seen to come to a batch", default=False)
    ended_utc: float | None = field("when the job ended; nil before", default=None)
    end: str | None = field("how it ended, where that is more than a status", default=None)

    @property
    def id(self) -> str:
        """What people call it."""
        return f"j{self.number}"

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.ended_utc is None

    def __str__(self) -> str:
        return f"{self.id} ({self.name})"


class JobFile:
    """The file of one state directory. Its calls block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> tuple[int, list[JobRecord]]:
        """The next number, and every job. A file that is damaged is kept under another name, and the log says so.

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
                f"the jobs of before are not known: {path} cannot be read: {error.strerror}",
                f"start hegmd again; if that fails too, move the file away: mv {path} {path}.unread",
                {"path": str(path)},
            ) from None
        try:
            return _read(data)
        except (ValueError, HegmError) as error:
            numbers = [*(int(number) + 1 for number in _ID.findall(data)), *map(int, _NEXT.findall(data))]
            logger.error("%s is damaged, and kept as %s: %s; jobs get new ids", path, DAMAGED_NAME, error)
            with contextlib.suppress(OSError):
                path.replace(self._folder / DAMAGED_NAME)
            return max(numbers, default=1), []

    def save(self, next_number: int, jobs: Sequence[JobRecord]) -> None:
        """Have these on disk. Raises OSError; the file is as it was then."""
        body = json.dumps({"next": next_number, "jobs": [job.to_plain() for job in jobs]}).encode()
        replace_file(self._folder / NAME, b"%s %08x\n" % (MAGIC, zlib.crc32(body)) + body)


#: Which change it is, the next number, and every job.
_State = tuple[int, int, Sequence[JobRecord]]


class JobSaving:
    """Has the newest records on disk soon after each change, in the order of the changes. `run` it."""

    def __init__(self, *, retry_s: float = RETRY_S) -> None:
        self._retry_s = retry_s
        self._file: JobFile | None = None
        self._newest: _State = (0, 1, ())
        # The last change, the last one on disk, and the last one whose write has ended, on disk or not.
        self._version: int = 0
        self._saved: int = 0
        self._tried: int = 0
        # At the end the loop's own thread writes, while another one may still do.
        self._lock = threading.Lock()
        self._written = 0
        self._news = Condition()

    def open(self, folder: Path) -> tuple[int, list[JobRecord]]:
        """What `JobFile.load` gives. Blocks. Raises HegmError."""
        self._file = JobFile(folder)
        return self._file.load()

    def change(self, next_number: int, jobs: Sequence[JobRecord]) -> None:
        """These are the newest."""
        self._version += 1
        self._newest = (self._version, next_number, jobs)
        self._news.notify_all()

    async def run(self) -> None:
        """Write what has changed, until cancelled; then the last change is written too."""
        try:
            while True:
                following, version = self._news.next, self._version
                if version == self._saved:
                    await following.wait()
                    continue
                is_saved = await self._write_detached(self._newest)
                self._tried = version
                if is_saved:
                    self._saved = version
                self._news.notify_all()
                if not is_saved and self._version == version:
                    with anyio.move_on_after(self._retry_s):
                        await self._news.wait()
        finally:
            if self._version > self._saved:
                self._write(self._newest)

    async def until_saved(self) -> None:
        """Wait until every change is on disk, and not for long: a job starts however slow or full that is."""
        version = self._version
        with anyio.move_on_after(SAVED_WITHIN_S):
            while self._tried < version:
                await self._news.wait()

    async def _write_detached(self, newest: _State) -> bool:
        try:
            return await run_detached(lambda _: self._write(newest), name="hegmd-jobs")
        except HegmError as error:  # there is no thread to be had now
            limited(logger, "jobs", logging.ERROR, "the jobs cannot be written down: %s; %s", error.message, error.hint)
            return False

    def _write(self, newest: _State) -> bool:
        """Whether it is on disk. Blocks. Raises nothing: jobs run and move without it, and it is written later."""
        version, next_number, jobs = newest
        with self._lock:
            if self._file is None or version <= self._written:
                return True
            try:
                self._file.save(next_number, jobs)
            except OSError as error:
                message = "the jobs cannot be written down: %s; free space on that disk"
                limited(logger, "jobs", logging.ERROR, message, error)
                return False
            self._written = version
            return True


def _read(data: bytes) -> tuple[int, list[JobRecord]]:
    """Raises ValueError and HegmError."""
    head, _, body = data.partition(b"\n")
    if head != b"%s %08x" % (MAGIC, zlib.crc32(body)):
        raise ValueError("its checksum does not fit")
    plain = as_map(json.loads(body)) or {}
    jobs = [JobRecord.from_plain(job, "jobs") for job in as_list(plain.get("jobs")) or ()]
    return max([int(plain["next"]), *(job.number + 1 for job in jobs)]), jobs
