"""Supervisors: the `hegmctl run --allow-restart` of each job that has one, and what they are asked.

A supervisor is known by its run and its user, over as many connections as that takes: one that comes back takes the
place of its earlier connection, and says what it expects and whether its command runs. Another process that offers the
same run of that user while the first one lives is refused, so that there is one parent to ask and never two.

Owns the orders under way and what each supervisor said last. Decides nothing about operations.
"""

from __future__ import annotations

import os
import select
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio

from hegmd.errors import DISCONNECTED, REFUSED, HegmError, Refused
from hegmd.protocol.messages import Supervise, SuperviseReport, SupervisorOrder
from hegmd.system.condition import Condition
from hegmd.workers.order_link import Awaited, OrderLink

DONE, FAILED, ENDED, READY = "done", "failed", "ended", "ready"
ASK, START = "ask", "start"
# Of so many that have ended it is known that they have.
MAX_ENDED = 1000
# A parent hears of the end of its child no later than we do, and says so at once; on a busy machine it takes its time.
SAYS_WITHIN_S = 2.0
# A supervisor tries to connect at least every five seconds.
COMES_WITHIN_S = 12.0
_POLL_INTERVAL_S = 0.25

Send = Callable[[SupervisorOrder, Sequence[int]], Awaitable[None]]


def go_on_command(operation: str) -> str:
    """What is typed to go on from the state that an operation holds."""
    return f"hegmctl run --allow-restart --resume {operation} -- COMMAND"


class SupervisorAway(HegmError):
    """The supervisor's connection ended, or there is none."""

    def __init__(self, run: str, operation: str, what: str) -> None:
        super().__init__(
            DISCONNECTED,
            f"the supervisor of the job (run {run}) is not connected: {what}",
            "wait for it to reconnect; if its hegmctl run has exited and a state is kept, run: "
            f"{go_on_command(operation)}",
            {"run": run, "operation": operation},
        )


class OrderFailed(HegmError):
    """The supervisor could not do what it was told, and says why."""

    def __init__(self, pid: int, do: str, report: SuperviseReport) -> None:
        why = report.message or "it gave no reason"
        super().__init__(
            REFUSED, f"the job was not restarted: {why}", report.hint or "read what it printed", {"pid": pid}
        )
        self.do = do


class _Given(Awaited[SuperviseReport]):
    def __init__(self, do: str, operation: str, key: str) -> None:
        super().__init__(do)
        self.key = key
        self.operation = operation


class _Link(OrderLink[SupervisorOrder, _Given]):
    #: The order by which the command was started last: it may be started again by that, and be done once more.
    start: int | None = None


class Supervisor:
    """One `hegmctl run` and its command."""

    def __init__(self, pid: int, start_ticks: int, uid: int, offer: Supervise, pidfd: int) -> None:
        self._pidfd = pidfd
        self.pid = pid
        self.start_ticks = start_ticks
        self.uid = uid
        self.offer = offer
        #: Why its command did not come to go on, by its last word.
        self.failure = ""
        #: Whether what it wants to go on with was asked for.
        self.has_asked = False
        #: Whether the process that it started last had been made ready before its turn.
        self.was_ready = False
        #: How its command ended last; None where it has not, or nobody saw it.
        self.status: int | None = None
        #: Set once the process that it was told to make ready waits for its turn, as that process, or never will.
        self.ready_pid: int | None = None
        self.readied = anyio.Event()
        #: Whether the one that it was told to keep ready for whatever restart may come does not wait any more.
        self.lacks_kept = False
        #: Whether it was told so, and whether what it says of one that is ready is about that one.
        self._keeps = self._is_on_kept = False
        self._link: _Link | None = None
        #: Counts its connections.
        self.connection = 0

    @property
    def run(self) -> str:
        return self.offer.run

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def lives(self) -> bool:
        """Whether its process has not ended; one that nobody has reaped has."""
        poll = select.poll()
        poll.register(max(self._pidfd, 0), select.POLLIN)
        return self._pidfd >= 0 and not poll.poll(0)

    def close(self) -> None:
        """Let go of the handle of its process. Twice is fine."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    @property
    def keeps(self) -> bool:
        """Whether it keeps one ready for whatever restart may come, or is about to, by its last word."""
        return self._keeps

    def serves(self, operation: str) -> bool:
        """Whether it waits for that operation, or has started its command from there."""
        return self.offer.operation == operation

    async def order(self, do: str, operation: str, *, fds: Sequence[int] = (), **how: Any) -> SuperviseReport:
        """Give an order and wait for what becomes of it. Raises OrderFailed, SupervisorAway."""
        report = await self._answered(do, operation, fds, how)
        if report.result != DONE:
            raise OrderFailed(self.pid, do, report)
        return report

    async def ask_python(self, python: str, changed: Mapping[str, str], without: tuple[str, ...]) -> tuple[str, bool]:
        """Which Python that program is, or why it is none, and whether it is one. Raises SupervisorAway."""
        how = {"python": python, "set": changed, "unset": without}
        report = await self._answered(ASK, "", (), how)
        return report.message, report.result == DONE

    async def _answered(self, do: str, operation: str, fds: Sequence[int], how: Mapping[str, Any]) -> SuperviseReport:
        link, given = self._link, _Given(do, operation, str(how.get("key", "")))
        if link is None:
            raise SupervisorAway(self.run, operation, f"it cannot be told to {do}")
        number = link.enter(given)
        if do == START:
            link.start = number
        try:
            await link.send(SupervisorOrder(order=number, do=do, operation=operation, **how), fds)
            await given.over.wait()
        except (OSError, anyio.ClosedResourceError) as error:
            raise SupervisorAway(self.run, operation, f"it cannot be told to {do}") from error
        finally:
            link.given.pop(number, None)
        if given.reported is None:
            raise SupervisorAway(self.run, operation, f"it left while it was told to {do}")
        return given.reported

    async def tell(self, do: str, operation: str, **how: Any) -> None:
        """Say something that is not answered. Raises SupervisorAway."""
        if do in ("forget", "unready"):
            self._note_over(operation, is_forgotten=do == "forget")
        if self._link is None:
            raise SupervisorAway(self.run, operation, f"it cannot be told to {do}")
        if do == READY:
            self.readied, self.ready_pid = anyio.Event(), None
            self._is_on_kept = not operation
            if self._is_on_kept:
                self._keeps, self.lacks_kept = True, False
        number = self._link.number()
        try:
            await self._link.send(SupervisorOrder(order=number, do=do, operation=operation, **how), ())
        except (OSError, anyio.ClosedResourceError, HegmError) as error:
            raise SupervisorAway(self.run, operation, f"it cannot be told to {do}") from error

    def _note_over(self, operation: str, *, is_forgotten: bool) -> None:
        """Whatever was made ready for that operation, or for any where it is empty, is not any more."""
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
        """Take a report that came on that connection."""
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
        given = None if report.order is None else link.given.get(report.order)
        if given is not None and given.do == ASK:
            pass  # says nothing of its command
        elif report.result == FAILED:
            self.failure = report.message
            self.offer = self.offer.replace(pid=None, started=False, left=True)
        elif report.result == DONE and given is not None:
            self.was_ready = report.was_ready
            started: dict[str, Any] = {"started": False}
            if given.do == START:
                started = {"started": True, "left": False, "kept": False, "readies": None}
                self._keeps = self._is_on_kept = False
            self.offer = self.offer.replace(pid=report.pid, operation=given.operation, key=given.key, **started)
        elif report.result == DONE and report.order is not None and report.order == link.start:
            self.was_ready = report.was_ready  # another process, by the same order
            self.offer = self.offer.replace(pid=report.pid, kept=False, readies=None)
        if given is not None and given.reported is None:
            given.conclude(report)


class Supervisors:
    """Every supervisor of the node. `start_ticks` tells a process's start time, or None if there is none."""

    def __init__(self, start_ticks: Callable[[int], int | None]) -> None:
        self._start_ticks = start_ticks
        self._known: dict[tuple[int, str], Supervisor] = {}
        self._links: dict[object, tuple[Supervisor, _Link]] = {}
        #: The exit status of the command of each that has ended, if it said so.
        self._ended: dict[tuple[int, str], int | None] = {}
        self._listeners: list[Callable[[Supervisor], object]] = []
        #: Told when one of them comes, goes, or says something.
        self.news = Condition()

    def __iter__(self) -> Iterator[Supervisor]:
        return iter(tuple(self._known.values()))

    def find(self, uid: int | None, run: str | None) -> Supervisor | None:
        """The supervisor of that run, if its process lives."""
        known = None if uid is None or run is None else self._known.get((uid, run))
        return known if known is not None and known.lives else None

    def has_ended(self, uid: int | None, run: str | None) -> bool:
        """Whether the supervisor of that run was there and its process has ended."""
        return (uid, run) in self._ended or any((one.uid, one.run) == (uid, run) and not one.lives for one in self)

    async def come(self, uid: int | None, run: str | None, known: Callable[[], Supervisor | None]) -> Supervisor | None:
        """The one that `known` finds, connected; None where that of this run has ended, or none comes for a while."""
        with anyio.move_on_after(COMES_WITHIN_S):
            while True:
                found = known()
                if found is not None and found.connected:
                    return found
                if found is None and self.has_ended(uid, run):
                    break
                with anyio.move_on_after(_POLL_INTERVAL_S):  # a connection ends a little before its process
                    await self.news.wait()
        return None

    async def exited_cleanly(self, uid: int, run: str | None, pid: int) -> bool:
        """Whether the command that was that process has ended with 0, by its supervisor's word, which is waited for.

        Not for long: one that has none, or was killed with it, has not.
        """
        with anyio.move_on_after(SAYS_WITHIN_S):
            while True:
                known = self._known.get((uid, run or ""))
                if known is None:
                    return self._ended.get((uid, run or "")) == 0
                if known.offer.pid != pid:
                    return known.offer.pid is None and known.status == 0
                await self.news.wait()
        return False

    def of_operation(self, uid: int | None, operation: str) -> Supervisor | None:
        """The one that waits for that operation, or has gone on from it; one that is connected before others."""
        serving = [one for one in self if one.uid == uid and one.serves(operation) and one.lives]
        return min(serving, key=lambda one: not one.connected, default=None)

    def of_pid(self, pid: int) -> Supervisor | None:
        """The supervisor that is this process."""
        return next((known for known in self if known.pid == pid and known.lives), None)

    async def attend(self, key: object, pid: int, uid: int, offer: Supervise, send: Send) -> None:
        """Let a supervisor attend on the connection `key`, until a newer one takes its place or this is cancelled."""
        supervisor = self._admit(pid, uid, offer)
        link = supervisor.connect(send, offer)
        self._links[key] = (supervisor, link)
        self._tell(supervisor)
        try:
            await link.replaced.wait()
        finally:
            self._links.pop(key, None)
            supervisor.disconnect(link)
            if not supervisor.lives:
                self._forget(supervisor)
                self._ended[supervisor.uid, supervisor.run] = supervisor.status
                for oldest in tuple(self._ended)[:-MAX_ENDED]:
                    del self._ended[oldest]
            self._tell(supervisor)

    def report(self, key: object, report: SuperviseReport) -> None:
        """Take what a supervisor reports. Raises Refused when it does not attend on that connection."""
        attending = self._links.get(key)
        if attending is None:
            raise Refused("this connection has no supervisor", "send supervise first, on the same connection")
        supervisor, link = attending
        supervisor.take(link, report)
        self._tell(supervisor)

    def _admit(self, pid: int, uid: int, offer: Supervise) -> Supervisor:
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
            raise Refused("a supervisor has to name its run", "set HEGM_RUN in the environment of its command")
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

    def _forget(self, supervisor: Supervisor) -> None:
        supervisor.close()
        if self._known.get((supervisor.uid, supervisor.run)) is supervisor:
            del self._known[supervisor.uid, supervisor.run]

    def close(self) -> None:
        """Let go of every handle of a process."""
        for supervisor in self:
            self._forget(supervisor)

    def listen(self, listener: Callable[[Supervisor], object]) -> None:
        """Have it told when one comes, goes or says something. Told from the event loop, must not wait."""
        self._listeners.append(listener)

    def _tell(self, supervisor: Supervisor) -> None:
        self.news.notify_all()
        for listener in self._listeners:
            listener(supervisor)
