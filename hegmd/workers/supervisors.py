"""Supervisors: the `hegmctl run --allow-restart` of each job that has one, and the orders to them.

A supervisor is identified by its run and its user, over any number of connections. A new connection replaces the old
one, and reports what the supervisor expects and whether its command runs. Another process with the same run and user is
refused while the first one lives.

Owns the orders in flight and the last report of each supervisor. Decides nothing about operations.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio

from hegmd.errors import DISCONNECTED, REFUSED, HegmError, Refused
from hegmd.protocol.messages import Supervise, SuperviseReport, SupervisorOrder
from hegmd.system.condition import Condition
from hegmd.system.descriptors import is_readable
from hegmd.workers.order_link import OrderLink, PendingOrder

DONE, FAILED, ENDED, READY, FELL = "done", "failed", "ended", "ready", "fell"
ASK, START = "ask", "start"
# Number of ended supervisors that are remembered.
MAX_ENDED = 1000
# A supervisor learns of its child's exit as soon as we do, but may report it late on a busy machine.
SAYS_WITHIN_S = 2.0
# A supervisor tries to connect every five seconds.
COMES_WITHIN_S = 12.0
_POLL_INTERVAL_S = 0.25

Send = Callable[[SupervisorOrder, Sequence[int]], Awaitable[None]]


def go_on_command(operation: str) -> str:
    """Return the command that continues from the state that an operation keeps."""
    return f"hegmctl run --allow-restart --resume {operation} -- COMMAND"


class SupervisorAway(HegmError):
    """The supervisor is not connected, or disconnected."""

    def __init__(self, run: str, operation: str, what: str) -> None:
        super().__init__(
            DISCONNECTED,
            f"the supervisor of the job (run {run}) is not connected: {what}",
            "wait for it to reconnect; if its hegmctl run has exited and a state is kept, run: "
            f"{go_on_command(operation)}",
            {"run": run, "operation": operation},
        )


class OrderFailed(HegmError):
    """The supervisor could not carry out an order, and reports why."""

    def __init__(self, pid: int, do: str, report: SuperviseReport) -> None:
        why = report.message or "it gave no reason"
        super().__init__(
            REFUSED, f"the job was not restarted: {why}", report.hint or "read what it printed", {"pid": pid}
        )
        self.do = do


class _Given(PendingOrder[SuperviseReport]):
    def __init__(self, do: str, operation: str, key: str) -> None:
        super().__init__(do)
        self.key = key
        self.operation = operation


class _Link(OrderLink[SupervisorOrder, _Given]):
    #: The last order that started the command. Repeating that order completes the same start.
    start: int | None = None


class Supervisor:
    """A `hegmctl run` and its command."""

    def __init__(self, pid: int, start_ticks: int, uid: int, offer: Supervise, pidfd: int) -> None:
        self._pidfd = pidfd
        self.pid = pid
        self.start_ticks = start_ticks
        self.uid = uid
        self.offer = offer
        #: Why its command did not continue, by its last report.
        self.failure = ""
        #: True once the state that it wants to continue from was requested.
        self.has_asked = False
        #: True if the process that it started last was prestarted.
        self.was_ready = False
        #: The last exit status of its command; None if it runs or the status is unknown.
        self.status: int | None = None
        #: Set once the prestarted process is ready, or has failed.
        self.ready_pid: int | None = None
        self.readied = anyio.Event()
        #: True if the process that was kept prestarted for any restart has ended.
        self.lacks_kept = False
        #: True if it was ordered to keep one prestarted, and its reports are about that one.
        self._keeps = self._is_on_kept = False
        self._link: _Link | None = None
        #: Number of its connections.
        self.connection = 0

    @property
    def run(self) -> str:
        return self.offer.run

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def is_alive(self) -> bool:
        """Return True while its process has not ended. A zombie counts as ended."""
        return self._pidfd >= 0 and not is_readable(self._pidfd)

    def close(self) -> None:
        """Close the handle of its process. Twice is fine."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    @property
    def keeps(self) -> bool:
        """Return True if it keeps a process prestarted for any restart, or is starting one."""
        return self._keeps

    def serves(self, operation: str) -> bool:
        """Return True if it waits for that operation, or started its command from it."""
        return self.offer.operation == operation

    async def order(self, do: str, operation: str, *, fds: Sequence[int] = (), **how: Any) -> SuperviseReport:
        """Send an order and wait for its result. Raises OrderFailed, SupervisorAway."""
        report = await self._answered(do, operation, fds, how)
        if report.result != DONE:
            raise OrderFailed(self.pid, do, report)
        return report

    async def ask_python(self, python: str, changed: Mapping[str, str], without: tuple[str, ...]) -> tuple[str, bool]:
        """Return the version of that Python, or why it is not a Python, and whether it is one. Raises
        SupervisorAway."""
        how = {"python": python, "set": changed, "unset": without}
        report = await self._answered(ASK, "", (), how)
        return report.message, report.result == DONE

    async def _answered(self, do: str, operation: str, fds: Sequence[int], how: Mapping[str, Any]) -> SuperviseReport:
        link, order = self._link, _Given(do, operation, str(how.get("key", "")))
        if link is None:
            raise SupervisorAway(self.run, operation, f"it cannot get the order {do}")
        number = link.enter(order)
        if do == START:
            link.start = number
        try:
            await link.send(SupervisorOrder(order=number, do=do, operation=operation, **how), fds)
            await order.over.wait()
        except (OSError, anyio.ClosedResourceError) as error:
            raise SupervisorAway(self.run, operation, f"it cannot get the order {do}") from error
        finally:
            link.order.pop(number, None)
        if order.reported is None:
            raise SupervisorAway(self.run, operation, f"it disconnected during the order {do}")
        return order.reported

    async def tell(self, do: str, operation: str, **how: Any) -> None:
        """Send an order that has no answer. Raises SupervisorAway."""
        if do in ("forget", "unready"):
            self._note_over(operation, is_forgotten=do == "forget")
        if self._link is None:
            raise SupervisorAway(self.run, operation, f"it cannot get the order {do}")
        if do == READY:
            self.readied, self.ready_pid = anyio.Event(), None
            self._is_on_kept = not operation
            if self._is_on_kept:
                self._keeps, self.lacks_kept = True, False
        number = self._link.number()
        try:
            await self._link.send(SupervisorOrder(order=number, do=do, operation=operation, **how), ())
        except (OSError, anyio.ClosedResourceError, HegmError) as error:
            raise SupervisorAway(self.run, operation, f"it cannot get the order {do}") from error

    def _note_over(self, operation: str, *, is_forgotten: bool) -> None:
        """Record that the process prestarted for that operation has ended; for any operation if it is empty."""
        self._keeps = self._keeps and bool(operation)
        self._is_on_kept = self._keeps
        if not operation:
            self.offer = self.offer.replace(kept=False)
        elif self.offer.readies == operation:
            self.offer = self.offer.replace(readies=None)
        if is_forgotten and self.offer.operation == operation:
            self.offer = self.offer.replace(operation=None, started=False)

    # -- for Supervisors -----------------------------------------------------------------------------------------------

    def connect(self, send: Send, offer: Supervise) -> _Link:
        before = self._link
        self.offer, self._link = offer, _Link(send)
        self._keeps, self._is_on_kept, self.lacks_kept = offer.kept, offer.kept and offer.readies is None, False
        self.connection += 1
        self.readied.set()
        if before is not None:
            before.end()
            before.replaced.set()
        return self._link

    def disconnect(self, link: _Link) -> None:
        link.end()
        if self._link is link:
            self._link = None
            self.readied.set()

    def take(self, link: _Link, report: SuperviseReport) -> None:
        """Handle a report that came on that connection."""
        if self._link is not link:
            return
        if report.result == READY:
            self.ready_pid = report.pid
            if self._is_on_kept:
                self._keeps, self.lacks_kept = report.pid is not None, report.pid is None
            self.readied.set()
        if report.result == ENDED:
            self.status = report.status
            self.offer = self.offer.replace(pid=None, started=False, left=self.offer.operation is not None)
        if report.result == FELL:
            self.status = report.status
            self.offer = self.offer.replace(pid=None, started=False, fell=report.status)
        order = None if report.order is None else link.order.get(report.order)
        if order is not None and order.do == ASK:
            pass  # tells nothing about its command
        elif report.result == FAILED:
            self.failure = report.message
            self.offer = self.offer.replace(pid=None, started=False, left=True)
        elif report.result == DONE and order is not None:
            self.was_ready = report.was_ready
            started: dict[str, Any] = {"started": False}
            if order.do == START:
                started = {
                    "started": True,
                    "left": False,
                    "kept": False,
                    "readies": None,
                    "fell": None,
                    "resumes": None,
                }
                self._keeps = self._is_on_kept = False
            self.offer = self.offer.replace(pid=report.pid, operation=order.operation, key=order.key, **started)
        elif report.result == DONE and report.order is not None and report.order == link.start:
            self.was_ready = report.was_ready  # another process of the same order
            self.offer = self.offer.replace(pid=report.pid, kept=False, readies=None)
        if order is not None and order.reported is None:
            order.conclude(report)


class Supervisors:
    """All supervisors of the node. `start_ticks` returns a process's start time, or None if it does not exist."""

    def __init__(self, start_ticks: Callable[[int], int | None]) -> None:
        self._start_ticks = start_ticks
        self._known: dict[tuple[int, str], Supervisor] = {}
        self._links: dict[object, tuple[Supervisor, _Link]] = {}
        #: Exit status of the command of each ended supervisor, if it was reported.
        self._ended: dict[tuple[int, str], int | None] = {}
        self._listeners: list[Callable[[Supervisor], object]] = []
        #: Notified when a supervisor connects, leaves or reports.
        self.changed = Condition()

    def __iter__(self) -> Iterator[Supervisor]:
        return iter(tuple(self._known.values()))

    def find(self, uid: int | None, run: str | None) -> Supervisor | None:
        """Return the supervisor of that run, if its process lives."""
        known = None if uid is None or run is None else self._known.get((uid, run))
        return known if known is not None and known.is_alive else None

    def has_ended(self, uid: int | None, run: str | None) -> bool:
        """Return True if that run had a supervisor whose process has ended."""
        return (uid, run) in self._ended or any((one.uid, one.run) == (uid, run) and not one.is_alive for one in self)

    async def come(self, uid: int | None, run: str | None, known: Callable[[], Supervisor | None]) -> Supervisor | None:
        """Return the supervisor that `known` finds, once connected. None if it has ended or does not connect for a
        while."""
        with anyio.move_on_after(COMES_WITHIN_S):
            while True:
                found = known()
                if found is not None and found.connected:
                    return found
                if found is None and self.has_ended(uid, run):
                    break
                with anyio.move_on_after(_POLL_INTERVAL_S):  # a connection ends shortly before its process
                    await self.changed.wait()
        return None

    async def exited_cleanly(self, uid: int, run: str | None, pid: int) -> bool:
        """Return True if the command with that pid ended with status 0. Waits briefly for its supervisor's report.

        False without a supervisor, or if it was killed too.
        """
        with anyio.move_on_after(SAYS_WITHIN_S):
            while True:
                known = self._known.get((uid, run or ""))
                if known is None:
                    return self._ended.get((uid, run or "")) == 0
                if known.offer.pid != pid:
                    return known.offer.pid is None and known.status == 0
                await self.changed.wait()
        return False

    def of_operation(self, uid: int | None, operation: str) -> Supervisor | None:
        """Return the supervisor that waits for that operation or continued from it; connected ones first."""
        serving = [one for one in self if one.uid == uid and one.serves(operation) and one.is_alive]
        return min(serving, key=lambda one: not one.connected, default=None)

    def of_pid(self, pid: int) -> Supervisor | None:
        return next((known for known in self if known.pid == pid and known.is_alive), None)

    async def attend(self, key: object, pid: int, uid: int, offer: Supervise, send: Send) -> None:
        """Serve a supervisor on the connection `key`, until a newer one replaces it or this is cancelled."""
        supervisor = self._admit(pid, uid, offer)
        link = supervisor.connect(send, offer)
        self._links[key] = (supervisor, link)
        self._tell(supervisor)
        try:
            await link.replaced.wait()
        finally:
            self._links.pop(key, None)
            supervisor.disconnect(link)
            self._forget_ended()
            self._tell(supervisor)

    def report(self, key: object, report: SuperviseReport) -> None:
        """Handle a supervisor's report. Raises Refused if it does not attend on that connection."""
        attending = self._links.get(key)
        if attending is None:
            raise Refused("this connection has no supervisor", "send supervise first, on the same connection")
        supervisor, link = attending
        supervisor.take(link, report)
        self._tell(supervisor)

    def _admit(self, pid: int, uid: int, offer: Supervise) -> Supervisor:
        self._forget_ended()
        known = self.find(uid, offer.run)
        ticks = self._start_ticks(pid)
        if ticks is None:
            raise Refused(f"hegmd cannot see process {pid}", "run hegmd in the node's own pid namespace")
        if known is not None and (known.pid, known.start_ticks) == (pid, ticks):
            return known
        if known is not None:
            raise Refused(
                f"process {known.pid} already supervises run {offer.run[:40]}",
                "run: hegmctl ps; each run has one supervisor",
            )
        if not offer.run:
            raise Refused("a supervisor must name its run", "set HEGM_RUN in the environment of its command")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise Refused(f"process {pid} has ended: {error.strerror}", "start it again") from error
        before = self._known.get((uid, offer.run))
        if before is not None:
            before.close()
        self._ended.pop((uid, offer.run), None)
        made = self._known[uid, offer.run] = Supervisor(pid, ticks, uid, offer, pidfd)
        return made

    def _forget_ended(self) -> None:
        """Forget those whose processes have ended. Most end shortly after their connections, which nothing reports: so
        this is done whenever one comes or leaves.
        """
        for supervisor in self:
            if not supervisor.is_alive and not supervisor.connected:
                self._forget(supervisor)
                self._ended[supervisor.uid, supervisor.run] = supervisor.status
        for oldest in tuple(self._ended)[:-MAX_ENDED]:
            del self._ended[oldest]

    def _forget(self, supervisor: Supervisor) -> None:
        supervisor.close()
        if self._known.get((supervisor.uid, supervisor.run)) is supervisor:
            del self._known[supervisor.uid, supervisor.run]

    def close(self) -> None:
        for supervisor in self:
            self._forget(supervisor)

    def listen(self, listener: Callable[[Supervisor], object]) -> None:
        """Call `listener` when a supervisor connects, leaves or reports. It runs on the event loop and must not
        wait."""
        self._listeners.append(listener)

    def _tell(self, supervisor: Supervisor) -> None:
        self.changed.notify_all()
        for listener in self._listeners:
            listener(supervisor)
