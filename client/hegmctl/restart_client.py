"""Asks the daemon whether a supervised command has to be started again, on a connection that is reestablished.

Keeps what is expected of the command, and how often it was started; `held_state` has the state. Restarts are limited: a
start that ends before the training has passed a boundary has failed. After a few failures it reports to the daemon,
which resumes the job where it was, or gives up and keeps its state. Longer than 400 lines because each exit of the
command is judged by all earlier orders of the daemon.
"""

from __future__ import annotations

import os
from time import monotonic

from hegmctl.agentless import HINT, AgentlessWatch
from hegmctl.held_state import HeldState
from hegmctl.isolation import PATHS, begins_with_python
from hegmctl.prestart import OPERATION, PrestartSpec
from hegmctl.recovering import ended_how
from hegmctl.supervision_line import SupervisionConnection
from hegmctl.supervisor import GAVE_UP_STATUS, NOT_ITS_TURN_STATUS, GiveUp, Start, left_status
from hegmd.errors import HegmError
from hegmd.protocol.messages import Supervise, SuperviseReport, SupervisorOrder
from hegmd.protocol.names import job_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hegmctl.python_probe import Probes
    from hegmctl.recovering import Recovery
    from hegmctl.wire import Descriptors

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 5.0
# A training that has not reached its place by then is reported once; the wait continues.
LONG_S = 120.0
SLOW_HINT = (
    "wait if it starts slowly; a process of another user or container has no agent, and starts from the beginning"
)
TRIES = 2
# How long a job that has failed waits for a daemon that is not there.
DAEMON_WITHIN_S = 600.0


class DaemonAuthority:
    """The daemon's wishes for one command. `say` writes a line for the user."""

    def __init__(  # noqa: PLR0913 - each option is named
        self,
        path: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        say: Callable[[str], object],
        tries: int = TRIES,
        resumes: str | None = None,
        gpu: str | None = None,
        ready: str | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        self._path = path
        self._command = tuple(command)
        self._environ = dict(environ)
        self._say = say
        self._tries = tries
        self._resumes, self._gpu, self._ready = resumes, gpu, ready
        #: How the job is recovered, if it is; and how its command failed, while it waits for that.
        self._recovery = recovery
        self._fell: int | None = None
        self._own_status: int | None = None
        self._waits_until: float | None = None
        self._pid: int | None = None
        #: The operation that a restart is expected of, and whether the command has left for it or was started from it.
        self._operation = resumes
        self._left = resumes is not None
        self._started = False
        self._order: SupervisorOrder | None = None
        self._key = ""
        self._held = HeldState()
        #: Finds processes that would start from the beginning; and the last finding.
        self._lookout = AgentlessWatch()
        self._found = ""
        self._tells_at: float | None = None
        #: How the command ended last, and whether it launches ranks.
        self._launches = False
        self._status = GAVE_UP_STATUS
        self._starts = 0
        self._was_ready = False
        self._due = False
        self._give_up: GiveUp | None = None
        #: Programs that are asked which Python they are, once one was.
        self._probes: Probes | None = None
        #: The expected start with its operation, and what to keep prestarted without one.
        self._expected: tuple[str, PrestartSpec] | None = None
        self._kept: PrestartSpec | None = None
        self._line: SupervisionConnection | None = None
        self._order_line: SupervisionConnection | None = None
        self._pause_s = FIRST_PAUSE_S
        self._again_at = 0.0
        self._has_said = False

    # ---- for the supervisor ------------------------------------------------------------------------------------------

    def turn(self, now: float, pid: int | None) -> float | None:
        """Read what was received, or connect again when that is due."""
        self._pid = pid
        if self._line is None and now >= self._again_at:
            self._connect(now)
        self._held.serve()
        if self._line is not None:
            try:
                self._line.read(self._on_order)
            except (OSError, HegmError) as error:
                self._hang_up(error)
        looks = [self._look_at_probes(now), self._look_for_agentless(now), self._look_for_daemon(now)]
        looks += [] if self._line is not None else [self._again_at]
        return min((look for look in looks if look is not None), default=None)

    def ended(self, status: int, *, sent_signal: int | None) -> bool:
        """Return True if a restart is expected and no signal asked the command to end."""
        if self._falls(status, sent_signal):
            self._fall(status)
            return True
        expected = self._operation is not None and sent_signal is None
        was_started, self._started, self._pid = self._started, False, None
        is_past = was_started and status != 0 and self._held.is_past()
        # A restarted command that exits with 0 has finished its training, whether or not a boundary was reported.
        may_go_on = status != 0 if was_started else self._launches or status < 0 or self._has_left(status)
        self._status = status
        if was_started and status == 0:
            may_go_on = not self._held.is_back()
            self._held.note_end()
        if is_past:
            whether = (
                f"to see whether operation {self._operation} still keeps its state, run: hegmctl op {self._operation}"
            )
            self._say(f"it ended with {status} after it had continued, and is not started again; {whether}")
        if not expected or not may_go_on or is_past:
            self._report(SuperviseReport(result="ended", status=status))
            self._forget()
            return False
        self._left = True
        if not was_started:
            self._report(SuperviseReport(result="ended", status=status))
        elif self._found:
            self._fail(self._found)
        elif status == 0:
            self._fail("its command ended with 0, but no training in it continued from the saved state")
        elif status == NOT_ITS_TURN_STATUS and self._was_ready and self._order is not None:
            self._say("the prestarted process could not continue; a new one is started")
            self._starts -= 1  # nothing of the script has run
            self._due = True
        elif status != GAVE_UP_STATUS and self._starts < self._tries and self._order is not None:
            self._say(f"it ended with {status} before its first boundary, and is started again")
            self._held.forget_notes()
            self._due = True
        else:
            self._fail(f"it ended with {status} before its first boundary, started {self._starts} times")
        return True

    def _falls(self, status: int, sent_signal: int | None) -> bool:
        """Return True if that exit is a failure of a protected job, and not one that an operation expects."""
        recovery, operation = self._recovery, self._operation
        is_free = operation is None or job_number(operation) is not None
        return recovery is not None and recovery.is_protected and is_free and recovery.is_failure(status, sent_signal)

    def _fall(self, status: int) -> None:
        """Wait until the daemon has the command started from a snapshot, or gives it up."""
        self._forget()
        self._held.close()
        # If the state could not be restored, the status is not that of the command itself.
        own = status if status != GAVE_UP_STATUS or self._own_status is None else self._own_status
        self._pid, self._status, self._fell, self._own_status = None, status, status, own
        self._say(f"it {ended_how(status)}, and is started again from its last snapshot")
        self._report(SuperviseReport(result="fell", status=status))

    def next_start(self) -> Start | GiveUp | None:
        if self._give_up is not None:
            return self._give_up
        order = self._order
        if order is None or not self._due:
            return None
        command, environ = self._surroundings_of(order)
        self._held.enter(environ)
        environ.update({OPERATION: order.operation})
        return Start(command, environ, *self._held.inherited)

    def expected(self) -> PrestartSpec | None:
        return self._kept if self._expected is None else self._expected[1]

    def is_ready(self, pid: int | None) -> None:
        """Report it to the daemon. A kept process that will not be ready is not started again."""
        if pid is None and self._expected is None:
            self._kept = None
        self._report(SuperviseReport(result="ready", pid=pid))

    def started(self, pid: int, *, was_ready: bool = False) -> None:
        self._pid, self._resumes, self._was_ready, self._found = pid, None, was_ready, ""
        self._expected = self._kept = None
        self._tells_at = monotonic() + LONG_S
        if self._order is not None:
            self._due, self._left, self._started, self._fell = False, False, True, None
            self._starts += 1
            number, starts = self._number(), self._starts
            self._report(SuperviseReport(order=number, result="done", pid=pid, starts=starts, was_ready=was_ready))

    def not_started(self, why: str) -> None:
        """Note that the command cannot be started, and that trying again would not help."""
        self._starts += 1
        self._fail(f"it cannot be started: {why}")

    def close(self) -> None:
        """Disconnect from the daemon; it keeps the state."""
        self._held.close()
        self._close_probes()
        if self._line is not None:
            self._line.settle()
            self._line.close()

    # ---- orders of the daemon ----------------------------------------------------------------------------------------

    def _on_order(self, order: SupervisorOrder, fds: Descriptors) -> None:
        """Carry out the order, now or at the next turn."""
        is_over = order.do in ("unready", "forget")
        if is_over and self._expected is not None and self._expected[0] == order.operation:
            self._expected = None
        elif order.do == "unready" and not order.operation:
            self._kept = None
        if order.do == "expect":
            self._expect(order)
        elif order.do == "ready":
            what = PrestartSpec(*self._surroundings_of(order), order.imports, order.path)
            if order.operation:
                self._expected = (order.operation, what)
            else:
                self._kept = what
        elif order.do == "start":
            self._take_start(order, fds)
        elif order.do == "forget" and order.operation == self._operation:
            if self._left:
                # A command that was killed before it saved its state has simply ended, and so does this process.
                status = self._status if self._launches or self._status < 0 else GAVE_UP_STATUS
                self._give_up = GiveUp(f"operation {order.operation} is over", "run: hegmctl ops", status)
            elif self._order is not None:
                self._settle(self._order)
            self._forget()
        elif order.do == "give-up" and (self._left or self._fell is not None):
            status = GAVE_UP_STATUS if self._own_status is None or self._fell is None else self._own_status
            self._give_up = GiveUp(order.message, order.hint, status)
        elif order.do == "protect" and self._recovery is not None:
            self._recovery.is_protected = True
        elif order.do == "ask":
            self._ask(order)
        elif order.do == "note":
            self._say(f"{order.message}; {order.hint}")

    def _expect(self, order: SupervisorOrder) -> None:
        """Expect a restart: an exit of the command is not its end, nor a failed start."""
        if self._started and self._order is not None and order.operation != self._operation:
            self._settle(self._order)  # the former operation is over, although the daemon did not say so
        self._held.supersede()
        self._operation, self._launches = order.operation, order.launches
        self._order, self._due, self._started = None, False, False
        self._report(SuperviseReport(order=order.order, result="done", pid=self._pid))

    def _take_start(self, order: SupervisorOrder, fds: Descriptors) -> None:
        if self._started and self._operation == order.operation:  # an earlier start of the daemon has ordered it
            self._report(SuperviseReport(order=order.order, result="done", pid=self._pid, starts=self._starts))
            return
        if order.python is not None and not begins_with_python(self._command):
            hint = "omit --python, or start the job with: hegmctl run -- PYTHON SCRIPT"
            message = f"its command begins with {self._command[0]}, which is not a Python"
            self._report(SuperviseReport(order=order.order, result="failed", message=message, hint=hint))
            return
        try:
            self._held.take(order.ranks, fds)
        except OSError as error:
            message, hint = (
                f"its state cannot be passed to the next process: {error}",
                "raise the limit of open files: ulimit -n",
            )
            self._report(SuperviseReport(order=order.order, result="failed", message=message, hint=hint))
            return
        self._order, self._order_line, self._key = order, self._line, order.key
        self._operation, self._starts, self._due = order.operation, 0, True

    def _has_left(self, status: int) -> bool:
        return status == left_status(self._environ)

    def _surroundings_of(self, order: SupervisorOrder) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the command and the environment of a start by that order, without its state."""
        kept = {name: value for name, value in self._environ.items() if name not in order.unset}
        command = self._command if order.python is None else (order.python, *self._command[1:])
        return command, {**kept, **order.set, **self._way_of_agent(order)}

    def _way_of_agent(self, order: SupervisorOrder) -> dict[str, str]:
        """Return PYTHONPATH if the order changes it: without the agent's directory the script would start over."""
        folder = self._environ.get(PATHS, "").partition(os.pathsep)[0]
        if not folder or (PATHS not in order.set and PATHS not in order.unset):
            return {}
        paths = order.set.get(PATHS, "")
        return {PATHS: folder + os.pathsep + paths if paths else folder}

    def _ask(self, order: SupervisorOrder) -> None:
        from hegmctl.python_probe import NoPython, Probes

        if self._probes is None:
            self._probes = Probes()
        try:
            python = order.python or self._command[0]
            self._probes.ask(order.order, python, self._surroundings_of(order)[1], monotonic())
        except (NoPython, OSError) as error:
            self._report(SuperviseReport(order=order.order, result="failed", message=str(error)))

    def _look_at_probes(self, now: float) -> float | None:
        """Report the answers of probes. Returns when to check again at the latest."""
        if self._probes is None:
            return None
        for number, answer in self._probes.answers(now):
            result = "done" if answer.is_python else "failed"
            self._report(SuperviseReport(order=number, result=result, message=answer.text))
        return self._probes.deadline

    def _look_for_agentless(self, now: float) -> float | None:
        """End processes that started from the beginning instead of from the state. Returns when to check again."""
        if not self._started or self._pid is None or self._found or self._held.is_taken_up():
            return None
        self._found = self._lookout.check(self._pid, now, self._held.right) or ""
        if self._found:
            self._say(f"{self._found}; {HINT}")
        elif self._tells_at is not None and now >= self._tells_at:
            self._tells_at = None
            self._say(f"it was started {LONG_S:g} s ago, but no training in it has loaded its state yet; {SLOW_HINT}")
        return None if self._found else self._lookout.look_at

    def _look_for_daemon(self, now: float) -> float | None:
        """Give up a failed job that no daemon recovers; when to look again at the latest."""
        if self._fell is None or (self._waits_until is None and self._line is not None):
            self._waits_until = None
        elif self._waits_until is None:
            self._waits_until = now + DAEMON_WITHIN_S
        elif now >= self._waits_until:
            self._waits_until = None
            if self._line is None:
                message = f"it {ended_how(self._fell)}, and hegmd has not answered for {DAEMON_WITHIN_S:g} s"
                hint = f"start the daemon of {self._path}, then run: hegmctl recovery"
                self._give_up = GiveUp(message, hint, self._fell)
        return self._waits_until

    def _settle(self, order: SupervisorOrder) -> None:
        """Adopt the environment of that start as the job's own."""
        self._command, self._environ = self._surroundings_of(order)

    def _forget(self) -> None:
        self._held.end()
        self._operation = self._order = None
        self._started = self._left = self._due = self._launches = False

    def _fail(self, message: str) -> None:
        number, self._due, self._order = self._number(), False, None
        self._held.end()
        hint = "read what it printed"
        report = SuperviseReport(order=number, result="failed", message=message, hint=hint, starts=self._starts)
        self._report(report)

    def _close_probes(self) -> None:
        if self._probes is not None:
            self._probes.close()

    # ---- the connection ----------------------------------------------------------------------------------------------

    def _number(self) -> int | None:
        """Return the order's number on the present connection; None if it came on an earlier one."""
        return self._order.order if self._order is not None and self._order_line is self._line else None

    def _connect(self, now: float) -> None:
        offer = Supervise(
            run=self._environ.get("HEGM_RUN", ""),
            name=self._environ.get("HEGM_JOB"),
            pid=self._pid,
            python=begins_with_python(self._command),
            started=self._started,
            left=self._left,
            operation=self._operation,
            resumes=self._resumes,
            gpu=self._gpu,
            asks=True,
            key=self._key if self._started else "",
            ready=self._ready,
            kept=self._kept is not None,
            readies=None if self._expected is None else self._expected[0],
            recover=None if self._recovery is None else self._recovery.wish,
            fell=self._fell,
        )
        try:
            self._line = SupervisionConnection(self._path, offer)
        except (OSError, HegmError) as error:
            self._hang_up(error, now)
        else:
            self._pause_s, self._has_said = FIRST_PAUSE_S, False

    def _hang_up(self, error: Exception, now: float | None = None) -> None:
        """Close the connection, and reconnect later. A prestarted process stays, and is reported to the next daemon."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
        self._close_probes()
        self._again_at = (monotonic() if now is None else now) + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        declined = isinstance(error, HegmError) and line is not None and line.declined
        if declined:
            self._expected = self._kept = None
        if self._resumes is not None and isinstance(error, HegmError) and declined:
            self._give_up = GiveUp(error.message, error.hint, error.code.exit_status)
        elif declined and not self._has_said:
            self._has_said = True
            self._say(f"{error}; the job runs, but cannot be restarted")
        elif (self._left or self._fell is not None) and not self._has_said:
            self._has_said = True
            holder = "hegmd" if self._operation is None else f"operation {self._operation}"
            self._say(
                f"its state is held by {holder}, and {self._path} does not answer: {error}; it "
                "continues when hegmd answers again"
            )

    def _report(self, report: SuperviseReport) -> None:
        """Report to the daemon. A missing daemon learns it from the next `supervise`."""
        if self._line is None:
            return
        try:
            self._line.ask(report)
        except OSError as error:
            self._hang_up(error)
