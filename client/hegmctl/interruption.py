"""Ends the process by a signal, as shells expect it, once everything is cleaned up."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class Interrupted(BaseException):
    """A signal asks the process to end. No subclass of Exception, so that no handler treats it as a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def die_of(number: int) -> NoReturn:
    """End this process by that signal; a shell shows it as 128 plus the number."""
    import os
    import signal

    # The interpreter must not retry failed writes at its exit, and complain about them. A signal with its default
    # action skips that exit.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # reached only if the signal is blocked
