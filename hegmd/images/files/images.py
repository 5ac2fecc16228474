"""The daemon's side of images: where they are written and opened, by which process, and who may open one.

`open_image` has images that are being written or were opened. Belongs to the event loop; `Images.run` must be running.
"""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial
from pathlib import Path

import anyio
import anyio.abc

from hegmd.errors import DENIED, UNAVAILABLE, HegmError
from hegmd.images.files.open_image import Image, ImageWriter, end_processes
from hegmd.images.files.private_directory import PrivateDirectory, require_bytes
from hegmd.images.files.signature import KEY_NAME, load_key, read_manifest
from hegmd.images.files.user_processes import UserProcess, UserProcesses
from hegmd.protocol.images import Manifest
from hegmd.system.programs import Rights
from hegmd.system.threads import run_detached

logger = logging.getLogger(__name__)

PRIVATE_NAME = "images"


class Images:
    """Writes and opens images. CRIU's files of an earlier daemon are removed while this runs."""

    def __init__(
        self,
        state_dir: Path,
        *,
        in_unit: bool,
        key_file: Path | None = None,
        hands: UserProcesses | None = None,
        read_back: bool = True,
    ) -> None:
        """`in_unit`: callers' processes are systemd units. `read_back`: new images are read back. Raises HegmError."""
        self._read_back = read_back
        self._private = state_dir / PRIVATE_NAME
        try:
            self._private.mkdir(mode=0o700, exist_ok=True)
            # They may hold many GB, and are taken away later; until then no name given here is one of theirs.
            self._earlier = list(self._private.iterdir())
        except OSError as error:
            raise HegmError(
                UNAVAILABLE,
                f"{self._private} cannot be created: {error.strerror}",
                f"check the disk of {state_dir}: df -h, dmesg",
            ) from error
        self._key = load_key(key_file or state_dir / KEY_NAME, make=key_file is None)
        self._hands = UserProcesses(in_unit=in_unit) if hands is None else hands

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._hands.run)
            tasks.start_soon(self._take_away_earlier)
            task_status.started()

    async def _take_away_earlier(self) -> None:
        for earlier in self._earlier:
            await run_detached(partial(_remove, earlier), name="private images")

    async def require_space(
        self, path: str, rights: Rights, *, criu_bytes: int, bytes_of_gpus: int, apart: bool = False
    ) -> None:
        """Raise HegmError unless an image of about that size fits there now. Call it before any process is stopped for
        it.

        Zeros take no space, so an image that would just fit may be refused; half an image is useless.
        """
        hand = await self._hands.start(rights)
        try:
            answer = await hand.call("room", {"path": path})
        finally:
            with anyio.CancelScope(shield=True):
                await end_processes(hand, None, None)
        require_bytes(os.path.dirname(path), criu_bytes + bytes_of_gpus, int(answer.values["free_bytes"]))
        if apart or self._is_other(rights):
            status = await run_detached(lambda _: os.statvfs(self._private), name="private images")
            require_bytes(str(self._private), criu_bytes, status.f_bavail * status.f_frsize)

    async def lend(self, path: str, rights: Rights, *, apart: bool = False, beside: bool = False) -> ImageWriter:
        """Create a new image at that path with the caller's rights. Raises HegmError, with nothing left there.

        `apart`: CRIU writes into a private directory, because it has other rights than the caller. `beside`: the job
        trains meanwhile, and has priority.
        """
        hand = await self._hands.start(rights)
        try:
            own, private = await self._private_for(rights, apart=apart)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await end_processes(hand, None, None)
            raise
        lent = ImageWriter(path, rights, self._key, hand, own, private, read_back=self._read_back)
        try:
            await lent.begin()
            if beside:
                await lent.give_way()
        except BaseException:
            await lent.discard()
            raise
        return lent

    async def open(self, path: str, rights: Rights) -> Image:
        """Open the image with the caller's rights. Raises HegmError: broken, truncated, foreign, too new, in use."""
        hand = await self._hands.start(rights)
        own: UserProcess | None = None
        private: PrivateDirectory | None = None
        try:
            answer = await hand.call("open", {"path": path})
            with answer.fds:
                data, seal = bytes(answer.values["manifest"]), bytes(answer.values["seal"])
                manifest = read_manifest(path, data, seal)
                self._require_ours(path, data, seal, manifest, rights)
                own, private = await self._private_for(rights, apart=is_of_user(manifest))
                (criu_dir_fd,) = answer.fds.take()
                foreign = [str(name) for name in answer.values["foreign"]]
            return Image(path, manifest, hand, criu_dir_fd, own, private, foreign)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await end_processes(hand, own, private)
            raise

    def own_folder(self) -> PrivateDirectory:
        """Return a new folder of the daemon's own; the caller closes it, or the next daemon removes it."""
        return PrivateDirectory(self._private)

    async def sweep(self, path: str, rights: Rights) -> list[str]:
        """Remove what killed writers left of an image of that path, and return it. Raises HegmError."""
        hand = await self._hands.start(rights)
        try:
            return [str(gone) for gone in (await hand.call("sweep", {"path": path})).values["gone"]]
        finally:
            with anyio.CancelScope(shield=True):
                await end_processes(hand, None, None)

    async def trim(self, path: str, series: str, keep: int, rights: Rights) -> list[str]:
        """Remove all complete images of a series there except the newest, and return them. Raises HegmError."""
        hand = await self._hands.start(rights)
        try:
            answer = await hand.call("trim", {"path": path, "series": series, "keep": keep})
            return [str(gone) for gone in answer.values["gone"]]
        finally:
            with anyio.CancelScope(shield=True):
                await end_processes(hand, None, None)

    def _require_ours(self, path: str, data: bytes, seal: bytes, manifest: Manifest, rights: Rights) -> None:
        if not self._is_other(rights):
            return
        if not self._key.has_signed(data, seal):
            raise HegmError(
                DENIED,
                f"{path} is not signed with this node's key: it comes from another node or was changed",
                "have root restore it, or give the nodes one key (image.key_file) and write the image again",
                {"path": path},
            )
        if manifest.uid != rights.uid:
            raise HegmError(
                DENIED,
                f"{path} belongs to uid {manifest.uid}; you are uid {rights.uid}",
                "have its owner restore it, or root",
                {"path": path, "uid": manifest.uid},
            )

    async def _private_for(self, rights: Rights, *, apart: bool) -> tuple[UserProcess | None, PrivateDirectory | None]:
        """Return the daemon's own process and directory, if CRIU must not use the caller's directory."""
        if not apart and not self._is_other(rights):
            return None, None
        own = await self._hands.start(None)
        try:
            return own, PrivateDirectory(self._private)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await end_processes(None, own, None)
            raise

    @staticmethod
    def _is_other(rights: Rights) -> bool:
        """True if the caller is another user than the daemon."""
        return rights.uid != os.geteuid()


def _remove(folder: Path, _: object) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def is_of_user(manifest: Manifest) -> bool:
    """Return True if CRIU made it with the rights of the job's user, and restores it with these."""
    return bool((manifest.more or {}).get("as_user"))
