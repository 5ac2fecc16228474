"""Takes the snapshots of one job: of all its ranks at one boundary, into the slots that hold no newer one.

A round begins with a count of all ranks, names a boundary a little ahead, and orders each to take its snapshot there. A
rank that was quicker declines; then the round is repeated further ahead. If the ranks take long to get there, the next
boundary is nearer. The state of a broken round is never started from, because not all ranks have that snapshot, and it
is in the slots whose turn it is again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from hegmd.errors import HegmError, Refused
from hegmd.memory.pool import Source
from hegmd.protocol.messages import AgentReport
from hegmd.protocol.slots import SlotRecord
from hegmd.recovery.job import ProtectedJob
from hegmd.recovery.policy import MAX_COSTS, complete_generations
from hegmd.recovery.slots import SLOTS, by_rank
from hegmd.workers.workers import AgentConnection, OrderFailed

logger = logging.getLogger(__name__)

# How far ahead the boundary of a round is at first, and at most.
FIRST_AHEAD, MAX_AHEAD = 2, 64
# Ranks that reach their boundary later than this have long steps: it need not be as far ahead.
LONG_S = 5.0
# A state may have grown between the look at its size and its snapshot.
MAX_ROUNDS = 10
# A rank that waits for a boundary that never comes gives up on its own.
LIMIT_S = 600.0
MAX_RANKS = 15


class Unprotected(Exception):
    """Snapshots of this job are impossible; the message tells its user why."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


# If no snapshot is written within this time, the job counts as unprotected.
PATIENCE_S = 60.0
# Before its first batch a script may prepare its data for long.
FIRST_BATCH_S = 600.0


class SnapshotPostponed(Exception):
    """No snapshot was taken, which tells nothing about the next one. `patience_s` is how long it is not reported."""

    def __init__(self, why: str, patience_s: float = PATIENCE_S) -> None:
        super().__init__(why)
        self.patience_s = patience_s


class BesideImage(NamedTuple):
    """A snapshot where a job is parked for an image."""

    operation: str
    slot: int
    generation: int


class SnapshotRounds:
    """The rounds of one job."""

    def __init__(self, job: ProtectedJob, clock: Callable[[], float] = anyio.current_time) -> None:
        self._job = job
        self._clock = clock
        self._slots = job.slots
        self._sizes: dict[int, int] = {}
        self._ahead = FIRST_AHEAD
        #: Variables of the script's that a start from the last snapshot does not keep.
        self.begins_anew: tuple[str, ...] = ()
        #: How long the training stood for the last snapshot.
        self.cost_s = 0.0
        #: How long it was copied to the host while the training continued; None if it was paused.
        self.copied_s: float | None = None
        #: Both, of the last snapshots.
        self.costs: deque[tuple[float, float]] = deque(maxlen=MAX_COSTS)

    async def take(self, ranks: Sequence[AgentConnection], generation: int, bad: Sequence[int] = ()) -> SlotRecord:
        """Take a snapshot of these processes, in the order of their ranks. Raises SnapshotPostponed, Unprotected.

        `generation` is its number at least. Each round has a number of its own that no slot has yet: a daemon that was
        killed has not always written down the last one.
        """
        held = [record.generation for record in (await self._slots.read()).values() if record is not None]
        generation = max([generation, *(number + 1 for number in held)])
        for number in range(MAX_ROUNDS):
            if any(self._job.node.is_in_hand(worker.pid) for worker in ranks):
                raise SnapshotPostponed("an operation includes the job")
            slot = await self._next_slot(len(ranks), bad)
            orders = await self._round(ranks, slot, generation + number)
            if orders is None:
                continue
            records = by_rank(await self._slots.read())
            newest = complete_generations(records, len(ranks))
            if newest and newest[0].generation == generation + number:
                self.cost_s = max([report.parked_s or 0.0 for report in orders])
                self.copied_s = max([one.copied_s for one in orders if one.copied_s is not None], default=None)
                self.costs.append((self.cost_s, self.copied_s or 0.0))
                self.begins_anew = tuple(dict.fromkeys(name for one in orders for name in one.begin_anew or ()))
                return newest[0]
        raise SnapshotPostponed("its ranks did not reach one boundary together")

    async def beside_image(self, operation: str, generation: int, bad: Sequence[int]) -> BesideImage:
        """Return the slot and the number of a snapshot that all processes take where they are parked for an image."""
        records = await self._slots.read()
        number = max([generation, *(one.generation + 1 for one in records.values() if one is not None)])
        return BesideImage(operation, await self._next_slot(self._job.record.ranks, bad), number)

    async def slot_of(self, worker: AgentConnection, beside: BesideImage) -> tuple[int, int] | None:
        """Return that slot of a process, and the number; None without memory for its state."""
        rank = worker.about.rank or 0 if self._job.record.launched else 0
        size_bytes = self._sizes.get(rank)
        if size_bytes is None:
            return None
        source = Source(worker.identity.uid, worker.identity.start_ticks)
        try:
            return (await self._slots.take(rank, beside.slot, size_bytes, source)).fd, beside.generation
        except HegmError as error:
            logger.debug("%s: no snapshot beside its image: %s", self._job, error.message)
            return None

    async def _next_slot(self, ranks: int, bad: Sequence[int]) -> int:
        """The slot that does not have the newest snapshot that can be started from."""
        records = await self._slots.read()
        newest = complete_generations(by_rank(records), ranks, bad)
        if not newest:
            return 0
        held = next(slot for slot in range(SLOTS) if _has(records.get((0, slot)), newest[0]))
        return (held + 1) % SLOTS

    async def _round(self, ranks: Sequence[AgentConnection], slot: int, generation: int) -> list[AgentReport] | None:
        """One snapshot of each rank; None if another round is worthwhile. Raises SnapshotPostponed, Unprotected."""
        where: dict[str, Any] = {}
        if len(ranks) > 1:
            await self._job.count(ranks)
            where = {"at": max(worker.boundary for worker in ranks) + self._ahead, "exact": True}
        began = self._clock()
        reports: dict[int, AgentReport] = {}
        failed: list[Exception] = []

        async def one(rank: int, worker: AgentConnection) -> None:
            try:
                reports[rank] = await self._order(rank, worker, slot, generation, where)
            except (HegmError, Unprotected) as error:
                failed.append(error)
                if not _is_short(error):  # of each rank the size is told
                    tasks.cancel_scope.cancel()  # the others give theirs up for the next round's

        async with anyio.create_task_group() as tasks:
            for rank, worker in enumerate(ranks):
                tasks.start_soon(one, rank, worker)
        if not failed:
            taken_s = max((one.parked_s or 0.0) + (one.copied_s or 0.0) for one in reports.values())
            self._come_nearer(self._clock() - began - taken_s)
            return [reports[rank] for rank in range(len(ranks))]
        first = next((error for error in failed if not _is_short(error)), failed[0])
        if isinstance(first, Unprotected):
            raise first
        if isinstance(first, OrderFailed) and first.refusals:
            what, _, hint = first.refusals[0].partition("; ")
            raise Unprotected(what, hint or "see docs/restarts.md for what can be saved")
        is_late = "at" in where and any(worker.boundary >= where["at"] for worker in ranks)
        if is_late and self._ahead < MAX_AHEAD:
            self._ahead *= 2
        elif not _is_short(first):
            self._come_nearer(self._clock() - began)
            raise SnapshotPostponed(str(first))
        return None

    def _come_nearer(self, waited_s: float) -> None:
        """Have the next boundary nearer if the ranks took so long to reach this one that it was too far ahead."""
        if waited_s > LONG_S:
            self._ahead = max(FIRST_AHEAD, self._ahead // 2)

    async def _order(
        self, rank: int, worker: AgentConnection, slot: int, generation: int, where: Mapping[str, Any]
    ) -> AgentReport:
        size_bytes = self._sizes.get(rank)
        fds: list[int] = []
        if size_bytes is not None:
            source = Source(worker.identity.uid, worker.identity.start_ticks)
            try:
                fds = [(await self._slots.take(rank, slot, size_bytes, source)).fd]
            except Refused as error:
                raise Unprotected(error.message, error.hint) from error
        try:
            return await worker.order("snapshot", fds=fds, generation=generation, limit_s=LIMIT_S, **where)
        except OrderFailed as error:
            if error.state_bytes is not None:
                self._sizes[rank] = error.state_bytes
            raise


def _is_short(error: Exception) -> bool:
    """Return True if only the slot was too small."""
    return isinstance(error, OrderFailed) and error.state_bytes is not None


def _has(record: SlotRecord | None, newest: SlotRecord) -> bool:
    return record is not None and record.generation == newest.generation
