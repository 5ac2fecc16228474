"""Runs one command as its child: starts it, passes signals on to it, and waits for it.

All signals are blocked and handled one at a time, with their sender. A terminal sends signals to its whole foreground
group, so the command has those already; only signals that another process sent to this one are passed on. Parent and
command stay in one process group for that reason: terminal, job control and pipelines work as without the parent. If
the parent is killed, the command keeps running.
"""

from __future__ import annotations

import os
import signal
from errno import ENOENT, ENOEXEC, ENOTDIR

from hegmctl.exec_command import failure_of, places_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

_SHELL = "/bin/sh"
# The shortest time that a timer accepts; 0 would disable it.
_MIN_S = 0.001
# Signals that stop a process, which its shell has to notice, and those that the process's own faults raise.
STOPS = frozenset((signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU))
_FAULTS = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS))
# A command that was asked to end may take this long, as to save its state; what ends it later has another reason.
ENDS_WITHIN_S = 600.0
_ENDS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
# Python ignores these signals, and ignored signals stay ignored across an exec.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Signal:
    """A received signal, and whether a process sent it or the kernel, as for a terminal.

    `ends` is True if it asks the command to end. One that was ignored at the start, as by nohup, does not: the command
    ignores it too.
    """

    __slots__ = ("ends", "number", "was_sent")

    def __init__(self, number: int, *, was_sent: bool, ends: bool = False) -> None:
        self.number = number
        self.was_sent = was_sent
        self.ends = ends


class EndRequest:
    """The last signal that asked a command to end, while that can be why it ends.

    A command that handles the signal and trains on ends for another reason after `ENDS_WITHIN_S`.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._at = 0.0

    def note(self, number: int, now: float) -> None:
        """Take a signal that was sent now."""
        self._number, self._at = number, now

    def forget(self) -> None:
        """Forget it: another command runs."""
        self._number = None

    def number(self, now: float) -> int | None:
        """The signal; None if none has come, or too long ago."""
        return None if now - self._at >= ENDS_WITHIN_S else self._number


class Signals:
    """Blocks all signals while entered; `next` returns them. For a process with one thread.

    Started commands ignore the signals in `ignores`; they are blocked here and returned all the same.
    """

    def __init__(self, ignores: Sequence[signal.Signals] = ()) -> None:
        self._ignores = ignores
        self._taken = signal.valid_signals() - _FAULTS - {signal.SIGKILL, signal.SIGSTOP}
        self._ends = frozenset([number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN])
        self.before: set[signal.Signals] = set()

    def __enter__(self) -> Self:
        self.before = {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would vanish without their status
        for number in self._ignores:
            signal.signal(number, signal.SIG_IGN)
        return self

    def __exit__(self, *_exc: object) -> None:
        # A pending SIGIO or SIGALRM would end this process now.
        for number in (signal.SIGIO, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def next(self, within_s: float | None) -> Signal | None:
        """Return the next signal; None if none came within that time."""
        if within_s is None or within_s > 0:
            found: signal.struct_siginfo | None = self._waited_for(0.0 if within_s is None else max(within_s, _MIN_S))
        else:
            found = signal.sigtimedwait(self._taken, 0)
        # For kill, sigqueue and similar calls the code is not positive (sigaction(2), SI_USER and others).
        number = 0 if found is None else found.si_signo
        came = None if found is None else Signal(number, was_sent=found.si_code <= 0, ends=number in self._ends)
        return None if came is not None and came.number == signal.SIGALRM and not came.was_sent else came

    def _waited_for(self, within_s: float) -> signal.struct_siginfo:
        """Return the next signal. After that time it is SIGALRM; 0 waits without a limit.

        Does not use sigtimedwait, which returns garbage if its time passes while the process is stopped (CPython 3.11).
        """
        signal.setitimer(signal.ITIMER_REAL, within_s)
        try:
            return signal.sigwaitinfo(self._taken)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


class Child:
    """A process that was started and is waited for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def pass_on(self, number: int) -> None:
        """Send it that signal. Its pid cannot be reused: it is not reaped before it is forgotten here."""
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended, or runs as another user, and cannot be signalled


def start(
    command: Sequence[str], environ: Mapping[str, str], *, mask: set[signal.Signals], keep: Sequence[int] = ()
) -> Child:
    """Start the command with these signals blocked, and with those descriptors open. Raises HegmError."""
    number = ENOENT
    for fd in keep:
        os.set_inheritable(fd, True)
    try:
        for path in places_of(command[0], environ):
            try:
                return Child(_spawn(path, list(command), environ, mask))
            except OSError as error:
                if error.errno == ENOEXEC:
                    return Child(_spawn(_SHELL, [_SHELL, path, *command[1:]], environ, mask))
                if error.errno not in (ENOENT, ENOTDIR) or os.sep in command[0]:
                    number = error.errno or ENOENT
    finally:
        for fd in keep:
            os.set_inheritable(fd, False)
    raise failure_of(command, number)


def _spawn(path: str, words: list[str], environ: Mapping[str, str], mask: set[signal.Signals]) -> int:
    return os.posix_spawn(path, words, environ, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)


def reap(ended: Callable[[int, int], object]) -> None:
    """Reap all children that have ended: as a container's first process also foreign ones.

    `ended` gets the pid and the exit status of each, or minus the signal that ended it.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ended(pid, os.waitstatus_to_exitcode(status))


def perform_default_stop(number: int) -> None:
    """Perform the signal's default action: stop, for a shell to notice; or nothing, if no shell would continue it."""
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def end_like(status: int) -> int:
    """End this process by the signal that ended the child, leaving no second core; the exit status if none did."""
    if status >= 0:
        return status
    import resource

    from hegmctl.interruption import die_of

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        die_of(-status)
    os.kill(os.getpid(), -status)
    return 128 - status
