"""Requests of several operations in a row: draining a GPU, and swapping two jobs.

Owns their order and the handling of a failed step. The daemon completes a swap even if its client disconnects: half
of it would leave one job suspended, or both on one GPU. If one of two moves fails, the other is undone. If both jobs
go through the pool, they go at the same time, over the links of both GPUs, and come back at the same time. If the
daemon is killed in between, the next one resumes the jobs that are suspended, makes the second of two moves, or else
undoes the first. If its client disconnects, a drain stops after the current job; with `--no-wait` it starts all moves
at once. `sequence_plan` decides the steps, and each step is an ordinary operation. Longer than 400 lines because what
the next daemon continues is here too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from hegmd.errors import NOT_FOUND, REFUSED, Bug, HegmError
from hegmd.migration.machine import events
from hegmd.migration.machine.next_effects import DONE, ROLLED_BACK, SETTLING, SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import MIGRATE, RESUME, SUSPEND, Failure, Limits, Operation
from hegmd.migration.machine.wording import no_such_gpu
from hegmd.migration.model import MigrationPlan, NodeSnapshotForPlan, place_of_all
from hegmd.migration.plan.draft import candidate_of
from hegmd.migration.plan.sequence_plan import at_once, departure, occupants, planned_drain, planned_swap
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.operations.operations import Operations
from hegmd.operations.request_context import OperationResult, RequestContext, plan_or_raise, plan_record, refusal
from hegmd.operations.survey import PlanSurvey
from hegmd.protocol import operations as protocol
from hegmd.protocol.operations import Reason
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.condition import Condition
from hegmd.system.process_ends import until_ended
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import fields

logger = logging.getLogger(__name__)

# A job of a swap that another daemon began is resumed when its agent is back and its GPU is free: after so many seconds
# it is tried again, so often.
RETRY_S, MAX_RETRIES = 2.0, 150
# The first of two moves is undone only if the second is still refused after so many attempts: its agent may be late.
MIN_ATTEMPTS = 3


@dataclass(slots=True, eq=False, repr=False)
class Outcome:
    """The result: the operations, for a dry run the plans, and why jobs were not moved."""

    operations: list[protocol.Operation] = field(default_factory=list[protocol.Operation])
    plans: list[protocol.Plan] = field(default_factory=list[protocol.Plan])
    left: list[Reason] = field(default_factory=list[Reason])


class _Swap:
    """A swap under way: the operations that it has begun, in their order, and what ended it early."""

    def __init__(self, steps: Sequence[MigrationPlan]) -> None:
        self.begun: list[str] = []
        #: The place where each suspended job is resumed, by its process.
        self.places = {_pid(step): step.place for step in steps if step.kind == RESUME}
        #: The second of two moves.
        self.last_move = steps[1] if len(steps) > 1 and all(step.kind == MIGRATE for step in steps) else None
        self.over = False
        self.failure: HegmError | None = None
        self.changed = Condition()


class MultiStepOperations(BackgroundTasks):
    """Carries out drains and swaps. Call `run` before `swap`."""

    def __init__(self, survey: PlanSurvey, operations: Operations, log: EventLog) -> None:
        self._survey = survey
        self._operations = operations
        self._log = log
        #: Waits after a start of the daemon until agents have connected, and calls what it gets if it has to wait.
        #: Sharing sets it.
        self.until_agents_are_back: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]] | None = None
        super().__init__()

    def _on_start(self) -> None:
        for op in self._operations.runner.operations():
            if op.swaps_with and (op.phase == DONE or op.phase not in TERMINAL) and not self._has_successor(op):
                self._open_tasks().start_soon(self._complete_moves, op.id, name=f"rest of the swap of {op.id}")
        halves = [op.id for op in self._operations.runner.under_way() if op.kind == SUSPEND and op.swaps_to is not None]
        for op_id in halves:
            self._open_tasks().start_soon(self._complete, op_id, halves, name=f"rest of the swap of operation {op_id}")

    # -- a GPU that is emptied -----------------------------------------------------------------------------------------

    async def drain(self, gpu: str, to: Sequence[str], context: RequestContext) -> Outcome:
        """Move every job off a GPU. Raises NOT_FOUND for a GPU that is not there.

        Just after a start of the daemon it waits for the agents of jobs, without which these may not be seen there.
        """

        async def tell() -> None:
            why = "agents of jobs have not connected since hegmd was started"
            waits = protocol.Wait(why=why, next="wait some seconds")
            await context.emit(protocol.OperationProgress(id="", phase=SETTLING.phase, waits=waits))

        if self.until_agents_are_back is not None:
            await self.until_agents_are_back(tell)
        snapshot = await self._survey.snapshot_for(gpu, may=context.may)
        _require_targets(snapshot, gpu, to)
        outcome = Outcome()
        if context.dry_run:
            await self._plan_drain(snapshot, gpu, to, context, outcome)
            return outcome
        for number, pid in enumerate(tuple(occupants(snapshot, gpu))):
            if number:  # the job before has taken memory, and time
                snapshot = await self._survey.snapshot([pid], may=context.may)
            try:
                answer = await self._move_off(snapshot, pid, gpu, to, context)
            except HegmError as error:
                outcome.left.append(_reason(error, pid))
            else:
                outcome.operations += _operation(answer)
        return outcome

    async def _move_off(
        self, node: NodeSnapshotForPlan, pid: int, gpu: str, to: Sequence[str], context: RequestContext
    ) -> OperationResult:
        self._operations.check(context, [pid])
        found, node = await self._operations.plan(
            lambda: self._survey.snapshot([pid], may=context.may), lambda node: departure(node, pid, gpu, to), node
        )
        return await self._operations.carry_out(plan_or_raise(found), node, context)

    async def _plan_drain(
        self, snapshot: NodeSnapshotForPlan, gpu: str, to: Sequence[str], context: RequestContext, outcome: Outcome
    ) -> None:
        denied: set[int] = set()
        for pid in tuple(occupants(snapshot, gpu)):
            try:
                self._operations.check(context, [pid])
            except HegmError as error:
                denied.add(pid)
                outcome.left.append(_reason(error, pid))

        def planned(node: NodeSnapshotForPlan) -> tuple[tuple[MigrationPlan, ...], tuple[tuple[Reason, ...], ...]]:
            allowed = tuple(candidate for candidate in node.candidates if candidate.pid not in denied)
            return planned_drain(node.replace(candidates=allowed), gpu, to)

        look = partial(self._survey.snapshot_for, gpu, may=context.may)
        (plans, stays), _ = await self._operations.plan(look, planned, snapshot)
        outcome.plans += [plan_record(plan) for plan in plans]
        outcome.left += [_reason(refusal(reasons), reasons[0].pid) for reasons in stays]

    # -- two jobs that change places -----------------------------------------------------------------------------------

    async def swap(self, first: int, second: int, context: RequestContext) -> Outcome:
        """Let two jobs change places, or two processes of one. Raises HegmError with every reason why not.

        Without `wait` it answers when the first step has begun; the others follow without a request.
        """
        first, second = [await self._operations.named_one(pid) for pid in (first, second)]
        found, snapshot = await self._operations.plan(
            lambda: self._operations.look(context, [first, second]), lambda node: planned_swap(node, first, second)
        )
        steps = _plans_or_raise(found)
        if context.dry_run:
            return Outcome(plans=[plan_record(step) for step in steps])
        tasks = self._open_tasks()
        for step in steps:
            self._operations.check(context, [worker.pid for worker in step.workers])
        exchange = _Swap(steps)
        alone = RequestContext(
            by=context.by, may=context.may, emit=_discard_progress, wait=False, limit_s=context.limit_s
        )
        tasks.start_soon(self._carry_out, exchange, steps, snapshot, alone, name=f"swap of {first} and {second}")
        await self._watch(exchange, context)
        if exchange.failure is not None and not exchange.begun:
            raise exchange.failure
        describe = self._operations.runner.describe
        outcome = Outcome(operations=[describe(op_id) for op_id in dict.fromkeys(exchange.begun)])
        if exchange.failure is not None:
            outcome.left.append(_reason(exchange.failure, second))
        return outcome

    async def _complete(self, op_id: str, halves: Sequence[str]) -> None:
        """Resume a job that a swap of an earlier daemon has suspended: on the other GPU, or else where it was."""
        for half in halves:  # the other job is on its GPU until its own half is complete
            await self._operations.follow(half, _discard_progress)
        context = RequestContext(by="the swap", may=lambda _uid: True, emit=_discard_progress, wait=False)
        refusal_of_last: HegmError | None = None
        for _ in range(MAX_RETRIES):
            for former in (False, True):
                op = self._operations.runner.find(op_id)
                if op is None or op.phase != SUSPENDED or op.swaps_to is None:
                    return  # it has ended, or was resumed
                place = None if former else op.swaps_to
                pid = next(op.live).pid
                try:
                    await self._operations.resume(pid, place, context)
                except HegmError as error:
                    refusal_of_last = error
                else:
                    where = "where it was" if former else f"on {place}"
                    self._report(op_id, "info", f"process {pid} is resumed {where}")
                    return
            await anyio.sleep(RETRY_S)
        if refusal_of_last is not None:
            text = f"operation {op_id} stays suspended: {refusal_of_last.message}; {refusal_of_last.hint}"
            self._report(op_id, "warning", text)

    def _report(self, op_id: str, severity: str, text: str) -> None:
        message = f"hegmd was ended within a swap: {text}"
        self._log.record("operation.swap-interrupted", severity, message, facts={"id": op_id})
        logger.log(logging.WARNING if severity == "warning" else logging.INFO, "%s", message)

    def _has_successor(self, first: Operation) -> bool:
        """Return True if the second move of that swap has begun, or one of its jobs has moved since."""
        keys = {first.swaps_with, *(worker.key for worker in first.workers)}
        known = self._operations.runner.operations()
        later = known[[op.id for op in known].index(first.id) + 1 :]
        return any(worker.key in keys for op in later for worker in op.workers)

    async def _complete_moves(self, op_id: str) -> None:
        """Make the second of two moves after an earlier daemon made the first, or else undo the first."""
        await self._operations.follow(op_id, _discard_progress)
        context = RequestContext(by="the swap", may=lambda _uid: True, emit=_discard_progress)
        first = self._operations.runner.history(op_id).operation
        for attempt in range(MAX_RETRIES):
            if first.phase != DONE or self._has_successor(first):
                return
            (other, ticks), own = first.swaps_with, first.workers[0].pid
            if start_ticks_of(other) != ticks:
                return
            ended = await self._move(other, first.swaps_to, context)
            what = f"process {other} was moved to {first.swaps_to}"
            has_begun = not isinstance(ended, HegmError)
            if not _is_well(ended) and (has_begun or attempt >= MIN_ATTEMPTS):
                origin = place_of_all([worker.origin_gpu for worker in first.workers])
                ended = await self._move(own, origin, context)
                what = f"process {own} was moved back to {origin}"
            if _is_well(ended) or has_begun or attempt == MAX_RETRIES - 1:
                failed = f"process {other} could not be moved, and is on one GPU with {own}; see hegmctl ops"
                self._report(op_id, *(("info", what) if _is_well(ended) else ("warning", failed)))
                return
            await anyio.sleep(RETRY_S)

    async def _move(self, pid: int, to: str | None, context: RequestContext) -> protocol.Operation | HegmError:
        try:
            answer = await self._operations.migrate([pid], to, context)
        except HegmError as error:
            return error
        return _operation(answer)[0]

    async def _watch(self, exchange: _Swap, context: RequestContext) -> None:
        """Report progress until the end, or until it has begun if the client does not wait."""
        reported = 0
        while True:
            if exchange.begun and not context.wait:
                return
            while reported < len(exchange.begun):
                await self._operations.follow(exchange.begun[reported], context.emit)
                reported += 1
            if exchange.over:
                return
            await exchange.changed.wait()

    async def _carry_out(
        self, exchange: _Swap, steps: Sequence[MigrationPlan], snapshot: NodeSnapshotForPlan, context: RequestContext
    ) -> None:
        try:
            async with anyio.create_task_group() as watching:
                for step in steps:
                    watching.start_soon(self._cancel_when_it_ends, exchange, _pid(step))
                try:
                    await self._exchange(exchange, steps, snapshot, context)
                except HegmError as error:
                    exchange.failure = exchange.failure or error
                watching.cancel_scope.cancel()
            if exchange.failure is not None:
                failure = exchange.failure
                logger.warning("a swap is not complete: %s", failure.message, extra=fields(hint=failure.hint))
        finally:
            exchange.over = True
            exchange.changed.notify_all()

    async def _cancel_when_it_ends(self, exchange: _Swap, pid: int) -> None:
        """Wait for the end of that process. Then cancel the step that takes the other job off its GPU."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # it has ended, and its own step is refused
        await until_ended(pidfd)
        message = f"process {pid} has ended, so the jobs cannot change places"
        exchange.failure = HegmError(NOT_FOUND, message, "see its log; hegmctl ops shows the other job")
        for op_id in dict.fromkeys(exchange.begun):
            operation = self._operations.runner.history(op_id).operation
            if operation.kind != RESUME and all(worker.pid != pid for worker in operation.workers):
                with contextlib.suppress(HegmError):  # it is over, or too far to turn back
                    await self._operations.runner.ask(op_id, events.CancelRequested(cause="request", by="the swap"))

    async def _exchange(
        self, exchange: _Swap, steps: Sequence[MigrationPlan], snapshot: NodeSnapshotForPlan, context: RequestContext
    ) -> None:
        """Carry out part after part; if one fails, return the jobs that have left their GPU."""
        waiting: dict[int, MigrationPlan] = {}
        moved: list[MigrationPlan] = []
        current: NodeSnapshotForPlan | None = snapshot  # of the first part
        for part in at_once(steps):
            ended = await self._all_of(exchange, part, current, context)
            current = None
            for step in part:
                if _is_well(ended[_pid(step)]) and step.kind == SUSPEND:
                    waiting[_pid(step)] = step
                elif _is_well(ended[_pid(step)]) and step.kind == RESUME:
                    del waiting[_pid(step)]
                elif _is_well(ended[_pid(step)]) and exchange.last_move is not None:
                    moved.append(step)
            if not all(map(_is_well, ended.values())):
                for suspended in waiting.values():
                    await self._bring_back(exchange, suspended, context)
                if exchange.failure is None:  # otherwise the other job has ended
                    for step in moved:
                        await self._move_back(exchange, step, snapshot, context)
                for failure in ended.values():
                    if isinstance(failure, HegmError):
                        raise failure
                return

    async def _all_of(
        self,
        exchange: _Swap,
        part: Sequence[MigrationPlan],
        snapshot: NodeSnapshotForPlan | None,
        context: RequestContext,
    ) -> dict[int, protocol.Operation | HegmError]:
        """Carry steps out at once; how each ended, by its process."""
        ended: dict[int, protocol.Operation | HegmError] = {}

        async def carry_out(step: MigrationPlan) -> None:
            try:
                ended[_pid(step)] = await self._step(exchange, step, snapshot, context)
            except HegmError as error:
                ended[_pid(step)] = error

        async with anyio.create_task_group() as tasks:
            for step in part:
                tasks.start_soon(carry_out, step)
        return ended

    async def _step(
        self, exchange: _Swap, step: MigrationPlan, snapshot: NodeSnapshotForPlan | None, context: RequestContext
    ) -> protocol.Operation:
        """Carry a step out, as things are by then, and wait for its end. Raises HegmError."""
        operations, pids = self._operations, [worker.pid for worker in step.workers]
        if snapshot is not None:
            swaps_to = exchange.places.get(pids[0]) if step.kind == SUSPEND else None
            swaps_with: tuple[int, ...] = ()
            if exchange.last_move is not None:
                swaps_to, other = exchange.last_move.place, candidate_of(snapshot, _pid(exchange.last_move))
                swaps_with = () if other is None else (other.pid, other.start_ticks)
            answer = await operations.carry_out(step, snapshot, context, swaps_to=swaps_to, swaps_with=swaps_with)
        elif step.kind == MIGRATE:
            placement = {str(worker.pid): worker.to for worker in step.workers if worker.to is not None}
            answer = await operations.place(pids, placement, context)
        else:
            answer = await operations.resume(pids[0], step.place, context)
        return await self._end(exchange, answer)

    async def _bring_back(self, exchange: _Swap, suspended: MigrationPlan, context: RequestContext) -> None:
        """Resume a job of a failed swap where it was, or on the other GPU if the other job has its own by now.

        If both fail, it stays suspended, and `hegmctl ops` shows the command.
        """
        pid = _pid(suspended)
        for place in (suspended.source, exchange.places.get(pid)):
            try:
                if _is_well(await self._end(exchange, await self._operations.resume(pid, place, context))):
                    return
            except HegmError as error:
                logger.warning("process %d stays suspended: %s", pid, error.message, extra=fields(hint=error.hint))

    async def _move_back(
        self, exchange: _Swap, step: MigrationPlan, snapshot: NodeSnapshotForPlan, context: RequestContext
    ) -> None:
        """Undo the first of two moves. If both are refused, the journal says so: the next daemon would make one."""
        try:
            await self._end(exchange, await self._operations.migrate([_pid(step)], step.source, context))
        except HegmError as error:
            logger.warning("process %d stays on %s: %s", _pid(step), step.place, error.message)
            runner = self._operations.runner
            refused = step.operation(runner.next_id(), snapshot.candidates, {}, limits=Limits(), utc=time.time())
            failure = Failure(code=error.code.name, message=error.message, hint=error.hint)
            await runner.remember(refused.replace(phase=ROLLED_BACK, failure=failure))

    async def _end(self, exchange: _Swap, answer: OperationResult) -> protocol.Operation:
        if answer.operation is None:
            raise Bug("a step of a swap was planned and not begun")
        op_id = answer.operation.id
        exchange.begun.append(op_id)
        exchange.changed.notify_all()
        await self._operations.follow(op_id, _discard_progress)
        return self._operations.runner.describe(op_id)


def _require_targets(snapshot: NodeSnapshotForPlan, gpu: str, to: Sequence[str]) -> None:
    names = [known.id for known in snapshot.gpus]
    for name in to:
        if name not in names:
            raise HegmError(NOT_FOUND, *no_such_gpu(name, names))
        if name == gpu:
            raise HegmError(REFUSED, f"{gpu} cannot be drained to itself", "name other GPUs with --to")


def _plans_or_raise(found: tuple[MigrationPlan, ...] | tuple[Reason, ...]) -> tuple[MigrationPlan, ...]:
    plans = tuple([step for step in found if isinstance(step, MigrationPlan)])
    if plans:
        return plans
    raise refusal([reason for reason in found if isinstance(reason, Reason)])


def _pid(step: MigrationPlan) -> int:
    return step.workers[0].pid


def _is_well(ended: protocol.Operation | HegmError) -> bool:
    return isinstance(ended, protocol.Operation) and ended.failure is None and ended.phase in (DONE, SUSPENDED)


def _reason(error: HegmError, pid: int | None) -> Reason:
    return Reason(code=error.code.name, message=error.message.replace("\n", "; "), hint=error.hint, pid=pid)


def _operation(answer: OperationResult) -> list[protocol.Operation]:
    return [] if answer.operation is None else [answer.operation]


async def _discard_progress(_progress: protocol.OperationProgress) -> None:
    """Discard progress: the swap continues without a client."""
