"""SIGUSR1 under `hegm-launcher`: a request for this process's state. Installed in every Python below a launcher.

Records the request and wakes `hegm_launcher`, if it is there yet: a request during PyTorch's import is kept. A script
with its own handler for SIGUSR1 keeps it, and cannot be asked in this way. Imports little, since it runs at the start
of Pythons that never train.
"""

from __future__ import annotations

import os
import signal

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# Set by the launcher: its pid.
LAUNCHER = "HEGM_LAUNCHER"
# The process that takes part without a launcher; a Python that it starts finds the number of another process here.
ENABLED = "HEGM_ENABLED"
# The file that the state is written to.
STATE_PATH = "HEGM_CHECKPOINT_PATH"


def _ignore() -> None:
    pass


class Request:
    """The request of this process for its state."""

    __slots__ = ("_pid", "is_wanted", "on_change")

    def __init__(self) -> None:
        self.is_wanted = False
        self.on_change: Callable[[], None] = _ignore
        self._pid = os.getpid()

    def make(self) -> None:
        """Record a request, in any thread at any moment; does nothing in a forked child, which has the handler too."""
        if os.getpid() == self._pid:
            self.is_wanted = True
            self.on_change()

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        self.make()

    def is_taken(self) -> bool:
        """Return True if this is still the signal's handler, and not one of the script."""
        return signal.getsignal(signal.SIGUSR1) == self.handle


REQUEST = Request()


def take() -> None:
    """Install the handler, in the main thread before anything of the script runs. Never raises.

    The launcher starts the process with the signal blocked, so an early one waits for this.
    """
    try:
        signal.signal(signal.SIGUSR1, REQUEST.handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    except (OSError, ValueError) as error:
        note(f"SIGUSR1 is not taken: {error}")
