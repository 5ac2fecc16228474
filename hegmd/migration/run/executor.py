"""Performs one effect and returns the event that ends it: the path from operations to workers, methods, carriers.

One function for each effect, named after it. Effects on bytes and GPUs are here; agent orders and images are in other
modules of this package. A missing function is a bug, not a failure. Decides nothing: the machine interprets the event,
and the operation names the worker's method and carrier. Every function may be called twice and then finds its work
done.

Longer than 400 lines because each effect on bytes and GPUs has its function here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

import anyio

from hegmd.errors import INTERNAL, Bug, HegmError, Refused
from hegmd.memory.sizes import rounds_of
from hegmd.migration.contracts import (
    Carrier,
    DriverOutOfMemory,
    GrewBeyondPlan,
    Method,
    MigratedProcess,
    OutOfMemory,
    OverlappedCopy,
    ProcessState,
    Progress,
    ReplacedBy,
    TrainingFinished,
)
from hegmd.migration.machine import effects, events
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import RESTART, SIMULATED, Operation
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.methods.progress_probe import is_ending, is_stopped
from hegmd.migration.plan.throughput import IN, OUT, Throughputs
from hegmd.migration.run.agent_effects import SURVEY_LIMIT_S, AgentEffects
from hegmd.migration.run.image_effects import ImageEffects
from hegmd.migration.run.image_service import Imager
from hegmd.migration.run.participants import Participants, SlotFor, no_slot
from hegmd.protocol.operations import BY_DRIVER, KEEP_CONTEXT
from hegmd.system.resource_errors import scarcity
from hegmd.telemetry.log import error_ref, fields
from hegmd.workers.workers import AgentAway, OrderFailed, Workers

logger = logging.getLogger(__name__)


class EffectExecutor:
    """Performs the effects of operations."""

    def __init__(
        self,
        workers: Workers,
        methods: Mapping[str, Method],
        carriers: Mapping[str, Carrier],
        *,
        start_ticks: Callable[[int], int | None],
        imager: Imager | None = None,
        paces: Throughputs | None = None,
        slot_for: SlotFor = no_slot,
    ) -> None:
        self._cast = Participants(workers, methods, carriers, start_ticks=start_ticks, imager=imager, slot_for=slot_for)
        #: How fast bytes went, for the next estimate.
        self.paces = Throughputs() if paces is None else paces
        agents, images = AgentEffects(self._cast), ImageEffects(self._cast)
        self._abandon = images.abandon
        self._do: dict[str, Callable[[Operation, Member, Any, Progress], Awaitable[Event]]] = {
            effects.Reserve.tag: self._reserve,
            effects.ReleaseReservation.tag: self._release_reservation,
            effects.ReservePool.tag: self._reserve_pool,
            effects.ReleasePool.tag: self._release_pool,
            effects.AwaitSuccessor.tag: self._await_successor,
            effects.Survey.tag: agents.survey,
            effects.Park.tag: agents.park,
            effects.Withdraw.tag: agents.withdraw,
            effects.Disconnect.tag: agents.disconnect,
            effects.Offload.tag: self._offload,
            effects.LockRank.tag: self._lock,
            effects.UnlockRank.tag: self._unlock,
            effects.Checkpoint.tag: self._checkpoint,
            effects.Hold.tag: self._hold,
            effects.Dump.tag: images.dump,
            effects.Seal.tag: images.seal,
            effects.RemoveImageFiles.tag: images.scrap,
            effects.End.tag: images.end,
            effects.Restore.tag: self._restore,
            effects.Reload.tag: self._reload,
            effects.Reconnect.tag: agents.reconnect,
            effects.Release.tag: agents.release,
            effects.Verify.tag: agents.verify,
            effects.Inspect.tag: self._inspect,
        }

    def is_alive(self, member: Member) -> bool:
        return self._cast.is_alive(member)

    def connection(self, member: Member) -> int | None:
        """Return the number of its agent's connection; None while there is none."""
        return self._cast.connection(member)

    def stopped(self, op: Operation) -> tuple[int, ...]:
        """Return its processes that a signal or a debugger has stopped: the driver makes no progress in them."""
        return tuple([member.pid for member in op.live if is_stopped(member.pid) and self._is_there(member)])

    def ending(self, op: Operation) -> tuple[int, ...]:
        """Return those of its processes that are about to exit: their agents will not reconnect."""
        return tuple([member.pid for member in op.live if member.waits is not None and is_ending(member.pid)])

    def _is_there(self, member: Member) -> bool:
        try:
            return self._cast.is_alive(member)
        except HegmError:  # it cannot be seen now
            return False

    def as_held(self, op: Operation) -> Operation:
        """Return the operation with the reservations and the pool memory that the daemon holds for it now.

        The operation itself has the figures from its journal, which is updated after each step.
        """
        return op.replace(workers=tuple([self._as_held(op, member) for member in op.workers]))

    def _as_held(self, op: Operation, member: Member) -> Member:
        method, carrier = self._cast.methods.get(member.method), self._cast.carriers.get(member.carrier)
        if method is None or carrier is None or member.has_exited:
            return member
        subject = self._cast.subject(op, member)
        return member.replace(reservations=method.reservations(subject), pool_bytes=carrier.held_bytes(subject))

    async def perform(self, op: Operation, effect: Effect, on_progress: Progress, heard: int | None) -> Event:
        """Perform the effect and return the event that ends it. Raises only cancellation, which leaves the effect to
        `inspect`.

        `heard` is the number of the connection that the operation uses. Only `inspect` uses another: what happened to
        the worker since is unknown.
        """
        member = op.worker(effect.worker)
        try:
            if member is None:
                raise Bug(f"operation {op.id} has no worker {effect.worker}")
            if effect.in_worker or member.has_exited:
                await self._abandon(op, member)
            is_order = effect.in_worker and member.has_agent and not isinstance(effect, effects.Inspect)
            # A successor that is being started has no connection yet: that says nothing about the process that left.
            is_order = is_order and not (member.is_absent and isinstance(effect, effects.Restore))
            if is_order and self._cast.connection(member) != heard:
                raise AgentAway(member.pid, f"it was not inspected yet, so hegmd does not order it to {effect.tag}")
            return await self._do[effect.tag](op, member, effect, on_progress)
        except HegmError as error:
            if error.code is INTERNAL:
                logger.error("operation %s: %s failed", op.id, effect.tag, exc_info=error)
            return self._failed(effect, error)
        except Exception as unexpected:  # the edge at which whatever happens becomes an event
            if (scarce := scarcity(unexpected)) is not None:
                return self._failed(effect, scarce)
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
        elif isinstance(error, DriverOutOfMemory):
            fault = events.DRIVER_OUT_OF_MEMORY
        elif isinstance(error, OutOfMemory) or (isinstance(error, OrderFailed) and error.lacks_bytes is not None):
            fault = events.OUT_OF_MEMORY
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

    # -- GPU memory and pool -------------------------------------------------------------------------------------------

    async def _reserve(self, op: Operation, member: Member, effect: effects.Reserve, tell: Progress) -> Event:
        """For bytes that are out the carrier is made ready too: what that takes has to be there before a restore."""
        subject = self._cast.subject(op, member)
        await self._cast.method(member).reserve(subject, effect.gpu, effect.size_bytes)
        if member.offloaded and not member.gpu_unknown:  # otherwise the GPU to copy to is not known yet
            await self._cast.carrier(member).fetch(subject, tell)
            began = anyio.current_time()
            await self._cast.carrier(member).prepare(subject)
            self.paces.note_arming(member.carrier, anyio.current_time() - began)
        return events.Reserved(**effect.ending())

    async def prepare_ahead(self, op: Operation, member: Member) -> None:
        """Prepare the copies of a process about to resume, if it kept its contexts and so stays. Raises HegmError."""
        if member.offloaded and member.keeps_context and not member.gpu_unknown:
            subject = replace(self._cast.subject(op, member), target_gpu=member.previous_gpu)
            await self._cast.carrier(member).prepare(subject)

    async def undo_preparation(self, op: Operation, member: Member) -> None:
        """Give up what was prepared ahead."""
        await self._cast.carrier(member).abandon(self._cast.subject(op, member))

    async def _release_reservation(
        self, op: Operation, member: Member, effect: effects.ReleaseReservation, _: Progress
    ) -> Event:
        subject = self._cast.subject(op, member)
        if member.target_gpu is None:
            await self._cast.carrier(member).abandon(subject)
        await self._cast.method(member).release(subject, effect.gpu)
        return events.ReservationReleased(**effect.ending())

    async def _reserve_pool(self, op: Operation, member: Member, effect: effects.ReservePool, _: Progress) -> Event:
        await self._cast.carrier(member).reserve(self._cast.subject(op, member), effect.size_bytes)
        return events.PoolReserved(**effect.ending())

    async def _release_pool(self, op: Operation, member: Member, effect: effects.ReleasePool, _: Progress) -> Event:
        await self._cast.carrier(member).release(self._cast.subject(op, member))
        return events.PoolReleased(**effect.ending())

    async def _await_successor(
        self, op: Operation, member: Member, effect: effects.AwaitSuccessor, tell: Progress
    ) -> Event:
        is_ready = await self._cast.carrier(member).await_successor(self._cast.subject(op, member), tell)
        return events.SuccessorAwaited(**effect.ending(), ready=is_ready)

    def doing(self, op: Operation) -> str | None:
        """Return what the operation waits for now, in words that change while the wait lasts, or None."""
        carriers = [(self._cast.carriers.get(member.carrier), member) for member in op.live]
        progress = [
            carrier.doing(self._cast.subject(op, member)) for carrier, member in carriers if carrier is not None
        ]
        return next(filter(None, progress), None)

    async def _offload(self, op: Operation, member: Member, effect: effects.Offload, tell: Progress) -> Event:
        worker = self._cast.worker(member)
        if worker.held_bytes:
            return events.Offloaded(**effect.ending(), size_bytes=worker.held_bytes)
        began = anyio.current_time()
        subject, carrier = self._cast.subject(op, member), self._cast.carrier(member)
        size_bytes = await carrier.offload(subject, tell)
        if not carrier.is_staged(subject):
            self._note_pace(member, member.carrier, OUT, size_bytes, began)
        return events.Offloaded(**effect.ending(), size_bytes=size_bytes)

    async def _lock(self, op: Operation, member: Member, effect: effects.LockRank, _: Progress) -> Event:
        try:
            await self._cast.method(member).lock(self._cast.subject(op, member))
        except GrewBeyondPlan as more:
            return _grown(effect, more)
        return events.Locked(**effect.ending())

    async def _unlock(self, op: Operation, member: Member, effect: effects.UnlockRank, _: Progress) -> Event:
        await self._cast.method(member).unlock(self._cast.subject(op, member))
        return events.Unlocked(**effect.ending())

    async def _checkpoint(self, op: Operation, member: Member, effect: effects.Checkpoint, _: Progress) -> Event:
        """It has ended when the bytes that are out are where they may stay, too."""
        subject, began = self._cast.subject(op, member), anyio.current_time()
        try:
            async with self._settling(member, subject) as passed:
                left = await self._cast.method(member).checkpoint(subject)
                took_s = anyio.current_time() - began
        except GrewBeyondPlan as more:
            return _grown(effect, more)
        self._note_step(member, OUT, left.driver_bytes or 0, took_s, passed)
        return events.Checkpointed(
            **effect.ending(),
            reserved_bytes=left.reserved_bytes,
            driver_bytes=left.driver_bytes,
            driver_bytes_by_gpu=left.driver_bytes_by_gpu,
            stays_bytes=left.stays_bytes,
        )

    async def _hold(self, op: Operation, _: Member, effect: effects.Hold, __: Progress) -> Event:
        """Never beyond the instant that the request itself allowed, however often a daemon is started meanwhile."""
        last_utc = op.created_utc + op.limits.park_s + op.limits.hold_s
        await anyio.sleep(max(0.0, min(op.limits.hold_s, last_utc - time.time())))
        return events.Held(**effect.ending())

    async def _restore(self, op: Operation, member: Member, effect: effects.Restore, tell: Progress) -> Event:
        subject = self._cast.subject(op, member)
        if member.offloaded:
            await self._cast.carrier(member).fetch(subject, tell)  # a failure here has changed nothing
        began, is_near = anyio.current_time(), False
        try:
            async with (
                self._cast.carrier(member).overlap_restore(subject)
                if member.offloaded
                else nullcontext(OverlappedCopy()) as ahead
            ):
                is_near = member.offloaded and self._cast.carrier(member).staged(subject) is not None
                landed = await self._cast.method(member).restore(subject, effect.gpu)
                took_s = anyio.current_time() - began
        except OutOfMemory as error:
            if not is_near:
                raise
            logger.warning("the staging copy for process %d is dropped to free memory: %s", member.pid, error.message)
            began, ahead = anyio.current_time(), OverlappedCopy()
            landed = await self._restore_anew(member, subject, effect.gpu)
            took_s = anyio.current_time() - began
        if isinstance(landed, TrainingFinished):
            return events.TrainingEnded(worker=effect.worker, cause=effect.tag)
        if isinstance(landed, ReplacedBy):
            return events.Restored(
                **effect.ending(),
                landed=landed.gpu,
                pid=landed.pid,
                start_ticks=landed.start_ticks,
                token=landed.token,
                run=landed.run,
                boundary=landed.boundary,
                is_earlier=landed.is_earlier,
            )
        if not member.gpu_unknown:  # otherwise driver_bytes is only an upper bound
            self._note_step(member, IN, member.driver_bytes, took_s, ahead)
        return events.Restored(**effect.ending(), landed=landed)

    async def _restore_anew(
        self, member: Member, subject: MigratedProcess, gpu: str
    ) -> str | ReplacedBy | TrainingFinished | None:
        """Reserve memory again, prepare the carrier and restore the worker."""
        await self._cast.method(member).reserve(subject, gpu, member.reservation_bytes)
        await self._cast.carrier(member).prepare(subject)
        return await self._cast.method(member).restore(subject, gpu)

    async def _reload(self, op: Operation, member: Member, effect: effects.Reload, tell: Progress) -> Event:
        if self._cast.worker(member).held_bytes:
            subject, carrier = self._cast.subject(op, member), self._cast.carrier(member)
            await carrier.fetch(subject, tell)
            began, staged = anyio.current_time(), carrier.staged(subject)
            size_bytes = await carrier.reload(
                subject, tell, lambda: self._cast.method(member).storage_allocation(subject)
            )
            if staged is not None:
                self.paces.note_overlapped(member.carrier, IN, staged.size_bytes, staged.took_s)
            else:
                rounds = rounds_of(size_bytes, member.overlap_bytes)
                self._note_pace(member, member.carrier, IN, size_bytes, began, rounds)
        return events.Reloaded(**effect.ending())

    async def _inspect(self, op: Operation, member: Member, effect: effects.Inspect, _: Progress) -> Event:
        subject = self._cast.subject(op, member)
        if not self._cast.is_alive(member):
            is_stateless = (
                member.state_saved and not member.verified and not self._cast.carrier(member).held_bytes(subject)
            )
            why = "it has ended"
            return events.WorkerExited(worker=member.name, cause=effect.tag, why=why, stateless=is_stateless)
        if not member.has_agent:
            state = await self._cast.method(member).inspect(subject)
            return self._inspected(effect, member, subject, state)
        known = self._cast.find(member.pid)
        if known is not None and known.token != member.token:  # the agent that is waited for will never come
            return events.WorkerExited(worker=member.name, cause=effect.tag, why="it runs another program")
        worker = self._cast.worker(member)
        state = await self._cast.method(member).inspect(subject)
        if worker.held_bytes and state.gpu is None and not state.busy:
            await self._settle(member, subject)
        is_parked = worker.parked or worker.held_bytes > 0
        if not worker.busy and not is_parked and not state.busy:
            await worker.order("survey", limit_s=SURVEY_LIMIT_S)
        if not (worker.parked or worker.held_bytes) and member.start_count and worker.boundary > (member.boundary or 0):
            await self._cast.method(member).note_resumed(subject)
        return self._inspected(effect, member, subject, state)

    def _inspected(
        self, effect: effects.Inspect, member: Member, subject: MigratedProcess, state: ProcessState
    ) -> Event:
        worker = subject.worker if member.has_agent else None
        return events.Inspected(
            **effect.ending(),
            parked=worker is not None and (worker.parked or worker.held_bytes > 0),
            boundary=0 if worker is None else worker.boundary,
            out_bytes=0 if worker is None else worker.held_bytes,
            gpu=state.gpu,
            reservations=self._cast.method(member).reservations(replace(subject, gpu=state.gpu)),
            pool_bytes=self._cast.carrier(member).held_bytes(subject),
            busy=state.busy or (worker is not None and worker.busy),
            failed=state.failed,
            locked=state.locked,
        )

    def _settling(self, member: Member, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        return (
            self._cast.carrier(member).overlap_checkpoint(subject)
            if member.offloaded
            else nullcontext(OverlappedCopy())
        )

    async def _settle(self, member: Member, subject: MigratedProcess) -> None:
        """Finish a copy that an earlier caller interrupted. Bytes that stay where they are can be reloaded."""
        carrier = self._cast.carrier(member)
        try:
            async with carrier.overlap_checkpoint(subject):
                pass
            if (
                member.target_gpu is None
            ):  # also where nothing was left to copy: memory that it passed through may be held
                await carrier.abandon(subject)
        except HegmError as error:
            logger.warning("the bytes of process %d stay where they are for now: %s", member.pid, error.message)

    def _note_step(
        self, member: Member, direction: str, driver_bytes: int, took_s: float, copied: OverlappedCopy
    ) -> None:
        """A step of the driver, and the copy beside it. A step with a copy tells nothing about steps without."""
        if member.method in (SIMULATED, RESTART, KEEP_CONTEXT):
            return
        if copied.size_bytes:
            self.paces.note_overlapped(member.carrier, direction, copied.size_bytes, copied.took_s)
        else:
            self.paces.note(BY_DRIVER, direction, driver_bytes, took_s)

    def _note_pace(
        self, member: Member, carrier: str, direction: str, size_bytes: int, began: float, rounds: int = 1
    ) -> None:
        if member.method not in (SIMULATED, RESTART):
            self.paces.note(carrier, direction, size_bytes, anyio.current_time() - began, rounds)


def _grown(effect: Effect, more: GrewBeyondPlan) -> Event:
    """Return the event for a process that exceeded the plan: it was not changed, and its need is journalled first."""
    return events.GrewBeyondPlan(
        **effect.ending(), driver_bytes=more.driver_bytes, driver_bytes_by_gpu=more.driver_bytes_by_gpu
    )
