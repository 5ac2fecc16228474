"""How this process stands between two orders: what is waited for, what was found, and whether it is to stay as it is.

Owns that state, which each order may only be judged by as a whole: a training thread that is parked is at rest only
while nothing else is pending, and what was found of its storages holds only until it is let go. Called in the agent's
thread; what an order does then is `orders`' and `byte_orders`' business.
"""

from __future__ import annotations

from time import monotonic

from .communicators import ProcessGroups
from .cuda_state import HAZARD_NCCL
from .other_threads import Attempts, busy_thread
from .refusals import BUSY_HINT, refusal
from .storage_transfer import Carrying

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..protocol.messages import Communicators, Order
    from . import torch_state
    from .quiesce import Gate


class Pending:
    """An order whose answer waits for the training thread."""

    __slots__ = ("attempts", "deadline", "do", "exact", "limit_s", "order")

    def __init__(self, order: Order, limit_s: float | None, attempts: Attempts | None = None) -> None:
        self.order = order.order
        self.do = order.do
        self.exact = order.exact
        self.attempts = attempts  # of a park
        self.limit_s = limit_s
        self.deadline = None if limit_s is None else monotonic() + limit_s


class Standing:
    """What is so until the next order."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.carrying = Carrying()
        self.groups = ProcessGroups()
        self.pending: Pending | None = None
        #: The storages as they were found last, while that still holds.
        self.found: torch_state.Found | None = None
        #: Its communicator groups as they were found with these.
        self.communicators: Communicators | None = None
        #: Whether it is to stay parked however long there is no daemon.
        self.resting = False

    def look(self) -> torch_state.Found:
        """Find its storages and its communicator groups, as they are now."""
        found = self.carrying.find()
        self.communicators = self.groups.inventory()
        if self.groups.is_down and found.cuda is not None:
            hazards = tuple(hazard for hazard in found.cuda.hazards if hazard != HAZARD_NCCL)
            found.cuda = found.cuda.replace(hazards=hazards)
        return found

    def take_pending(self) -> Pending | None:
        """What was waited for, and is not any more."""
        pending, self.pending = self.pending, None
        return pending

    def require_parked(self, what: str) -> None:
        """Raises HegmError unless its training thread stands and nothing else is waited for."""
        if not self.gate.parked or self.pending is not None:
            raise refusal(f"{what} needs a parked training thread, and it is not parked", "park it first")

    def require_all_here(self, hint: str) -> None:
        """Raises HegmError while bytes of it are out."""
        if self.carrying.out is not None:
            raise refusal("the bytes of this process are offloaded", hint)
        if self.groups.is_down:
            raise refusal("the communicator groups of this process are disconnected", "reconnect them first")

    def found_at_rest(self, what: str) -> torch_state.Found:
        """The storages that are to leave, with nobody using them. Raises HegmError."""
        if self.carrying.out is not None:
            raise refusal(
                "the bytes of this process are already offloaded", "reload them before they are offloaded again"
            )
        self.require_parked(what)
        busy = busy_thread(self.gate)
        if busy is not None:
            raise refusal(f"{busy} and may be using storages", BUSY_HINT)
        found, self.found = self.found or self.carrying.find(), None
        return found

    def let_go(self) -> None:
        """Let the training go on, with what was parted for a move as it was."""
        self.carrying.forget()
        self.carrying.rejoin()
        self.found = None
        self.resting = False
        self.gate.withdraw()
