"""Orders to one agent over one connection, on top of `order_link`.

Owns how long an order may take, and its two failures: the agent reports one, or disconnects. `workers` knows which
connection is current and what a report says about the worker.

An order delays later ones, but not forever: its caller may have left, and an agent may lose it. After its own limit
and a margin it is overdue, and only remembered.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence

import anyio

from hegmd.errors import DISCONNECTED, REFUSED, HegmError
from hegmd.protocol.agents import not_connected
from hegmd.protocol.messages import AgentReport, Order
from hegmd.workers.order_link import OrderLink, PendingOrder

DONE, FAILED, PROGRESS = "done", "failed", "progress"

# Orders that move bytes. While one runs, no other report of the worker is reliable.
MOVING = frozenset({"offload", "reload", "free", "make", "copy", "save"})
# Orders for which the process itself copies all of its storages, and the direction of the copy.
COPIED = {"offload": "out", "reload": "in", "save": "out"}
# Orders that change communicators. While one runs, the state of the groups is not final.
COLLECTIVE = frozenset({"disconnect", "reconnect"})
# Orders that an agent obeys while its communicators are disconnected or reconnected.
_BESIDE_COLLECTIVE = MOVING | {"export", "filled", "part"}
# Orders that an agent answers within its own limit, whatever its training does.
LIMITED = frozenset({"survey", "weigh", "beforehand", "count", "stacks"}) | COLLECTIVE
# These wait for no other order, and no other order waits for them: the agent's own thread answers them.
COUNT, STACKS = "count", "stacks"
# Waits for the orders before it, and no other order waits for it: the agent gives it up for any other one.
SNAPSHOT = "snapshot"
# Orders that an agent answers at a boundary, however long that takes without a limit.
_AT_A_BOUNDARY = frozenset({"park", "release"})
# Margin beyond the limit that an agent keeps itself.
ANSWERS_WITHIN_S = 1.0
# The agent's own limit for orders without one, and the time for an immediate answer on a busy machine.
_LIMITED_S, _AT_ONCE_S = 5.0, 30.0

Send = Callable[[Order, Sequence[int]], Awaitable[None]]
Progress = Callable[[int], object]


class AgentAway(HegmError):
    """The agent is not connected, or disconnected during an order. It is unknown whether it obeyed."""

    def __init__(self, pid: int, what: str) -> None:
        super().__init__(
            DISCONNECTED,
            f"{not_connected(pid)}: {what}",
            "wait for it to reconnect; if it does not, run: hegmctl ps, and read the output of the job",
            {"pid": pid},
        )


class OrderFailed(HegmError):
    """The agent could not carry out an order, and reports why."""

    def __init__(self, pid: int, do: str, report: AgentReport) -> None:
        why = report.message or "the agent gave no reason"
        super().__init__(
            REFUSED, f"{do} in process {pid}: {why}", report.hint or "check what the job is doing", {"pid": pid}
        )
        #: How many bytes its GPU lacks; None if it failed for another reason.
        self.lacks_bytes = report.lacks_bytes
        #: How long its training thread was parked for the order.
        self.parked_s = report.parked_s or 0.0
        #: How many bytes the state has that its slot is too small for.
        self.state_bytes = report.state_bytes
        #: The reasons that prevent saving the job's state, now and later.
        self.refusals = report.refusals


def answered_within_s(do: str, limit_s: float | None) -> float:
    """Return how long an agent may take to answer an order with that limit."""
    if do in MOVING or do == SNAPSHOT or (limit_s is None and do in _AT_A_BOUNDARY):
        return math.inf
    if do in _AT_A_BOUNDARY or do in LIMITED:
        return (limit_s or _LIMITED_S) + ANSWERS_WITHIN_S
    return _AT_ONCE_S


class SentOrder(PendingOrder[AgentReport]):
    """An order that was sent. `report` waits for its result; `deadline` is when the answer is due."""

    def __init__(self, pid: int, do: str, on_progress: Progress | None, deadline: float = math.inf) -> None:
        super().__init__(do)
        self.deadline = deadline
        self._pid = pid
        self._on_progress = on_progress

    async def report(self) -> AgentReport:
        """Return the report. Raises OrderFailed, or AgentAway if the connection ended first."""
        await self.over.wait()
        if self.reported is None:
            raise AgentAway(self._pid, f"it disconnected during the order to {self.do}")
        if self.reported.result != DONE:
            raise OrderFailed(self._pid, self.do, self.reported)
        return self.reported

    def take(self, report: AgentReport) -> bool:
        """Handle a report; True if it was the last one."""
        if report.result == PROGRESS:
            if self._on_progress is not None and report.size_bytes is not None:
                self._on_progress(report.size_bytes)
            return False
        self.conclude(report)
        return True


class AgentLink(OrderLink[Order, SentOrder]):
    """A connection of an agent."""

    def enter(self, order: SentOrder) -> int:
        """Return the order's number. Overdue orders that an agent answers itself no longer count."""
        now = anyio.current_time()
        late = [number for number, old in self.order.items() if old.do in LIMITED and old.deadline <= now]
        for number in late:
            self.order.pop(number).end()
        return super().enter(order)

    def in_the_way(self, do: str) -> Iterator[SentOrder]:
        """Return the orders that run and are not overdue, oldest first."""
        now = anyio.current_time()
        if do in (COUNT, STACKS):
            return iter(())
        beside = frozenset({COUNT, STACKS, SNAPSHOT})
        if do in COLLECTIVE or do in _BESIDE_COLLECTIVE:
            beside |= _BESIDE_COLLECTIVE if do in COLLECTIVE else COLLECTIVE
        return (order for order in tuple(self.order.values()) if order.deadline > now and order.do not in beside)
