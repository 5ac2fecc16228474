"""Files for their owner only, in directories that any user may have created. All file access of this package.

Directories get mode 0700, files 0600. A file gets its name when it is complete, and links are not followed. No
descriptor stays open: an image that CRIU makes of a waiting launcher can be restored where these directories differ.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hegmd.errors import EXTERNAL, HegmError, Refused

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HEX = frozenset("0123456789abcdef")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_folder(path: Path) -> None:
    """Check that it exists, belongs to this user or root, and is no link. Raises HegmError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with _opened(path) as fd:
            owner = os.fstat(fd).st_uid
    except OSError as error:
        raise HegmError(
            EXTERNAL,
            f"{path} cannot be used for checkpoints: {error.strerror}",
            "name a folder of your own in HEGM_CHECKPOINT_DIR",
            {"path": str(path)},
        ) from error
    if owner not in (0, os.geteuid()):
        raise Refused(
            f"{path} belongs to user {owner}, who could redirect files that are written there",
            "name a folder of your own in HEGM_CHECKPOINT_DIR",
            {"path": str(path), "uid": owner},
        )


def write(path: Path, data: bytes | memoryview) -> None:
    """Write the whole file to disk, or nothing. Raises OSError."""
    with _opened(path.parent) as folder:
        unnamed = f".{path.name}-{os.urandom(8).hex()}"
        try:
            fd = os.open(unnamed, _NEW, 0o600, dir_fd=folder)
            with open(fd, "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(fd)
            os.rename(unnamed, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(unnamed, dir_fd=folder)
            raise


def is_number(name: str) -> bool:
    """Return True if the name is a number. Some digits, such as a superscript two, are none to `int`."""
    return name.isascii() and name.isdigit()


def remove_unfinished(path: Path) -> None:
    """Remove unfinished files of killed processes. Call it while no process writes."""
    with suppress(OSError):
        for name in os.listdir(path.parent):
            if _is_unfinished(name, path.name):
                with suppress(OSError):
                    (path.parent / name).unlink()


def _is_unfinished(name: str, former: str) -> bool:
    begins = f".{former}-"
    return name.startswith(begins) and len(name) == len(begins) + 16 and set(name[len(begins) :]) <= _HEX


@contextmanager
def opened(path: Path) -> Generator[int]:
    """Open a plain file of this user or of root for reading. Raises OSError."""
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is not a regular file", str(path))
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(0, f"it belongs to user {found.st_uid}", str(path))
        yield fd
    finally:
        os.close(fd)


def read(path: Path, most_bytes: int) -> bytes | None:
    """Return the content of a small file; None if there is none, or it may not be read."""
    try:
        with opened(path) as fd:
            return os.read(fd, most_bytes)
    except OSError:
        return None


def identity(path: Path) -> tuple[int, int, int, int] | None:
    """Return what distinguishes that file from all others of its name; None for a missing file or a link."""
    try:
        found = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def _opened(folder: Path) -> Generator[int]:
    fd = os.open(folder, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)
