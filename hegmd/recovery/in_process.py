"""Jobs of `hegmctl run --ranks`: their ranks recover by themselves, from slots that the daemon holds.

The launcher decides. This holds the memory, so that it counts in the pool's budget and outlives the daemon, and stores
the launcher's reports of recoveries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hegmd.errors import NOT_FOUND, HegmError, Refused
from hegmd.memory.pool import Memory, Source
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.protocol.messages import HoldSlot, ReportRecovery
from hegmd.protocol.recovery import GIVEN_UP, PROTECTED, RECOVERED, RECOVERING, UNDER_WAY, UNPROTECTED, RecoveryAttempt
from hegmd.recovery.job import Node
from hegmd.recovery.records import JobSnapshots
from hegmd.recovery.slots import SLOTS, JobSlots
from hegmd.workers.job_file import JobRecord
from hegmd.workers.job_names import trains
from hegmd.workers.jobs import Jobs

_EVENTS = {
    UNDER_WAY: ("job.fell", "warning"),
    RECOVERED: ("job.recovered", "info"),
    GIVEN_UP: ("job.given-up", "error"),
}


class InProcess:
    """The slots and reports of all such jobs. `record_of` returns the record of a job by its id."""

    def __init__(self, jobs: Jobs, node: Node, record_of: Callable[[str], JobSnapshots | None]) -> None:
        self._jobs = jobs
        self._node = node
        self._record_of = record_of
        #: The GPUs of the jobs whose ranks may all be started again, and do not train yet.
        self._starting: dict[str, tuple[str, ...]] = {}

    def is_live(self, record: JobSnapshots) -> bool:
        """Return True if the launcher of that job runs."""
        pid = record.launcher_pid
        return pid is not None and start_ticks_of(pid) == record.launcher_start_ticks

    def starts_ranks(self, job: str) -> bool:
        """Return True if the launcher of that job runs: it starts the ranks again that have ended."""
        record = self._record_of(job)
        return record is not None and self.is_live(record)

    def start_on(self, job: str, gpus: Sequence[str]) -> None:
        """Keep the GPUs of a job for its ranks, all of which may be started again."""
        if self.starts_ranks(job):
            self._starting[job] = tuple(gpus)

    def returns_to(self, job: str) -> tuple[str, ...]:
        """Return the GPUs on which all ranks of that job are being started, until they train."""
        if job in self._starting:
            workers = self._node.workers_of(job)
            if not self.starts_ranks(job) or (workers and all(trains(worker) for worker in workers)):
                del self._starting[job]
        return self._starting.get(job, ())

    async def hold(self, pid: int, uid: int, request: HoldSlot) -> tuple[str, Memory]:
        """Hold memory for a slot of the caller's job; the job's id, and the memory. Raises HegmError."""
        if not 0 <= request.slot < SLOTS or request.size_bytes <= 0:
            raise Refused(
                f"slot {request.slot} of {request.size_bytes} bytes cannot be", "ask for slot 0 or 1, and a size"
            )
        job, record = self._job_of(uid, request.run)
        ticks = start_ticks_of(pid)
        if self.is_live(record) and (record.launcher_pid, record.launcher_start_ticks) != (pid, ticks):
            raise Refused(f"process {record.launcher_pid} launches the ranks of job {job.id}", "run: hegmctl recovery")
        self._node.save(record.replace(launcher_pid=pid, launcher_start_ticks=ticks, ranks=1))
        await self._node.until_saved()  # without the record, the next daemon would free the slot
        slots = JobSlots(self._node.pool, job.id)
        return job.id, await slots.take(0, request.slot, request.size_bytes, Source(uid, ticks or 0))

    def report(self, uid: int, report: ReportRecovery) -> None:
        """Store a launcher's report. Raises HegmError."""
        job, record = self._job_of(uid, report.run)
        if report.unprotected is not None and record.unprotected is None:
            message = f"job {job.id} ({job.name}) is not protected: {report.unprotected}"
            self._node.events.record("job.unprotected", "warning", message, facts={"job": job.id, "uid": job.uid})
        record = record.replace(unprotected=report.unprotected)
        attempt = report.recovery
        if attempt is not None:
            former = next((one for one in record.attempts if one.failed_utc == attempt.failed_utc), None)
            if attempt.result in _EVENTS and (former is None or former.result != attempt.result):
                kind, severity = _EVENTS[attempt.result]
                self._node.events.record(kind, severity, _message(job, attempt), facts={"job": job.id, "uid": job.uid})
            record = record.with_attempt(attempt)
        self._node.save(record)

    def may_start(self, uid: int, run: str) -> bool:
        """Return True unless that job is off its GPUs. Raises HegmError."""
        job, _ = self._job_of(uid, run)
        return not self._node.must_wait(job.id)

    def _job_of(self, uid: int, run: str) -> tuple[JobRecord, JobSnapshots]:
        job = self._jobs.of_run(uid, run)
        if job is None:
            raise HegmError(NOT_FOUND, "this user has no job of that run", "start it with: hegmctl run --ranks N")
        return job, self._record_of(job.id) or JobSnapshots(job=job.id, uid=job.uid)


def _message(job: JobRecord, attempt: RecoveryAttempt) -> str:
    name = f"job {job.id} ({job.name})"
    if attempt.result == RECOVERED:
        return f"{name} recovered in process from step {attempt.from_step} in {attempt.trained_s or 0.0:.2f} s"
    if attempt.result == GIVEN_UP:
        return f"{name} is not recovered: {attempt.why}"
    return f"{name} failed at step {attempt.step}: {attempt.why}"


def in_process_state(record: JobSnapshots) -> str:
    """Return how a job of a launcher is, as `hegmctl recovery` says it."""
    if record.attempts and record.attempts[-1].result == UNDER_WAY:
        return RECOVERING
    return PROTECTED if record.unprotected is None else UNPROTECTED
