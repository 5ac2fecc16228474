"""Truncates output files to their sizes in an image, and keeps the rest.

The daemon can report a file that has grown only before a restore, and the restore can fail after that. So the rest is
kept in a file beside until the job is restored. Uses the caller's rights, and never follows a link.
"""

from __future__ import annotations

import os
from errno import ELOOP

from hegmd.errors import REFUSED, HegmError
from hegmd.protocol.record import as_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_AT_ONCE_BYTES = 1 << 20


class TruncatedFile:
    """A truncated file, its former size, and the file with its rest."""

    __slots__ = ("kept", "path", "size_bytes", "whole_bytes")

    def __init__(self, path: str, size_bytes: int, whole_bytes: int, kept: str) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.whole_bytes = whole_bytes
        self.kept = kept

    def cut(self) -> None:
        """Truncate the file. Raises OSError."""
        fd = _opened(self.path)
        try:
            os.ftruncate(fd, self.size_bytes)
        finally:
            os.close(fd)

    def put_back(self) -> bool:
        """Append the rest again. Returns False if the file has changed since. Raises OSError."""
        fd = _opened(self.path)
        try:
            now_bytes = os.fstat(fd).st_size
            if now_bytes not in (self.size_bytes, self.whole_bytes):
                return False
            if now_bytes == self.size_bytes:
                with open(self.kept, "rb") as kept:
                    os.lseek(fd, self.size_bytes, os.SEEK_SET)
                    _copy(kept.fileno(), fd)
        finally:
            os.close(fd)
        os.unlink(self.kept)
        return True

    def drop(self) -> None:
        """Remove the rest: the job is restored, and writes it again. Raises OSError."""
        os.unlink(self.kept)


def cut_back(grown: Iterable[object], done: list[TruncatedFile]) -> None:
    """Truncate the files, adding each to `done` first, so that an interrupt can undo it. Raises HegmError."""
    for each in grown:
        named = as_list(each)
        if named is None or len(named) != 2 or not isinstance(named[1], int):
            continue
        path, size_bytes = str(named[0]), named[1]
        try:
            if (cut := _kept(path, size_bytes)) is not None:
                done.append(cut)
                cut.cut()
        except OSError as error:
            raise HegmError(
                REFUSED,
                f"{path} cannot be truncated to {size_bytes} bytes: {error.strerror}",
                "have its owner truncate it and keep a copy of the rest, then restore again",
            ) from error


def _kept(path: str, size_bytes: int) -> TruncatedFile | None:
    """Keep the file's rest beside it, without truncating; None if there is none. Raises OSError."""
    fd = _opened(path)
    try:
        whole_bytes = os.fstat(fd).st_size
        if whole_bytes <= size_bytes:
            return None
        kept = f"{path}.hegm-cut-{os.getpid()}"
        kept_fd = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.lseek(fd, size_bytes, os.SEEK_SET)
            _copy(fd, kept_fd)
            os.fsync(kept_fd)
        except BaseException:
            os.unlink(kept)
            raise
        finally:
            os.close(kept_fd)
        return TruncatedFile(path, size_bytes, whole_bytes, kept)
    finally:
        os.close(fd)


def _opened(path: str) -> int:
    """Open the file of that path, and no link to another one. Raises OSError.

    The path is the file's own path without links: the target of a link was not the job's file, and whoever prepared the
    link could make the caller write to a file of the caller.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{fd}") != path:
        os.close(fd)
        raise OSError(ELOOP, "a link leads to another file")
    return fd


def _copy(source: int, target: int) -> None:
    while data := os.read(source, _AT_ONCE_BYTES):
        while data:
            data = data[os.write(target, data) :]
