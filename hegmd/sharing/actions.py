"""Carries out what the policy has decided: each action is an ordinary operation, asked for by "sharing".

Owns one task for each action, the notes by which a job that was suspended comes back, and what a failure means: the job
is left alone for a while, and nothing else changes. A task that is cancelled leaves its operation to the journal, and
its note to the next daemon.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from hegmd.errors import INTERNAL, Bug, HegmError, code_named
from hegmd.migration.machine.next_effects import DONE, SUSPENDED
from hegmd.migration.machine.wording import gigabytes
from hegmd.node.gpu_sets import place_of
from hegmd.operations.operations import Operations
from hegmd.operations.request_context import OperationResult, RequestContext
from hegmd.operations.suspended import SuspendedOperations
from hegmd.protocol.operations import Operation, OperationProgress
from hegmd.sharing import model
from hegmd.sharing.history import History
from hegmd.sharing.model import Action
from hegmd.sharing.records import SuspendedRecord
from hegmd.sharing.room import rooms_of
from hegmd.sharing.rules import AUTO, KEEP_CONTEXT, SharingRules
from hegmd.sharing.state import SharingMemory
from hegmd.sharing.view import JobView, View
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import fields

logger = logging.getLogger(__name__)

BY = "sharing"
# A job whose turn comes within this time is prepared: its bytes are compared with their checksums, 32 GiB in 4 s.
PREPARE_AHEAD_S = 15.0
# It stays prepared while its turn is expected within this time: more than above, so that nothing is closed and opened
# again because an estimate has changed a little.
KEEP_PREPARED_S = 2 * PREPARE_AHEAD_S


class StartsAgain(Protocol):
    """Starts failed jobs again."""

    def returns_to(self, job: str) -> Sequence[str]:
        """Return the GPUs on which that job will be started again; none for any other job."""
        ...

    def start_on(self, job: str, gpus: Sequence[str]) -> None:
        """Have a job that waits for room started on these GPUs."""
        ...


class SharingActions(BackgroundTasks):
    """`run` has to be running. `changed` is called when an action has ended."""

    def __init__(  # noqa: PLR0913 - the parts that it uses, each named
        self,
        operations: Operations,
        memory: SharingMemory,
        history: History,
        events: EventLog,
        rules: SharingRules,
        changed: Callable[[], object],
        *,
        suspended: SuspendedOperations,
        recoveries: StartsAgain,
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._operations = operations
        self._memory = memory
        self._history = history
        self._events = events
        self._rules = rules
        self._changed = changed
        self._suspended = suspended
        self._recoveries = recoveries
        self._clock = clock
        self._utc = utc
        #: Actions that are under way, by the job.
        self.acting: dict[str, Action] = {}

    def of(self, job: str) -> Action | None:
        """The action that is under way on that job."""
        return self.acting.get(job)

    def begin(self, action: Action, view: View) -> None:
        """Carry an action out: a grant and a start at once, the others in a task."""
        tasks = self._open_tasks()
        if action.kind == model.GRANT:
            self._grant(action)
        elif action.kind == model.START:
            self._start(action, view)
        elif action.kind == model.RESUME and not view.jobs[action.subject].pids:
            self._let_start(action, view.jobs[action.subject])
        elif action.subject not in self.acting and action.subject in view.jobs:
            self.acting[action.subject] = action
            tasks.start_soon(self._carry_out, action, view, name=f"{action.kind} of {action.subject}")

    # -- ahead of a turn -----------------------------------------------------------------------------------------------

    def prepare_ahead(self, view: View, decision: model.Decision) -> None:
        """Prepare suspended jobs whose turns come soon, and close what was opened for those whose turns went to others.

        One that resumes now compares its bytes faster by itself.
        """
        now = self._clock()
        operations = {job: seen.operation.id for job, seen in view.jobs.items() if seen.operation is not None}
        kept = {operations[job] for job in self.acting if job in operations}
        leaving = {gpu for job in view.snapshot.jobs if job.state == model.LEAVING for gpu in job.gpus}
        leaving.update(gpu for action in self.acting.values() for gpu in action.gpus)
        for waiting in decision.waiting:
            op_id = operations.get(waiting.subject)
            if op_id is None or op_id in kept:
                continue
            in_s = math.inf if waiting.at_s is None else waiting.at_s - now
            if in_s < PREPARE_AHEAD_S:
                self._suspended.prepare_soon(op_id)
            if in_s < KEEP_PREPARED_S or (waiting.gpus and leaving.issuperset(waiting.gpus)):
                kept.add(op_id)
        self._suspended.keep_prepared(kept)

    def undo_preparations(self) -> None:
        """Close what was opened ahead: no job is about to resume."""
        self._suspended.keep_prepared(())

    # -- at once -------------------------------------------------------------------------------------------------------

    def _grant(self, action: Action) -> None:
        lease = self._memory.leases.find(action.subject)
        if lease is not None and not lease.is_held:
            self._memory.leases.hold(lease.number, action.gpus[0])
            message = f"lease {lease} holds {gigabytes(lease.size_bytes)} of {action.gpus[0]}"
            self._record("sharing.lease-held", message, gpu=action.gpus[0], lease=lease.id)

    def _start(self, action: Action, view: View) -> None:
        job = view.jobs[action.subject].record
        queued = self._memory.queue.get(job.number)
        if queued is not None and queued.placed is None:
            where = place_of(action.gpus)
            self._memory.put_queued(queued.replace(placed=where, placed_s=self._clock()))
            self._record("sharing.placed", f"job {job} starts on {where}", gpu=where, job=job.id)

    def _let_start(self, action: Action, job_view: JobView) -> None:
        """A job whose processes have ended while it was suspended: it is started again, which waited for this."""
        self._recoveries.start_on(job_view.record.id, action.gpus)
        queued = self._memory.queue.get(job_view.record.number)
        if queued is not None and not queued.has_trained:  # its memory is kept where it starts now
            self._memory.put_queued(queued.replace(placed=place_of(action.gpus), placed_s=self._clock()))
        self._memory.forget_suspended(job_view.record.number)
        where = ",".join(action.gpus)
        self._record(
            "sharing.resumed", f"job {job_view.record} is started again on {where}", gpu=where, job=job_view.record.id
        )

    # -- operations ----------------------------------------------------------------------------------------------------

    async def _carry_out(self, action: Action, view: View) -> None:
        job_view, began = view.jobs[action.subject], self._clock()
        do = {model.SUSPEND: self._suspend, model.RESUME: self._resume, model.MIGRATE: self._migrate}[action.kind]
        try:
            operation = await do(action, job_view, view)
            goal = SUSPENDED if action.kind == model.SUSPEND else DONE
            if operation.phase != goal or operation.failure is not None:
                raise _failure_of(operation)
            self._note_end(action, job_view, self._cost_s(operation, self._clock() - began))
        except HegmError as error:
            self._note_failure(action, job_view, error)
        except Exception as bug:  # the edge of one action: what is wrong here is not to end the daemon
            logger.exception("the %s of %s failed", action.kind, action.subject)
            self._note_failure(
                action, job_view, HegmError(INTERNAL, f"{type(bug).__name__}: {bug}", "read the log of hegmd")
            )
        finally:
            self.acting.pop(action.subject, None)
            self._changed()

    async def _suspend(self, action: Action, job_view: JobView, view: View) -> Operation:
        keeps = self._keeps_context(action, job_view, view)
        return await self._leave(
            action, job_view, lambda: self._operations.suspend(job_view.pids, _context(), keep_context=keeps)
        )

    async def _leave(
        self, action: Action, job_view: JobView, begin: Callable[[], Awaitable[OperationResult]]
    ) -> Operation:
        """Have a job leave its GPUs, with the note by which it comes back if it ends up suspended."""
        past = self._history.of(action.subject)
        note = SuspendedRecord(
            job=job_view.record.number,
            gpu=",".join(action.gpus),
            size_bytes=sum(action.size_bytes),
            since_utc=self._utc(),
            turn_s=0.0 if action.ends_turn else past.turn_s + max(0.0, self._clock() - past.since_s),
            why=action.reason,
        )
        self._memory.put_suspended(note)
        try:
            what = f"that job {job_view.record} is to resume by itself"
            await self._memory.require_saved(what, "no job is suspended for others")
            answer = await begin()
        except Exception:  # nothing has begun; of a cancelled task that is not known
            self._memory.forget_suspended(job_view.record.number)
            raise
        operation = _begun(answer)
        self._memory.put_suspended(note.replace(operation=operation.id))
        operation = await self._end_of(operation.id)
        # A job that failed meanwhile, and is started again, waits for its turn as if it had been suspended.
        if operation.phase != SUSPENDED and not self._recoveries.returns_to(job_view.record.id):
            self._memory.forget_suspended(job_view.record.number)
        return operation

    def _keeps_context(self, action: Action, job_view: JobView, view: View) -> bool:
        """Whether the job keeps its CUDA contexts: it can only leave so, or what it then frees is enough."""
        leaves = job_view.leaves
        if leaves is None or leaves.stays_bytes is None:
            return False
        if leaves.keeps_context or self._rules.method == KEEP_CONTEXT:
            return True
        # A job that ends its turn comes back to the same GPU soon. Otherwise whoever asks for memory decides.
        lease = None if action.beneficiary is None else self._memory.leases.find(action.beneficiary)
        may_stay = action.ends_turn or (lease is not None and lease.keeps_context)
        return self._rules.method == AUTO and may_stay and is_enough(action, leaves.stays_bytes, view.snapshot)

    async def _resume(self, action: Action, job_view: JobView, view: View) -> Operation:
        answer = await self._operations.resume(job_view.pids[0], target_of(action, view.snapshot), _context())
        return await self._end_of(_begun(answer).id)

    async def _migrate(self, action: Action, job_view: JobView, view: View) -> Operation:
        to = target_of(action, view.snapshot)
        # If it can neither arrive nor return, because its own GPU is full by then, it ends up suspended.
        return await self._leave(action, job_view, lambda: self._operations.migrate(job_view.pids, to, _context()))

    async def _end_of(self, op_id: str) -> Operation:
        await self._operations.follow(op_id, _discard_progress)
        return self._operations.runner.describe(op_id)

    def _cost_s(self, operation: Operation, took_s: float) -> float:
        """Return how long the job was parked in the action, which took that long. It trains until its boundary, so a
        wait for that costs nothing, and does not lengthen turns.
        """
        if operation.phase == SUSPENDED:
            known = [op.parked_since for op in self._operations.runner.operations() if op.id == operation.id]
            return min([took_s, *(max(0.0, self._clock() - since) for since in known if since is not None)])
        return took_s if operation.downtime_s is None else min(took_s, operation.downtime_s)

    def _note_end(self, action: Action, job_view: JobView, cost_s: float) -> None:
        past, job = self._history.of(action.subject), job_view.record
        self._history.note_success(action.subject)
        where = ",".join(action.gpus)
        if action.kind == model.SUSPEND:
            past.suspend_s = cost_s
            self._record("sharing.suspended", f"job {job} was suspended: {action.reason}", gpu=where, job=job.id)
        elif action.kind == model.RESUME:
            past.resume_s = cost_s
            # It runs from now on, whenever the node is looked at next.
            self._history.note_state(action.subject, model.RUNNING, self._clock())
            self._memory.forget_suspended(job.number)
            self._record("sharing.resumed", f"job {job} was resumed on {where}", gpu=where, job=job.id)
        else:
            self._record("sharing.moved", f"job {job} was migrated to {where}: {action.reason}", gpu=where, job=job.id)

    def _note_failure(self, action: Action, job_view: JobView, error: HegmError) -> None:
        first_line = error.message.replace("\n", "; ")
        again_s = self._history.note_failure(action.subject, first_line, self._clock()) - self._clock()
        message = f"job {job_view.record} could not {_VERBS[action.kind]}: {first_line}; tried again in {again_s:.0f} s"
        self._events.record("sharing.failed", "warning", message, facts={"job": job_view.record.id})
        logger.warning("%s", message, extra=fields(hint=error.hint))

    def _record(self, kind: str, message: str, *, gpu: str, **facts: str) -> None:
        self._events.record(kind, "info", message, gpu=gpu, facts=facts)
        logger.info("%s", message)


_VERBS = {model.SUSPEND: "be suspended", model.RESUME: "resume", model.MIGRATE: "be migrated"}


def target_of(action: Action, snapshot: model.Snapshot) -> str | None:
    """Return the target as the planner has it: one GPU, or which replaces which; None to stay where the job was."""
    former = next((job.gpus for job in snapshot.jobs if job.id == action.subject), ())
    if former == action.gpus:
        return None
    if len(action.gpus) == 1:
        return action.gpus[0]
    return ",".join(f"{old}={new}" for old, new in zip(former, action.gpus, strict=True) if old != new)


def is_enough(action: Action, stays_bytes: Mapping[str, int], snapshot: model.Snapshot) -> bool:
    """Return True if the job or lease for which a job leaves fits on its GPUs although these bytes stay there."""
    rooms = rooms_of(snapshot)
    needs = [max(job.needs_bytes) for job in snapshot.jobs if job.id == action.beneficiary and job.needs_bytes]
    needs += [lease.size_bytes for lease in snapshot.leases if lease.id == action.beneficiary]
    if not needs:
        return False
    (needed_bytes,) = needs
    for gpu, size_bytes in zip(action.gpus, action.size_bytes, strict=True):
        room = rooms.get(gpu)
        if room is None:
            return False
        left_bytes = room.now_bytes + room.freed_bytes.get(action.subject, size_bytes) - stays_bytes.get(gpu, 0)
        if left_bytes < needed_bytes:
            text = "job %s frees its contexts too: it would leave %s of %s, and %s needs %s"
            sizes = gigabytes(max(0, left_bytes)), gpu, action.beneficiary, gigabytes(needed_bytes)
            logger.info(text, action.subject, *sizes)
            return False
    return True


def _context() -> RequestContext:
    return RequestContext(by=BY, may=lambda _uid: True, emit=_discard_progress, wait=False)


def _begun(answer: OperationResult) -> Operation:
    if answer.operation is None:
        raise Bug("an action was planned and not begun")
    return answer.operation


def _failure_of(operation: Operation) -> HegmError:
    why = operation.failure
    if why is None:
        return HegmError(INTERNAL, f"operation {operation.id} ended as {operation.phase}", f"hegmctl op {operation.id}")
    return HegmError(code_named(why.code), why.message, why.hint)


async def _discard_progress(_progress: OperationProgress) -> None:
    """Discard progress: no client watches."""
