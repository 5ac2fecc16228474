"""Files by which disconnected agents learn whether to wait, or where to reconnect.

Owns the folder beside the daemon's socket, whose files are named by the agents' tokens. An empty file means wait, a
path in it is the socket to connect to, and without a file an agent connects to its usual socket. At the start of a
daemon, files of a former one are removed, and waiting agents reconnect.

An image is restored with the folder that its agents look at, which may be another daemon's. The file is then created
there, before they look. The caller decides which folders are allowed: the path comes from an image.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hegmd.errors import UNAVAILABLE, HegmError, Refused

FOLDER_NAME = "aside"
# The mode lets anyone with a token read its file, and no one list the folder.
_FOLDER_MODE = 0o711
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TOKEN = re.compile(r"[0-9a-f]{32}")


class Rendezvous:
    """The rendezvous folder of one daemon. Each call is a few system calls, on a file system in memory.

    A given folder may be on any file system, and hang with it: do not call that on the event loop.
    """

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.folder = socket_path.parent / FOLDER_NAME

    def open(self) -> None:
        """Release the agents that wait for an earlier daemon. Never raises: without it no image is written."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                if _TOKEN.match(name):
                    os.unlink(self.folder / name)

    def hold(self, token: str, folder: Path | None = None) -> str:
        """Have that agent stay from now on; the file's path. Raises HegmError."""
        return self._write(self._place(token, folder), b"")

    def call(self, token: str, folder: Path | None = None) -> None:
        """Have it connect to this daemon. Raises HegmError."""
        self._write(self._place(token, folder), os.fsencode(self.socket_path))

    def leave(self, token: str, folder: Path | None = None) -> None:
        """Have it connect to its usual socket, if it waits. Raises nothing."""
        with suppress(OSError, Refused):
            place = self._place(token, folder)
            with self._opened(place.parent, make=False) as opened:
                os.unlink(place.name, dir_fd=opened)

    def _place(self, token: str, folder: Path | None) -> Path:
        if not _TOKEN.fullmatch(token):
            raise Refused(f"an agent sent {token[:40]!r}, which is no token", "read the output of its job")
        return (folder or self.folder) / token

    def _write(self, place: Path, content: bytes) -> str:
        """Write a file atomically: a reader sees the old one or the new one."""
        new = f".{secrets.token_hex(8)}"
        try:
            with self._opened(place.parent, make=True) as folder:
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
                try:
                    os.write(fd, content)
                    os.fchmod(fd, 0o644)
                    os.replace(new, place.name, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(new, dir_fd=folder)
                    raise
                finally:
                    os.close(fd)
        except OSError as error:
            raise HegmError(
                UNAVAILABLE,
                f"the directory {place}, where agents reconnect, cannot be created: {error.strerror}",
                f"check that hegmd can write {place.parent}",
            ) from error
        return str(place)

    @contextmanager
    def _opened(self, folder: Path, *, make: bool) -> Generator[int]:
        """Open the directory, creating missing parents. Raises OSError, and Refused for one that is not allowed.

        The daemon's own directory is where the administrator put it. The path of any other comes from an image: it must
        contain no link, and all of it must belong to root or this daemon, so that it leads where it says.
        """
        if folder == self.folder:
            way, rest = os.open(folder.parent, _DIRECTORY & ~os.O_NOFOLLOW), [folder.name]
        else:
            way, rest = os.open("/", _DIRECTORY), [part for part in folder.parts if part != "/"]
        try:
            for at, name in enumerate(rest, 1):
                if make:
                    with suppress(FileExistsError):
                        _make(name, way, _FOLDER_MODE if at == len(rest) else 0o755)
                below = os.open(name, _DIRECTORY, dir_fd=way)
                os.close(way)
                way = below
                _require_trusted(folder, os.fstat(way), is_last=at == len(rest))
            yield way
        finally:
            os.close(way)


def _make(name: str, dir_fd: int, mode: int) -> None:
    """Create a directory with exactly that mode, whatever the umask."""
    os.mkdir(name, 0o700, dir_fd=dir_fd)
    made = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    try:
        os.fchmod(made, mode)
    finally:
        os.close(made)


def _require_trusted(folder: Path, status: os.stat_result, *, is_last: bool) -> None:
    is_others = bool(status.st_mode & _OTHERS_MAY_WRITE) and (is_last or not status.st_mode & stat.S_ISVTX)
    if status.st_uid not in {0, os.geteuid()} or is_others:
        raise Refused(
            f"the agents of the image reconnect in {folder}, which other users than root can write",
            "restore it under a daemon with the same socket path, in a folder that only root can write",
        )
