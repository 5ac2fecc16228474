"""Replaces this process by another program, which can keep one of its descriptors open.

Programs are found as in execvp(3), and a script without a `#!` line is run by `/bin/sh`, as a shell does. Exit statuses
are those of a shell: 127 for a command that was not found, 126 for one that cannot be executed.
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
    """Execute the command, optionally with one descriptor left open. Raises NO_COMMAND, NOT_EXECUTABLE.

    The process id stays the same, and so do the credentials of the connection: to the daemon it is the same caller.
    """
    flush()
    if keep is not None:
        os.set_inheritable(keep, True)
    # Python ignores these signals, and ignored signals stay ignored across an exec. Other programs need the defaults.
    ignored = [(number, signal.getsignal(number)) for number in (signal.SIGPIPE, signal.SIGXFSZ)]
    for number, _handler in ignored:
        signal.signal(number, signal.SIG_DFL)
    failure = _execute(command)
    for number, handler in ignored:
        signal.signal(number, handler)
    raise failure


def require(command: Sequence[str]) -> None:
    """Check that the command exists and is executable. Raises NO_COMMAND, NOT_EXECUTABLE."""
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
    """Return the possible paths of the program in order, from that environment's PATH or this process's own."""
    if os.sep in name:
        return [name]
    return [os.path.join(folder, name) for folder in os.get_exec_path(None if environ is None else dict(environ))]


def _execute(command: Sequence[str]) -> HegmError:
    """Execute it. Returns only after a failure."""
    number = ENOENT
    for path in places_of(command[0]):
        try:
            os.execv(path, list(command))
        except OSError as error:
            if error.errno == ENOEXEC:
                return _execute_as_script(path, command)
            # As in execvp, a file that may not be executed does not end the search, but its error is reported at the
            # end.
            if error.errno not in (ENOENT, ENOTDIR) or os.sep in command[0]:
                number = error.errno or ENOENT
    return failure_of(command, number)


def _execute_as_script(path: str, command: Sequence[str]) -> HegmError:
    try:
        os.execv(_SHELL, [_SHELL, path, *command[1:]])
    except OSError as error:
        return failure_of(command, error.errno or ENOEXEC)


def failure_of(command: Sequence[str], number: int) -> HegmError:
    """Return why the command cannot be run, for that error number."""
    missing = number == ENOENT
    hint = "give the full path of a program, and its arguments after it"
    if missing and os.path.isfile(command[0]):
        hint = "install the interpreter that its first line names"
    elif number == EACCES and os.path.isdir(command[0]):
        hint = "name a program in this directory"
    elif number == EACCES:
        hint = "make it an executable file: chmod +x"
    return HegmError(
        NO_COMMAND if missing else NOT_EXECUTABLE,
        f"{command[0]} cannot be run: {os.strerror(number)}",
        hint,
        {"argv": list(command)},
    )
