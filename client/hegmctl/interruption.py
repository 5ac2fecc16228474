"""Ending by a signal, in the way that shells go by: the process dies of it, once everything is put in order."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class Interrupted(BaseException):
    """A signal asks the process to end. Not an Exception: nothing on the way out may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def die_of(number: int) -> NoReturn:
    """End this process by that signal, which the shell then shows as 128 and the number."""
    import os
    import signal

    # What could not be written must not be tried again, and complained of, by the interpreter on its way out; and a
    # signal whose default is to end the process needs no way out at all.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # reached only if the signal is blocked
