"""Turns this process into another program, which may keep one of its descriptors open.

Programs are found as execvp(3) finds them, and what a shell would run is run: a script without a `#!` line is given to
`/bin/sh`. Exit statuses are those of a shell as well: 127 for a command that was not found, 126 for one that cannot be.
"""

from __future__ import annotations

import os
import signal
from errno import EACCES, ENOENT, ENOEXEC, ENOTDIR

from hegmctl.output import flush
from hegmd.errors import NO_COMMAND, NOT_EXECUTABLE, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

_SHELL = "/bin/sh"


def become(command: Sequence[str], *, keep: int | None = None) -> NoReturn:
    """Execute the command, with the descriptor left open in it, if one is to be. Raises NO_COMMAND, NOT_EXECUTABLE.

    The process id stays the same, and so do the credentials of the connection: to the daemon it is the same caller.
    """
    flush()
    if keep is not None:
        os.set_inheritable(keep, True)
    # Python ignores these for itself, and what is ignored stays so across an exec; others count on the defaults.
    ignored = [(number, signal.getsignal(number)) for number in (signal.SIGPIPE, signal.SIGXFSZ)]
    for number, _handler in ignored:
        signal.signal(number, signal.SIG_DFL)
    failure = _execute(command)
    for number, handler in ignored:
        signal.signal(number, handler)
    raise failure


def require(command: Sequence[str]) -> None:
    """See that there is such a command before anything is done for it. Raises NO_COMMAND, NOT_EXECUTABLE."""
    failure = failure_of(command, ENOENT)
    for path in places_of(command[0]):
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return
            failure = failure_of(command, EACCES)
        elif os.path.isdir(path) and os.sep in command[0]:
            failure = failure_of(command, EACCES)
    raise failure


def places_of(name: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Where the program may be, in their order, by that environment's PATH or this process's own."""
    if os.sep in name:
        return [name]
    return [os.path.join(folder, name) for folder in os.get_exec_path(None if environ is None else dict(environ))]


def _execute(command: Sequence[str]) -> HegmError:
    """Execute it; returns only if that failed."""
    number = ENOENT
    for path in places_of(command[0]):
        try:
            os.execv(path, list(command))
        except OSError as error:
            if error.errno == ENOEXEC:
                return _execute_as_script(path, command)
            # As execvp has it: what may not be executed does not end the search, but it is what is said at its end.
            if error.errno not in (ENOENT, ENOTDIR) or os.sep in command[0]:
                number = error.errno or ENOENT
    return failure_of(command, number)


def _execute_as_script(path: str, command: Sequence[str]) -> HegmError:
    try:
        os.execv(_SHELL, [_SHELL, path, *command[1:]])
    except OSError as error:
        return failure_of(command, error.errno or ENOEXEC)


def failure_of(command: Sequence[str], number: int) -> HegmError:
    """Why the command cannot be run, by the kernel's number of the error."""
    missing = number == ENOENT
    hint = "give the full path of a program, and its arguments after it"
    if missing and os.path.isfile(command[0]):
        hint = "install the interpreter that its first line names"
    elif number == EACCES:
        hint = "make it an executable file: chmod +x"
    return HegmError(
        NO_COMMAND if missing else NOT_EXECUTABLE,
        f"{command[0]} cannot be run: {os.strerror(number)}",
        hint,
        {"argv": list(command)},
    )
