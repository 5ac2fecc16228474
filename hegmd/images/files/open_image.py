"""Images that are being written or were opened.

Three processes touch bytes. The caller's own process writes and reads the image, so nothing happens that the caller
could not do. CRIU must neither write into a directory that a caller could put links into nor read files that a caller
could change. So if the caller is not the daemon's user, or CRIU lacks the caller's rights, CRIU gets a folder of the
daemon's own. The daemon's process sums CRIU's files there before the caller's process copies them, or copies what CRIU
will read and sums the copy. The manifest is composed here, from these checksums, and signed. This costs a copy of
CRIU's files, which contain no GPU memory. Rejected: to use a directory of the caller as root. It fails on file
systems where root has no rights (NFS) or that the caller runs (FUSE), and it would have to be undone after every crash.

Belongs to the event loop. The caller that gets an ImageWriter or an Image from `Images` must end it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import anyio

from hegmd import __version__
from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.images.files.private_directory import PrivateDirectory, require_bytes
from hegmd.images.files.signature import Key, written
from hegmd.images.files.user_processes import UserProcess
from hegmd.protocol.images import ImageFile, Manifest
from hegmd.protocol.record import as_list
from hegmd.system.descriptors import MAX_IN_A_MESSAGE
from hegmd.system.programs import Rights

logger = logging.getLogger(__name__)

Progress = Callable[[int], object]

# Time limit, so that a disk that hangs blocks no caller forever.
DISCARD_WITHIN_S = 30.0
_FILES_IN_A_MESSAGE = MAX_IN_A_MESSAGE - 13


def ignore(_done_bytes: int) -> None:
    """Ignore progress."""


class OpenImage:
    """An image's path, the processes that work on it, and CRIU's directory, if that is inside the image."""

    def __init__(
        self, path: str, hand: UserProcess, criu_dir_fd: int, own: UserProcess | None, private: PrivateDirectory | None
    ) -> None:
        self.path = path
        self._hand, self._own, self._private = hand, own, private
        self._criu_dir_fd = criu_dir_fd

    async def end(self) -> None:
        """Close it and release its lock; an incomplete image is left over. Twice is fine. Not cancelled half-way."""
        with anyio.CancelScope(shield=True):
            if self._criu_dir_fd >= 0:
                os.close(self._criu_dir_fd)
                self._criu_dir_fd = -1
            await end_processes(self._hand, self._own, self._private)


class ImageWriter(OpenImage):
    """An image that is being written, under a name that is not yet its own."""

    def __init__(
        self,
        path: str,
        rights: Rights,
        key: Key,
        hand: UserProcess,
        own: UserProcess | None,
        private: PrivateDirectory | None,
        *,
        read_back: bool,
    ) -> None:
        super().__init__(path, hand, -1, own, private)
        self._read_back = read_back
        self.id = secrets.token_hex(16)
        self._rights, self._key = rights, key
        self._byte_files: dict[str, ImageFile] = {}
        self._criu_files: list[ImageFile] | None = None

    @property
    def criu_dir_fd(self) -> int:
        """Return the empty directory for CRIU's files; this object owns it."""
        return self._criu_dir_fd if self._private is None else self._private.fd

    @property
    def hand_pid(self) -> int | None:
        """Return the process that writes it."""
        return self._hand.pid

    async def begin(self) -> None:
        """Have the directory made. Raises HegmError, with nothing there."""
        answer = await self._hand.call("make", {"path": self.path, "read_back": self._read_back})
        with answer.fds:
            (self._criu_dir_fd,) = answer.fds.take()

    async def give_way(self) -> None:
        """Lower the priority of its processes from now on. Raises HegmError."""
        for hand in (self._hand, self._own):
            if hand is not None:
                await hand.call("give-way")

    async def write_bytes(self, name: str, piece_fd: int, size_bytes: int, on_progress: Progress = ignore) -> None:
        """Write the first bytes of that memory, synced and read back; several at once are fine. Raises HegmError."""
        args = {"name": name, "size_bytes": size_bytes, "id": self.id}
        began = time.monotonic()
        answer = await self._hand.call("write", args, fds=[piece_fd], on_progress=_so_far(on_progress))
        wrote_ms, whole_ms = float(answer.values["wrote_s"]) * 1e3, (time.monotonic() - began) * 1e3
        text = "image %s: wrote %d bytes in %.1f ms, and had read them back after %.1f ms"
        logger.debug(text, self.path, size_bytes, wrote_ms, whole_ms)
        stored_bytes, total = int(answer.values["stored_bytes"]), str(answer.values["sum"])
        if not answer.values["direct"]:
            logger.info("%s is written through the page cache: its file system does not support O_DIRECT", self.path)
        self._byte_files[name] = ImageFile(name=name, size_bytes=size_bytes, stored_bytes=stored_bytes, sum=total)

    async def finish(self, manifest: Manifest, on_progress: Progress = ignore) -> Manifest:
        """Complete the image: CRIU has ended, and all bytes are written. Returns the manifest as written.

        On return everything was read back from disk, unless the settings say otherwise, and the directory has its
        name. Raises HegmError; after a failure or a cancellation the caller has to discard it. Fills in identity, time,
        owner and files.
        """
        began = time.monotonic()
        await self.collect_criu_files()
        node = os.uname()
        manifest = manifest.replace(
            id=self.id,
            made_utc=time.time(),
            uid=self._rights.uid,
            gid=self._rights.gid,
            hegmd_version=__version__,
            host=node.nodename,
            kernel=node.release,
            architecture=node.machine,
            criu_files=tuple(self._criu_files or ()),
            byte_files=tuple(self._byte_files[name] for name in sorted(self._byte_files)),
        )
        data = written(manifest)
        args = {"manifest": data, "seal": self._key.seal(data)}
        await self._hand.call("finish", args, on_progress=_so_far(on_progress))
        logger.debug("image %s: completed in %.1f ms", self.path, (time.monotonic() - began) * 1e3)
        await self.end()
        return manifest

    async def discard(self) -> None:
        """Remove it if possible in time; a remainder is recognised. Never raises; continues when the caller is
        cancelled.
        """
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(DISCARD_WITHIN_S), contextlib.suppress(HegmError):
                await self._hand.call("discard")
            await self.end()

    async def collect_criu_files(self) -> None:
        """Have CRIU's files in the image, with their checksums: CRIU has ended. Twice is fine. Raises HegmError."""
        if self._criu_files is None:
            self._criu_files = await self._collected()

    async def _collected(self) -> list[ImageFile]:
        if self._private is None or self._own is None:
            return _files(await self._hand.call("sum"))
        files = _files(await self._own.call("sum-of", fds=[self._private.fd]))
        for some in _batches(files):
            with _held(self._private.open_files([file.name for file in some])) as fds:
                args = {"files": [[file.name, file.size_bytes] for file in some]}
                answer = await self._hand.call("take", args, fds=fds)
            _require_same(some, answer.values["sums"], self.path)
        return files


class Image(OpenImage):
    """An image that was opened: locked, its manifest read and found right, every file there and of its size."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        hand: UserProcess,
        criu_dir_fd: int,
        own: UserProcess | None,
        private: PrivateDirectory | None,
        foreign: Sequence[str] = (),
    ) -> None:
        super().__init__(path, hand, criu_dir_fd, own, private)
        self.manifest = manifest
        #: Files in its directory that are no part of it.
        self.foreign = tuple(foreign)
        self._is_good = False

    async def verify(self, on_progress: Progress = ignore) -> None:
        """Read everything that `read_bytes` would, and compare it with its checksums. Raises HegmError.

        This excludes CRIU's files, which `private_criu_dir` reads.
        """
        await self._hand.call("verify", on_progress=_so_far(on_progress))

    async def read_bytes(self, name: str, into_fd: int, on_progress: Progress = ignore) -> int:
        """Have those bytes in that memory, every chunk found right; how many. Several at once are fine."""
        file = next((file for file in self.manifest.byte_files if file.name == name), None)
        if file is None:
            raise Refused(
                f"{self.path} has no byte file {name!r:.140}", f"run: hegmctl images show {shlex.quote(self.path)}"
            )
        args = {"name": name, "size_bytes": file.size_bytes, "sum": file.sum, "id": self.manifest.id}
        began = time.monotonic()
        await self._hand.call("read", args, fds=[into_fd], on_progress=_so_far(on_progress))
        took_ms = (time.monotonic() - began) * 1e3
        logger.debug("image %s: read %d bytes in %.1f ms", self.path, file.size_bytes, took_ms)
        return file.size_bytes

    async def private_criu_dir(self) -> int:
        """Return a descriptor of CRIU's files, all verified. It belongs to this object. Raises HegmError.

        It is the image's own directory if the caller is the daemon's user, and otherwise a copy that no one else can
        reach.
        """
        if not self._is_good:
            began = time.monotonic()
            if self._private is None or self._own is None:
                await self._hand.call("verify", {"only_criu": True})
            else:
                needed_bytes = sum(file.size_bytes for file in self.manifest.criu_files)
                require_bytes(str(self._private.path), needed_bytes, self._private.free_bytes)
                for some in _batches(self.manifest.criu_files):
                    await self._copy(some, self._own, self._private)
            self._is_good = True
            took_ms = (time.monotonic() - began) * 1e3
            logger.debug("image %s: checked CRIU's files in %.1f ms", self.path, took_ms)
        return self._criu_dir_fd if self._private is None else self._private.fd

    async def _copy(self, some: Sequence[ImageFile], own: UserProcess, private: PrivateDirectory) -> None:
        shown = await self._hand.call("show", {"names": [file.name for file in some]})
        with shown.fds:
            args = {"files": [[file.name, file.size_bytes] for file in some]}
            fds = [private.fd, *shown.fds.view()]
            answer = await own.call("keep", args, fds=fds)
        _require_same(some, answer.values["sums"], self.path)


async def end_processes(hand: UserProcess | None, own: UserProcess | None, private: PrivateDirectory | None) -> None:
    """End these processes, if they exist, and empty the private directory."""
    for each in (hand, own):
        if each is not None:
            each.kill()
            await each.ended()
    if private is not None:
        await private.close()


def _so_far(on_progress: Progress) -> Callable[[Mapping[str, Any]], object]:
    return lambda event: on_progress(int(event["done_bytes"]))


def _files(answer: Any) -> list[ImageFile]:
    return [ImageFile.from_plain(file, "file") for file in as_list(answer.values["files"]) or ()]


def _batches(files: Sequence[ImageFile]) -> list[Sequence[ImageFile]]:
    """Split the files into groups of as many as a message can carry descriptors."""
    return [files[first : first + _FILES_IN_A_MESSAGE] for first in range(0, len(files), _FILES_IN_A_MESSAGE)]


def _require_same(files: Sequence[ImageFile], sums: Sequence[object], path: str) -> None:
    if wrong := [file.name for file, found in zip(files, sums, strict=True) if file.sum != found]:
        raise HegmError(
            UNAVAILABLE,
            f"criu/{wrong[0]} of {path} does not match its checksum: it is damaged or was changed",
            "use another image, or copy this one again from a complete copy",
            {"path": path, "files": wrong},
        )


@contextlib.contextmanager
def _held(fds: list[int]) -> Generator[list[int]]:
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
