"""Plain `python train.py` where `hegmctl hegm enable` was called: SIGUSR1 saves the state and ends it with 99.

That is HeGM's own form of use. Owns what a launcher does otherwise: the name of the state, whose state it is, and its
end with the training. Nothing is done in a Python that imports no PyTorch, and in none that a training has started.
A state of another command is left where it is: the training begins anew, and cannot be asked for its own.
"""

from __future__ import annotations

import os
import sys

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The process that takes part; a Python that it starts finds the number of another process here.
ENABLED = "HEGM_ENABLED"
_PATH, _DEFAULT_PATH = "HEGM_CHECKPOINT_PATH", "/checkpoint/latest.pt"
_LAUNCHER, _BY_NO_LAUNCHER = "HEGM_LAUNCHER", "none"
_COMMAND = "command"
_COMMAND_BYTES = 1 << 20
_OVER = ".done"


class TorchFinder:
    """Calls the action when PyTorch is about to be imported; finds nothing."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """None, since others find it."""
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                self._action()
            except Exception as error:  # noqa: BLE001 - the import goes on as it would without us
                note(f"not taking part: {error!r}")


def mount() -> None:
    """Wait for PyTorch, unless this Python belongs to a training that takes part already."""
    if os.environ.get(ENABLED, str(os.getpid())) == str(os.getpid()):
        sys.meta_path.insert(0, TorchFinder(begin))


def begin() -> None:
    """Take the place of a worker of a launcher, with the state that this command has left."""
    from . import import_hooks as mounting

    environ = os.environ
    path = os.path.abspath(environ.get(_PATH) or _DEFAULT_PATH)
    environ.update({_PATH: path, ENABLED: str(os.getpid()), _LAUNCHER: _BY_NO_LAUNCHER, "HEGM_ALLOW_RESTART": "1"})
    if is_own(path):
        environ["HEGM_STATE"] = path
    elif os.path.lexists(path):
        _say(f"{path} is of another command: this training begins anew, and SIGUSR1 does not save it; {_hint(path)}")
    mounting.mount()
    # Not by a statement: the agent does without it where no training ends with its own state.
    __import__("atexit").register(_end, os.getpid(), path)


def against(environ: Any) -> tuple[str, str] | None:
    """Why this training cannot save its state there, and what to do; None where it can."""
    path = environ.get(_PATH, "")
    if environ.get(ENABLED) != str(os.getpid()) or not os.path.lexists(path) or is_own(path):
        return None
    return f"{path} holds the state of another command", _hint(path)


def note_command(environ: Any, write: Callable[[str, Callable[[int], object]], object]) -> None:
    """Write beside the state whose it is, before the state is written. Raises OSError."""
    if environ.get(ENABLED) == str(os.getpid()):
        folder = os.path.dirname(environ[_PATH])
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write(f"{folder}/{_COMMAND}", lambda fd: os.write(fd, command()))


def is_own(path: str) -> bool:
    """Whether the file there is a state that this command has left."""
    try:
        found = os.lstat(path)
        fd = os.open(f"{os.path.dirname(path)}/{_COMMAND}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        owners = {found.st_uid, os.fstat(fd).st_uid}
        return owners <= {0, os.geteuid()} and os.read(fd, _COMMAND_BYTES) == command()
    finally:
        os.close(fd)


def command() -> bytes:
    """The words of this process and its folder, by which its state is known."""
    with open("/proc/self/cmdline", "rb") as file:
        return os.fsencode(os.getcwd()) + b"\0" + file.read()


def _end(pid: int, path: str) -> None:
    """The training is over, so its state is kept under another name: nothing is to go on from it by itself."""
    if os.getpid() != pid or getattr(sys, "last_value", None) is not None or not is_own(path):
        return
    try:
        os.replace(path, path + _OVER)
        os.unlink(f"{os.path.dirname(path)}/{_COMMAND}")
    except OSError as error:
        note(f"the state of a training that is over stays: {error!r}")


def _hint(path: str) -> str:
    return f"name another file in {_PATH}, or move {path} away"


def _say(text: str) -> None:
    from .hegm_launcher import say

    say(text)
