"""SIGUSR1 as `hegm-launcher` has it: this process is asked for its state. Taken in every Python below a launcher.

Takes the request down and wakes whoever is to look after it (`hegm_launcher`), if there is anybody yet: one that comes
while PyTorch is still being imported is kept. A script that has its own handler for SIGUSR1 keeps it, and then cannot
be asked in this way. Imports little, since it runs at the start of Pythons that never train.
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
# Where the state is written.
STATE_PATH = "HEGM_CHECKPOINT_PATH"


def _ignore() -> None:
    pass


class Request:
    """Whether the state is wanted. One a process."""

    __slots__ = ("_pid", "is_wanted", "on_change")

    def __init__(self) -> None:
        self.is_wanted = False
        self.on_change: Callable[[], None] = _ignore
        self._pid = os.getpid()

    def make(self) -> None:
        """It is. From any thread, at any moment; in a forked child, which has the handler too, it means nothing."""
        if os.getpid() == self._pid:
            self.is_wanted = True
            self.on_change()

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """The signal's handler."""
        self.make()

    def is_taken(self) -> bool:
        """Whether the signal means this still, and nothing of the script's."""
        return signal.getsignal(signal.SIGUSR1) == self.handle


REQUEST = Request()


def take() -> None:
    """Have SIGUSR1 mean a request from now on. In the main thread, before anything of the script runs; never raises.

    The launcher starts us with the signal held back, so that one that comes earlier waits for this.
    """
    try:
        signal.signal(signal.SIGUSR1, REQUEST.handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    except (OSError, ValueError) as error:
        note(f"SIGUSR1 is not taken: {error}")
