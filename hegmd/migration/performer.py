"""Performs one effect and says how it ended: the only place where operations touch workers, rooms and the pool.

One method for each effect, by its name; a name that is missing here is a bug and not a failure. Decides nothing: what
an ending means is the machine's. Each may be asked for twice and finds its work done the second time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from hegmd.errors import INTERNAL, TIMEOUT, Bug, HegmError, Refused
from hegmd.log import error_ref, fields
from hegmd.methods import worker as carrier
from hegmd.migration import effects, events
from hegmd.migration.effects import Effect
from hegmd.migration.events import Event
from hegmd.migration.operation import Operation
from hegmd.migration.operation import Worker as Member
from hegmd.pool import Key, Memory, Pool
from hegmd.rooms import Rooms
from hegmd.workers import AgentAway, Given, OrderFailed, Worker, Workers

logger = logging.getLogger(__name__)

Progress = Callable[[int], object]

# The agent answers a survey at its next boundary; without one in this time it tells its count alone.
SURVEY_LIMIT_S = 5.0
AGENT_SHARE = 0.9


class Performer:
    """The hands of the operations."""

    def __init__(
        self,
        workers: Workers,
        rooms: Rooms,
        pool: Pool,
        *,
        start_ticks: Callable[[int], int | None],
    ) -> None:
        self._workers = workers
        self._rooms = rooms
        self._pool = pool
        self._start_ticks = start_ticks
        self._released: dict[tuple[int, int], Given] = {}
        self._do: dict[str, Callable[[Operation, Member, Any, Progress], Awaitable[Event]]] = {
            effects.TakeRoom.tag: self._take_room,
            effects.GiveRoom.tag: self._give_room,
            effects.TakePool.tag: self._take_pool,
            effects.GivePool.tag: self._give_pool,
            effects.Survey.tag: self._survey,
            effects.Park.tag: self._park,
            effects.Withdraw.tag: self._withdraw,
            effects.Evacuate.tag: self._evacuate,
            effects.Checkpoint.tag: self._checkpoint,
            effects.Restore.tag: self._restore,
            effects.Refill.tag: self._refill,
            effects.Release.tag: self._release,
            effects.Verify.tag: self._verify,
            effects.Inspect.tag: self._inspect,
        }

    async def perform(self, op: Operation, effect: Effect, on_progress: Progress) -> Event:
        """The event that ends the effect. Raises nothing but cancellation, which leaves the effect to `inspect`."""
        member = op.worker(effect.worker)
        try:
            if member is None:
                raise Bug(f"operation {op.id} has no worker {effect.worker}")
            return await self._do[effect.tag](op, member, effect, on_progress)
        except HegmError as error:
            if error.code is INTERNAL:
                logger.error("operation %s: %s failed", op.id, effect.tag, exc_info=error)
            return self._failed(effect, error)
        except Exception as unexpected:  # the edge at which whatever happens becomes an event
            reference = error_ref()
            logger.error(
                "operation %s: %s failed [%s]",
                op.id,
                effect.tag,
                reference,
                exc_info=unexpected,
                extra=fields(error_ref=reference),
            )
            message = f"{effect.tag} failed inside hegmd: {type(unexpected).__name__} [{reference}]"
            hint = f"report it with what `journalctl -u hegmd | grep -A30 {reference}` shows"
            return self._failed(effect, HegmError(INTERNAL, message, hint))

    def _failed(self, effect: Effect, error: HegmError) -> Event:
        fault = events.BROKEN
        if isinstance(error, AgentAway):
            fault = events.DISCONNECTED
        elif isinstance(error, Refused):
            fault = events.REFUSED
        return events.Failed(
            effect=effect.number,
            worker=effect.worker,
            cause=effect.tag,
            fault=fault,
            code=error.code.name,
            message=error.message,
            hint=error.hint,
        )

    # -- room and pool -------------------------------------------------------------------------------------------------

    async def _take_room(self, op: Operation, member: Member, effect: effects.TakeRoom, _: Progress) -> Event:
        self._rooms.hold(_who(member), effect.gpu, effect.size_bytes)
        return events.RoomTaken(**_ends(effect))

    async def _give_room(self, op: Operation, member: Member, effect: effects.GiveRoom, _: Progress) -> Event:
        self._rooms.give(_who(member), effect.gpu)
        return events.RoomGiven(**_ends(effect))

    async def _take_pool(self, op: Operation, member: Member, effect: effects.TakePool, _: Progress) -> Event:
        await self._pool.take(_key(op, member), effect.size_bytes)
        return events.PoolTaken(**_ends(effect))

    async def _give_pool(self, op: Operation, member: Member, effect: effects.GivePool, _: Progress) -> Event:
        await self._pool.give(_key(op, member))
        return events.PoolGiven(**_ends(effect))

    # -- orders --------------------------------------------------------------------------------------------------------

    async def _survey(self, op: Operation, member: Member, effect: effects.Survey, _: Progress) -> Event:
        worker = self._worker(member)
        report = await worker.order("survey", limit_s=SURVEY_LIMIT_S)
        size_bytes = member.size_bytes if report.size_bytes is None else report.size_bytes
        if worker.gpu is not None:
            self._rooms.hold_what_fits(_who(member), worker.gpu, max(size_bytes, member.rooms.get(worker.gpu, 0)))
        return events.Surveyed(**_ends(effect), boundary=worker.boundary, size_bytes=size_bytes)

    async def _park(self, op: Operation, member: Member, effect: effects.Park, _: Progress) -> Event:
        worker = self._worker(member)
        if effect.at is not None and worker.parked and worker.boundary > effect.at:
            return events.Overran(**_ends(effect), boundary=worker.boundary)
        # The agent's limit is the first to pass, so that it withdraws by itself and says what it has waited for.
        limit_s = effect.limit_s * AGENT_SHARE
        began = anyio.current_time()
        exact = effect.at is not None
        if exact:
            worker.parked = False  # one that stands at an earlier boundary goes on to this one
        try:
            await worker.order("park", at=effect.at, limit_s=limit_s, exact=exact)
        except OrderFailed as error:
            if effect.at is not None and worker.boundary >= effect.at:
                return events.Overran(**_ends(effect), boundary=worker.boundary)
            if anyio.current_time() - began < limit_s:
                raise
            raise HegmError(TIMEOUT, error.message, error.hint, error.facts) from error
        return events.Parked(**_ends(effect), boundary=worker.boundary)

    async def _withdraw(self, op: Operation, member: Member, effect: effects.Withdraw, _: Progress) -> Event:
        await self._worker(member).order("withdraw")
        return events.Withdrawn(**_ends(effect))

    async def _evacuate(self, op: Operation, member: Member, effect: effects.Evacuate, tell: Progress) -> Event:
        worker = self._worker(member)
        if worker.held_bytes:
            return events.Evacuated(**_ends(effect), size_bytes=worker.held_bytes)
        size_bytes = await carrier.take_out(worker, await self._pool.to_fill(_key(op, member)), tell)
        return events.Evacuated(**_ends(effect), size_bytes=size_bytes)

    async def _checkpoint(self, op: Operation, member: Member, effect: effects.Checkpoint, _: Progress) -> Event:
        self._worker(member).gpu = None  # nothing of it is left on a simulated GPU; the room there stays held
        return events.Checkpointed(**_ends(effect))

    async def _restore(self, op: Operation, member: Member, effect: effects.Restore, tell: Progress) -> Event:
        await self._pool.fetch(_key(op, member), tell)  # bytes that are on disk; one that fails has changed nothing
        self._worker(member).gpu = effect.gpu
        return events.Restored(**_ends(effect))

    async def _refill(self, op: Operation, member: Member, effect: effects.Refill, tell: Progress) -> Event:
        worker = self._worker(member)
        if worker.held_bytes:
            await self._pool.fetch(_key(op, member), tell)
            await carrier.put_back(worker, self._memory(op, member), tell)
        return events.Refilled(**_ends(effect))

    async def _release(self, op: Operation, member: Member, effect: effects.Release, _: Progress) -> Event:
        worker = self._worker(member)
        self._released[_who(member)] = await worker.give("release")
        worker.parked = False
        return events.Released(**_ends(effect))

    async def _verify(self, op: Operation, member: Member, effect: effects.Verify, _: Progress) -> Event:
        worker = self._worker(member)
        released = self._released.pop(_who(member), None)
        if released is not None:
            await released.report()
        while worker.boundary <= effect.beyond:
            await worker.order("survey", limit_s=SURVEY_LIMIT_S)  # comes back at a boundary, or at its limit
        return events.Verified(**_ends(effect), boundary=worker.boundary)

    async def _inspect(self, op: Operation, member: Member, effect: effects.Inspect, _: Progress) -> Event:
        if self._start_ticks(member.pid) != member.start_ticks:
            return events.WorkerGone(worker=member.name, cause=effect.tag, why="it is not there any more")
        worker = self._worker(member)
        standing = worker.parked or worker.held_bytes > 0
        if not worker.busy and not standing:
            await worker.order("survey", limit_s=SURVEY_LIMIT_S)
        return events.Inspected(
            **_ends(effect),
            parked=standing,
            boundary=worker.boundary,
            out_bytes=worker.held_bytes,
            gpu=worker.gpu,
            rooms=self._rooms.of(_who(member)),
            pool_bytes=self._pool.held_for(_key(op, member)),
            busy=worker.busy,
        )

    def _worker(self, member: Member) -> Worker:
        """The handle of that process and program. Raises AgentAway."""
        worker = self._workers.find(member.pid)
        if worker is None or worker.identity.start_ticks != member.start_ticks or worker.token != member.token:
            raise AgentAway(member.pid, "it has not attended since hegmd was started")
        return worker

    def _memory(self, op: Operation, member: Member) -> Memory | None:
        """The worker's piece of the pool; None if it went with an earlier daemon: the agent has its own hold on it."""
        try:
            return self._pool.memory(_key(op, member))
        except Refused:
            return None


def _ends(effect: Effect) -> dict[str, Any]:
    return {"effect": effect.number, "worker": effect.worker, "cause": effect.tag}


def _who(member: Member) -> tuple[int, int]:
    return member.pid, member.start_ticks


def _key(op: Operation, member: Member) -> Key:
    return Key(op.id, member.name)
