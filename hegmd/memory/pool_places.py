"""Directories where pool memory has a name: on hugetlbfs, or on the tmpfs of /dev/shm.

A file there outlives every process. It disappears with the node's memory at the next boot, when the processes of its
bytes have ended as well. The directory is private and named after the identity of the state directory, so that two
daemons on one node never share one. It exists only while a daemon uses it or it contains files. While it does not
exist, any user may create one of that name: then the daemon creates another with an unpredictable suffix. A file that
is found there is checked before it is used: it must be a file of this user, with one name, unreadable for other users,
and of its full size.

All operations use the descriptor of the directory, so a renamed parent directory cannot redirect them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from hegmd.memory.sizes import HUGE_PAGE_BYTES

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - our directory in it is private, and that is checked
# A file that is being created. Only the daemon that creates it has had a descriptor of it.
UNFINISHED = ".new"

_MOUNTS = Path("/proc/self/mounts")
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class FoundFile(NamedTuple):
    """A file from an earlier daemon: open for reading and writing, or the reason why it is not trusted."""

    name: str
    size_bytes: int
    fd: int = -1
    why_not: str = ""


class PoolDirectory:
    """A directory in memory. Its methods block. OSError means that it cannot provide memory now."""

    def __init__(self, folder: Path, *, huge: bool) -> None:
        self.folder = folder
        self.huge = huge
        self._is_kept = False
        self._coming_or_going = threading.Lock()  # of the directory, which is there only while it has something

    def __repr__(self) -> str:
        return f"<Place {self.folder}>"

    def keep(self) -> None:
        """Keep the directory, empty or not, until `leave`, so that no other user can create it. Raises OSError."""
        with self._coming_or_going:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            with self._opened():
                self._is_kept = True

    def leave(self) -> None:
        """Allow the directory to be removed when it is empty."""
        self._is_kept = False
        self._forget_if_empty()

    def create(self, name: str) -> int:
        """Create a file for that name; it gets the name once it is finished. Raises OSError."""
        with self._coming_or_going:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            with self._opened() as folder:
                return os.open(name + UNFINISHED, _CREATE, 0o600, dir_fd=folder)

    def finish(self, name: str) -> None:
        self.rename(name + UNFINISHED, name)

    def abandon(self, name: str) -> None:
        self._unlink(name + UNFINISHED)

    def remove(self, name: str) -> None:
        """Remove the file. Does nothing if it does not exist."""
        self._unlink(name)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file to another owner. Raises OSError."""
        with self._opened() as folder:
            os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def find(self) -> list[FoundFile]:
        """Return the files of an earlier daemon, and remove those that it was creating. Raises OSError."""
        try:
            with self._opened() as folder:
                names = sorted(os.listdir(folder))
                left = [name for name in names if not name.endswith(UNFINISHED) or not _took_away(folder, name)]
                found = [_look_at(folder, name) for name in left]
        except FileNotFoundError:
            return []
        self._forget_if_empty()
        return found

    @contextlib.contextmanager
    def _opened(self) -> Generator[int]:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise PermissionError(1, f"{self.folder} is not this daemon's own and private", str(self.folder))
            yield folder
        finally:
            os.close(folder)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)
        self._forget_if_empty()

    def _forget_if_empty(self) -> None:
        with self._coming_or_going, contextlib.suppress(OSError):  # it still contains files
            if not self._is_kept:
                self.folder.rmdir()


def _took_away(folder: int, name: str) -> bool:
    """Return True if the unfinished file was removed; a directory of that name, for example, is none."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _look_at(folder: int, name: str) -> FoundFile:
    try:
        fd = os.open(name, _OPEN, dir_fd=folder)
    except OSError as error:
        return FoundFile(name, 0, why_not=f"it cannot be opened: {error.strerror}")
    status = os.fstat(fd)
    why_not = why_not_ours(status)
    if why_not:
        os.close(fd)
        return FoundFile(name, status.st_size, why_not=why_not)
    return FoundFile(name, status.st_size, fd)


def why_not_ours(status: os.stat_result) -> str:
    """Return why an opened file is not one of this daemon's private files; empty if it is."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no file"
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        return f"it belongs to uid {status.st_uid}, with mode {stat.S_IMODE(status.st_mode):04o}"
    return "" if status.st_nlink == 1 else f"it has {status.st_nlink} names"


def find_places(
    identity: str, *, mounts: Path = _MOUNTS, shared_memory: Path = SHARED_MEMORY
) -> tuple[PoolDirectory, ...]:
    """Return this node's places for a state directory of that identity: the mounted ones, large pages first."""
    name = f"hegmd-{os.geteuid()}-{identity[:16]}"
    roots = [(Path(root), True) for root in _huge_mounts(mounts)]
    if os.path.isdir(shared_memory):
        roots.append((shared_memory, False))
    return tuple([PoolDirectory(folder, huge=huge) for root, huge in roots for folder in _folders(root, name)])


def _folders(root: Path, name: str) -> list[Path]:
    """Return this daemon's own directories there; without any, where one can be created."""
    first = root / name
    try:
        there = sorted(path for path in root.iterdir() if path.name == name or path.name.startswith(f"{name}-"))
    except OSError:
        return [first]
    own = [path for path in there if _is_own(path)]
    if own or first not in there:
        return own or [first]
    other = root / f"{name}-{secrets.token_hex(8)}"
    logger.warning(
        "%s exists and is not private to this daemon: %s is used instead; check who created the former", first, other
    )
    return [other]


def _is_own(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _huge_mounts(mounts: Path) -> Iterator[str]:
    try:
        lines = mounts.read_bytes().splitlines()  # users mount by FUSE, at paths of any bytes
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) > 2 and words[2] == b"hugetlbfs":
            root = os.fsdecode(words[1].decode("unicode_escape").encode("latin-1"))  # a blank is written as \040
            with contextlib.suppress(OSError):
                if os.statvfs(root).f_bsize == HUGE_PAGE_BYTES:
                    yield root
