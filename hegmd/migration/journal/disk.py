"""The system calls of the journal's file; passed in, so that tests can make a disk fail.

Owns no state and no order; those are file.py's. Each call raises OSError, and nothing is retried here.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h


class Disk:
    """The real one."""

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def create(self, path: Path) -> int:
        """An empty file of that name, for appending, readable for its owner alone."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_APPEND | os.O_NOFOLLOW, 0o600)

    def write(self, fd: int, data: bytes) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Write everything to the disk itself."""
        os.fdatasync(fd)

    def cut(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Allocate space for a file of that size without changing its length, so that later writes do not fail."""
        if _libc().fallocate(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Have the names in that folder on the disk itself."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
