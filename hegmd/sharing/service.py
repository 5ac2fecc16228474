"""Shares the GPUs of the node: looks at it after each change, has the policy decide, and carries the decision out.

Owns the loop and the parts that it needs. Idle while nobody waits: without a queue, a pending lease or a suspended job
it takes no snapshot. The policy is in `policy`, the requests are in `requests`. Longer than 400 lines because what
other parts ask about the sharing is answered here, from the state that the loop keeps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.abc

from hegmd.errors import HegmError
from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import RESUME, SUSPEND, Operation
from hegmd.migration.machine.wording import gigabytes
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.migration.model import Candidate
from hegmd.node.gpu_sets import CPU
from hegmd.node.inventory import NodeSnapshot
from hegmd.operations.job_requests import JobOperationsOf
from hegmd.operations.service import OperationsService
from hegmd.protocol.operations import Wait
from hegmd.protocol.recovery import RecoveryAttempt
from hegmd.protocol.sharing import NORMAL
from hegmd.sharing import model, wording
from hegmd.sharing.actions import SharingActions
from hegmd.sharing.history import History
from hegmd.sharing.leases import StartTicks
from hegmd.sharing.memory_use import needs_by_gpu
from hegmd.sharing.policy import decide
from hegmd.sharing.records import LeaseRecord, SuspendedRecord
from hegmd.sharing.rules import SharingRules
from hegmd.sharing.state import SharingMemory
from hegmd.sharing.view import SharingView, View
from hegmd.system.condition import Condition
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import limited
from hegmd.workers.job_file import JobRecord
from hegmd.workers.job_names import trains
from hegmd.workers.workers import AgentConnection

logger = logging.getLogger(__name__)

# After a start, agents have so long to connect. Until then no request is refused because a job cannot leave.
SETTLED_AFTER_S, SETTLE_INTERVAL_S = 15.0, 0.1
# While somebody waits: at most so long from one look to the next. Nothing reports that other programs free memory.
LOOK_INTERVAL_S = 1.0
# Looks are at least so far apart: each asks the driver.
MIN_INTERVAL_S = 0.02


class Sharing:
    """`open` it, then `run` it."""

    def __init__(
        self,
        moving: OperationsService,
        events: EventLog,
        rules: SharingRules,
        start_ticks: StartTicks,
        *,
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], float] = time.time,
    ) -> None:
        self._moving = moving
        self._events = events
        self.rules = rules
        self._clock = clock
        self._utc = utc
        self._began = clock()
        self._changed = Condition()
        self.memory = SharingMemory(start_ticks, self.note_end)
        self.history = History()
        self._operations_of = JobOperationsOf(moving.runner)
        self.actions = SharingActions(
            *(moving.operations, self.memory, self.history, events, rules, self._changed.notify_all),
            suspended=moving.suspended_operations,
            recoveries=moving.recoveries,
            clock=clock,
            utc=utc,
        )
        self._view = SharingView(
            *(moving.jobs, moving.workers, self._operations_of, moving.survey, self.memory, self.history, rules),
            acting=self.actions.of,
            returns_to=moving.recoveries.returns_to,
            starts_ranks=moving.recoveries.in_process.starts_ranks,
            awaits_resume=moving.recoveries.awaits_resume,
            clock=clock,
            utc=utc,
        )
        #: The operations that had a job off its GPUs when it failed, once the job was entered into the queue.
        self._failed_away: set[str] = set()
        #: Told after each decision.
        self.decided = Condition()
        #: The last look at the node and what was decided; None before the first.
        self.latest: tuple[View, model.Decision] | None = None
        #: Set once the daemon stops: whoever waits then has not left by itself.
        self.is_stopping = False
        moving.jobs.default_priority = rules.priorities[NORMAL]
        moving.survey.leased = self.leased_bytes
        moving.sequences.until_agents_are_back = self.until_agents_are_back
        moving.job_requests.waits_for, moving.job_requests.awaits_resume = self.waits_for, self.awaits_resume
        moving.operations.keep_suspended = self.keep_suspended
        moving.recoveries.queue, node = self._queue_failed, moving.recoveries.node
        node.must_wait, node.queue_for_room, node.is_leased = self.must_wait, self._queue_for_room, self._is_leased
        moving.runner.resumes_by_itself = self.wait_of

    # -- the life of the part ------------------------------------------------------------------------------------------

    def open(self, folder: Path) -> None:
        """Read what the daemon before has left. Blocks. Raises HegmError if it cannot be trusted."""
        self.memory.open(folder)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Share the GPUs until cancelled."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.memory.run)
            await tasks.start(self.actions.run)
            for changed in (self.memory.changed, self._moving.jobs.changed, self._moving.supervisors.changed):
                tasks.start_soon(self._pass_on, changed, self.look_again)
            # A job that is to be started again waits until it is no longer in the list of suspended jobs.
            tasks.start_soon(self._pass_on, self.memory.changed, self._moving.recoveries.look_again)
            tasks.start_soon(self._keep_deciding)
            task_status.started()

    def stop(self) -> None:
        """Note that the daemon stops. Called before the requests of clients are cancelled."""
        self.is_stopping = True

    def look_again(self) -> None:
        """Something has changed."""
        self._changed.notify_all()

    async def _pass_on(self, changed: Condition, notify: Callable[[], object]) -> None:
        while True:
            await changed.wait()
            notify()

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _keep_deciding(self) -> None:
        await self._settle()
        while True:
            changed, began, computed_s = self._changed.next, anyio.current_time(), time.thread_time()
            wait_s: float | None = LOOK_INTERVAL_S
            try:
                self._forget_what_is_over()
                if self.is_wanted:
                    wait_s = await self._decide()
                else:
                    self.actions.undo_preparations()
                    wait_s = None
            except HegmError as error:
                limited(logger, "sharing", logging.ERROR, "GPUs cannot be shared now: %s", error.message)
            except Exception:  # the edge of one decision: what is wrong here is not to end the daemon
                logger.exception("a decision about sharing GPUs failed")
            next_at = next_look_at(began, anyio.current_time(), time.thread_time() - computed_s)
            if wait_s is None:
                await changed.wait()
            else:
                with anyio.move_on_after(wait_s):
                    await changed.wait()
                await anyio.sleep_until(next_at)

    async def _settle(self) -> None:
        """After a start on simulated GPUs, wait for the agents of jobs of before: only they know what their jobs hold.

        A real driver knows that at once, and nobody has to wait.
        """
        if self._moving.simulated_memory.simulated:
            await self.until_agents_are_back()

    async def until_agents_are_back(self, tell: Callable[[], Awaitable[None]] | None = None) -> None:
        """After a start, wait until no agent of a job of before has yet to connect, for so long at most; call `tell`
        first.
        """
        if tell is not None and self.awaits_agents:
            await tell()
        while self.awaits_agents:
            with anyio.move_on_after(SETTLE_INTERVAL_S):
                await self._changed.wait()

    @property
    def awaits_agents(self) -> bool:
        """Return True if this daemon has just started, and an agent of a job of before has yet to connect."""
        if self._clock() - self._began >= SETTLED_AFTER_S:
            return False
        for job in self._moving.jobs:
            is_stopped_job = job.pid is not None and not job.is_gone and is_stopped(job.pid)
            has_failed = bool(self._moving.recoveries.returns_to(job.id))
            if job.is_alive and job.members and not is_stopped_job and not has_failed:
                workers = [worker for worker in self._moving.jobs.workers_of(job) if worker.connected]
                if not workers or any(self._is_unplaced(worker) for worker in workers):
                    return True
        return False

    def _is_unplaced(self, worker: AgentConnection) -> bool:
        """Return True if it trains, and what it holds on a simulated GPU is not known yet. Real drivers know it at
        once.
        """
        held = self._moving.simulated_memory
        who = (worker.pid, worker.identity.start_ticks)
        is_free = trains(worker) and worker.about.gpu != CPU and self._moving.runner.of_process(worker.pid) is None
        return held.simulated and is_free and not held.of(who)

    @property
    def is_wanted(self) -> bool:
        """Return True if there is anything to decide."""
        memory = self.memory
        waits = any(not record.has_trained for record in memory.queue.values())
        return waits or bool(memory.suspended) or any(not lease.is_held for lease in memory.leases)

    async def _decide(self) -> float:
        """Decide once, and begin what was decided; how long to wait until the next look."""
        view = await self._view.take()
        decision = decide(view.snapshot, view.now)
        self.latest = (view, decision)
        for action in decision.actions:
            self.actions.begin(action, view)
        self.decided.notify_all()
        self.actions.prepare_ahead(view, decision)
        if decision.again_at_s is None:
            return LOOK_INTERVAL_S
        return max(MIN_INTERVAL_S, min(LOOK_INTERVAL_S, decision.again_at_s - self._clock()))

    async def look(self, *more: LeaseRecord) -> tuple[View, model.Decision]:
        """Look at the node now and decide, without carrying anything out. `more` are leases only thought of."""
        view = await self._view.take(*more)
        decision = decide(view.snapshot, view.now)
        if self.awaits_agents:
            waiting = tuple([one._replace(waits=wording.SETTLING) for one in decision.waiting])
            decision = decision._replace(waiting=waiting)
        return view, decision

    def _forget_what_is_over(self) -> None:
        """Drop the notes of jobs that have ended, that run again, or that their users have suspended."""
        jobs = {job.number: job for job in self._moving.jobs if job.is_alive}
        for number, queued in tuple(self.memory.queue.items()):
            job = jobs.get(number)
            # `hegmctl run` itself waits for the start; without it there is nothing to start.
            if job is None or (job.is_gone and not queued.has_trained):
                self.memory.forget_queued(number)
        for number, note in tuple(self.memory.suspended.items()):
            job = jobs.get(number)
            if job is not None and self.actions.of(job.id) is not None:
                continue
            op = None if job is None else self._operations_of.of(job)
            if job is not None and op is None and self._may_be_started_again(job):
                continue
            is_others = op is not None and op.phase in (SUSPENDED, HOLDING) and not self._view.is_ours(op, note)
            if op is None or is_others:
                self.memory.forget_suspended(number)
        self.history.keep_only({job.id for job in jobs.values()} | {lease.id for lease in self.memory.leases})

    def _may_be_started_again(self, job: JobRecord) -> bool:
        """Whether a suspended job that has no process any more will be started again, or may be: its launcher waits
        for that, or its supervisor has yet to return to this daemon.
        """
        recoveries = self._moving.recoveries
        is_new = self._clock() - self._began < SETTLED_AFTER_S and job.id in recoveries.job_ids
        has_process = any(not worker.ended for worker in self._moving.jobs.workers_of(job))
        has_starter = recoveries.is_supervised(job.id) or recoveries.in_process.starts_ranks(job.id)
        return bool(recoveries.returns_to(job.id)) or ((is_new or has_starter) and not has_process)

    def must_wait(self, job_id: str) -> bool:
        """Return True if a job that is to be started again had left its GPUs, and may not return yet.

        One that its user had suspended waits until they resume it, and any for room: others may have its memory. While
        other ranks of it are suspended, it waits for them.
        """
        job = self._moving.jobs.with_id(job_id)
        if job is None:
            return False
        op, recoveries = self._operations_of.last_of(job), self._moving.recoveries
        if op is not None:
            recoveries.learn_gpus(
                job_id, tuple(needs_by_gpu(op.workers, lambda one: one.previous_gpu or one.first_gpu))
            )
        if op is not None and op.phase == SUSPENDED:
            return True
        if op is not None and op.kind == RESUME and self._operations_of.of(job) is op:
            return False
        was_away = op is not None and any(worker.lost for worker in op.workers)
        has_returned = op is not None and recoveries.has_returned_since(job_id, op.created_utc)
        if op is not None and was_away and not has_returned and op.id not in self._failed_away:
            self._failed_away.add(op.id)
            is_queued = job.number in self.memory.suspended
            if not is_queued and op.kind == SUSPEND and recoveries.suspended_by(job_id) != op.id:
                recoveries.note_suspended(job_id, op.id, by_user=True)
            elif is_queued:  # a later daemon is not to take it for suspended by its user, once it has left the queue
                recoveries.note_suspended(job_id, op.id, by_user=False)
            elif not recoveries.awaits_resume(job_id):  # a daemon before may not have queued it
                self._enter(job, op, "it failed while it was off its GPU")
        return job.number in self.memory.suspended or self._moving.recoveries.awaits_resume(job_id)

    def awaits_resume(self, job: JobRecord) -> bool:
        """Return True if that job has failed while its user had suspended it, and they have not resumed it."""
        return job.is_alive and self._moving.recoveries.awaits_resume(job.id)

    def return_failed(self, job: JobRecord) -> None:
        """Have a job started again that failed while its user had suspended it, as soon as there is room."""
        self._queue_failed(job.id)
        self._moving.recoveries.resume(job.id)

    def _queue_failed(self, job_id: str) -> None:
        """Have such a job wait for room, also while its supervisor has yet to connect."""
        job = self._moving.jobs.with_id(job_id)
        op = None if job is None else self._operations_of.last_of(job)
        if job is not None and op is not None and job.number not in self.memory.suspended:
            self._enter(job, op, "its user has resumed it")

    def _queue_for_room(self, job_id: str, gpus: Sequence[str], size_bytes: int, why: str) -> None:
        """Have a failed job wait for room on its own GPUs, or in place of those that have failed."""
        job = self._moving.jobs.with_id(job_id)
        if job is not None and job.number not in self.memory.suspended:
            self._put_waiting(job, None, gpus, size_bytes, why)

    def _is_leased(self, pid: int, gpus: Sequence[str]) -> bool:
        """Return True if memory of these GPUs is leased to others than that process."""
        held = [lease for lease in self.memory.leases if lease.is_held and lease.gpu in gpus]
        return any(not self._view.is_open_to(lease, (pid,)) for lease in held)

    def _put_waiting(
        self, job: JobRecord, operation: str | None, gpus: Sequence[str], size_bytes: int, why: str
    ) -> None:
        """Note that a job waits for its turn. It need not settle as one that has just been suspended."""
        self.memory.put_suspended(
            SuspendedRecord(
                job=job.number,
                operation=operation,
                gpu=",".join(gpus) or None,
                size_bytes=size_bytes,
                since_utc=self._utc() - self.rules.policy.settle_s,
                why=why,
            )
        )

    def keep_failed(self, job: JobRecord) -> bool:
        """Have such a job wait for its user again; False if it is being started by now."""
        if job.number not in self.memory.suspended or self.actions.of(job.id) is not None:
            return False
        self._moving.recoveries.wait_again(job.id)
        self.memory.forget_suspended(job.number)
        return True

    def last_attempt(self, job: JobRecord) -> RecoveryAttempt | None:
        """Return the newest recovery of a job."""
        return self._moving.recoveries.last_attempt(job.id)

    def is_alive(self, job: JobRecord) -> bool:
        """Return True unless that job has ended."""
        known = self._moving.jobs.numbered(job.number)
        return known is not None and known.is_alive

    # -- events --------------------------------------------------------------------------------------------------------

    def note_end(self, lease: LeaseRecord, why: str) -> None:
        message = f"lease {lease} has ended: {why}"
        if lease.is_held:
            self._record("sharing.lease-ended", message, gpu=lease.gpu, lease=lease.id)
        else:
            self._record("sharing.lease-dropped", message, gpu=lease.gpu, lease=lease.id)

    def note_request(self, lease: LeaseRecord) -> None:
        """A lease was asked for."""
        where = lease.gpu or "any GPU"
        message = f"lease {lease} needs {gigabytes(lease.size_bytes)} on {where}, with priority {lease.priority}"
        self._record("sharing.lease-requested", message, gpu=lease.gpu, lease=lease.id)

    def note_queued(self, job: JobRecord) -> None:
        """A job waits for a GPU."""
        self._record("sharing.queued", f"job {job} waits for a GPU, with priority {job.priority}", job=job.id)

    def note_priority(self, job: JobRecord, priority: int) -> None:
        if job.priority != priority:
            self._record("sharing.priority", f"job {job} has priority {priority}, after {job.priority}", job=job.id)
        self.look_again()

    def _record(self, kind: str, message: str, *, gpu: str | None = None, **facts: str) -> None:
        self._events.record(kind, "info", message, gpu=gpu, facts=facts)
        logger.info("%s", message)

    # -- what others are told ------------------------------------------------------------------------------------------

    def leased_bytes(self, pids: Sequence[int], candidates: Sequence[Candidate]) -> Mapping[str, int]:
        """Return how much memory of each GPU is kept for others than those processes, and not used yet.

        Held leases, pending ones for which jobs leave, and what jobs said that they need.
        """
        kept = self._view.stated_bytes(candidates)
        helped = {action.beneficiary for action in self.actions.acting.values()}
        leases = [lease for lease in self.memory.leases if lease.is_held or lease.id in helped]
        leases = [lease for lease in leases if not self._view.is_open_to(lease, pids)]
        used = self._view.used_bytes(leases, candidates)
        for lease in leases:
            if lease.gpu is not None:
                kept[lease.gpu] = kept.get(lease.gpu, 0) + max(0, lease.size_bytes - used[lease.id])
        return kept

    def keep_suspended(self, op: Operation) -> bool:
        """A user suspends a job that is suspended for others: it is theirs to resume from now on. Whether it was."""
        job = self.job_of(op) if op.phase == SUSPENDED else None
        if job is None or not self._view.is_ours(op, self.memory.suspended.get(job.number)):
            return False
        if self.actions.of(job.id) is not None:
            return False
        self.memory.forget_suspended(job.number)
        return True

    def job_of(self, op: Operation) -> JobRecord | None:
        """Return the job that an operation has; None if its processes belong to no job."""
        return next((job for job in self._moving.jobs if job.is_alive and self._operations_of.of(job) is op), None)

    def queue_resume(self, job: JobRecord, op: Operation, why: str = "its user has resumed it") -> None:
        """Have a suspended job resume in its turn. Nothing changes for one that does so already."""
        if self._view.is_ours(op, self.memory.suspended.get(job.number)):
            return
        self._enter(job, op, why)

    def _enter(self, job: JobRecord, op: Operation, why: str) -> None:
        """Have a job that is off its GPUs wait for its turn."""
        needs = needs_by_gpu(op.workers, lambda one: one.previous_gpu or one.first_gpu)
        self._put_waiting(job, op.id, tuple(needs), sum(needs.values()), why)
        self._record("sharing.queued", f"job {job} waits to resume, with priority {job.priority}", job=job.id)

    def kept_bytes(self, node: NodeSnapshot) -> Mapping[str, int]:
        """Return how much of each GPU no job and no lease can ever have, by GPU."""
        return self._moving.survey.kept_bytes(node)

    def figures(self) -> Mapping[str, int]:
        """Return how many jobs wait and are suspended, and how many leases there are, for the metrics."""
        held = [lease.is_held for lease in self.memory.leases]
        return {
            "waiting": sum(record.placed is None for record in self.memory.queue.values()),
            "suspended": len(self.memory.suspended),
            "lease-held": sum(held),
            "lease-pending": len(held) - sum(held),
        }

    def waits_for(self, job: JobRecord) -> str | None:
        """Return what a job waits for that was suspended for others, or is not started yet; None for any other."""
        if self.awaits_resume(job):
            return f"its user, who had suspended it when it failed: hegmctl resume {job.id}"
        queued, note = self.memory.queue.get(job.number), self.memory.suspended.get(job.number)
        is_queued = queued is not None and queued.placed is None
        action = self.actions.of(job.id)
        is_migrating = action is not None and action.kind == model.MIGRATE
        if not is_queued and (note is None or is_migrating):
            return None
        waiting = self.waiting_of(job.id)
        if waiting is not None:
            return waiting.waits
        return "a GPU" if is_queued else "room on its GPU; it resumes by itself"

    def wait_of(self, op: Operation) -> Wait | None:
        """Return what a suspended operation waits for if its job resumes by itself; None for any other."""
        note = next((note for note in self.memory.suspended.values() if note.operation == op.id), None)
        if note is None:
            return None
        known = self.waiting_of(f"j{note.job}")
        return Wait(why="room on its GPU" if known is None else known.waits, next="hegmctl queue shows when it resumes")

    def waiting_of(self, subject: str) -> model.WaitReason | None:
        """Return the policy's reason for which a job or lease waits."""
        return None if self.latest is None else self.latest[1].waiting_of(subject)


def next_look_at(began: float, ended: float, computed_s: float) -> float:
    """Return when the node is looked at again at the earliest.

    A look that took long on the processor is followed by as long a pause, so that others have half of the event loop.
    """
    return max(began + MIN_INTERVAL_S, ended + computed_s)
