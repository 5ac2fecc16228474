"""The daemon's side of images: one that is being written, one that was opened, and the private place between both.

Three hands touch bytes. The caller's own hand writes and reads the image, so nothing happens that the caller could
not do. CRIU must neither write into a directory that a caller could put links into nor read files that a caller could
change: where the caller is not who the daemon is, or CRIU has not the caller's rights, CRIU has a folder of the
daemon's own, and the daemon's hand sums what CRIU wrote there before the caller's hand copies it, or copies what it
will read and sums the copy. The manifest is composed here, from these sums, and signed. That costs a copy of CRIU's
files, which have no video memory in them; what was rejected is to lend a directory of the caller's to root, which
fails on file systems where root is nobody (NFS), and on those that the caller runs (FUSE), and would have to be given
back after every crash.

Belongs to the event loop. `Images.run` has to be running. Whoever has a Lent or an Image ends it, in any case.

Longer than 400 lines because an image that is made and one that is opened are to be read against one another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from hegmd import __version__
from hegmd.descriptors import MOST_IN_A_MESSAGE
from hegmd.detached import run_detached
from hegmd.errors import DENIED, UNAVAILABLE, HegmError, Refused
from hegmd.external import Rights
from hegmd.image.hands import Hand, Hands
from hegmd.image.private import Private, require_bytes
from hegmd.image.seal import KEY_NAME, Key, load_key, read_manifest, written
from hegmd.protocol.images import ImageFile, Manifest
from hegmd.protocol.record import as_list

logger = logging.getLogger(__name__)

Progress = Callable[[int], object]

PRIVATE_NAME = "images"
# A disk that does not answer keeps nobody for good.
DISCARD_WITHIN_S = 30.0
_FILES_IN_A_MESSAGE = MOST_IN_A_MESSAGE - 13


def ignore(_done_bytes: int) -> None:
    """For those who do not want to know how far it is."""


class _InHand:
    """An image's path, the hands that are at it, and CRIU's directory, if that is in the image itself."""

    def __init__(self, path: str, hand: Hand, criu_dir_fd: int, own: Hand | None, private: Private | None) -> None:
        self.path = path
        self._hand, self._own, self._private = hand, own, private
        self._criu_dir_fd = criu_dir_fd

    async def end(self) -> None:
        """Let go of it and of its lock. What was not made whole stays as a left-over.

        Twice is fine; cannot be cancelled half-way.
        """
        with anyio.CancelScope(shield=True):
            if self._criu_dir_fd >= 0:
                os.close(self._criu_dir_fd)
                self._criu_dir_fd = -1
            await _let_go(self._hand, self._own, self._private)


class Lent(_InHand):
    """An image that is being written, under a name that is not yet its own."""

    def __init__(
        self, path: str, rights: Rights, key: Key, hand: Hand, own: Hand | None, private: Private | None
    ) -> None:
        super().__init__(path, hand, -1, own, private)
        self.id = secrets.token_hex(16)
        self._rights, self._key = rights, key
        self._byte_files: dict[str, ImageFile] = {}

    @property
    def criu_dir_fd(self) -> int:
        """The empty directory that CRIU is to write its files into. Stays this object's."""
        return self._criu_dir_fd if self._private is None else self._private.fd

    @property
    def hand_pid(self) -> int | None:
        """The process that writes it."""
        return self._hand.pid

    async def begin(self) -> None:
        """Have the directory made. Raises HegmError, with nothing there."""
        answer = await self._hand.call("make", {"path": self.path})
        with answer.fds:
            (self._criu_dir_fd,) = answer.fds.take()

    async def give_way(self) -> None:
        """Have whoever works on it leave the processors to others from now on. Raises HegmError."""
        for hand in (self._hand, self._own):
            if hand is not None:
                await hand.call("give-way")

    async def write_bytes(self, name: str, piece_fd: int, size_bytes: int, on_progress: Progress = ignore) -> None:
        """Have the first bytes of that memory in the image, synced; several at once are fine. Raises HegmError."""
        args = {"name": name, "size_bytes": size_bytes, "id": self.id}
        began = time.monotonic()
        answer = await self._hand.call("write", args, fds=[piece_fd], on_progress=_so_far(on_progress))
        logger.debug("image %s: wrote %d bytes in %.1f ms", self.path, size_bytes, (time.monotonic() - began) * 1e3)
        stored_bytes, total = int(answer.values["stored_bytes"]), str(answer.values["sum"])
        if not answer.values["direct"]:
            logger.info("%s is written by the page cache: its file system takes no O_DIRECT", self.path)
        self._byte_files[name] = ImageFile(name=name, size_bytes=size_bytes, stored_bytes=stored_bytes, sum=total)

    async def finish(self, manifest: Manifest, on_progress: Progress = ignore) -> Manifest:
        """Make it whole: CRIU has ended, and all bytes are written. The manifest as it was written.

        Everything has been read back from the disk when this returns, and the directory has its name. Raises HegmError;
        cancelled or failed, it is the caller's to discard. Identity, time, owner and files are filled in here.
        """
        began = time.monotonic()
        criu_files = await self._criu_files()
        node = platform.uname()
        manifest = manifest.replace(
            id=self.id,
            made_utc=time.time(),
            uid=self._rights.uid,
            gid=self._rights.gid,
            hegmd_version=__version__,
            host=node.node,
            kernel=node.release,
            architecture=node.machine,
            criu_files=tuple(criu_files),
            byte_files=tuple(self._byte_files[name] for name in sorted(self._byte_files)),
        )
        data = written(manifest)
        args = {"manifest": data, "seal": self._key.seal(data)}
        await self._hand.call("finish", args, on_progress=_so_far(on_progress))
        logger.debug("image %s: made whole in %.1f ms", self.path, (time.monotonic() - began) * 1e3)
        await self.end()
        return manifest

    async def discard(self) -> None:
        """Leave nothing of it, as far as that can be done in some time; what stays is known as left over.

        Never raises; goes on when its caller is cancelled.
        """
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(DISCARD_WITHIN_S), contextlib.suppress(HegmError):
                await self._hand.call("discard")
            await self.end()

    async def _criu_files(self) -> list[ImageFile]:
        if self._private is None or self._own is None:
            return _files(await self._hand.call("sum"))
        files = _files(await self._own.call("sum-of", fds=[self._private.fd]))
        for some in _batches(files):
            with _held(self._private.open_files([file.name for file in some])) as fds:
                args = {"files": [[file.name, file.size_bytes] for file in some]}
                answer = await self._hand.call("take", args, fds=fds)
            _require_same(some, answer.values["sums"], self.path)
        return files


class Image(_InHand):
    """An image that was opened: locked, its manifest read and found right, every file there and of its size."""

    def __init__(
        self, path: str, manifest: Manifest, hand: Hand, criu_dir_fd: int, own: Hand | None, private: Private | None
    ) -> None:
        super().__init__(path, hand, criu_dir_fd, own, private)
        self.manifest = manifest
        self._is_good = False

    async def verify(self, on_progress: Progress = ignore) -> None:
        """Read every byte and compare it with its checksum. Raises HegmError."""
        await self._hand.call("verify", on_progress=_so_far(on_progress))

    async def read_bytes(self, name: str, into_fd: int, on_progress: Progress = ignore) -> int:
        """Have those bytes in that memory, every chunk found right; how many. Several at once are fine."""
        file = next((file for file in self.manifest.byte_files if file.name == name), None)
        if file is None:
            raise Refused(f"{self.path} has no bytes called {name!r:.140}", f"see `hegmctl images show {self.path}`")
        args = {"name": name, "size_bytes": file.size_bytes, "sum": file.sum, "id": self.manifest.id}
        began = time.monotonic()
        await self._hand.call("read", args, fds=[into_fd], on_progress=_so_far(on_progress))
        took_ms = (time.monotonic() - began) * 1e3
        logger.debug("image %s: read %d bytes in %.1f ms", self.path, file.size_bytes, took_ms)
        return file.size_bytes

    async def private_criu_dir(self, on_progress: Progress = ignore) -> int:
        """The directory for CRIU to read, every byte of it found right; it stays this object's. Raises HegmError.

        It is the image's own where the caller is who the daemon is, and else a copy that nobody else can reach.
        """
        if not self._is_good:
            began = time.monotonic()
            if self._private is None or self._own is None:
                await self._hand.call("verify", {"only_criu": True}, on_progress=_so_far(on_progress))
            else:
                needed_bytes = sum(file.size_bytes for file in self.manifest.criu_files)
                require_bytes(str(self._private.path), needed_bytes, self._private.free_bytes)
                for some in _batches(self.manifest.criu_files):
                    await self._copy(some, self._own, self._private, on_progress)
            self._is_good = True
            took_ms = (time.monotonic() - began) * 1e3
            logger.debug("image %s: found what CRIU reads right in %.1f ms", self.path, took_ms)
        return self._criu_dir_fd if self._private is None else self._private.fd

    async def _copy(self, some: Sequence[ImageFile], own: Hand, private: Private, on_progress: Progress) -> None:
        shown = await self._hand.call("show", {"names": [file.name for file in some]})
        with shown.fds:
            args = {"files": [[file.name, file.size_bytes] for file in some]}
            fds = [private.fd, *shown.fds.view()]
            answer = await own.call("keep", args, fds=fds, on_progress=_so_far(on_progress))
        _require_same(some, answer.values["sums"], self.path)


class Images:
    """Where images are written and opened. What CRIU wrote for an earlier daemon goes while this runs."""

    def __init__(
        self, state_dir: Path, *, in_unit: bool, key_file: Path | None = None, hands: Hands | None = None
    ) -> None:
        """`in_unit`: callers' hands are units of systemd's. Raises HegmError for a key that cannot be used."""
        self._private = state_dir / PRIVATE_NAME
        try:
            self._private.mkdir(mode=0o700, exist_ok=True)
            # They may hold many GB, and are taken away later; until then no name given here is one of theirs.
            self._earlier = list(self._private.iterdir())
        except OSError as error:
            raise HegmError(
                UNAVAILABLE, f"{self._private} cannot be made: {error.strerror}", f"look at the disk of {state_dir}"
            ) from error
        self._key = load_key(key_file or state_dir / KEY_NAME, make=key_file is None)
        self._hands = Hands(in_unit=in_unit) if hands is None else hands

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Let images be worked on, until cancelled."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._hands.run)
            tasks.start_soon(self._take_away_earlier)
            task_status.started()

    async def _take_away_earlier(self) -> None:
        for earlier in self._earlier:
            await run_detached(partial(_remove, earlier), name="private images")

    async def require_room(
        self, path: str, rights: Rights, *, criu_bytes: int, bytes_of_gpus: int, apart: bool = False
    ) -> None:
        """Raise HegmError unless an image of about that size could be made there now: before anybody is stopped for it.

        Zeros take no room, so what is refused here might just have fitted; half of an image is of no use to anybody.
        """
        hand = await self._hands.start(rights)
        try:
            answer = await hand.call("room", {"path": path})
        finally:
            with anyio.CancelScope(shield=True):
                await _let_go(hand, None, None)
        require_bytes(os.path.dirname(path), criu_bytes + bytes_of_gpus, int(answer.values["free_bytes"]))
        if apart or self._is_other(rights):
            status = await run_detached(lambda _: os.statvfs(self._private), name="private images")
            require_bytes(str(self._private), criu_bytes, status.f_bavail * status.f_frsize)

    async def lend(self, path: str, rights: Rights, *, apart: bool = False, beside: bool = False) -> Lent:
        """A new image at that path, with the caller's rights. Raises HegmError, with nothing there.

        With `apart` CRIU writes into a private place in any case, because it is to have other rights than the caller.
        With `beside` it is written while its job trains, which has the processors first.
        """
        hand = await self._hands.start(rights)
        try:
            own, private = await self._private_for(rights, apart=apart)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _let_go(hand, None, None)
            raise
        lent = Lent(path, rights, self._key, hand, own, private)
        try:
            await lent.begin()
            if beside:
                await lent.give_way()
        except BaseException:
            await lent.discard()
            raise
        return lent

    async def open(self, path: str, rights: Rights) -> Image:
        """The image at that path, with the caller's rights. Raises HegmError: broken, cut, foreign, too new, in use."""
        hand = await self._hands.start(rights)
        own: Hand | None = None
        private: Private | None = None
        try:
            answer = await hand.call("open", {"path": path})
            with answer.fds:
                data, seal = bytes(answer.values["manifest"]), bytes(answer.values["seal"])
                manifest = read_manifest(path, data, seal)
                self._require_ours(path, data, seal, manifest, rights)
                own, private = await self._private_for(rights, apart=is_of_user(manifest))
                (criu_dir_fd,) = answer.fds.take()
            return Image(path, manifest, hand, criu_dir_fd, own, private)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _let_go(hand, own, private)
            raise

    async def sweep(self, path: str, rights: Rights) -> list[str]:
        """Take away what killed writers left of an image of that path; what is gone. Raises HegmError."""
        hand = await self._hands.start(rights)
        try:
            return [str(gone) for gone in (await hand.call("sweep", {"path": path})).values["gone"]]
        finally:
            with anyio.CancelScope(shield=True):
                await _let_go(hand, None, None)

    async def trim(self, path: str, series: str, keep: int, rights: Rights) -> list[str]:
        """Take away all whole images of a series in that directory but the newest; what is gone. Raises HegmError."""
        hand = await self._hands.start(rights)
        try:
            answer = await hand.call("trim", {"path": path, "series": series, "keep": keep})
            return [str(gone) for gone in answer.values["gone"]]
        finally:
            with anyio.CancelScope(shield=True):
                await _let_go(hand, None, None)

    def _require_ours(self, path: str, data: bytes, seal: bytes, manifest: Manifest, rights: Rights) -> None:
        if not self._is_other(rights):
            return
        if not self._key.has_signed(data, seal):
            raise HegmError(
                DENIED,
                f"{path} is not signed with this node's key: it is from another node, or was changed",
                "have root restore it, or give the nodes one key (image.key_file) and make it anew",
                {"path": path},
            )
        if manifest.uid != rights.uid:
            raise HegmError(
                DENIED,
                f"{path} was made for uid {manifest.uid}, and you are uid {rights.uid}",
                "have its owner restore it, or root",
                {"path": path, "uid": manifest.uid},
            )

    async def _private_for(self, rights: Rights, *, apart: bool) -> tuple[Hand | None, Private | None]:
        """The daemon's own hand and place, where CRIU is not to meet the caller's directory."""
        if not apart and not self._is_other(rights):
            return None, None
        own = await self._hands.start(None)
        try:
            return own, Private(self._private)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _let_go(None, own, None)
            raise

    @staticmethod
    def _is_other(rights: Rights) -> bool:
        """Whether the caller is somebody else than the daemon."""
        return rights.uid != os.geteuid()


def _remove(folder: Path, _: object) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def is_of_user(manifest: Manifest) -> bool:
    """Whether CRIU has made it with the rights of the job's user, and brings it back with these."""
    return bool((manifest.more or {}).get("as_user"))


async def _let_go(hand: Hand | None, own: Hand | None, private: Private | None) -> None:
    for each in (hand, own):
        if each is not None:
            each.let_go()
            await each.ended()
    if private is not None:
        await private.close()


def _so_far(on_progress: Progress) -> Callable[[Mapping[str, Any]], object]:
    return lambda event: on_progress(int(event["done_bytes"]))


def _files(answer: Any) -> list[ImageFile]:
    return [ImageFile.from_plain(file, "file") for file in as_list(answer.values["files"]) or ()]


def _batches(files: Sequence[ImageFile]) -> list[Sequence[ImageFile]]:
    """As many at once as a message carries descriptors."""
    return [files[first : first + _FILES_IN_A_MESSAGE] for first in range(0, len(files), _FILES_IN_A_MESSAGE)]


def _require_same(files: Sequence[ImageFile], sums: Sequence[object], path: str) -> None:
    if wrong := [file.name for file, found in zip(files, sums, strict=True) if file.sum != found]:
        raise HegmError(
            UNAVAILABLE,
            f"criu/{wrong[0]} of {path} does not fit its checksum: it is damaged, or was changed",
            "use another image, or copy this one again from where it was whole",
            {"path": path, "files": wrong},
        )


@contextlib.contextmanager
def _held(fds: list[int]) -> Generator[list[int]]:
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
