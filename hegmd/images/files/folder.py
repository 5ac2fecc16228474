"""The directory of an image on disk: its layout, how it is created, and what makes its content trustworthy.

    DIR/manifest.json   its description (`hegmd.protocol.images`); written last
    DIR/seal            the manifest's SHA-256, and its signature
    DIR/lock            locked while the image is written, restored or removed
    DIR/criu/           CRIU's files
    DIR/bytes/          the GPUs' bytes, a file for each pool segment

It is written under another name (`.NAME.hegm-new-…`), synced, verified from the disk, and renamed: an image with its
own name has been verified. A directory with the other name and no lock is left over from a writer that was killed, and
is recognised by that name.

Runs with the rights of the image's owner, in a process of its own or in hegmctl, never in the daemon. Everything is
opened relative to a directory that was opened once, and no link below it is followed. Everything blocks.

Longer than 400 lines because what is trusted of an image, and since when, is decided in one place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hegmd.errors import DENIED, NOT_FOUND, UNAVAILABLE, HegmError, Refused
from hegmd.images.files.byte_file import ByteFile, Written
from hegmd.images.files.copy_file import sum_of
from hegmd.images.files.lock import lock_alone
from hegmd.images.files.refusals import refused_as, taken
from hegmd.images.files.signature import MAX_BYTES
from hegmd.protocol.images import ImageFile, Manifest
from hegmd.system.direct_io import Progress, opened

if TYPE_CHECKING:
    from typing_extensions import Self

MANIFEST, SEAL, LOCK, CRIU, BYTES = "manifest.json", "seal", "lock", "criu", "bytes"
KNOWN = frozenset((MANIFEST, SEAL, LOCK, CRIU, BYTES))
NEW, OLD = "hegm-new", "hegm-old"
MAX_NAME_BYTES = 200

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNNAMED = re.compile(rf"\.(?P<name>.+)\.(?P<kind>{NEW}|{OLD})-[0-9a-f]{{8}}")
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """An image's directory that was opened, and the lock on it if it was taken. A context manager; owns descriptors."""

    def __init__(self, parent_fd: int, name: str, path: str) -> None:
        """Owns the parent's descriptor. `path` is the image's final path, whatever its present name is."""
        self.path = path
        self.name = name
        self._parent_fd = parent_fd
        self._fds = [parent_fd]
        #: Whether what is written here is read back from the disk before the image gets its name.
        self.reads_back = True
        #: Folder, name and checksum of the files that were read back from the disk since this object wrote them.
        self._read_back: set[tuple[str, str, str]] = set()
        try:
            self.fd = self._open(name, parent_fd)
            self.criu_fd = self._open(CRIU, self.fd)
            self.bytes_fd = self._open(BYTES, self.fd)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, dir_fd: int) -> int:
        fd = os.open(name, DIRECTORY, dir_fd=dir_fd)
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        """Close it, and release the lock. Closing twice is fine."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- holding it ----------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock it for writing, restoring or removing until closed. Raises HegmError BUSY."""
        try:
            fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            fd = os.dup(self.fd)  # nothing is written here; this excludes others on this node
        self._fds.append(fd)
        lock_alone(fd, self.path)

    @property
    def owner_uid(self) -> int:
        return os.fstat(self.fd).st_uid

    def require_own(self, uid: int) -> None:
        """Raise HegmError unless only that user can write to it: an image that others could write is not restored."""
        entries = ((name, os.stat(name, dir_fd=self.fd, follow_symlinks=False)) for name in (MANIFEST, SEAL))
        within = ((f"{CRIU}/{name}", status) for name, status in listed(self.criu_fd))
        folders = [(name, os.fstat(fd)) for name, fd in ((".", self.fd), (CRIU, self.criu_fd), (BYTES, self.bytes_fd))]
        for name, status in (*folders, *entries, *within):
            if status.st_uid != uid:
                raise HegmError(
                    DENIED,
                    f"{self.path}: {name} belongs to uid {status.st_uid}, not to uid {uid}",
                    "restore it as its owner: an image runs with the rights that are written in it",
                )
            if stat.S_IMODE(status.st_mode) & _OTHERS_MAY_WRITE:
                raise Refused(
                    f"{self.path}: {name} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})",
                    f"run, if you trust its contents: chmod -R go-w {self.path}",
                )

    # -- content -------------------------------------------------------------------------------------------------------

    def read_small(self, name: str) -> bytes:
        """Return the content of a file at the top. Raises OSError, and Refused if it is larger than any manifest."""
        with opened_plain(name, self.fd) as fd:
            if os.fstat(fd).st_size > MAX_BYTES:
                raise Refused(f"{self.path}/{name} has more than {MAX_BYTES} bytes", "name an image that hegmd wrote")
            with open(fd, "rb", closefd=False) as file:
                return file.read()

    def require_whole(self, manifest: Manifest) -> None:
        """Raise HegmError unless every file is there, regular and of its size, and nothing else is in `criu`."""
        for folder, fd, files in self._parts(manifest):
            found = dict(listed(fd))
            for file in files:
                status = found.pop(checked_name(file.name), None)
                if status is None or not stat.S_ISREG(status.st_mode):
                    raise self._broken(f"{folder}/{file.name} is {'missing' if status is None else 'not a file'}")
                if folder == CRIU and status.st_size != file.size_bytes:
                    raise self._broken(f"{folder}/{file.name} has {status.st_size} bytes instead of {file.size_bytes}")
            if found and folder == CRIU:
                raise self._broken(f"{folder} holds {', '.join(sorted(found)[:3])}, which is not in the manifest")
        with contextlib.suppress(FileNotFoundError):  # a lock that is missing is made again
            if not stat.S_ISREG(os.stat(LOCK, dir_fd=self.fd, follow_symlinks=False).st_mode):
                raise self._broken(f"{LOCK} is not a file")

    def foreign(self, manifest: Manifest) -> list[str]:
        """Return the paths within it of files that are no part of the image. No restore reads them."""
        known = {file.name for file in manifest.byte_files}
        beside = [name for name in os.listdir(self.fd) if name not in KNOWN]
        return sorted([*beside, *(f"{BYTES}/{name}" for name in os.listdir(self.bytes_fd) if name not in known)])

    def verify(self, manifest: Manifest, progress: Progress) -> None:
        """Have every byte read from the disk and compared with its checksum. Raises HegmError and OSError.

        Files that were read back since this object wrote them are not read again.
        """
        self.require_whole(manifest)
        if not self.reads_back:
            return
        self.read_back(manifest.criu_files, progress)
        criu_bytes = sum(file.size_bytes for file in manifest.criu_files)
        self.verify_byte_files(manifest, after(criu_bytes, progress))

    def read_back(self, criu_files: Sequence[ImageFile], progress: Progress) -> None:
        """Read those of CRIU's files from the disk and compare them. Raises HegmError and OSError."""
        if self.reads_back:
            left = [file for file in criu_files if (CRIU, file.name, file.sum) not in self._read_back]
            self._compare(left, progress, from_disk=True)
            self._read_back.update((CRIU, file.name, file.sum) for file in left)

    def write_bytes(self, name: str, image_id: str, memory_fd: int, size_bytes: int, progress: Progress) -> Written:
        """Write a byte file and read it back. Raises HegmError and OSError."""
        file = self.byte_file(name, image_id)
        written = file.write(memory_fd, size_bytes, progress, read_back=self.reads_back)
        self._read_back.add((BYTES, name, written.sum))
        return written

    def verify_byte_files(self, manifest: Manifest, progress: Progress) -> None:
        """Verify the byte files. Raises HegmError and OSError."""
        before_bytes = 0
        for file in manifest.byte_files:
            if (BYTES, file.name, file.sum) not in self._read_back:
                self.byte_file(file.name, manifest.id).verify(file.size_bytes, file.sum, after(before_bytes, progress))
            before_bytes += file.size_bytes

    def verify_criu_files(self, manifest: Manifest, progress: Progress) -> None:
        """Verify CRIU's files, and leave them in the page cache for CRIU."""
        self.require_whole(manifest)
        self._compare(manifest.criu_files, progress, from_disk=False)

    def _compare(self, criu_files: Sequence[ImageFile], progress: Progress, *, from_disk: bool) -> None:
        before_bytes = 0
        for file in criu_files:
            opening = partial(opened, flags=os.O_RDONLY) if from_disk else opened_plain
            with opening(file.name, dir_fd=self.criu_fd) as fd:
                total = sum_of(fd, file.size_bytes, after(before_bytes, progress), from_disk=from_disk)
            if total != file.sum:
                raise self._broken(f"{CRIU}/{file.name} does not match its checksum")
            before_bytes += file.size_bytes

    def byte_file(self, name: str, image_id: str) -> ByteFile:
        """Return a byte file, existing or to be written."""
        return ByteFile(self.bytes_fd, checked_name(name), f"{image_id}/{name}")

    def _parts(self, manifest: Manifest) -> Iterator[tuple[str, int, Sequence[ImageFile]]]:
        yield CRIU, self.criu_fd, manifest.criu_files
        yield BYTES, self.bytes_fd, manifest.byte_files

    def _broken(self, why: str) -> HegmError:
        return HegmError(
            UNAVAILABLE,
            f"{self.path} is damaged: {why}",
            "use another image, or copy this one again from a complete copy",
            {"path": self.path},
        )

    # -- its coming and going ------------------------------------------------------------------------------------------

    def publish(self, manifest: bytes, seal: bytes) -> None:
        """Write its manifest and rename it; everything else is already on disk. Raises HegmError and OSError."""
        for name, data in ((MANIFEST, manifest), (SEAL, seal)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=self.fd), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for fd in (self.criu_fd, self.bytes_fd, self.fd):
            os.fsync(fd)
        self._rename(os.path.basename(self.path))
        os.fsync(self._parent_fd)

    def _rename(self, name: str) -> None:
        try:
            os.rename(self.name, name, src_dir_fd=self._parent_fd, dst_dir_fd=self._parent_fd)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise taken(self.path) from error
            raise
        self.name = name


def make(path: str) -> Folder:
    """Create an empty, locked directory for an image at that path, under a temporary name. Raises HegmError."""
    parent, name = split(path)
    _require_outside(parent, path)
    with refused_as(path, "made"):
        parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        unnamed = unnamed_beside(name, NEW)
        try:
            _require_free(parent_fd, name, path)
            os.mkdir(unnamed, 0o700, dir_fd=parent_fd)
            fd = os.open(unnamed, DIRECTORY, dir_fd=parent_fd)
            try:
                for inner in (CRIU, BYTES):
                    os.mkdir(inner, 0o700, dir_fd=fd)
            finally:
                os.close(fd)
        except BaseException:
            os.close(parent_fd)
            raise
        folder = Folder(parent_fd, unnamed, path)
        try:
            folder.lock()
        except BaseException:
            folder.close()
            raise
        return folder


def free_bytes_at(path: str) -> int:
    """Return the free bytes for an image at that path. Raises HegmError if none could be made. Creates nothing."""
    parent, name = split(path)
    _require_outside(parent, path)
    with refused_as(path, "made"):
        parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _require_free(parent_fd, name, path)
            status = os.fstatvfs(parent_fd)
            if status.f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=parent_fd, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return status.f_bavail * status.f_frsize
        finally:
            os.close(parent_fd)


def find(path: str) -> Folder:
    """Return the directory at that path, whatever it contains. Raises HegmError."""
    parent, name = split(path)
    with refused_as(path, "opened"):
        parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return Folder(parent_fd, name, path)
        except FileNotFoundError as error:
            if not os.path.isdir(path):
                raise
            hint = "run: hegmctl images ls"
            raise HegmError(NOT_FOUND, f"{path} is not an image: it has no {CRIU} and {BYTES}", hint) from error


def _require_outside(parent: str, path: str) -> None:
    """Raise Refused if the path is in another image: additional content would make that one incomplete."""
    inner = os.path.realpath(parent)
    while inner != os.path.dirname(inner):
        if all(os.path.lexists(os.path.join(inner, name)) for name in (MANIFEST, SEAL)):
            raise Refused(
                f"{path} is inside the image {inner}, which could then not be restored",
                "name a directory outside the image",
            )
        inner = os.path.dirname(inner)


def is_left_over(name: str) -> str | None:
    """Return the name of the image that a left-over directory was to become, or was; None for other names."""
    found = _UNNAMED.fullmatch(name)
    return None if found is None else found["name"]


def checked_name(name: str) -> str:
    """Return the name if a file in an image can have it: it may come from a forged manifest."""
    if _NAME.fullmatch(name) is None:
        raise Refused(
            f"{name!r:.140} is not a file name that an image can have",
            "use another image: this one was tampered with or damaged",
        )
    return name


def listed(fd: int) -> list[tuple[str, os.stat_result]]:
    """Return the entries of that directory by name, without following links."""
    return [(name, os.stat(name, dir_fd=fd, follow_symlinks=False)) for name in sorted(os.listdir(fd))]


@contextlib.contextmanager
def opened_plain(name: str, dir_fd: int) -> Generator[int]:
    """Open a regular file through the page cache; no link, and nothing that could block its reader."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refused(f"{name} is not a regular file", "use another image: this one was tampered with or damaged")
        yield fd
    finally:
        os.close(fd)


def summed(dir_fd: int, progress: Progress) -> list[ImageFile]:
    """Make our own files in that directory private, sync all of them, and compute checksums of what CRIU wrote.

    Reads from the page cache: what the disk has is compared with these checksums later. Raises HegmError for other
    files.
    """
    files: list[ImageFile] = []
    before_bytes = 0
    for name, _status in listed(dir_fd):
        with opened_plain(checked_name(name), dir_fd) as fd:
            os.fsync(fd)
            status = os.fstat(fd)
            if status.st_uid == os.geteuid():  # others may be of the job's user, in a folder that is the daemon's alone
                os.fchmod(fd, 0o600)
            total = sum_of(fd, status.st_size, after(before_bytes, progress), from_disk=False)
        files.append(ImageFile(name=name, size_bytes=status.st_size, stored_bytes=status.st_blocks * 512, sum=total))
        before_bytes += status.st_size
    return files


def after(before_bytes: int, progress: Progress) -> Progress:
    """Return a progress function that continues from that count."""
    return lambda done_bytes: progress(before_bytes + done_bytes)


def split(path: str) -> tuple[str, str]:
    """Return its parent and its name. Raises Refused for what cannot be an image's path."""
    parent, name = os.path.split(os.path.normpath(path))
    if (length_bytes := len(os.fsencode(name))) > MAX_NAME_BYTES:
        message = f"the name {name!r:.60} has {length_bytes} bytes; the name of an image has at most {MAX_NAME_BYTES}"
        raise Refused(message, "give a shorter name")
    if not os.path.isabs(path) or "\0" in path or name in ("", ".."):
        raise Refused(
            f"{path!r:.200} cannot be the directory of an image", "give an absolute path that ends with a name"
        )
    return parent, name


def _require_free(parent_fd: int, name: str, path: str) -> None:
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        fd = os.open(name, DIRECTORY, dir_fd=parent_fd)
        try:
            if not os.listdir(fd):  # such as one created for the image; renaming replaces it
                return
        finally:
            os.close(fd)
    raise taken(path)


def unnamed_beside(name: str, kind: str) -> str:
    """Return a temporary name, which no complete image has."""
    return f".{name}.{kind}-{secrets.token_hex(4)}"
