"""The state of this process between two orders: what is pending, what was surveyed, and whether it stays parked.

Orders are judged by this state as a whole: a parked training thread is idle only while nothing else is pending, and
a survey of its storages is valid only until it continues. Called in the agent's thread. `orders` and `byte_orders`
carry out orders.
"""

from __future__ import annotations

from time import monotonic

from .communicators import ProcessGroups
from .cuda_state import HAZARD_NCCL
from .meeting import Meeting
from .other_threads import Attempts, busy_thread
from .refusals import BUSY_HINT, refusal
from .storage_transfer import StorageTransfer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..protocol.messages import Communicators, Order
    from . import torch_state
    from .quiesce import Gate


class Pending:
    """An order whose answer waits for the training thread."""

    __slots__ = ("at", "attempts", "deadline", "do", "exact", "limit_s", "meeting", "order")

    def __init__(self, order: Order, limit_s: float | None, attempts: Attempts | None = None) -> None:
        self.order = order.order
        self.do = order.do
        self.exact = order.exact
        self.at = order.at or 0
        self.meeting: Meeting | None = None
        self.attempts = attempts  # of a park
        self.limit_s = limit_s
        self.deadline = None if limit_s is None else monotonic() + limit_s


class OrderState:
    """The state that is valid until the next order."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.carrying = StorageTransfer()
        self.groups = ProcessGroups()
        self._pending: Pending | None = None
        #: The last survey of the storages, while it is valid.
        self.found: torch_state.FoundStorages | None = None
        #: Its communicator groups in that survey.
        self.communicators: Communicators | None = None
        #: True if it stays parked without a daemon, without a limit.
        self.is_suspended = False

    def find_storages(self) -> torch_state.FoundStorages:
        """Find its current storages and communicator groups."""
        found = self.carrying.find(self.groups.kinds())
        self.communicators = self.groups.inventory(found.others)
        if self.groups.is_down and found.cuda is not None:
            hazards = tuple(hazard for hazard in found.cuda.hazards if hazard != HAZARD_NCCL)
            found.cuda = found.cuda.replace(hazards=hazards)
        return found

    @property
    def pending(self) -> Pending | None:
        """The order whose answer waits for the training thread."""
        return self._pending

    @pending.setter
    def pending(self, pending: Pending | None) -> None:
        """Replace it. An order that is not pending any more meets no ranks."""
        before, self._pending = self._pending, pending
        if before is not None and before.meeting is not None:
            before.meeting.end()

    def meet(self, pending: Pending) -> None:
        """Begin to meet the other ranks of the job, if it has any, for that order."""
        if self.groups.has_other_ranks:
            pending.meeting = Meeting(pending.at, self.groups.ranks, self.groups.positions, self.gate.on_change)
            pending.meeting.start(self.gate.home)

    def take_pending(self) -> Pending | None:
        pending, self.pending = self.pending, None
        return pending

    def require_parked(self, what: str) -> None:
        """Raise HegmError unless its training thread is parked and nothing is pending."""
        if not self.gate.parked or self.pending is not None:
            raise refusal(f"{what} needs a parked training thread, and it is not parked", "park it first")

    def require_all_here(self, hint: str) -> None:
        """Raise HegmError while bytes of it are offloaded."""
        if self.carrying.out is not None:
            raise refusal("the bytes of this process are offloaded", hint)
        if self.groups.is_down:
            raise refusal("the communicator groups of this process are disconnected", "reconnect them first")

    def storages_while_parked(self, what: str) -> torch_state.FoundStorages:
        """Return the storages to offload, while no thread uses them. Raises HegmError."""
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

    def resume_training(self) -> None:
        """Let the training continue, with peer access as before."""
        self.carrying.forget()
        self.carrying.rejoin()
        self.found = None
        self.is_suspended = False
        self.gate.withdraw()
