"""The daemon's own folders for CRIU's files, between CRIU and the directories of callers.

One for each image, in the state directory: no other user can reach it, and it is removed when the image is closed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.system.threads import run_detached

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateDirectory:
    """A folder of the daemon's own, for CRIU's files of one image; there until it is closed, descriptor and all."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / secrets.token_hex(8)
        try:
            self.path.mkdir(mode=0o700)
            self.fd = os.open(self.path, _DIRECTORY)
        except OSError as error:
            raise HegmError(
                UNAVAILABLE,
                f"{self.path} cannot be created: {error.strerror or error}",
                f"free space on the disk of {parent}: df -h",
            ) from error

    @property
    def free_bytes(self) -> int:
        """Return the free space on its disk."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def open_files(self, names: Sequence[str]) -> list[int]:
        """Open its files for reading; the caller closes them."""
        fds: list[int] = []
        try:
            fds.extend(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd) for name in names)
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise HegmError(UNAVAILABLE, f"{self.path} cannot be read: {error}", "check that disk: dmesg") from error
        return fds

    async def close(self) -> None:
        """Take it away."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            path = self.path
            await run_detached(lambda _: shutil.rmtree(path, ignore_errors=True), name="private images")


def require_bytes(folder: str, needed_bytes: int, free_bytes: int) -> None:
    """Raise Refused if there is too little space."""
    if free_bytes < needed_bytes:
        raise Refused(
            f"{folder} has {free_bytes >> 20} MiB free, and {needed_bytes >> 20} MiB are needed for the image",
            f"free space on its disk: df -h {folder}",
            {"path": folder, "needed_bytes": needed_bytes, "free_bytes": free_bytes},
        )
