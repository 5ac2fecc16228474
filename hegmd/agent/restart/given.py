"""The state that this process was started with, if it was: read once, and kept until all of it is put back."""

from __future__ import annotations

import os

from . import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: An inherited descriptor, or a file. Set by who starts a worker again.
DESCRIPTOR, PATH = "HEGM_STATE_FD", "HEGM_STATE"

_NOT_READ = object()
_state: Any = _NOT_READ
_claimed: tuple[str | None, str] | None = None


def is_there() -> bool:
    """Whether this process goes on from another one's state, and has not put it back yet."""
    return _state is not None and (_claimed is not None or DESCRIPTOR in os.environ or PATH in os.environ)


def claim() -> None:
    """Make it this process's own: its children get neither the descriptor nor the word of it. Raises OSError."""
    global _claimed  # noqa: PLW0603 - one a process
    if _claimed is None and is_there():
        number, path = os.environ.pop(DESCRIPTOR, None), os.environ.pop(PATH, "")
        if number is not None and number.isdigit():
            os.set_inheritable(int(number), False)
        _claimed = (number, path)


def state() -> Any:
    """That state, or None. Raises plain.Damaged and OSError; whoever asks again reads again then."""
    global _state  # noqa: PLW0603 - one a process
    if not is_there():
        return None
    if _state is _NOT_READ:
        _state = _read()
    return _state


def forget() -> None:
    """All of it is put back: the file's memory goes when nobody uses it any more."""
    global _state  # noqa: PLW0603 - one a process
    _state = None


def _read() -> Any:
    number, path = _claimed or (os.environ.get(DESCRIPTOR), os.environ.get(PATH, ""))
    if number is not None:
        try:
            return plain.read(int(number))
        except ValueError as error:
            if isinstance(error, plain.Damaged):
                raise
            raise plain.Damaged(f"{DESCRIPTOR} is {number!r}, which is no descriptor") from error
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return plain.read(fd)
    finally:
        os.close(fd)
