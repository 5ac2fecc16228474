"""The images on disk: which exist, whether they are good, and removing them.

hegmctl runs this with its user's rights, without a daemon. It also removes what killed writers left. Everything blocks.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Sequence

from hegmd.errors import BUSY, NOT_FOUND, HegmError, Refused
from hegmd.images.files.folder import (
    DIRECTORY,
    KNOWN,
    LOCK,
    MANIFEST,
    OLD,
    SEAL,
    Folder,
    find,
    is_left_over,
    split,
    unnamed_beside,
)
from hegmd.images.files.lock import lock_alone
from hegmd.images.files.refusals import refused_as
from hegmd.images.files.signature import read_manifest
from hegmd.protocol.images import ImageSeen, ImageVerified, Manifest

# The clocks of nodes that share a directory may differ by this much.
MAX_SKEW_S = 60.0


def manifest_in(folder: Folder) -> Manifest:
    """Return its manifest, after checking that every file is there with its size. Raises HegmError."""
    with refused_as(folder.path, "read"):
        try:
            data, seal = folder.read_small(MANIFEST), folder.read_small(SEAL)
        except FileNotFoundError as error:
            raise HegmError(
                NOT_FOUND,
                f"{folder.path} is not a finished image: it has no {MANIFEST} with a {SEAL}",
                "run: hegmctl images ls",
            ) from error
        manifest = read_manifest(folder.path, data, seal)
        folder.require_whole(manifest)
        return manifest


def read(path: str) -> Manifest:
    """Return the manifest of the image at that path. Raises HegmError."""
    with find(path) as folder:
        return manifest_in(folder)


def verify(path: str, progress: Callable[[int, int], object]) -> ImageVerified:
    """Read all of it; `progress` gets the bytes read and the total. Raises HegmError.

    The code of a restore finds all damage: the manifest and its seal, owners and modes, and every byte of every file.
    Only a node's daemon can tell whose key has signed it, and what the node lacks for it.
    """
    began = time.monotonic()
    with find(path) as folder:
        manifest = manifest_in(folder)
        size_bytes = size_of(manifest)
        with refused_as(path, "read"):
            folder.require_own(folder.owner_uid)
            folder.verify(manifest, lambda done_bytes: progress(done_bytes, size_bytes))
            foreign = folder.foreign(manifest)
    return ImageVerified(
        path=path,
        size_bytes=size_bytes,
        stored_bytes=stored_of(manifest),
        took_s=time.monotonic() - began,
        foreign=tuple(foreign),
    )


def look_into(path: str) -> list[ImageSeen]:
    """Return the image at that path, or those in it, with left-over ones. Raises HegmError."""
    with refused_as(path, "read"):
        names = sorted(os.listdir(path))
    if MANIFEST in names:
        return [_look_at(path)]
    return [_look_at(os.path.join(path, name)) for name in names if _is_one(os.path.join(path, name))]


def remove(path: str) -> None:
    """Remove an image, complete or left over. Raises HegmError with nothing changed."""
    parent, name = split(path)
    with refused_as(path, "removed"):
        parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = os.open(name, DIRECTORY, dir_fd=parent_fd)
            try:
                _require_image(path, name, os.listdir(fd))
                _take_away(parent_fd, name, fd, path)
            finally:
                os.close(fd)
        finally:
            os.close(parent_fd)


def require_removable(path: str) -> None:
    """Check that `remove` would remove something at that path. Raises HegmError."""
    _, name = split(path)
    with refused_as(path, "removed"):
        fd = os.open(path, DIRECTORY)
        try:
            _require_image(path, name, os.listdir(fd))
        finally:
            os.close(fd)


def sweep(path: str) -> list[str]:
    """Remove what killed writers left of an image of that path; what a live writer has locked stays."""
    parent, name = split(path)
    gone: list[str] = []
    with refused_as(parent, "read"):
        for found in sorted(os.listdir(parent)):
            left = os.path.join(parent, found)
            if is_left_over(found) == name and not _is_held(left):
                remove(left)
                gone.append(left)
    return gone


def from_oldest(images: Sequence[ImageSeen], now_utc: float) -> list[ImageSeen]:
    """Sort complete images from the oldest to the newest.

    One with a later time than now is old: the clock was set back since.
    """

    def place(image: ImageSeen) -> tuple[bool, float, str]:
        made_utc = image.made_utc or 0.0
        return made_utc <= now_utc + MAX_SKEW_S, made_utc, image.path

    return sorted(images, key=place)


def trim(path: str, series: str, keep: int, now_utc: float | None = None) -> list[str]:
    """Remove all complete images of a series except the newest `keep`, and return the removed ones. An image in use
    stays.

    Their names are `SERIES.STAMP`. Other files and broken images are not touched.
    """
    named = re.compile(re.escape(series) + r"\.[0-9]{8}T[0-9]{6}Z")
    mine = [image for image in look_into(path) if named.fullmatch(os.path.basename(image.path))]
    whole = [seen for seen in mine if seen.state in ("whole", "in-use")]
    gone: list[str] = []
    in_order = [seen.path for seen in from_oldest(whole, time.time() if now_utc is None else now_utc)]
    for old in in_order[:-keep] if keep > 0 else ():
        try:
            remove(old)
        except HegmError as error:
            if error.code is not BUSY:  # in use; removed the next time
                raise
            continue
        gone.append(old)
    return gone


def size_of(manifest: Manifest) -> int:
    """Return the uncompressed size of an image in bytes."""
    return sum(file.size_bytes for file in (*manifest.criu_files, *manifest.byte_files))


def stored_of(manifest: Manifest) -> int:
    """Return the bytes that an image takes on disk."""
    return sum(file.stored_bytes for file in (*manifest.criu_files, *manifest.byte_files))


def _look_at(path: str) -> ImageSeen:
    if is_left_over(os.path.basename(path)) is not None:
        state, why = (
            ("in-use", None) if _is_held(path) else ("left-over", "its writer ended before the image was complete")
        )
        return _seen(path, state, why, None)
    try:
        manifest = read(path)
    except HegmError as error:
        return _seen(path, "broken", error.message, None)
    return _seen(path, "in-use" if _is_held(path) else "whole", None, manifest)


def _seen(path: str, state: str, why: str | None, manifest: Manifest | None) -> ImageSeen:
    if manifest is None:
        return ImageSeen(
            path=path, state=state, why=why, size_bytes=None, stored_bytes=None, made_utc=None, host=None, command=None
        )
    command = next((one.command for one in manifest.processes if one.pid == manifest.root_pid), None)
    return ImageSeen(
        path=path,
        state=state,
        why=why,
        size_bytes=size_of(manifest),
        stored_bytes=stored_of(manifest),
        made_utc=manifest.made_utc,
        host=manifest.host or None,
        command=command,
    )


def _is_one(path: str) -> bool:
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return False
        return is_left_over(os.path.basename(path)) is not None or MANIFEST in os.listdir(path)
    except OSError:  # no permission, or removed meanwhile
        return False


def _is_held(path: str) -> bool:
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _require_image(path: str, name: str, found: list[str]) -> None:
    if is_left_over(name) is None and MANIFEST not in found:
        raise Refused(f"{path} is not an image: it has no {MANIFEST}", "remove it yourself: rm -r")
    if strange := sorted(set(found) - KNOWN):
        raise Refused(f"{path} has files that belong to no image: {', '.join(strange[:3])}", "move them away first")


def _take_away(parent_fd: int, name: str, fd: int, path: str) -> None:
    """Rename it first to a left-over's name: if the removal is interrupted, the rest is recognised."""
    lock_fd = _locked(fd, path)
    try:
        if is_left_over(name) is None:
            unnamed = unnamed_beside(name, OLD)
            os.rename(name, unnamed, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
            name = unnamed
        for entry in sorted(os.listdir(fd), key=lambda entry: entry == LOCK):  # the lock last: until then it is held
            if stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                _empty(entry, fd)
            else:
                os.unlink(entry, dir_fd=fd)
        os.rmdir(name, dir_fd=parent_fd)
    finally:
        if lock_fd is not None:
            os.close(lock_fd)


def _locked(fd: int, path: str) -> int | None:
    try:
        lock_fd = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        return None
    try:
        lock_alone(lock_fd, path)
    except HegmError:
        os.close(lock_fd)
        raise
    return lock_fd


def _empty(name: str, dir_fd: int) -> None:
    fd = os.open(name, DIRECTORY, dir_fd=dir_fd)
    try:
        for entry in os.listdir(fd):
            os.unlink(entry, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=dir_fd)
