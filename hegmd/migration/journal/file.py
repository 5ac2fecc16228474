"""The journal's file: appended and synced before any effect, truncated after a torn write, compacted by renaming.

Owns the descriptor and the order of writes; records.py owns the content. A record is on disk when `append` returns. If
it raises, nothing that the record says may be done. A write that found the disk full is truncated again, and the file
stays in use. After a disk error its content is unknown, so the whole journal is rewritten under another name before the
next record.

A full disk must not stop a job in the middle of a move: for every operation that begins, disk space for its likely
records is reserved in the file. Without it, the operation does not begin.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration.journal import records
from hegmd.migration.journal.disk import Disk
from hegmd.migration.journal.records import History, JournalBroken, Reading

if TYPE_CHECKING:
    from typing_extensions import Self

NAME = "operations.journal"
# After this much growth the journal is compacted again, even while operations run.
COMPACT_BYTES = 4 * 1024 * 1024
# Growth that triggers a rewrite before the first record of an operation, when no job is parked for it.
QUIET_COMPACT_BYTES = 256 * 1024
# A migration of one process takes some 30 records of 0.4 KiB; of eight ranks, about 200 of them.
OPERATION_BYTES = 192 * 1024

# A file system without that call reserves nothing; operations may then stop on a full disk.
_NO_SUCH_CALL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class JournalFile:
    """A file in the state directory. Its methods block: call them in a thread, one at a time."""

    def __init__(self, folder: Path, disk: Disk | None = None, *, compact_bytes: int = COMPACT_BYTES) -> None:
        self.path = folder / NAME
        self._folder = folder
        self._disk = disk or Disk()
        self._compact_bytes = compact_bytes
        self._fd = -1
        self._size_bytes = 0
        self._small_bytes = 0
        self._reserved_bytes = 0
        #: Why the last write failed; None if it did not.
        self.trouble: HegmError | None = None

    def open(self) -> Reading:
        """Read the journal and prepare to append. Raises HegmError if it cannot be read or trusted.

        A journal that cannot be written does not prevent the start: its content is known, and the first `append` that
        succeeds rewrites it.
        """
        try:
            data = self._disk.read(self.path)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise self._failed("read", error) from error
        try:
            reading = records.read(data)
        except JournalBroken as broken:
            raise self._named(broken) from None
        with contextlib.suppress(HegmError):  # `trouble` tells
            self.rewrite(reading.histories.values())
        return reading

    def _named(self, broken: JournalBroken) -> JournalBroken:
        """Name the file in the error, and for a damaged one the commands to start without it."""
        broken.message = broken.message.replace("the journal of operations", f"the journal of operations {self.path}")
        broken.facts["path"] = str(self.path)
        if type(broken) is JournalBroken:
            broken.hint = (
                f"check the disk; then: mv {self.path} {self.path}.damaged; start hegmd again, and run hegmctl adopt,"
                " which lists the jobs and bytes of operations that had not ended. The jobs do not change meanwhile"
            )
        return broken

    def append(self, record: bytes, histories: Iterable[History], *, ahead_bytes: int = 0) -> None:
        """Write and sync the record, and reserve disk space for `ahead_bytes` more. Raises HegmError; then it is not on
        disk.

        `histories` are the journal's content without the record, in case it must be rewritten first.
        """
        grown_bytes = self._size_bytes - self._small_bytes
        if self.is_due or (ahead_bytes and grown_bytes > QUIET_COMPACT_BYTES):
            try:
                self.rewrite(histories)
            except HegmError:
                if self._fd < 0:
                    raise  # if it is only too large, it keeps growing
        self._reserve(len(record) + ahead_bytes, must=bool(ahead_bytes))
        try:
            self._write(self._fd, record)
        except OSError as error:
            self._cut_off()
            raise self._failed("appended to", error) from error
        try:
            self._disk.sync(self._fd)
        except OSError as error:
            self._cut_off()
            self._close_file()  # the disk's content is unknown now
            raise self._failed("appended to", error) from error
        self._size_bytes += len(record)
        self.trouble = None

    @property
    def is_due(self) -> bool:
        """Whether it should be rewritten: it has grown a lot, or the content on disk is unknown."""
        return self._fd < 0 or self._size_bytes - self._small_bytes > self._compact_bytes

    def rewrite(self, histories: Iterable[History]) -> None:
        """Put a small journal of these in the file's place. Raises HegmError; the file's content is then unchanged."""
        data = records.compacted(histories)
        fresh = self.path.with_suffix(".new")
        fd = -1
        try:
            fd = self._disk.create(fresh)
            self._write(fd, data)
            self._disk.sync(fd)
        except OSError as error:
            if fd >= 0:
                self._disk.close(fd)
            self._discard(fresh)
            raise self._failed("rewritten", error) from error
        self._close_file()  # the descriptor may now refer to a file without a name
        try:
            self._disk.rename(fresh, self.path)
            self._disk.sync_folder(self._folder)
        except OSError as error:
            self._disk.close(fd)
            self._discard(fresh)
            raise self._failed("rewritten", error) from error
        self._fd = fd
        self._size_bytes = self._small_bytes = self._reserved_bytes = len(data)
        self.trouble = None
        with contextlib.suppress(HegmError):
            self._reserve(OPERATION_BYTES, must=False)

    def close(self) -> None:
        """Twice is fine."""
        self._close_file()

    def _write(self, fd: int, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += self._disk.write(fd, data[written:])

    def _reserve(self, size_bytes: int, *, must: bool) -> None:
        """Reserve disk space for that much more. With `must`, raises HegmError if that fails, with nothing changed."""
        wanted_bytes = self._size_bytes + size_bytes
        if wanted_bytes <= self._reserved_bytes:
            return
        try:
            self._disk.reserve(self._fd, wanted_bytes)
        except OSError as error:
            if must and error.errno not in _NO_SUCH_CALL:
                raise self._failed("extended for an operation", error) from error
            return
        self._reserved_bytes = wanted_bytes

    def _cut_off(self) -> None:
        """Truncate an incomplete record. If that fails too, the file is rewritten before it is used again."""
        try:
            self._disk.cut(self._fd, self._size_bytes)
            self._disk.sync(self._fd)
        except OSError:
            self._close_file()
        self._reserved_bytes = self._size_bytes  # truncating also frees the space reserved behind the end

    def _discard(self, fresh: Path) -> None:
        """Remove a partial journal, whose disk space the journal itself may need."""
        with contextlib.suppress(OSError):
            self._disk.remove(fresh)

    def _close_file(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _failed(self, what: str, error: OSError) -> HegmError:
        self.trouble = HegmError(
            UNAVAILABLE,
            f"{self.path} cannot be {what}: {error.strerror or error}",
            f"check the disk: df -h {self._folder}; hegmd moves no job without a journal",
            {"path": str(self.path), "errno": error.errno},
        )
        return self.trouble

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
