"""Effects that are orders to an agent: survey, park, withdraw, release, verify.

Owns the time limit of each order and the meaning of a missing answer. A boundary passed after the move is what proves
that it succeeded. `executor` calls one function for each effect.
"""

from __future__ import annotations

from typing import Any

import anyio

from hegmd.errors import TIMEOUT, HegmError, Refused
from hegmd.migration.contracts import Progress
from hegmd.migration.machine import effects, events
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import CHECKPOINT, RESTORE, SIMULATED, Operation
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.run.participants import Participants
from hegmd.protocol.messages import AgentReport
from hegmd.protocol.operations import BY_DRIVER
from hegmd.workers.workers import AgentConnection, OrderFailed, SentOrder

# The agent answers a survey at its next boundary; without a boundary in this time it reports only its count.
SURVEY_LIMIT_S = 5.0
AGENT_SHARE = 0.9


class AgentEffects:
    """Sends orders to agents, and turns their reports into events."""

    def __init__(self, cast: Participants) -> None:
        self._cast = cast
        self._released: dict[tuple[int, int], SentOrder] = {}

    async def survey(self, op: Operation, member: Member, effect: effects.Survey, _: Progress) -> Event:
        worker = self._cast.worker(member)
        if member.restarts and member.is_parked:
            size_bytes = await _weighed(worker)
            return events.Surveyed(**effect.ending(), boundary=worker.boundary, size_bytes=size_bytes)
        if not member.is_parked:  # only its boundaries count, and its bytes once it is parked
            await _answered(worker, "count", op.limits.park_s)
            return events.Surveyed(**effect.ending(), boundary=worker.boundary, size_bytes=member.size_bytes)
        report = await _answered(worker, "survey", 0.0)
        size_bytes = member.size_bytes if report.size_bytes is None else report.size_bytes
        had_bytes = member.reservations.get(member.gpu, 0) if member.gpu is not None else 0
        self._cast.method(member).note_size(self._cast.subject(op, member), max(size_bytes, had_bytes))
        return events.Surveyed(**effect.ending(), boundary=worker.boundary, size_bytes=size_bytes)

    async def park(self, op: Operation, member: Member, effect: effects.Park, _: Progress) -> Event:
        worker = self._cast.worker(member)
        if effect.at is not None and worker.parked and worker.boundary > effect.at:
            return events.PassedBoundary(**effect.ending(), boundary=worker.boundary)
        # The agent's limit passes first, so that it withdraws by itself and reports what it waited for.
        limit_s = effect.limit_s * AGENT_SHARE
        began = anyio.current_time()
        exact = effect.at is not None
        if exact:
            worker.parked = False  # an agent parked at an earlier boundary runs on to this one
        slot = await self._cast.slot_for(op.id, worker) if op.kind == CHECKPOINT and not worker.parked else None
        snapshot: dict[str, Any] = {} if slot is None else {"fds": [slot[0]], "generation": slot[1]}
        try:
            max_park_s, leaving = op.limits.max_park_s, member.restarts
            report = await worker.order(
                "park", at=effect.at, limit_s=limit_s, exact=exact, leaving=leaving, max_park_s=max_park_s, **snapshot
            )
        except OrderFailed as error:
            if effect.at is not None and worker.boundary >= effect.at and not error.refusals:
                why = error.message if error.parked_s else ""
                return events.PassedBoundary(
                    **effect.ending(), boundary=worker.boundary, parked_s=error.parked_s, why=why
                )
            is_late = anyio.current_time() - began >= limit_s
            return events.Failed(
                **effect.ending(),
                fault=events.BROKEN,
                code=TIMEOUT.name if is_late else error.code.name,
                message=error.message,
                hint=error.hint,
                parked_s=error.parked_s,
            )
        return events.Parked(**effect.ending(), boundary=worker.boundary, parked_s=report.parked_s or 0.0)

    async def withdraw(self, op: Operation, member: Member, effect: effects.Withdraw, _: Progress) -> Event:
        report = await self._cast.worker(member).order("withdraw")
        return events.Withdrawn(**effect.ending(), parked_s=report.parked_s or 0.0)

    async def disconnect(self, op: Operation, member: Member, effect: effects.Disconnect, _: Progress) -> Event:
        await self._cast.worker(member).order("disconnect", limit_s=effect.limit_s, abort=effect.abort)
        return events.Disconnected(**effect.ending())

    async def reconnect(self, op: Operation, member: Member, effect: effects.Reconnect, _: Progress) -> Event:
        await self._cast.worker(member).order("reconnect", limit_s=effect.limit_s, generation=effect.generation)
        return events.Reconnected(**effect.ending())

    async def release(self, op: Operation, member: Member, effect: effects.Release, _: Progress) -> Event:
        worker = self._cast.worker(member)
        has_returned = member.previous_gpu is not None or op.kind == RESTORE  # an image of another node names no GPU
        by_driver = has_returned and member.method == BY_DRIVER
        restored = has_returned and member.method != SIMULATED and member.carrier == BY_DRIVER
        worker.driver_restored = worker.driver_restored or by_driver
        self._released[_who(member)] = await worker.give(
            "release", restored=restored, by_driver=by_driver, abort=effect.abort
        )
        worker.parked = False
        return events.Released(**effect.ending())

    async def verify(self, op: Operation, member: Member, effect: effects.Verify, _: Progress) -> Event:
        subject = self._cast.subject(op, member)
        try:
            await self._cast.method(member).verify(subject)
        finally:  # resume it even if the verification failed
            await self._cast.carrier(member).resumed(subject)
        if not member.has_agent:
            return events.Verified(**effect.ending(), boundary=effect.beyond)
        worker = self._cast.worker(member)
        released = self._released.pop(_who(member), None)
        if released is not None:
            await released.report()
        while worker.boundary <= effect.beyond:
            await worker.order("survey", limit_s=SURVEY_LIMIT_S)  # comes back at a boundary, or at its limit
        if member.start_count:
            await self._cast.method(member).note_resumed(subject)
        return events.Verified(**effect.ending(), boundary=worker.boundary)


async def _answered(worker: AgentConnection, do: str, limit_s: float) -> AgentReport:
    """Ask a worker, again and again until that limit if its agent does not answer: its node may be busy, or it is
    stopped by a signal. Raises what `order` raises.
    """
    until = anyio.current_time() + limit_s
    while True:
        try:
            return await worker.order(do, limit_s=SURVEY_LIMIT_S)
        except HegmError as error:
            if error.code is not TIMEOUT or anyio.current_time() >= until:
                raise


async def _weighed(worker: AgentConnection) -> int:
    """Return the size of the state that a restart of a parked worker would save. Raises Refused for what is lost."""
    report = await worker.order("weigh")
    if report.refusals or report.state_bytes is None:
        why = "\n".join(report.refusals) or "its agent does not report the size of its state"
        raise Refused(
            f"process {worker.pid} cannot be restarted: {why}",
            "declare its state in the script with hegm.keep or hegm.resumable",
        )
    return report.state_bytes


def _who(member: Member) -> tuple[int, int]:
    return member.pid, member.start_ticks
