"""The file of audit records: opened so that no other user can divert it, and written by a thread.

The disk may be full, slow or dead, which must affect neither the loop nor requests. So lines wait in a bounded queue,
and lost ones are counted and reported in the log. A file that logrotate moved is noticed; until a new one can be
opened, the old one is kept, so that no line is lost.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from hegmd.errors import BAD_CONFIG, HegmError

logger = logging.getLogger(__name__)

WAITING_LINES = 1000
CLOSING_DEADLINE_S = 2.0
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o600


class AuditFile:
    """Appends lines to one file, or to none. Raises HegmError if the first cannot be opened; later calls raise
    nothing."""

    def __init__(self, path: Path | None, *, waiting_lines: int = WAITING_LINES) -> None:
        self._path = path
        self._descriptor = None if path is None else _open(path)
        self._at_line_start = self._descriptor is None or _ends_a_line(self._descriptor)
        self._last_reason = ""  # the last reason why it could not be opened again
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting_lines)
        self._lock = threading.Lock()  # guards the two below, which loop and thread count
        self._missing = 0
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name="hegmd-audit", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Return how many lines could not be written since the start."""
        return self._lost

    def append(self, line: bytes) -> None:
        """Queue a line, with its line end. Does not wait."""
        self._submit(lambda: self._append(line))

    def reopen(self, path: Path | None) -> None:
        """Continue in that file, or in none; in the former one while that cannot be opened. Does not wait."""
        self._submit(lambda: self._reopen(path))

    def flush(self, deadline_s: float = CLOSING_DEADLINE_S) -> bool:
        """Wait until everything queued is written; False after the limit."""
        done = threading.Event()
        return self._submit(done.set) and done.wait(deadline_s)

    def close(self) -> None:
        """Write what is queued, within a short limit. Can be called twice."""
        if not self._thread.is_alive():
            return
        try:
            self._tasks.put(None, timeout=CLOSING_DEADLINE_S)
        except queue.Full:
            return  # the thread hangs in the kernel; it does not keep the process from exiting
        self._thread.join(CLOSING_DEADLINE_S)

    def _submit(self, task: Callable[[], None]) -> bool:
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._lose("the disk does not keep up")
            return False
        return True

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _append(self, line: bytes) -> None:
        if self._path is None:
            return
        if self._is_elsewhere(self._path):
            self._reopen(self._path)
        if self._descriptor is None:
            self._lose("it cannot be opened")
            return
        whole = line if self._at_line_start else b"\n" + line
        try:
            written = os.write(self._descriptor, whole)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self._at_line_start = written == len(whole)
        if self._at_line_start:
            self._recover()
        else:
            self._lose("too many records wait to be written")

    def _is_elsewhere(self, path: Path) -> bool:
        """True if the path now names another file than the open one."""
        if self._descriptor is None:
            return True
        try:
            named = path.lstat()
        except OSError:
            return True
        opened = os.fstat(self._descriptor)
        return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)

    def _reopen(self, path: Path | None) -> None:
        descriptor: int | None = None
        if path is not None:
            try:
                descriptor = _open(path)
            except HegmError as error:
                if (path, error.message) != (self._path, self._last_reason):
                    logger.error("%s; %s", error.message, error.hint)
                self._path, self._last_reason = path, error.message
                return
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._path, self._last_reason, self._descriptor = path, "", descriptor
        self._at_line_start = descriptor is None or _ends_a_line(descriptor)

    def _lose(self, why: str) -> None:
        with self._lock:
            self._lost += 1
            self._missing += 1
            is_first = self._missing == 1
        if is_first:
            logger.error("audit records are missing from %s: %s; this log has them", self._path, why)

    def _recover(self) -> None:
        with self._lock:
            missing, self._missing = self._missing, 0
        if missing:
            logger.warning("%d audit records are missing from %s; this log has them", missing, self._path)


def check_openable(path: Path) -> None:
    """Raise HegmError if that file cannot be used for the audit; creates it if it does not exist."""
    os.close(_open(path))


def _open(path: Path) -> int:
    """Open or create the file. Raises HegmError if that fails, or if other users than we and root can change it."""
    try:
        descriptor = os.open(path, _FLAGS, _MODE)
    except OSError as error:
        raise HegmError(
            BAD_CONFIG,
            f"the audit file {path} cannot be opened: {error.strerror}",
            "set audit.file to a path below /var/log/hegm, or let the service write another directory with "
            "ReadWritePaths= (systemctl edit hegmd)",
        ) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        wrong = "is not a regular file"
    elif found.st_uid not in (0, os.geteuid()):
        wrong = f"belongs to uid {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"has mode {stat.S_IMODE(found.st_mode):04o}, so that others can change it"
    else:
        return descriptor
    os.close(descriptor)
    raise HegmError(BAD_CONFIG, f"the audit file {path} {wrong}", "move it away; hegmd makes a new one with mode 0600")


def _ends_a_line(descriptor: int) -> bool:
    """Return True if the file is empty or its last line is complete; a power failure or a full disk may cut it."""
    size_bytes = os.fstat(descriptor).st_size
    return size_bytes == 0 or os.pread(descriptor, 1, size_bytes - 1) == b"\n"
