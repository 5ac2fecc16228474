"""Turns this process into another program, which may keep one of its descriptors open."""

from __future__ import annotations

import os
import signal

from hegmctl.output import flush
from hegmd.errors import NOT_FOUND, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def become(command: Sequence[str], *, keep: int | None = None) -> NoReturn:
    """Execute the command, found along PATH, with the descriptor left open in it, if one is to be. Raises NOT_FOUND.

    The process id stays the same, and so do the credentials of the connection: to the daemon it is the same caller.
    """
    flush()
    if keep is not None:
        os.set_inheritable(keep, True)
    # Python ignores these for itself, and what is ignored stays so across an exec; others count on the defaults.
    ignored = [(number, signal.getsignal(number)) for number in (signal.SIGPIPE, signal.SIGXFSZ)]
    for number, _handler in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        for number, handler in ignored:
            signal.signal(number, handler)
        raise HegmError(
            NOT_FOUND,
            f"{command[0]} cannot be run: {error.strerror or error}",
            "give the full path of a program, and its arguments after it",
            {"argv": list(command)},
        ) from error
