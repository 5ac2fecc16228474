"""`hegmctl resume --queue`: a job that its user has suspended waits in the queue until a GPU has room for it.

Owns that request, and waits for the job. The job is entered like one that was suspended for others, so the policy
resumes it in its turn, also after the client has left or the daemon was killed. `hegmctl suspend` takes it out again.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from hegmd.errors import BAD_REQUEST, CANCELLED, EXTERNAL, TIMEOUT, HegmError
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import Operation
from hegmd.operations.job_requests import JobRequests
from hegmd.operations.operations import Operations
from hegmd.operations.request_context import OperationResult, RequestContext, limit_of
from hegmd.protocol.operations import WAITS_IN_QUEUE, OperationProgress, Wait
from hegmd.protocol.recovery import GIVEN_UP, RECOVERED, RecoveryAttempt
from hegmd.sharing.service import Sharing
from hegmd.workers.job_file import JobRecord

# How often the reason for which a job waits is compared with the one that its client knows.
TELL_INTERVAL_S = 1.0


class QueuedResumes:
    """The requests to resume a job once there is room."""

    def __init__(self, sharing: Sharing, operations: Operations, jobs: JobRequests) -> None:
        self._sharing = sharing
        self._jobs = jobs
        self._operations = operations

    async def failed(self, named: int | str, may: Callable[[int | None], bool]) -> JobRecord | None:
        """Return that job if it failed while its user had suspended it, and is started again by a resume. Raises
        HegmError.
        """
        try:
            job = await self._jobs.record(named, may)
        except HegmError:  # what is wrong with the name is said by the resume
            return None
        return job if self._sharing.awaits_resume(job) else None

    async def start_failed(self, job: JobRecord, to: str | None, asked: RequestContext) -> None:
        """Have such a job started again from its newest snapshot, once there is room, and wait until it trains. Raises
        HegmError: also if it does not come back, or not in time.
        """
        if to is not None:
            message = f"job {job} failed while it was suspended, and is started again where hegmd finds room for it"
            raise HegmError(BAD_REQUEST, message, "leave out --to; move it once it trains")
        limit_s = limit_of(asked)
        if asked.dry_run:
            return
        before = self._sharing.last_attempt(job)
        self._sharing.return_failed(job)
        what = f"that job {job} waits in the queue"
        await self._sharing.memory.require_saved(what, "it may be lost if hegmd is killed")
        if not asked.wait:
            return
        with anyio.move_on_after(limit_s) as waiting:
            await self._until_it_trains(job, before, asked)
        if waiting.cancelled_caught:
            raise self._not_started_in_time(job, limit_s or 0.0)

    async def _until_it_trains(self, job: JobRecord, before: RecoveryAttempt | None, asked: RequestContext) -> None:
        """Wait until the recovery after `before` has succeeded. Raises EXTERNAL if it has not, or the job has ended."""
        last = ""
        while True:
            changed = self._sharing.decided.next
            attempt = self._sharing.last_attempt(job)
            if attempt is not None and attempt != before and attempt.result == RECOVERED:
                return
            if attempt is not None and attempt != before and attempt.result == GIVEN_UP:
                message = f"job {job} is not started again: it {attempt.why}"
                raise HegmError(EXTERNAL, message, f"run: hegmctl recovery {job.id}")
            if not self._sharing.is_alive(job):
                raise HegmError(EXTERNAL, f"job {job} has ended before it trained again", f"run: hegmctl jobs {job.id}")
            waiting = self._sharing.waiting_of(job.id)
            if waiting is not None and waiting.waits != last and job.number in self._sharing.memory.suspended:
                last = waiting.waits
                told = Wait(why=waiting.waits, next=waiting.next)
                await asked.emit(OperationProgress(id="", phase=WAITS_IN_QUEUE, waits=told))
            with anyio.move_on_after(TELL_INTERVAL_S):
                await changed.wait()

    def _not_started_in_time(self, job: JobRecord, limit_s: float) -> HegmError:
        """Have the job wait for its user again, unless it is being started by now."""
        no_room = self._no_room(job, limit_s)
        if self._sharing.keep_failed(job):
            return no_room
        message = f"job {job} does not train within {limit_s:g} s, and is being started now"
        return HegmError(TIMEOUT, message, f"run: hegmctl recovery {job.id}")

    def enter(self, op: Operation) -> None:
        """Have the job of a suspended operation resume in its turn: it has left its `hegm.released()` block."""
        if (job := self._sharing.job_of(op)) is not None:
            self._sharing.queue_resume(job, op, "its hegm.released() block has ended")

    async def resume(self, pid: int, to: str | None, asked: RequestContext) -> OperationResult:
        """Resume a suspended job, now or in its turn. Raises HegmError, and TIMEOUT if there was no room in time."""
        if to is not None:
            hint = "leave out --to or --queue"
            raise HegmError(BAD_REQUEST, "in the queue hegmd chooses the GPU on which a job resumes", hint)
        pid = await self._operations.named_one(pid)
        limit_s = limit_of(asked)
        op = await self._operations.settled(pid, asked)
        job = None if op is None or op.phase != SUSPENDED else self._sharing.job_of(op)
        if op is None or job is None or asked.dry_run:
            return await self._operations.resume(pid, to, asked)
        self._operations.check(asked, [pid])
        self._sharing.queue_resume(job, op)
        what = f"that job {job} waits in the queue"
        await self._sharing.memory.require_saved(what, "it may be lost if hegmd is killed")
        if asked.wait:
            with anyio.move_on_after(limit_s) as waiting:
                await self._until_resumed(job, op.id, asked)
            if waiting.cancelled_caught:
                raise self._too_late(job, op.id, limit_s or 0.0)
        return OperationResult(self._operations.runner.describe(op.id), None)

    async def _until_resumed(self, job: JobRecord, op_id: str, asked: RequestContext) -> None:
        """Follow its operation until that has ended; a resume that failed is tried again by the policy."""
        last = ""
        while True:
            changed = self._sharing.decided.next
            op = self._operations.runner.find(op_id)
            if op is None or op.phase != SUSPENDED:
                await self._operations.follow(op_id, asked.emit)
                op = self._operations.runner.find(op_id)
                if op is None or op.phase != SUSPENDED:
                    return
            if job.number not in self._sharing.memory.suspended:
                message = f"job {job} has left the queue, and stays suspended"
                raise HegmError(CANCELLED, message, f"run: hegmctl resume --queue {job.id}")
            waiting = self._sharing.waiting_of(job.id)
            if waiting is not None and waiting.waits != last and self._sharing.actions.of(job.id) is None:
                last = waiting.waits
                told = Wait(why=waiting.waits, next=waiting.next)
                await asked.emit(OperationProgress(id=op_id, phase=WAITS_IN_QUEUE, waits=told))
            with anyio.move_on_after(TELL_INTERVAL_S):
                await changed.wait()

    def _too_late(self, job: JobRecord, op_id: str, limit_s: float) -> HegmError:
        """Take the job out of the queue, unless it is resuming by now."""
        op, no_room = self._operations.runner.find(op_id), self._no_room(job, limit_s)
        if op is not None and self._sharing.keep_suspended(op):
            return no_room
        message = f"job {job} has not resumed within {limit_s:g} s, and is resuming now"
        return HegmError(TIMEOUT, message, f"watch it with: hegmctl op {op_id}")

    def _no_room(self, job: JobRecord, limit_s: float) -> HegmError:
        """Return the error with the reason for which the job waits now."""
        waiting = self._sharing.waiting_of(job.id)
        why = "nothing was decided yet" if waiting is None else waiting.waits
        hint = "see hegmctl queue; give a longer --timeout, or none"
        return HegmError(TIMEOUT, f"there was no room for job {job} within {limit_s:g} s: {why}", hint)
