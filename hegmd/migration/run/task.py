"""One operation that has not ended: its unhandled events, and the tasks that perform its effects.

Owns the inbox of events, the order in which effects are performed, and the last known connection of each agent.
Journals nothing and decides nothing: `runner` journals and the machine decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

import anyio

from hegmd.errors import HegmError
from hegmd.migration.journal.records import History
from hegmd.migration.machine import events
from hegmd.migration.machine.effects import FINISH, Dump, Effect, ReleasePool, ReleaseReservation, Reserve, ReservePool
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.next_effects import SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation
from hegmd.node.processes.procfs import ProcessKey
from hegmd.protocol.operations import Timing
from hegmd.system.condition import Condition

AT_REST = frozenset((SUSPENDED, *TERMINAL))
# Phases that a client waits for, including `holding` when only a quiesce was requested.
SETTLED = AT_REST | {HOLDING}


# Takes uid, run and pid. Returns True if that process exited with status 0, which may take a moment to be known.
EndedWell = Callable[[int, str | None, int], Awaitable[bool]]


async def exit_unknown(_uid: int, _run: str | None, _pid: int) -> bool:
    """The EndedWell of a node without supervisors: always False."""
    return False


class QueuedEvent:
    """An event in the inbox of an operation whose sender waits until it is handled.

    `connection` is the agent connection that reported it, if any. `timings` are the steps of the effect that it ends.
    `process` is the process that it is news of, if it counts only while the worker is that process.
    """

    def __init__(
        self,
        event: Event,
        connection: int | None = None,
        timings: tuple[Timing, ...] = (),
        process: ProcessKey | None = None,
    ) -> None:
        self.event = event
        self.connection = connection
        self.timings = timings
        self.process = process
        self.settled = anyio.Event()
        self.refusal: HegmError | None = None

    def settle(self, refusal: HegmError | None = None) -> None:
        self.refusal = refusal
        self.settled.set()


class PendingEffect:
    """An effect that is performed now or waits for its turn. `heard` is the connection that an order uses."""

    def __init__(self, effect: Effect, heard: int | None) -> None:
        self.effect = effect
        self.heard = heard
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()

    def holds_up(self, later: Effect) -> bool:
        """Return True if the later effect has to wait for this one.

        GPU memory and pool memory are reserved and released one after the other, also when the machine has given up
        waiting for the first. An order goes out while others are under way, because the agent sorts them out. It waits
        only for an order that was dropped and has not ended yet.
        """
        own = self.effect
        if own.tag == Dump.tag:  # undo a dropped effect first, whichever worker of the job the later effect is for
            return own.number < later.number and self.scope.cancel_called
        if own.worker != later.worker or own.number >= later.number:
            return False
        if own.in_worker or later.in_worker:
            return own.in_worker and later.in_worker and self.scope.cancel_called
        return _resource(own) == _resource(later)


def _resource(effect: Effect) -> tuple[str, str | None]:
    """Return what the effect reserves or releases, and on which GPU; an empty name for every other effect."""
    return _RESERVED.get(effect.tag, ""), getattr(effect, "gpu", None)


_RESERVED = {Reserve.tag: "gpu", ReleaseReservation.tag: "gpu", ReservePool.tag: "pool", ReleasePool.tag: "pool"}


class OperationTask:
    """An operation that has not ended: its history, its unhandled events, and its running effects."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.inbox: deque[QueuedEvent] = deque()
        #: Whether something that happened is being handled: taken from the inbox, and not on disk yet.
        self.taking = False
        self.changed = anyio.Event()
        #: Notified when the operation progresses.
        self.progress = Condition()
        self.performing: dict[int, PendingEffect] = {}
        #: The last known connection of each worker, from `agent-back`, `inspected` or the start.
        self.heard: dict[str, int] = {}
        self.moved: dict[str, int] = {}

    @property
    def op(self) -> Operation:
        return self.history.operation

    def enqueue(
        self,
        event: Event,
        connection: int | None = None,
        timings: tuple[Timing, ...] = (),
        process: ProcessKey | None = None,
    ) -> QueuedEvent:
        asking = QueuedEvent(event, connection, timings, process)
        self.inbox.append(asking)
        self.changed.set()
        return asking

    def is_outdated(self, asking: QueuedEvent) -> bool:
        """Return True for news of a process that another has replaced while they waited in the inbox."""
        worker = self.op.worker(getattr(asking.event, "worker", ""))
        return asking.process is not None and worker is not None and worker.key != asking.process

    def note_connection(self, worker: str, connection: int | None) -> None:
        """Record the newest connection of the worker. Older news may arrive after newer."""
        self.heard[worker] = max(self.heard.get(worker, 0), connection or 0)

    def forget_connection(self, worker: str) -> None:
        """Forget the connections of a worker that another process replaces: its connections are counted from 0."""
        self.heard.pop(worker, None)

    async def next(self, clock: Callable[[], float]) -> QueuedEvent:
        """Return the next event, or DeadlinePassed once the deadline is over."""
        while not self.inbox:
            self.changed = anyio.Event()
            deadline = self.op.deadline
            wait_s = math.inf if deadline is None or self.op.phase in AT_REST else max(0.0, deadline - clock())
            with anyio.move_on_after(wait_s):
                await self.changed.wait()
                continue
            return QueuedEvent(events.DeadlinePassed(cause="the clock"))
        return self.inbox.popleft()

    def start(self, effect: Effect) -> PendingEffect:
        """Enter an effect that is to be performed, over the connection that is known of now and no later one."""
        self.performing[effect.number] = errand = PendingEffect(effect, self.heard.get(effect.worker))
        return errand

    def end(self, errand: PendingEffect) -> None:
        """It is performed, or given up."""
        errand.over.set()
        self.performing.pop(errand.effect.number, None)

    def before(self, effect: Effect) -> Iterator[PendingEffect]:
        """Yield the running effects that must end before `effect` is performed."""
        return (errand for errand in tuple(self.performing.values()) if errand.holds_up(effect))

    def drop_what_is_not_awaited(self) -> None:
        """Cancel effects that the machine does not wait for, where that is allowed."""
        awaited = {pending.number for pending in self.op.pending}
        for number, errand in self.performing.items():
            if number not in awaited and errand.effect.on_cancel != FINISH:
                errand.scope.cancel()


def reservations_to_restore(ops: Iterable[Operation]) -> Iterable[tuple[Member, str, int]]:
    """Yield the reservations of unfinished operations, to be made again after a restart of the daemon."""
    for op in ops:
        if op.phase not in TERMINAL:
            for member in op.live:
                for gpu, size_bytes in member.reservations.items():
                    yield member, gpu, size_bytes
