"""Orders of the daemon to this process, and their answers. Runs in the agent's thread only.

Owns what each order does, when a wait ends, and the return without a daemon. Knows neither socket nor frames (`channel`
does), and learns about the training thread from the gate; `order_state` has the state between two orders, and
`byte_orders` has the orders about bytes. Every order is answered once: at once, or by `tick`.

After any failure the process trains with all its bytes, or is parked with all of them held. If the daemon is gone
for too long, or a signal waits for the script's handler, the agent brings everything back by itself.

Longer than 400 lines because each order is judged by what is pending, which only this module changes.
"""

from __future__ import annotations

import os
from time import monotonic

from ..errors import HegmError
from . import departing
from .answers import ReportSender
from .byte_orders import ByteOrders
from .disconnected import RendezvousWait
from .notes import note
from .order_state import OrderState, Pending
from .other_threads import Attempts
from .quiesce import CALL, PARK, Gate, ParkRequest
from .refusals import DEBUG_HINT, never_meets, no_boundary, not_parked, refusal, waits_in_join
from .snapshots import BESIDE, BESIDE_FETCHING, SNAPSHOT, Snapshots
from .thread_stacks import thread_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..protocol.messages import AgentReport, Communicators, Order
    from .torch_state import FoundStorages

SURVEY_LIMIT_S = 5.0
PARK_LIMIT_S = 300.0
_POLL_INTERVAL_S = 0.002
_TRY_AGAIN_S = 5.0
# How long to wait for the other ranks, which reconnect their groups without an order too. Longer than the pause above.
_ALONE_LIMIT_S = 20.0
# Orders that change nothing. Another order drops one that is not answered yet.
_QUESTIONS = frozenset(("survey", "weigh"))
# Signals by which a user or a program wants something of the script now. Timers and children are no reason to reload.
_URGENT = frozenset((1, 2, 3, 10, 12, 15))  # HUP, INT, QUIT, USR1, USR2, TERM


class Orders:
    """Carries out orders. `report` sends their results; it is None without a daemon."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._answers = ReportSender(gate)
        self._state = OrderState(gate)
        self._carrying = self._state.carrying
        self._bytes = ByteOrders(self._state, self._answers)
        self.snapshots = Snapshots(self._state, self._answers)
        self._alone_deadline: float | None = None
        self._signal: int | None = None
        self._weighed: departing.RestartCost | HegmError | None = None
        #: A survey that is answered while a snapshot waits for its boundary, and its result.
        self._beside: Pending | None = None
        self._found_beside: FoundStorages | None = None
        self._left_alone: str | None = None
        self.known_bytes = self.obeyed = 0
        self.changed_by_itself = False
        #: Whether the driver has ever restored this process.
        self.driver_restored = False
        #: Set by the order to disconnect: the connection ends, and this says where to reconnect.
        self.aside: RendezvousWait | None = None
        self._do: dict[str, Callable[[Order, int | None], None]] = {
            "count": lambda order, _fd: self._answers.done(order.order),  # every report has the count
            "stacks": lambda order, _fd: self._answers.done(order.order, stacks=thread_stacks(gate.home)),
            "survey": self._survey,
            "park": self._park,
            "withdraw": self._withdraw,
            "rest": self._stay_parked_alone,
            "aside": self._disconnect_for_image,
            "release": self._release,
            "weigh": self._weigh,
            "beforehand": self._report_prestart,
            "leave": self._leave,
            SNAPSHOT: self._snapshot,
            **self._bytes.table(),
        }

    @property
    def held_bytes(self) -> int:
        return self._carrying.held_bytes

    @property
    def awaits_daemon(self) -> bool:
        """Return True while the training thread is parked until the daemon orders the next step."""
        return self._gate.parked and not self._gate.lent and not self._state.is_suspended

    @property
    def known_communicators(self) -> Communicators | None:
        """Return its groups with other ranks, of the survey that `known_bytes` is from."""
        return self._state.communicators if self.known_bytes else None

    @property
    def entrusted(self) -> bool:
        """Return True if only the daemon has these bytes."""
        return self._carrying.entrusted

    @property
    def mark(self) -> str:
        """Return how the memory of these bytes begins, if this process copied them there."""
        return self._carrying.mark

    # ---- the daemon comes and goes ----------------------------------------------------------------------------------

    def begin(self, report: Callable[[AgentReport], None]) -> None:
        self._answers.send = report
        self._alone_deadline = None
        self.changed_by_itself = False

    def end(self) -> None:
        """Withdraw the daemon's pending orders; a parked process waits for the next daemon.

        During a move it waits for a limited time; a suspended process stays suspended without a limit.
        """
        if self._answers.send is None:
            return
        self._answers.send = None
        # First: whatever is raised below, the process must not stay parked.
        self._alone_deadline = monotonic() + _park_limit_s()
        self._bytes.finish()  # the next daemon must find the communicators in a state that lasts
        pending, self._beside, self._found_beside = self._state.take_pending(), None, None
        if pending is not None and not self._gate.parked:
            self._gate.withdraw()
        elif pending is not None and pending.do in ("park", SNAPSHOT):
            self._state.resume_training()
        self.snapshots.close()
        self.snapshots.leave_unanswered()
        if not self._gate.parked or self._state.is_suspended or self._gate.lent:
            self._alone_deadline = None

    def note_signal(self, number: int) -> None:
        """Record a signal that waits for the parked thread. Called from another thread."""
        if number in _URGENT:
            self._signal = number

    def leave_alone(self, why: str) -> bool:
        """Refuse all orders from now on; returns False while one is under way."""
        in_hand = self._state.pending is not None or self._gate.parked or self._gate.requested
        if self._left_alone is None and in_hand:
            return False
        self._left_alone = why
        return True

    def take_up(self) -> None:
        """Obey orders again."""
        self._left_alone = None

    # ---- orders -----------------------------------------------------------------------------------------------------

    def obey(self, order: Order, fd: int | None) -> None:
        """Carry out the order, or start to. The descriptor belongs to this call."""
        note(f"order {order.order}: {order.do}")
        self.obeyed += 1
        try:
            action = self._do.get(order.do)
            if action is None:
                raise refusal(f"there is no order {order.do!r}", "bring hegmd and the agent to the same release")
            if self._left_alone is not None:
                raise refusal(self._left_alone, "try again once it has been restarted")
            if order.do not in BESIDE:
                self._end_snapshot("another order arrived first")
                self._end_survey_beside("another order arrived before the answer")
            if order.do not in BESIDE_FETCHING:
                self.snapshots.end_fetching("another order arrived first")
            action(order, fd)
        except HegmError as error:
            self._answers.failed(order.order, error)
        except Exception as error:  # noqa: BLE001 - the edge: whatever fails in here, the script does not notice
            note(f"order {order.do} failed: {error!r}")
            self._answers.failed(order.order, refusal(f"the agent failed at {order.do}: {error!r}", DEBUG_HINT))
            self.come_back("an error in the agent")
        finally:
            if fd is not None and not self._carrying.keeps(fd):
                os.close(fd)

    def _survey(self, order: Order, _fd: int | None) -> None:
        if (out := self._carrying.out) is not None:
            facts = {"held_bytes": out.size_bytes, "size_bytes": out.required_bytes, "storages": len(out)}
            self._answers.done(order.order, parked=True, communicators=self._state.groups.inventory(), **facts)
        elif self._gate.parked:
            self._state.found = self._state.find_storages()
            self._report_storages(order.order, self._state.found)
        elif (pending := self._state.pending) is not None and pending.do == SNAPSHOT:
            self._end_survey_beside("a later survey was requested")
            self._beside = Pending(order, order.limit_s or SURVEY_LIMIT_S)
            self._gate.call_beside(self._look_beside)
        else:
            self._wait_for(order, order.limit_s or SURVEY_LIMIT_S)
            self._gate.ask(ParkRequest(CALL, call=self._survey_at_boundary))

    def _end_survey_beside(self, why: str) -> None:
        survey, self._beside, self._found_beside = self._beside, None, None
        if survey is not None:
            self._answers.failed(survey.order, refusal(why, "nothing needs to be done"))

    def _park(self, order: Order, fd: int | None) -> None:
        """Park at a boundary, of which the last order names the newest. With a slot a snapshot is taken there too."""
        at = order.at or 0
        fits = departing.fits_of(self._gate) if order.leaving else None
        goes_on = fits is not None and self._gate.parked and not departing.can_restart_here()
        is_parked = self._gate.parked and not goes_on and self._state.pending is None
        if is_parked and (not order.exact or self._gate.count == at):
            self._answers.done(order.order)
            return
        self._state.require_all_here("reload it first")
        if (before := self._state.pending) is not None and before.do == "park":
            self._state.pending = None
            another = refusal("a later order named another boundary to park at", "nothing needs to be done")
            self._answers.failed(before.order, another)
        attempts = Attempts(self._gate, ParkRequest(PARK, at=at, fits=fits), order.max_park_s)
        self._meet_for(order, attempts)
        self.snapshots.begin(order, fd)
        self._state.found = None
        if self._gate.parked and self._gate.count >= at and not goes_on:
            return
        attempts.begin()
        # A rank that has passed that boundary must not park at the next one, which the others never reach.
        if order.exact and self._gate.count >= at and not self._gate.parked and not goes_on:
            self._state.pending = None
            self.snapshots.close()
            self._gate.withdraw()
            passed = f"boundary {at} was passed before the order to park at it arrived"
            self._answers.failed(order.order, refusal(passed, "name a later one"))

    def _snapshot(self, order: Order, fd: int | None) -> None:
        """Park at a boundary, write the state into the slot, and continue. A pending snapshot is cancelled."""
        self._end_snapshot("a later snapshot was requested")
        attempts = self.snapshots.attempts_for(order)
        self._meet_for(order, attempts)
        self.snapshots.begin(order, fd)
        attempts.begin()
        if order.exact and self._gate.count >= (order.at or 0) and not self._gate.parked:
            self._end_snapshot(f"boundary {order.at} was passed before the order for a snapshot there arrived")

    def _end_snapshot(self, why: str) -> None:
        """Abandon the snapshot that waits for its boundary, if there is one."""
        pending = self._state.pending
        if pending is None or pending.do != SNAPSHOT:
            return
        self._state.pending = None
        self._state.resume_training()
        self.snapshots.close()
        self._answers.failed(pending.order, refusal(why, "it is taken at a later boundary"))

    def _withdraw(self, order: Order, _fd: int | None) -> None:
        self._state.require_all_here("reload it first, then release it")
        pending = self._state.take_pending()
        parked_s = self._parked_s(pending)
        self.snapshots.close()
        self._state.resume_training()
        if pending is not None:
            self._answers.failed(pending.order, refusal(f"{pending.do} was withdrawn", "nothing needs to be done"))
        self._answers.done(order.order, parked_s=parked_s)

    def _stay_parked_alone(self, order: Order, _fd: int | None) -> None:
        """Keep this process parked without a daemon too: its operation is suspended."""
        self._state.require_parked("rest")
        self._state.is_suspended = True
        self._answers.done(order.order)

    def _disconnect_for_image(self, order: Order, _fd: int | None) -> None:
        """Disconnect for an image: the image must contain neither a socket nor a descriptor of its bytes.

        A process that never reached a boundary, such as a launcher of ranks, need not be parked.
        """
        if self._gate.count or self._gate.parked:
            self._state.require_parked("aside")
        if order.path is None:
            raise refusal("the order has no place to reconnect", "name the file that says when to reconnect")
        aside = RendezvousWait(order.path, order.limit_s)
        if self._carrying.out is not None:
            self._carrying.entrust()
        self._state.is_suspended = self._gate.parked
        departing.give_up_lock()
        self._answers.done(order.order)
        self.aside = aside

    def _release(self, order: Order, _fd: int | None) -> None:
        if order.abort:
            self._state.groups.give_up()
        self._state.require_all_here("reload it first")
        self._state.require_parked("release")
        self._carrying.forget()
        if order.restored:
            self._carrying.note_restored()
        self.driver_restored = self.driver_restored or order.by_driver
        self._carrying.rejoin()
        self._state.found = None
        self._state.is_suspended = False
        self._wait_for(order, order.limit_s)
        self._gate.release_and_watch()

    def _weigh(self, order: Order, _fd: int | None) -> None:
        """Report what a restart would save, for a process that is parked or passes a boundary."""
        if self._gate.parked:
            self._state.require_parked("weigh")
            self._gate.release_other_threads()  # one of them may have a lock that the script's own code needs here
            self._answers.weight(order.order, departing.weigh())
        else:
            self._weighed = None
            self._wait_for(order, order.limit_s or SURVEY_LIMIT_S)
            self._gate.ask(ParkRequest(CALL, call=self._weigh_at_boundary))

    def _report_prestart(self, order: Order, _fd: int | None) -> None:
        """Report what a prestarted process can import. This needs no boundary."""
        what = departing.beforehand()
        self._answers.done(order.order, imports=what.modules, path=what.path)

    def _leave(self, order: Order, _fd: int | None) -> None:
        """Exit. There is no report: the end of the process is one."""
        self._state.require_parked("leave")
        departing.leave()

    # ---- news and limits --------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        deadlines = [self._alone_deadline, self._bytes.next_deadline(), self.snapshots.next_deadline()]
        deadlines += [] if self._beside is None else [self._beside.deadline]
        pending = self._state.pending
        if pending is not None:
            deadlines.append(pending.deadline)
            if pending.attempts is not None:
                deadlines.append(pending.attempts.next_deadline(_POLL_INTERVAL_S))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self) -> None:
        """Check the gate and the limits, and answer what can be answered."""
        self._bytes.tick()
        self.snapshots.tick()
        if self._signal is not None:
            number, self._signal = self._signal, None
            if self._gate.parked:
                self.come_back(f"signal {number}")
        now = monotonic()
        if self._state.pending is not None:
            self._look_after(self._state.pending, now)
        if self._beside is not None:
            self._look_after_survey(self._beside, now)
        if self._alone_deadline is not None and now >= self._alone_deadline:
            self.come_back("the limit on being parked without a daemon")

    def _look_after(self, pending: Pending, now: float) -> None:
        is_late = pending.deadline is not None and now >= pending.deadline
        if pending.attempts is not None:
            self._look_after_park(pending, pending.attempts, is_late=is_late)
        elif self._gate.passed is not None:
            self._state.pending = None
            if pending.do == "weigh" and self._weighed is not None:
                weighed, self._weighed = self._weighed, None
                self._answers.weight(pending.order, weighed)
            elif pending.do == "survey" and self._state.found is not None:
                found, self._state.found = self._state.found, None
                self._report_storages(pending.order, found)
            else:
                self._answers.done(pending.order, boundary=self._gate.passed)
        elif is_late:
            self._state.pending = None
            self._gate.withdraw()
            if pending.do == "weigh":
                self._answers.failed(
                    pending.order, no_boundary(pending.limit_s, "at which its state could be looked at")
                )
            elif pending.do == "survey":
                self._answers.done(pending.order, parked=False, held_bytes=0)  # the count is known, the bytes are not
            else:
                self._answers.failed(pending.order, no_boundary(pending.limit_s, "after it was released"))

    def _look_after_survey(self, survey: Pending, now: float) -> None:
        """Answer a survey that was asked for beside a snapshot; once that has ended, it is a survey like any other."""
        found = self._found_beside
        if found is None and self._gate.parked:
            found = self._state.find_storages()
        if found is not None:
            self._beside = self._found_beside = None
            self._report_storages(survey.order, found)
        elif survey.deadline is not None and now >= survey.deadline:
            self._beside = None
            self._answers.done(survey.order, parked=False, held_bytes=0)  # the count is known, the bytes are not
        elif self._state.pending is None and not self._gate.requested:
            self._state.pending, self._beside = survey, None
            self._gate.ask(ParkRequest(CALL, call=self._survey_at_boundary))

    def _look_after_park(self, pending: Pending, attempts: Attempts, *, is_late: bool) -> None:
        """Answer a park as soon as it succeeds or fails: ranks that are parked may have to go to a later boundary."""
        declined = self._gate.declined
        if declined is None and self._is_met(pending, attempts):
            if pending.do != SNAPSHOT and not self._gate.lent and (took_s := self.snapshots.write_beside_park()):
                attempts.extend(took_s)  # other threads may have run meanwhile: they are stopped again
                return
            self._state.pending = None
            if pending.do == SNAPSHOT:
                self.snapshots.write(pending, attempts)
                return
            self._answers.done(pending.order, parked_s=attempts.parked_s)
        elif pending.meeting is not None and pending.meeting.is_in_join:
            self._fail_park(pending, attempts, waits_in_join())
        elif pending.meeting is not None and pending.meeting.never_meets:
            self._fail_park(pending, attempts, never_meets())
        elif is_late or declined is not None or (pending.exact and attempts.is_stopped_too_long):
            self._fail_park(pending, attempts, not_parked(pending.limit_s, attempts.busy, declined))
        elif attempts.is_stopped_too_long:
            note(f"{attempts.busy}; the training continues until the next attempt")
            attempts.pause()

    def _fail_park(self, pending: Pending, attempts: Attempts, error: HegmError) -> None:
        """Let the training continue, and answer that it does not park."""
        parked_s = attempts.parked_s
        self._state.pending = None
        self.snapshots.close()
        self._gate.withdraw()
        self._answers.failed(pending.order, error, parked_s=parked_s)

    def _is_met(self, pending: Pending, attempts: Attempts) -> bool:
        """Return True once the training is parked, and the other ranks are parked at the same place."""
        meeting = pending.meeting
        if meeting is None:
            return attempts.check()
        if not (meeting.is_parked and self._gate.parked) and not attempts.check():
            if meeting.is_uncounted:
                attempts.park_next()
            return False
        meeting.park()
        if meeting.has_met:
            self._gate.count_from(pending.at)
            return True
        if meeting.is_awaited and not self._gate.lent:
            meeting.go_on()
            attempts.park_next()
        return False

    def _parked_s(self, pending: Pending | None) -> float:
        """Return how long the training thread was parked for the order that is withdrawn."""
        if pending is not None and pending.attempts is not None:
            return pending.attempts.parked_s
        since = self._gate.parked_since
        return 0.0 if since is None else monotonic() - since

    def come_back(self, why: str) -> None:
        """Reload everything without an order and let the training continue. Repeated until it succeeds."""
        note(f"reconnecting without a request: {why}")
        if self._carrying.entrusted:  # it stays parked until they are reloaded
            self._alone_deadline = None
            return
        # Set before anything that could raise, so that it is tried again.
        self._alone_deadline = monotonic() + _TRY_AGAIN_S
        pending = self._state.take_pending()
        self._bytes.finish()
        if self._carrying.out is not None:
            try:
                self._carrying.reload(None, lambda _so_far_bytes: None)
            except HegmError as error:
                note(f"{error.message}; trying again")
                return
        try:
            self._state.groups.reconnect(None, _ALONE_LIMIT_S)
        except HegmError as error:
            note(f"{error.message}; trying again")
            self._alone_deadline = monotonic() + _TRY_AGAIN_S
            return
        self._state.resume_training()
        self._alone_deadline = None
        self.changed_by_itself = True
        if pending is not None:
            self._answers.failed(pending.order, refusal(f"the process continued by itself: {why}", "try again"))

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _survey_at_boundary(self) -> None:
        """Survey the storages, in the training thread at a boundary."""
        try:
            self._state.found = self._state.find_storages()
        except Exception as error:  # noqa: BLE001 - the edge to the script
            note(f"no survey: {error!r}")

    def _look_beside(self) -> None:
        """Survey the storages, in the training thread at a boundary that a snapshot may wait for too."""
        try:
            self._found_beside = self._state.find_storages()
        except Exception as error:  # noqa: BLE001 - the edge to the script
            note(f"no survey: {error!r}")

    def _weigh_at_boundary(self) -> None:
        """Weigh the state, in the training thread at a boundary."""
        try:
            self._weighed = departing.weigh()
        except HegmError as error:
            self._weighed = error
        except Exception as error:  # noqa: BLE001 - the edge to the script
            self._weighed = refusal(f"its state cannot be inspected: {error!r}", DEBUG_HINT)

    def _report_storages(self, order: int, found: FoundStorages) -> None:
        self.known_bytes = self._carrying.required_bytes(found)
        self._answers.found(order, found, self.known_bytes, self._state.communicators)

    def _wait_for(self, order: Order, limit_s: float | None, attempts: Attempts | None = None) -> None:
        """Make an order pending. A question is dropped once another order comes."""
        before = self._state.pending
        if before is not None:
            if before.do not in _QUESTIONS:
                raise refusal(f"order {before.order} ({before.do}) is under way", "wait, or withdraw it")
            self._answers.failed(
                before.order, refusal("another order arrived before the answer", "nothing needs to be done")
            )
        self._state.pending = Pending(order, limit_s, attempts)

    def _meet_for(self, order: Order, attempts: Attempts) -> None:
        """Make an order to park pending; ranks of a job then meet."""
        self._wait_for(order, order.limit_s, attempts)
        if order.exact and self._state.pending is not None:
            self._state.meet(self._state.pending)


def _park_limit_s() -> float:
    try:
        return float(os.environ["HEGM_PARK_LIMIT_S"])
    except (KeyError, ValueError):
        return PARK_LIMIT_S
