"""All protected jobs of the node: which there are, what is reported of them, and the states that are kept.

A job is protected from the moment at which the `hegmctl run --recover` of it connects. When that has ended, the slots
are given back, unless it was killed or the job was given up: then the state is kept for a day. Longer than 400 lines
because what other parts ask about recoveries is answered here, from the records.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from hegmd.errors import DENIED, NOT_FOUND, HegmError, Refused
from hegmd.memory.pool import Key, Pool
from hegmd.node.inventory import NodeSnapshot
from hegmd.node.processes.procfs import seconds_since_boot
from hegmd.protocol import recovery as protocol
from hegmd.protocol.recovery import RecoveryAttempt
from hegmd.protocol.snapshots import Gpu
from hegmd.recovery.in_process import InProcess, in_process_state
from hegmd.recovery.job import Node, ProtectedJob
from hegmd.recovery.policy import complete_generations
from hegmd.recovery.protection import Protection
from hegmd.recovery.records import JobSnapshots, SnapshotFiles
from hegmd.recovery.slots import JobSlots, by_rank
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.condition import Condition
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.metrics.report import RecoveryTally
from hegmd.workers.jobs import Jobs
from hegmd.workers.supervisors import Supervisor, Supervisors
from hegmd.workers.workers import AgentConnection, Workers

logger = logging.getLogger(__name__)

# How long the state of a job is kept that has ended without its own will.
KEPT_S = 86400.0
_KILLED = "its hegmctl run was killed"
_LOOK_INTERVAL_S = 60.0
# After a start of the daemon, supervisors have this long to reconnect.
RETURN_WITHIN_S = 60.0
# The delay before a failed protection starts again.
FAILED_S = 1.0

May = Callable[[int | None], bool]


class Recoveries(BackgroundTasks):
    """Owns the protection of each job. `open` it before the pool is looked through, then `run` it."""

    def __init__(  # noqa: PLR0913 - the parts that it works on, each named
        self,
        *,
        workers: Workers,
        supervisors: Supervisors,
        jobs: Jobs,
        pool: Pool,
        events: EventLog,
        state_dir: Path,
        gpus: Callable[[], Sequence[Gpu]],
        take_snapshot: Callable[[], Awaitable[NodeSnapshot]],
        variables: Callable[[Sequence[str]], dict[str, Any]],
        is_in_hand: Callable[[int], bool],
        is_kept_from_training: Callable[[int], bool],
        utc: Callable[[], float] = time.time,
        boot_s: Callable[[], float] = seconds_since_boot,
    ) -> None:
        super().__init__()
        self._supervisors = supervisors
        self._jobs = jobs
        self._pool = pool
        self._utc = utc
        self._boot_s = boot_s
        self._files = SnapshotFiles(state_dir)
        #: The record of each job, by its id, and the running protections.
        self._records: dict[str, JobSnapshots] = {}
        self._running: dict[str, Protection] = {}
        self._taken = 0
        self._news = Condition()
        self.node = Node(
            workers=workers,
            pool=pool,
            events=events,
            state_dir=state_dir,
            gpus=gpus,
            look=take_snapshot,
            variables=variables,
            is_in_hand=is_in_hand,
            is_kept_from_training=is_kept_from_training,
            save=self._save,
            until_saved=self._files.until_saved,
            workers_of=self._workers_of,
            changed=self._news,
            is_being_written=jobs.is_being_written,
            end_of=jobs.end_of,
            utc=utc,
        )
        #: Has a job wait for room that failed while it was suspended; sharing sets it.
        self.queue: Callable[[str], None] = lambda _job: None
        #: Jobs whose ranks recover in process.
        self.in_process = InProcess(jobs, self.node, self._records.get)
        supervisors.listen(self._on_supervisor_change)
        workers.listen(lambda _news, _worker: self._news.notify_all())

    # -- the life of the part ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the records of earlier daemons. Blocks."""
        self._records.update({record.job: record for record in self._files.load()})

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the protections running and write what changes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._files.run)
            await super().run(task_status=task_status)

    def owns(self, key: Key) -> bool:
        """Return True if a segment of the pool is a slot of a known job."""
        return key.operation in self._records

    @property
    def job_ids(self) -> frozenset[str]:
        """The jobs that have slots."""
        return frozenset(self._records)

    async def slot_beside_image(self, operation: str, worker: AgentConnection) -> tuple[int, int] | None:
        """Return the slot and the number of the snapshot that this process takes where it is parked for an image.

        None if its job is not protected, or if no snapshot is due.
        """
        for protection in self._running.values():
            if worker in protection.job.own_workers():
                return await protection.slot_beside_image(operation, worker)
        return None

    def returns_to(self, job: str) -> tuple[str, ...]:
        """Return the GPUs on which that job will be started again, or is being started; none for any other job."""
        running = self._running.get(job)
        return self.in_process.returns_to(job) if running is None else running.returns_to

    def start_on(self, job: str, gpus: Sequence[str]) -> None:
        """Have a job that waits for room started on these GPUs."""
        if (running := self._running.get(job)) is not None:
            running.job.put(running.job.record.replace(gpus=tuple(gpus)))
        else:
            self.in_process.start_on(job, gpus)

    def note_suspended(self, job: str, operation: str, *, by_user: bool) -> None:
        """Record which operation had a job suspended when it failed. If its user had, it waits for that user."""
        record = self._record_of(job)
        if record is not None and record.suspended_by != operation:
            self._put(record.replace(suspended_by=operation, awaits_resume=record.awaits_resume or by_user))

    def learn_gpus(self, job: str, gpus: Sequence[str]) -> None:
        """Record where a job was that has failed, if its snapshots were taken before that was known."""
        record = self._record_of(job)
        if record is not None and gpus and not record.gpus:
            self._put(record.replace(gpus=tuple(gpus)))

    def awaits_resume(self, job: str) -> bool:
        """Return True if that job is started again only once its user resumes it."""
        record = self._record_of(job)
        return record is not None and record.awaits_resume

    def resume(self, job: str) -> None:
        """Record that the user of that job has resumed it."""
        record = self._record_of(job)
        if record is not None and record.awaits_resume:
            self._put(record.replace(awaits_resume=False))
            self._news.notify_all()

    def wait_again(self, job: str) -> None:
        """Have that job wait for its user again, as before `resume`."""
        record = self._record_of(job)
        if record is not None:
            self._put(record.replace(awaits_resume=True))
            self._news.notify_all()

    def suspended_by(self, job: str) -> str | None:
        """Return the operation that had that job suspended when it failed."""
        record = self._record_of(job)
        return None if record is None else record.suspended_by

    def last_attempt(self, job: str) -> RecoveryAttempt | None:
        """Return the newest recovery of that job."""
        record = self._record_of(job)
        return None if record is None or not record.attempts else record.attempts[-1]

    def has_returned_since(self, job: str, utc: float) -> bool:
        """Return True if that job has failed after that time, and was recovered."""
        record = self._record_of(job)
        attempts = () if record is None else record.attempts
        return any(one.result == protocol.RECOVERED and one.failed_utc >= utc for one in attempts)

    def is_supervised(self, job: str) -> bool:
        """Return True if the supervisor of that job is connected, or was and may return."""
        return job in self._running

    def _record_of(self, job: str) -> JobSnapshots | None:
        running = self._running.get(job)
        return self._records.get(job) if running is None else running.job.record

    def _put(self, record: JobSnapshots) -> None:
        running = self._running.get(record.job)
        if running is None:
            self._save(record)
        else:
            running.job.put(record)

    def look_again(self) -> None:
        """Check again what the starts of jobs wait for, which may have changed."""
        self._news.notify_all()

    async def keep_looking(self) -> None:
        """Free states that were kept for too long, and slots whose job did not return. Runs until cancelled."""
        await anyio.sleep(RETURN_WITHIN_S)
        while True:
            for record in tuple(self._records.values()):
                try:
                    await self._look_at(record)
                except HegmError as error:
                    logger.warning("the slots of job %s are still held: %s", record.job, error.message)
            await anyio.sleep(_LOOK_INTERVAL_S)

    async def _look_at(self, record: JobSnapshots) -> None:
        if record.job in self._running or self.in_process.is_live(record):
            return
        is_lost = not JobSlots(self._pool, record.job).held()
        if record.launcher_pid is not None or (is_lost and not record.generation):
            await self._drop(record.job)  # only a launcher could use its own
            return
        now_s = self._boot_s()
        if record.kept_boot_s is None or record.kept_boot_s > now_s:  # it has just ended, or before a reboot
            kept = record.kept or (None if is_lost else _KILLED)  # if lost, its user learns where its newest image is
            self._save(record.replace(kept=kept, kept_boot_s=now_s))
        elif now_s - record.kept_boot_s > KEPT_S:
            await self._drop(record.job)

    def _workers_of(self, job: str) -> list[AgentConnection]:
        known = self._jobs.with_id(job)
        return [] if known is None else list(self._jobs.workers_of(known))

    def _save(self, record: JobSnapshots) -> None:
        self._records[record.job] = record
        self._files.put(dict(self._records))

    # -- who comes and goes --------------------------------------------------------------------------------------------

    def _on_supervisor_change(self, supervisor: Supervisor) -> None:
        """Handle a change of a supervisor. Called from the event loop; must not wait."""
        self._news.notify_all()
        if supervisor.offer.recover is None or self._tasks is None or not supervisor.is_alive:
            return
        job = self._jobs.of_run(supervisor.uid, supervisor.run)
        if job is not None and job.id not in self._running:
            record = self._records.get(job.id) or JobSnapshots(job=job.id, uid=job.uid)
            if supervisor.offer.resumes == job.id and not supervisor.offer.started:
                if record.awaits_resume:
                    self.queue(job.id)
                record = record.replace(awaits_resume=False)  # by `hegmctl run --resume`
            if supervisor.offer.pid is not None:  # it was away for so long that its state was kept for a new one
                record = record.replace(kept=None, kept_boot_s=None)
            protection = self._running[job.id] = Protection(ProtectedJob(self.node, record, job.name, supervisor))
            self._tasks.start_soon(self._protect, protection)

    async def _protect(self, protection: Protection) -> None:
        job = protection.job.record.job
        self._save(protection.job.record)
        try:
            await self._files.until_saved()  # without the record, the next daemon would free the slots
            while protection.job.supervisor.is_alive:
                await run_once(protection)
            await self._keep_or_drop(protection)
        finally:
            del self._running[job]
            self._taken += protection.taken
        for supervisor in self._supervisors:  # one may have come meanwhile that continues from the state
            self._on_supervisor_change(supervisor)

    async def _keep_or_drop(self, protection: Protection) -> None:
        """Keep the state of a job whose `hegmctl run` was killed; release the slots of one that has ended."""
        record, offer = protection.job.record, protection.job.supervisor.offer
        if record.kept is not None:
            return
        if offer.pid is None and offer.fell is None:
            await self._drop_ended(record)
        else:
            self._save(record.replace(kept=_KILLED, kept_boot_s=self._boot_s()))

    async def _drop_ended(self, record: JobSnapshots) -> None:
        """Release the slots of a job that has ended; those that cannot be released are tried again later."""
        try:
            await self._drop(record.job)
        except HegmError as error:
            logger.warning("the slots of job %s are still held: %s", record.job, error.message)
            self._save(record.replace(kept="its memory could not be released yet", kept_boot_s=-KEPT_S))

    async def _drop(self, job: str) -> int:
        """Give the slots back. Raises HegmError; then they are held, and it is tried again."""
        freed_bytes = await JobSlots(self._pool, job).release()
        self._records.pop(job, None)
        self._files.put(dict(self._records))
        return freed_bytes

    # -- requests ------------------------------------------------------------------------------------------------------

    def require_kept(self, job: str, uid: int, pid: int) -> None:
        """Check that this user may continue from the kept state of that job in this process. Raises HegmError."""
        record, running = self._records.get(job), self._running.get(job)
        by = None if running is None else running.job.supervisor
        if record is not None and record.uid == uid and by is not None and by.is_alive and by.pid != pid:
            raise Refused(f"process {by.pid} runs job {job} already", f"run: hegmctl recovery {job}")
        if record is None or record.kept is None:
            raise Refused(f"no state of job {job} is kept", "run: hegmctl recovery")
        if record.uid != uid:
            hint = "run the command as that user: only the owner may use a saved state"
            raise HegmError(DENIED, f"job {job} belongs to uid {record.uid}", hint)

    async def show(self, jobs: Sequence[int | str], may: May) -> protocol.RecoveryReply:
        """Return how these jobs are protected, or all. Raises HegmError for one that is not."""
        records = [self._named(one, may) for one in jobs] or list(self._records.values())
        views = [await self._view(record, may) for record in sorted(records, key=lambda one: int(one.job[1:]))]
        return protocol.RecoveryReply(taken_utc=self._utc(), jobs=tuple(views))

    async def drop(self, job: int | str, may: May) -> int:
        """Delete the kept state of a job; how many bytes that frees. Raises HegmError."""
        record = self._named(job, may)
        if not may(record.uid):
            hint = "ask its owner, or an administrator of hegmd"
            raise HegmError(DENIED, f"job {record.job} belongs to uid {record.uid}", hint)
        if record.job in self._running or self.in_process.is_live(record):
            raise Refused(f"job {record.job} has not ended", "its snapshots are deleted when it ends")
        return await self._drop(record.job)

    def _named(self, wanted: int | str, may: May) -> JobSnapshots:
        job = self._jobs.of_pid(wanted) if isinstance(wanted, int) else self._jobs.named(wanted, may)
        record = None if job is None else self._records.get(job.id)
        if record is None:
            hint = "start it with: hegmctl run --recover -- COMMAND"
            raise HegmError(NOT_FOUND, f"job {wanted} is not protected, and no state of it is kept", hint)
        return record

    async def _view(self, record: JobSnapshots, may: May) -> protocol.JobRecovery:
        running, slots = self._running.get(record.job), JobSlots(self._pool, record.job)
        job = self._jobs.with_id(record.job)
        view = protocol.JobRecovery(
            id=record.job,
            name=record.job if job is None else job.name,
            uid=record.uid,
            state=self._state(record),
            held_bytes=sum(slots.held().values()),
        )
        if not may(record.uid):
            return view
        read = await slots.read()
        whole = {one.generation for one in complete_generations(by_rank(read), max(1, record.ranks))}
        shown = [
            protocol.Snapshot(rank=rank, slot=slot)
            if found is None or found.generation not in whole
            else protocol.Snapshot(
                rank=rank,
                slot=slot,
                generation=found.generation,
                step=found.step,
                size_bytes=found.size_bytes,
                taken_utc=found.taken_utc,
                damaged=found.generation in record.bad,
            )
            for (rank, slot), found in sorted(read.items())
        ]
        return view.replace(
            why=_why(record, view.state) if running is None or record.awaits_resume else running.why,
            interval_s=None if running is None else running.interval_s,
            cost_s=None if running is None else running.cost_s,
            copied_s=None if running is None else running.copied_s,
            snapshots=0 if running is None else running.taken,
            slots=tuple(shown),
            begins_anew=record.begins_anew,
            recoveries=record.attempts,
        )

    def _state(self, record: JobSnapshots) -> str:
        running = self._running.get(record.job)
        if running is None and record.launcher_pid is not None:
            return in_process_state(record)
        if running is None and not JobSlots(self._pool, record.job).held():
            return protocol.LOST
        if running is None:
            return protocol.AWAITED if record.kept is None else protocol.KEPT
        if running.is_recovering:
            return protocol.RECOVERING
        if running.why is not None:
            return protocol.UNPROTECTED
        return protocol.STARTING if running.job.newest is None else protocol.PROTECTED

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def tally(self) -> RecoveryTally:
        """Return how many jobs are in each state, and how many snapshots were taken since the daemon began."""
        states = Counter(self._state(record) for record in self._records.values())
        return RecoveryTally(states, self._taken + sum(protection.taken for protection in self._running.values()))


async def run_once(protection: Protection, pause_s: float = FAILED_S) -> None:
    """Protect a job until its supervisor has ended. A failure of one job does not end the daemon."""
    try:
        await protection.run()
    except Exception:  # the edge: a full disk, no more descriptors; the protection starts over
        logger.exception("the protection of %s failed, and starts again", protection.job)
        await anyio.sleep(pause_s)


def _why(record: JobSnapshots, state: str) -> str | None:
    """Return the reason for the state of a job that no running protection explains."""
    if record.awaits_resume:
        return f"it failed while its user had suspended it; hegmctl resume {record.job} starts it again"
    if state == protocol.AWAITED:
        return "its hegmctl run has not connected since hegmd has started"
    if state == protocol.LOST:
        images = (
            "" if record.images is None else f"; hegmctl restore --newest {record.images} restores its newest image"
        )
        return f"no memory of its snapshots is left, as after a reboot{images}"
    return record.kept or record.unprotected
