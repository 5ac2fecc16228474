"""The daemon's state directory: private, and locked by one daemon at a time.

The lock is a flock, which ends with its process. Two daemons on one directory would both own the jobs in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hegmd.errors import REFUSED, UNAVAILABLE, HegmError

if TYPE_CHECKING:
    from typing_extensions import Self

LOCK_NAME = "lock"
IDENTITY_NAME = "identity"
SOCKET_NAME = "socket"
_IDENTITY_BYTES = 16


class StateDir:
    """Owns the lock on the directory until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_if_others_may_write(path)
            self._lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise HegmError(
                REFUSED,
                f"the state directory {path} cannot be used: {error.strerror or error}",
                "name a directory that this user may write with --state-dir, or free space on its disk",
            ) from error
        try:
            self._take_lock()
        except BaseException:
            os.close(self._lock_fd)
            raise

    @staticmethod
    def _refuse_if_others_may_write(path: Path) -> None:
        found = path.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HegmError(
                REFUSED,
                f"the state directory {path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}, "
                f"owner uid {found.st_uid})",
                f"make it private: chown {os.geteuid()} {path} && chmod 0700 {path}",
            )

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise HegmError(
                REFUSED,
                f"another hegmd (pid {holder}) holds the state directory {self.path}",
                "stop it first, or give this one a --state-dir and a --socket of its own",
            ) from error
        # The pid is only information: a full disk must not stop the daemon.
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def identity(self) -> str:
        """Return hexadecimal digits that identify this directory on all nodes, drawn once. Raises HegmError."""
        path = self.path / IDENTITY_NAME
        try:
            with contextlib.suppress(FileNotFoundError):
                known = path.read_text(errors="replace").strip()
                if re.fullmatch(rf"[0-9a-f]{{{2 * _IDENTITY_BYTES}}}", known):
                    return known
            made = secrets.token_hex(_IDENTITY_BYTES)
            replace_file(path, f"{made}\n".encode())
        except OSError as error:
            raise HegmError(
                UNAVAILABLE,
                f"{path} cannot be made: {error.strerror or error}",
                f"free space on the disk of {self.path}",
            ) from error
        return made

    def close(self) -> None:
        """Release the lock. Closing twice is fine."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def note_socket(folder: Path, socket: Path) -> None:
    """Write into a state directory which socket file its daemon has bound. Best effort.

    `hegmctl run` compares it with a socket whose daemon has ended: only a daemon on this directory may take its place.
    """
    with contextlib.suppress(OSError):
        found = socket.lstat()
        (folder / SOCKET_NAME).write_text(f"{found.st_dev} {found.st_ino} {found.st_mtime_ns}\n")


def replace_file(path: Path, data: bytes) -> None:
    """Write exactly these bytes to the file, safe against a power cut. Raises OSError; then the file is unchanged."""
    fresh = path.with_name(f".{path.name}.new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
