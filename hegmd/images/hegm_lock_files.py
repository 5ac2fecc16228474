"""Files that tell HeGM's controllers about jobs in images: `FOLDER/PPID/lock`.

PPID is the process that started the job. The file exists from the moment when the job's image is complete, before its
processes end, until the job is restored on this node. Owns the files and their content: the path of the image, and its
operation, by which a restore recognises the file of its job.

The folder belongs to the operator, and only root may write to it: another user could redirect these files. So nothing
is written to a folder with other permissions, no link is followed, and a file gets its name when it is complete.
Everything blocks. A failure is raised for the caller to report: a complete image stays valid without the file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hegmd.errors import EXTERNAL, HegmError, Refused

LOCK = "lock"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 8192


class LockFiles:
    """Those in one folder; without a folder none is ever made."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def make(self, parent_pid: int, image: str, mark: str) -> Path | None:
        """Say that the job which that process has started is in that image. Raises HegmError."""
        if self._folder is None:
            return None
        with self._opened() as folder_fd:
            with suppress(FileExistsError):
                os.mkdir(str(parent_pid), 0o755, dir_fd=folder_fd)
            inner = self._folder / str(parent_pid)
            try:
                with _own_folder(str(parent_pid), folder_fd, inner) as fd:
                    _write(fd, f"{image}\n{mark}\n", _beginning(mark))
            except NotADirectoryError as error:
                message = f"{inner} is not a directory, so no lock file can be created in it"
                raise HegmError(EXTERNAL, message, f"check what it is and remove it: ls -l {inner}") from error
        return inner / LOCK

    def remove(self, mark: str) -> list[Path]:
        """Remove the job's lock files once it is restored, and return them. Raises HegmError."""
        if self._folder is None or not self._folder.exists():
            return []
        gone: list[Path] = []
        with self._opened() as folder_fd:
            for name in filter(str.isdigit, os.listdir(folder_fd)):
                # A foreign entry must not prevent the removal of ours.
                with (
                    suppress(FileNotFoundError, NotADirectoryError, HegmError),
                    _own_folder(name, folder_fd, self._folder / name) as fd,
                ):
                    halves = [half for half in os.listdir(fd) if half.startswith(_beginning(mark))]
                    for half in halves:  # a daemon was killed while it wrote
                        os.unlink(half, dir_fd=fd)
                    is_told = _said(fd).splitlines()[1:2] == [mark]
                    if is_told:
                        os.unlink(LOCK, dir_fd=fd)
                        gone.append(self._folder / name / LOCK)
                    if is_told or halves:
                        with suppress(OSError):  # the directory has files that are not ours
                            os.rmdir(name, dir_fd=folder_fd)
        return gone

    @contextmanager
    def _opened(self) -> Generator[int]:
        folder = self._folder or Path()
        try:
            with _own_folder(str(folder), None, folder) as fd:
                yield fd
        except OSError as error:
            raise HegmError(
                EXTERNAL,
                f"{folder}, where controllers look for lock files, cannot be written: {error.strerror}",
                f"create it: install -d -m 0755 {folder}; under systemd name it in ReadWritePaths= as well",
                {"path": str(folder)},
            ) from error


@contextmanager
def _own_folder(name: str, dir_fd: int | None, path: Path) -> Generator[int]:
    """Open a folder that no other user can write to. Raises OSError, Refused."""
    fd = os.open(name, _FOLDER, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o022:
            raise Refused(
                f"{path} can be written by other users than root, who could redirect its lock files",
                f"run: chown root {path}; chmod 0755 {path}",
                {"path": str(path)},
            )
        yield fd
    finally:
        os.close(fd)


def _beginning(mark: str) -> str:
    """Return the prefix of temporary names of that mark's files."""
    return f".{LOCK}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}-"


def _write(dir_fd: int, text: str, beginning: str) -> None:
    """Write the whole file, or nothing."""
    unnamed = f"{beginning}{os.urandom(8).hex()}"
    try:
        fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
        with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            os.fchmod(fd, 0o644)  # whatever the umask: controllers run as other users
            file.flush()
            os.fsync(fd)
        os.rename(unnamed, LOCK, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.fsync(dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(unnamed, dir_fd=dir_fd)
        raise


def _said(dir_fd: int) -> str:
    try:
        fd = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")
