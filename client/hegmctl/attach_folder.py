"""The folder through which `hegmctl attach` and its target speak: the script, the right to come in, and the answer.

Its files are handled through a descriptor of the folder: it may belong to another user, when root attaches.
"""

from __future__ import annotations

import os
from contextlib import suppress
from tempfile import gettempdir

from hegmd.errors import EXTERNAL, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

ASKED, TAKEN, SCRIPT, ANSWER = "asked", "taken", "script.py", "answer"
_MAX_ANSWER_BYTES = 65_536


class Folder:
    """A directory of the target's user and group, for the script and its answer. Removed with the context."""

    def __init__(self, owner: tuple[int, int]) -> None:
        self._owner = owner
        self.is_left = False  # the target may still run the script: it removes the folder itself
        self._is_withdrawn = False
        self.path = os.path.join(gettempdir(), f"hegm-attach-{os.urandom(8).hex()}")
        try:
            os.mkdir(self.path, 0o700)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.fchown(self._fd, *self._owner)
        except OSError as error:
            message = f"{self.path} cannot be made: {error.strerror}"
            raise HegmError(EXTERNAL, message, "set TMPDIR to a folder that both users can reach") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if not self.is_left:
            for name in (ASKED, TAKEN, SCRIPT, ANSWER):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)
            with suppress(OSError):
                os.rmdir(self.path)
        os.close(self._fd)

    def write(self, name: str, text: str) -> None:
        """Make a file that the target's user can read."""
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        with open(fd, "w", encoding="utf-8") as file:
            os.fchown(fd, *self._owner)
            file.write(text)

    def read(self, name: str) -> str | None:
        """Return what the target wrote there; None before it has."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        with open(fd, "rb") as file:
            return file.read(_MAX_ANSWER_BYTES).decode(errors="replace")

    def withdraw(self) -> bool:
        """Take the right to come in back; whether the target had not taken it."""
        with suppress(OSError):
            os.unlink(ASKED, dir_fd=self._fd)
            self._is_withdrawn = True
        return self._is_withdrawn
