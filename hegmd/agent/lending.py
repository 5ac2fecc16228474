"""A `hegm.released()` block: the script's code runs while the storages of its process are offloaded.

The start of the block is a boundary. There the training thread is parked, and the agent asks the daemon to suspend the
job with its CUDA contexts kept. Then the thread runs the body of the block, and still counts as parked. At the end of
the block it is parked again, and the agent asks the daemon to resume the job. The orders in between are those of any
suspend and resume.

Keeps the stage of the block, and sends the two requests. The block runs even after a failure: with the storages in
place if the daemon refuses, and with the storages reloaded by the agent if no daemon is there at its end. Orders that
would reload storages wait for the end of the block.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident
from time import monotonic

from ..errors import BUSY, NOT_FOUND, HegmError
from ..protocol.agents import AgentLend, AgentReclaim, Lent
from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..protocol.messages import Order
    from ..protocol.record import Record
    from .orders import Orders
    from .quiesce import Gate

    Send = Callable[[AgentLend | AgentReclaim], int]

# How long the begin of a block waits while another operation has the job, and the first and last pause between tries.
LIMIT_S = 60.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
# Orders that end the suspension: they wait for the end of the block.
AFTER_BLOCK = frozenset(("reload", "make", "filled", "release", "withdraw"))

WAITING, IN_BODY, RETURNING = "waiting", "in its body", "returning"

NO_DAEMON = "no hegmd answers"
OTHER_THREAD = "only the training thread can release the GPU memory of its process"


class Lending:
    """The block that the training thread is in. One for each process."""

    def __init__(self, gate: Gate, orders: Orders) -> None:
        self._gate = gate
        self._orders = orders
        self._lock = allocate_lock()  # guards the stage; only the gate is locked under it
        self._stage: str | None = None
        self._why: str | None = None
        self._waiting_since = 0.0
        self._send: Send | None = None
        self._request_id: int | None = None
        self._asked_to_lend = False  # what that request is; it may be about the block before this one
        #: True from the request to lend until the daemon reports that nothing is lent.
        self._owed = False
        self._again_at = monotonic()
        self._pause_s = FIRST_PAUSE_S
        self._later: list[tuple[Order, int | None]] = []

    # ---- in the training thread -------------------------------------------------------------------------------------

    @property
    def is_here(self) -> bool:
        """True inside a block of this thread: a block within it changes nothing."""
        return self._gate.lent and self._gate.home == get_ident()

    def begin(self) -> str | None:
        """Ask that the storages are offloaded. Returns why they stay, or None. Raises exceptions of other threads."""
        if not self._gate.pass_block():
            return OTHER_THREAD
        self._why = None
        self._waiting_since = self._again_at = monotonic()
        self._stage = WAITING
        try:
            self._gate.on_change()
            self._gate.park_here(self._is_waiting)
        except BaseException:
            if not self._stop_waiting("an exception was raised in the thread that waited"):
                self.end()
            raise
        self._stop_waiting("its signals cannot be held back, or a restart of the job is under way")
        return self._why

    def end(self) -> None:
        """Wait until the storages are reloaded, and then raise exceptions of other threads."""
        raised: list[BaseException] = []
        self._stage, self._again_at, self._pause_s = RETURNING, monotonic(), FIRST_PAUSE_S
        while self._gate.lent:
            try:
                self._gate.on_change()
                self._gate.park_here(self._is_lent)
            except BaseException as error:  # noqa: BLE001 - the script's
                raised[:] = [error]
        self._stage = None
        self._gate.on_change()
        self._gate.pass_block()
        if raised:
            raise raised.pop()

    def _is_waiting(self) -> bool:
        return self._stage == WAITING

    def _is_lent(self) -> bool:
        return self._gate.lent

    # ---- in the agent's thread --------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        if self._request_id is not None:
            return None
        has_more = self._stage == RETURNING or (self._send is not None and (self._stage == WAITING or self._owed))
        return self._again_at if has_more else None

    @property
    def awaits_answer(self) -> bool:
        """True while the training thread waits for the daemon's answer."""
        return self._request_id is not None and self._stage is not None

    def connect(self, send: Send) -> None:
        """Note that a daemon is there; `send` sends it a request and returns its number."""
        self._send, self._request_id = send, None

    def disconnect(self) -> None:
        """Note that the daemon has ended, and drop its waiting orders."""
        self._send = self._request_id = None
        later, self._later = self._later, []
        for _, fd in later:
            if fd is not None:
                os.close(fd)

    def postpones(self, order: Order, fd: int | None) -> bool:
        """Keep an order, with its descriptor, that has to wait for the end of the block; False if it need not."""
        if self._stage != IN_BODY or order.do not in AFTER_BLOCK:
            return False
        note(f"order {order.order}: {order.do} waits for the end of hegm.released()")
        self._later.append((order, fd))
        return True

    def tick(self, *, alone: bool) -> None:
        """Do what the stage requires. `alone` is True if no daemon has answered at the last try."""
        if self._stage == RETURNING and self._later:
            later, self._later = self._later, []
            for order, fd in later:
                self._orders.obey(order, fd)
        if self._request_id is not None:
            return
        if self._send is None:
            self._continue_without_daemon(alone=alone)
        elif monotonic() >= self._again_at:
            self._ask(self._send)

    def _ask(self, send: Send) -> None:
        if self._stage == WAITING:
            self._owed = self._asked_to_lend = True
            self._request_id = send(AgentLend())
        elif (self._stage == RETURNING and self._gate.lent) or (self._stage is None and self._owed):
            self._asked_to_lend = False
            self._request_id = send(AgentReclaim())

    def _continue_without_daemon(self, *, alone: bool) -> None:
        """Continue without a daemon: run the block with its storages in place, or let the agent reload them."""
        if self._stage == WAITING and (alone or self._owed):
            if not self._stop_waiting(NO_DAEMON):
                return
            if self._orders.held_bytes:
                self._orders.come_back(NO_DAEMON)
            else:
                self._gate.withdraw()
        elif self._stage == RETURNING and self._gate.lent and monotonic() >= self._again_at:
            self._try_later()
            self._orders.come_back("hegm.released() ended without a daemon")

    def take_answer(self, request: int, answer: Record | HegmError) -> bool:
        """Handle the daemon's answer to one of the two requests; False for the answer to any other request."""
        if request != self._request_id:
            return False
        self._request_id = None
        if self._stage == WAITING and not self._asked_to_lend:
            self._owed = self._gate.lent  # the block before has ended, whatever the answer is
        elif isinstance(answer, HegmError):
            self._take_refusal(answer)
        elif isinstance(answer, Lent):
            self._run_body()
        else:
            self._owed = self._gate.lent
        return True

    def _run_body(self) -> None:
        """Run the body: the storages are offloaded. If the thread has not waited for it, they are reloaded at once."""
        with self._lock:
            if self._stage == WAITING:
                self._stage = IN_BODY
                self._pause_s = FIRST_PAUSE_S
                self._gate.run_block()

    def _take_refusal(self, error: HegmError) -> None:
        note(f"hegm.released(): {error.message}")
        if self._stage == WAITING:
            is_late = monotonic() - self._waiting_since >= LIMIT_S
            if self._orders.held_bytes or (error.code is BUSY and not is_late):
                self._try_later()
                return
            self._owed = False
            if self._stop_waiting(error.message):
                self._gate.withdraw()
        elif error.code is NOT_FOUND:
            self._owed = False
            if self._stage == RETURNING and self._gate.lent:
                self._orders.come_back("hegmd does not know that its memory is lent")
        else:
            self._try_later()

    def _try_later(self) -> None:
        self._again_at = monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _stop_waiting(self, why: str) -> bool:
        """Have the block run with the storages in place; False if they are away already. From any thread."""
        with self._lock:
            if self._stage == WAITING:
                self._stage, self._why = None, why
            return self._stage is None


class Block:
    """A `with hegm.released()`. `lending` returns that of this process, None without an agent."""

    def __init__(self, lending: Callable[[], Lending | None], warn: Callable[[str], object]) -> None:
        self._lending = lending
        self._warn = warn
        self._lent: Lending | None = None

    def __enter__(self) -> None:
        lending = self._lending()
        if lending is None or lending.is_here:
            return
        why = lending.begin()
        if why is None:
            self._lent = lending
        else:
            self._warn(why)

    def __exit__(self, *_exc: object) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.end()
