"""Plain `python train.py` after `hegmctl hegm enable`: SIGUSR1 saves the state and ends the process with 99.

This is HeGM's form of use. Does what a launcher does otherwise: names the state, records its command, and removes it at
the end of the training. Does nothing in a Python that imports no PyTorch, or that a training has started. A state of
another command stays where it is: the training then starts over, and cannot save its own.
"""

from __future__ import annotations

import os
import sys

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_DEFAULT_PATH = "/checkpoint/latest.pt"
_BY_NO_LAUNCHER = "none"
_OVER = ".done"


class TorchFinder:
    """Calls the action when PyTorch is about to be imported; finds nothing."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Return None: other finders find it."""
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                self._action()
            except Exception as error:  # noqa: BLE001 - the import continues as it would without us
                note(f"not taking part: {error!r}")


def mount() -> None:
    """Wait for PyTorch. Imports nothing, since it runs at the start of Pythons that never train."""
    sys.meta_path.insert(0, TorchFinder(begin))


def begin() -> None:
    """Take the place of a worker of a launcher, with the state that this command has left.

    Not in a Python that belongs to a training which is already registered.
    """
    from .hegm_signal import ENABLED, LAUNCHER, STATE_PATH

    environ = os.environ
    if environ.get(ENABLED, str(os.getpid())) != str(os.getpid()):
        return
    from . import hegm_launcher
    from . import import_hooks as mounting

    path = os.path.abspath(environ.get(STATE_PATH) or _DEFAULT_PATH)
    environ.update({STATE_PATH: path, ENABLED: str(os.getpid()), LAUNCHER: _BY_NO_LAUNCHER, "HEGM_ALLOW_RESTART": "1"})
    if hegm_launcher.is_own(path):
        environ["HEGM_STATE"] = path
    elif os.path.lexists(path):
        hint = hegm_launcher.hint_of(path)
        hegm_launcher.say(
            f"{path} belongs to another command: this training starts over, and SIGUSR1 does not save it; {hint}"
        )
    mounting.mount()
    # Not by a statement: the agent does without it where no training ends with its own state.
    __import__("atexit").register(_end, os.getpid(), path)


def _end(pid: int, path: str) -> None:
    """Rename the state at the end of the training, so that no later training continues from it."""
    from .hegm_launcher import command_file, is_own

    if os.getpid() != pid or getattr(sys, "last_value", None) is not None or not is_own(path):
        return
    try:
        os.replace(path, path + _OVER)
        os.unlink(command_file(path))
    except OSError as error:
        note(f"the state of a training that is over stays: {error!r}")
