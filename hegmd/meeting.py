"""Meeting places: files by which agents that have stepped aside are told to stay, or where to come.

Owns the folder beside the daemon's socket, whose files are named by the agents' tokens. An empty file is to stay, a
path in it is where to come, and without the file an agent comes to its usual socket. What is there when a daemon starts
is of one that has ended: it is taken away, and whoever waits there comes back.

An image is restored with the place that its agents look at, which may be another daemon's, elsewhere. The file is made
there then, before they look. Which places may be made is the caller's to say: the path is out of an image.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from hegmd.errors import UNAVAILABLE, HegmError, Refused

FOLDER_NAME = "aside"
# Whoever knows a token may read its file; nobody may list them.
_FOLDER_MODE = 0o711
_TOKEN = re.compile(r"[0-9a-f]{32}")


class MeetingPlaces:
    """The places of one daemon. Each call is a few calls of the kernel, on a file system in memory."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.folder = socket_path.parent / FOLDER_NAME

    def open(self) -> None:
        """Let everybody go who waits for an earlier daemon. Raises nothing: without places no image can be made."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                if _TOKEN.match(name):
                    os.unlink(self.folder / name)

    def hold(self, token: str, folder: Path | None = None) -> str:
        """Have that agent stay from now on; the file's path. Raises HegmError."""
        return self._write(self._place(token, folder), b"")

    def call(self, token: str, folder: Path | None = None) -> None:
        """Have it come to this daemon. Raises HegmError."""
        self._write(self._place(token, folder), os.fsencode(self.socket_path))

    def leave(self, token: str, folder: Path | None = None) -> None:
        """Have it come to its usual socket, if it waits at all. Raises nothing."""
        with suppress(OSError):
            os.unlink(self._place(token, folder))

    def _place(self, token: str, folder: Path | None) -> Path:
        if not _TOKEN.fullmatch(token):
            raise Refused(f"an agent calls itself {token[:40]!r}, which is no token", "see the log of its job")
        return (folder or self.folder) / token

    @staticmethod
    def _write(place: Path, content: bytes) -> str:
        """Put a file there at once: whoever looks sees the old one or the new one."""
        new = place.with_name(f".{secrets.token_hex(8)}")
        try:
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with suppress(PermissionError):
                os.chmod(place.parent, _FOLDER_MODE)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, content)
                os.fchmod(fd, 0o644)
            finally:
                os.close(fd)
            os.replace(new, place)
        except OSError as error:
            with suppress(OSError):
                os.unlink(new)
            raise HegmError(
                UNAVAILABLE,
                f"the meeting place {place} cannot be made: {error.strerror}",
                f"see whether {place.parent} can be written by hegmd",
            ) from error
        return str(place)
