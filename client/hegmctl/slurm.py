"""How `hegmctl run --slurm` handles Slurm's signals: SIGTSTP suspends the job, SIGCONT resumes it.

Slurm sends SIGTSTP to all processes of a step, and SIGSTOP once its grace time is over: 2 s before Slurm 23.11, then
`suspend_grace_time`. The parent of the command takes both signals here. hegmd handles no signal in the command: the
command inherits that SIGTSTP is ignored, and a handler that the script installs runs as before. A separate process,
this module as a program, asks the daemon, so that the parent never waits. The parent ends that process as soon as the
other signal comes.
"""

from __future__ import annotations

import os
import signal
import sys
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hegmctl.connection import Connection

SIGNALS = frozenset((signal.SIGTSTP, signal.SIGCONT))
SUSPEND, RESUME = "suspend", "resume"
# The grace time that hegmd recommends, and the variable by which the SPANK plugin gives another one.
GRACE_S, GRACE = 30.0, "HEGM_SLURM_GRACE"
# The part of the grace time that the wait for a boundary may take. The rest is for the bytes.
WAITS_SHARE = 2 / 3
LOOK_INTERVAL_S, RETRY_S = 0.1, 1.0
# A process that fails each time, as after a broken update of hegmctl, writes its error into the job's output each time.
MAX_RETRY_S = 300.0
# How long the agents of jobs need to connect to a restarted daemon.
AGENT_BACK_S = 10.0


def grace_s(environ: Mapping[str, str]) -> float:
    """Return how long Slurm waits from SIGTSTP to SIGSTOP. Raises HegmError if the variable is no time."""
    from hegmd.errors import USAGE, HegmError

    text = environ.get(GRACE) or f"{GRACE_S:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 3600.0:
        raise HegmError(USAGE, f"{GRACE}={text[:40]} is no grace time", "write 1 to 3600 seconds, as in slurm.conf")
    return seconds


class SlurmSignals:
    """Asks the daemon to suspend and resume one job. `job` is None where no daemon has given it an id.

    If no process can be started that asks, or it is killed, `retry` starts it later: the job must not stay suspended
    after SIGCONT, and the command must not end.
    """

    def __init__(
        self,
        job: str | None,
        path: str,
        environ: Mapping[str, str],
        grace_s: float,
        say: Callable[[str], object],
        python: str = sys.executable,
    ) -> None:
        self._job = job
        self._path = path
        self._environ = dict(environ)
        self._limit_s = grace_s * WAITS_SHARE
        self._say = say
        self._python = python
        self._has_suspended = False
        #: A descriptor of the process that asks, and its pid.
        self._asking: int | None = None
        self._asking_pid: int | None = None
        self._words: list[str] = []
        self._failures = 0
        #: When to call `retry`, a monotonic instant. None if nothing has failed.
        self.retry_at: float | None = None

    def take(self, number: int, pid: int, mask: set[signal.Signals]) -> None:
        """Handle one of the two signals. `pid` is the command's, `mask` for new processes. Never waits."""
        is_suspension = number == signal.SIGTSTP
        if not is_suspension and not self._has_suspended:
            return
        self._has_suspended = is_suspension
        self._failures = 0
        self.close()
        job = self._job or str(pid)
        limit = [f"{self._limit_s:g}"] if is_suspension else []
        self._words = [SUSPEND if is_suspension else RESUME, job, self._path, *limit]
        self._ask(mask)

    def ended(self) -> None:
        """The command has ended, and its operation with it: no request needs to be made for it."""
        self.close()
        self._has_suspended = False

    def reaped(self, pid: int, status: int) -> None:
        """Ask again later if that process was to ask and has failed: a resume can wait for hours, and be killed."""
        if pid == self._asking_pid:
            words = self._words
            self.close()
            if status:
                self._words = words
                self.retry_at = monotonic() + min(RETRY_S * 2.0 ** min(self._failures, 16), MAX_RETRY_S)
                self._failures += 1

    def retry(self, mask: set[signal.Signals]) -> None:
        """Start the process that asks the daemon, if that failed before and is due again."""
        if self.retry_at is not None and monotonic() >= self.retry_at:
            self._ask(mask, is_first=False)

    def _ask(self, mask: set[signal.Signals], *, is_first: bool = True) -> None:
        isolated = ["-I"] if sys.flags.isolated else []
        argv = [self._python, *isolated, "-m", "hegmctl.slurm", *self._words]
        # hegmctl writes to the standard error of the job only.
        output = [(os.POSIX_SPAWN_DUP2, 2, 1)]
        try:
            asking = os.posix_spawn(argv[0], argv, self._environ, file_actions=output, setsigmask=mask)
        except OSError as error:
            self._failed(error, is_first=is_first)
            return
        try:
            self._asking = os.pidfd_open(asking)  # the number cannot be reused: the parent has not reaped it
        except OSError as error:
            os.kill(asking, signal.SIGKILL)  # nothing could end it at the next signal
            self._failed(error, is_first=is_first)
        else:
            self.retry_at, self._asking_pid = None, asking

    def _failed(self, error: OSError, *, is_first: bool) -> None:
        self.retry_at = monotonic() + RETRY_S
        if is_first:
            verb = "suspends" if self._has_suspended else "resumes"
            why = os.strerror(error.errno or 0)
            self._say(
                f"Slurm {verb} this job, but hegmctl cannot start a process that notifies hegmd: {why}; trying again"
            )

    def close(self) -> None:
        """End the process that asks the daemon, if there is one, and ask for nothing more."""
        self.retry_at, self._words = None, []
        asking, self._asking, self._asking_pid = self._asking, None, None
        if asking is not None:
            try:
                signal.pidfd_send_signal(asking, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended
            finally:
                os.close(asking)


class NeverRestarted:
    """The authority of a command that is never started again."""

    def turn(self, now: float, pid: int | None) -> None:
        """Nothing comes."""

    def ended(self, status: int, *, sent_signal: int | None) -> bool:
        return False

    def next_start(self) -> None:
        """No other start."""

    def expected(self) -> None:
        """No other start."""

    def is_ready(self, pid: int | None) -> None:
        """Nothing is made ready."""

    def started(self, pid: int, *, was_ready: bool = False) -> None:
        """The command runs."""

    def not_started(self, why: str) -> None:
        """It is not started again."""

    def close(self) -> None:
        """Nothing is held."""


def suspend(connect: Callable[[], Connection], job: str, limit_s: float) -> str:
    """Suspend the job. Return the result in words. Raises HegmError.

    Sharing may be suspending it already, for the lease of Slurm's Prolog: then this waits, and asks again, so that only
    SIGCONT resumes the job. A daemon that restarts is waited for as well, and its agents.
    """
    from hegmctl.watch import PASSING
    from hegmd.errors import HegmError
    from hegmd.protocol.jobs import SUSPENDED

    began, operation = monotonic(), None
    while operation is None:
        try:
            with connect() as hegmd:
                operation = hegmd.suspend(job, limit_s=limit_s).operation
        except HegmError as error:
            if monotonic() - began > (limit_s if error.code in PASSING else min(limit_s, AGENT_BACK_S)):
                raise
            sleep(LOOK_INTERVAL_S)
    if operation.failure is not None:
        return f"Slurm suspends this job, and it keeps its GPU: {operation.failure.message}"
    if operation.phase != SUSPENDED:
        return "Slurm suspends this job, and it keeps its GPU: hegmctl ops has the reason"
    return f"Slurm suspends this job: it is off its GPU after {monotonic() - began:.1f} s"


def resume(connect: Callable[[], Connection], job: str, say: Callable[[str], object]) -> None:
    """Resume the job as soon as GPU memory is free; until then, report once why it waits. A resume that failed is tried
    again.
    """
    from hegmd.errors import NOT_FOUND, HegmError, code_named
    from hegmd.protocol.jobs import SUSPENDED

    shown = ""
    while True:
        pause_s = LOOK_INTERVAL_S
        try:
            with connect() as hegmd:
                job_record = hegmd.job(job).job
                if job_record.operation is None and job_record.state != SUSPENDED:
                    return  # it was not suspended, or runs again
                if job_record.state == SUSPENDED:
                    reply = hegmd.resume(job)
                    if reply.recovered is not None:
                        say("Slurm resumes this job: it had failed, and is started again from its newest snapshot")
                        return
                    failure = None if reply.operation is None else reply.operation.failure
                    if failure is None:
                        say("Slurm resumes this job: it is back on its GPU")
                        return
                    raise HegmError(code_named(failure.code), failure.message, failure.hint)
        except HegmError as error:
            if error.code is NOT_FOUND:
                return  # it has ended
            if error.message != shown:
                shown = error.message
                say(f"Slurm resumes this job, which waits: {shown}")
            pause_s = RETRY_S
        sleep(pause_s)


def main(words: Sequence[str]) -> None:
    """Ask the daemon: `suspend JOB SOCKET SECONDS`, or `resume JOB SOCKET`."""
    from hegmctl.connection import connect
    from hegmctl.output import sink_for
    from hegmd.errors import HegmError

    what, job, path, *rest = words
    say = sink_for(json=False, quiet=False, colour=None).note

    def connected() -> Connection:
        return connect(path, timeout_s=None, name="hegmctl run --slurm")

    try:
        if what == SUSPEND:
            say(suspend(connected, job, float(rest[0])))
        else:
            resume(connected, job, say)
    except HegmError as error:
        say(f"Slurm suspends this job, and it keeps its GPU: {error.message}")


if __name__ == "__main__":
    main(sys.argv[1:])
