"""Stays with a command that can be restarted: starts it, waits for it, and starts it again if that is wanted.

Handles events, and decides what an exit of the command means. An authority knows whether a restart is wanted, and from
which state: the daemon's (`restart_client`), or the files of a launcher without a daemon. A command that exits
otherwise ends this process in the same way. A state that no process can start from is never dropped here: its owner
keeps it, and this process prints where it is.

Light, because it lives as long as the job: one thread, no framework, and it sleeps until a signal comes; events of the
authority come as a signal too (SIGIO).
"""

from __future__ import annotations

import os
from signal import SIGCHLD, SIGCONT, SIGIO, SIGTSTP
from time import monotonic

from hegmctl.parenthood import STOPS, Child, EndRequest, Signals, end_like, perform_default_stop, reap, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Protocol

    from hegmctl.parenthood import Signal
    from hegmctl.prestart import PrestartedProcess, PrestartSpec
    from hegmctl.slurm import SlurmSignals

    class RestartAuthority(Protocol):
        """Decides whether the command is started again, where, and from which state."""

        def turn(self, now: float, pid: int | None) -> float | None:
            """Handle what was received; return the monotonic instant of the next call at the latest. Must not wait."""
            ...

        def ended(self, status: int, *, sent_signal: int | None) -> bool:
            """Return whether the command can be started again after that exit status, or minus a signal.

            `sent_signal` is the signal by which a user asked it to end shortly before, if any.
            """
            ...

        def next_start(self) -> Start | GiveUp | None:
            """Return what to do while no command runs; None to keep waiting."""
            ...

        def expected(self) -> PrestartSpec | None:
            """Return what to prestart while the command runs; the same object for the same start."""
            ...

        def is_ready(self, pid: int | None) -> None:
            """Note that the prestarted process waits, or without a pid, that it never will."""
            ...

        def started(self, pid: int, *, was_ready: bool = False) -> None: ...

        def not_started(self, why: str) -> None: ...

        def close(self) -> None: ...


# HeGM's own, for a worker that has written its state and left; and ours, for giving up with the state held elsewhere.
LEFT_STATUS = 99
GAVE_UP_STATUS = 98
# For a prestarted process that was activated and could not start: no line of the script has run.
NOT_ITS_TURN_STATUS = 97
# The exit status of a worker that has saved its state, if the job chose another one.
EXIT_CODE = "HEGM_EXIT_CODE"


def left_status(environ: Mapping[str, str]) -> int:
    """Return the exit status of a worker in that environment that has saved its state."""
    try:
        return int(environ[EXIT_CODE]) & 0xFF
    except (KeyError, ValueError):
        return LEFT_STATUS


class Start:
    """The command's arguments, its environment, and the descriptors that it inherits.

    `state` is the state's descriptor, if any. `lock` is one that only has to stay open as long as a process of it
    lives.
    """

    __slots__ = ("command", "environ", "keep")

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], state: int | None = None, lock: int | None = None
    ) -> None:
        self.command = command
        self.environ = environ
        self.keep = tuple([fd for fd in (state, lock) if fd is not None])


class GiveUp:
    """It is not started again, and why."""

    __slots__ = ("hint", "message", "status")

    def __init__(self, message: str, hint: str, status: int = GAVE_UP_STATUS) -> None:
        self.message = message
        self.hint = hint
        self.status = status


class Supervisor:
    """A command and its authority. `say` writes a line for the user; `slurm` handles SIGTSTP and SIGCONT."""

    def __init__(
        self, authority: RestartAuthority, say: Callable[[str], object], slurm: SlurmSignals | None = None
    ) -> None:
        self._authority = authority
        self._say = say
        self._slurm = slurm
        self._child: Child | None = None
        self._end_request = EndRequest()
        self._over: int | None = None
        #: The last requested prestart, and its process.
        self._expected: PrestartSpec | None = None
        self._readied: PrestartedProcess | None = None

    def run(self, first: Start | None) -> int:
        """Start the command, or wait for what the authority wants first. Returns its exit status once it is over.

        Raises HegmError if it cannot be started at all. If a signal ended the command, this process dies of the same
        one, and the call does not return.
        """
        with Signals(ignores=() if self._slurm is None else (SIGTSTP,)) as signals:
            if first is not None:
                self._start(first, signals)
            try:
                while self._over is None:
                    look_at = self._authority.turn(monotonic(), None if self._child is None else self._child.pid)
                    self._make_ready(signals)
                    if self._slurm is not None:
                        self._slurm.retry(signals.before)
                    if self._child is None and not self._do_what_is_wanted(signals):
                        self._on_signal(signals.next(_within_s(look_at, self._awaited_until())), signals)
                    elif self._child is not None and self._over is None:
                        retry_at = None if self._slurm is None else self._slurm.retry_at
                        self._on_signal(signals.next(_within_s(look_at, retry_at)), signals)
            finally:
                self._unready()
                if self._slurm is not None:
                    self._slurm.close()
            self._authority.close()
        return end_like(self._over)

    def _make_ready(self, signals: Signals) -> None:
        """Have a process wait for the start that is expected, and none for any other."""
        expected = self._authority.expected()
        if self._expected is not expected:
            self._expected = expected
            readied = self._readied
            if expected is None or readied is None or not readied.is_to_serve(expected):
                self._ready_anew(expected, signals)
        readied = self._readied
        if readied is None or not readied.check():
            return
        if readied.is_kept and not readied.waits:
            self._ready_anew(expected, signals)  # its modules have changed on disk since
        else:
            self._authority.is_ready(readied.pid if readied.waits else None)

    def _ready_anew(self, expected: PrestartSpec | None, signals: Signals) -> None:
        self._unready()
        if expected is not None and self._child is not None:
            from hegmctl.prestart import make_ready

            self._readied = make_ready(expected, signals.before)
            if self._readied is None:
                self._authority.is_ready(None)

    def _unready(self) -> None:
        readied, self._readied = self._readied, None
        if readied is not None:
            readied.end()

    def _awaited_until(self) -> float | None:
        wanted = self._authority.next_start()
        if self._readied is None or not isinstance(wanted, Start):
            return None
        return self._readied.awaited_until(wanted.command, wanted.environ)

    def _start(self, wanted: Start, signals: Signals) -> None:
        readied, self._readied = self._readied, None
        pid = None if readied is None else readied.activate_as(wanted.command, wanted.environ)
        if pid is None:
            self._child = start(wanted.command, wanted.environ, mask=signals.before, keep=wanted.keep)
        else:
            self._child = Child(pid)
        self._end_request.forget()
        self._authority.started(self._child.pid, was_ready=pid is not None)

    def _do_what_is_wanted(self, signals: Signals) -> bool:
        """Do what the authority wants, unless it waits for the prestarted process. True if something was done."""
        from hegmd.errors import HegmError

        wanted = self._authority.next_start()
        if self._awaited_until() is not None:
            return False
        if isinstance(wanted, GiveUp):
            self._say(f"{wanted.message}; {wanted.hint}")
            self._over = wanted.status
        elif wanted is not None:
            try:
                self._start(wanted, signals)
            except (HegmError, OSError) as error:
                self._authority.not_started(
                    error.message if isinstance(error, HegmError) else os.strerror(error.errno or 0)
                )
        return wanted is not None

    def _on_signal(self, came: Signal | None, signals: Signals) -> None:
        if came is None:
            return
        if came.number == SIGCHLD:
            reap(self._reaped)
        elif self._slurm is not None and came.number in (SIGTSTP, SIGCONT):
            if self._child is not None:
                self._slurm.take(came.number, self._child.pid, signals.before)
        elif came.number == SIGIO and not came.was_sent:
            pass  # something has come for the authority
        elif came.ends and self._child is None:
            self._say(f"ended by signal {came.number} while waiting to be started again")
            self._over = -came.number
        else:
            self._pass_on(came)

    def _pass_on(self, came: Signal) -> None:
        if came.ends:
            self._end_request.note(came.number, monotonic())
        if came.was_sent and self._child is not None:
            self._child.pass_on(came.number)
        if came.number in STOPS:
            perform_default_stop(came.number)

    def _reaped(self, pid: int, status: int) -> None:
        if self._slurm is not None:
            self._slurm.reaped(pid, status)
        if self._child is None or pid != self._child.pid:
            return
        self._child = None
        if self._slurm is not None:
            self._slurm.ended()
        if not self._authority.ended(status, sent_signal=self._end_request.number(monotonic())):
            self._over = status


def _within_s(*instants: float | None) -> float | None:
    """Return the time until the first of these instants, or None."""
    first = min((instant for instant in instants if instant is not None), default=None)
    return None if first is None else first - monotonic()
