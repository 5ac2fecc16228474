"""The journal's file: appended and synced before anything is done, cut where a crash tore it, made small by renaming.

Owns the descriptor and the order of writes; what stands in the file is journal.py's. A record is on disk when `append`
returns. When it raises, nothing may be done of what the record says, and no further record is taken until the file was
written anew, for its end is not known any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration import journal
from hegmd.migration.journal import History, Reading

if TYPE_CHECKING:
    from typing_extensions import Self

NAME = "operations.journal"
# A journal that has grown by so much since it was last made small is made small again.
COMPACT_BYTES = 4 * 1024 * 1024


class JournalFile:
    """One file in the state directory. Its methods block: call them in a thread, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._folder = folder
        self._fd = -1
        self._size_bytes = 0
        self._small_bytes = 0

    def open(self) -> Reading:
        """Read what is there and be ready to append after what is sound. Raises HegmError, changing nothing."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise self._failed("read", error) from error
        reading = journal.read(data)
        self.rewrite(reading.histories.values())
        return reading

    def append(self, record: bytes) -> None:
        """Have the record on disk. Raises HegmError."""
        if self._fd < 0:
            raise self._failed("appended to", OSError("an earlier write failed"))
        try:
            written = 0
            while written < len(record):
                written += os.write(self._fd, record[written:])
            os.fdatasync(self._fd)
        except OSError as error:
            self._let_go()
            raise self._failed("appended to", error) from error
        self._size_bytes += len(record)

    @property
    def is_due(self) -> bool:
        """Whether it should be written anew: it has grown a lot, or its end is not known."""
        return self._fd < 0 or self._size_bytes - self._small_bytes > COMPACT_BYTES

    def rewrite(self, histories: Iterable[History]) -> None:
        """Put a small journal of these in the file's place. Raises HegmError; the file is then as it was."""
        data = journal.compacted(histories)
        fresh = self.path.with_suffix(".new")
        fd = -1
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_APPEND, 0o600)
            written = 0
            while written < len(data):
                written += os.write(fd, data[written:])
            os.fsync(fd)
            fresh.rename(self.path)
            self._sync_folder()
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise self._failed("written anew", error) from error
        self._let_go()
        self._fd = fd
        self._size_bytes = self._small_bytes = len(data)

    def close(self) -> None:
        """Twice is fine."""
        self._let_go()

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _failed(self, what: str, error: OSError) -> HegmError:
        return HegmError(
            UNAVAILABLE,
            f"{self.path} cannot be {what}: {error.strerror or error}",
            f"look at the disk under {self._folder} with `df -h {self._folder}`; no job is moved without a journal",
            {"path": str(self.path), "errno": error.errno},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
