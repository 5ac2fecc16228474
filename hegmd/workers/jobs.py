"""Jobs: their ids, names and ends. They outlive the daemon (`job_file`).

A job is known from the moment at which its `hegmctl run` registers it, or its first agent attends. It has ended once
its first process, its agents and its supervisor have ended, and no operation has it. One that comes back, from an image
or because an agent connects late, is the same job again. Owns ids and names. `hegmd.operations.job_requests` reports
what a job does at the moment, and on which GPUs.

Longer than 400 lines because all that changes the record of a job is here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import anyio

from hegmd.errors import BAD_REQUEST, BUSY, NOT_FOUND, UNAVAILABLE, HegmError
from hegmd.node.processes.procfs import ProcessGone, Unreadable, exit_status, read_arguments, seconds_since_boot
from hegmd.protocol.jobs import DEFAULT_PRIORITY
from hegmd.protocol.messages import RegisterJob
from hegmd.protocol.names import closest, job_number, why_no_name
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.condition import Condition
from hegmd.system.threads import run_detached
from hegmd.telemetry.log import limited
from hegmd.workers.job_file import JobRecord, JobSaving
from hegmd.workers.job_names import MAX_RUN_CHARS, ago, name_of, run_of, script_of, shown_command, status_text
from hegmd.workers.supervisors import Supervisor, Supervisors
from hegmd.workers.workers import CAME, ENDED, LEFT, AgentConnection, Workers

logger = logging.getLogger(__name__)

# How many ended jobs are kept, for how long, and how many of each user.
MAX_ENDED, MAX_ENDED_OF_USER, MAX_ENDED_S = 500, 100, 30 * 86400.0
# How many jobs a user can have that have not ended: one process can keep any number of them.
MAX_ALIVE_OF_USER = 1000
MAX_RUNS = 8
# Ranks and their loaders' workers; the latest ones, such as those of a restart.
MAX_MEMBERS = 256
# After a start of the daemon: agents and supervisors of jobs whose first process is gone have so long to connect.
RETURN_WITHIN_S = 15.0
_LOOK_INTERVAL_S = 2.0
_COMMAND_WITHIN_S = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

May = Callable[[int | None], bool]


class JobOperations(Protocol):
    def holds(self, job: JobRecord) -> bool:
        """Whether an operation that is not over has the job, its processes gone or not."""
        ...

    def end_of(self, job: JobRecord, since_ticks: int = 0) -> str | None:
        """Describe how an operation ended the job, by processes that were started since then; None if none did."""
        ...

    def is_being_written(self, job: JobRecord) -> bool:
        """Whether an operation has the job that ends it once its image is written."""
        ...


class Jobs(BackgroundTasks):
    """Every job of the node. Call `open` before agents connect, then `run`."""

    def __init__(
        self,
        workers: Workers,
        supervisors: Supervisors,
        start_ticks: Callable[[int], int | None],
        operations: JobOperations,
    ) -> None:
        super().__init__()
        self._workers = workers
        self._supervisors = supervisors
        self._start_ticks = start_ticks
        self._operations = operations
        self._saving = JobSaving()
        self._boot = ""
        self._next = 1
        #: The priority of a job without a given one.
        self.default_priority = DEFAULT_PRIORITY
        self._jobs: dict[int, JobRecord] = {}
        self._by_run: dict[tuple[int, str], int] = {}
        #: Earlier jobs whose first process was gone when this daemon started, until they had time to reconnect.
        self._awaited: set[int] = set()
        #: Processes with an agent that lived when this daemon started, and have not connected to it.
        self._away: dict[str, tuple[int, int]] = {}
        #: The watch on the first process of each job, by the job's number.
        self._watches: dict[int, anyio.CancelScope] = {}
        #: Called when a job is added, removed or changed.
        self.changed = Condition()
        #: Called when the first process of a job has ended.
        self.on_command_end: Callable[[JobRecord], None] = lambda _job: None
        workers.listen(self._on_worker_event)
        supervisors.listen(self._on_supervisor_event)

    # -- the life of the part ------------------------------------------------------------------------------------------

    def open(self, folder: Path) -> None:
        """Read the jobs of before. Blocks."""
        self._boot = _BOOT_ID.read_text().strip()
        self._next, known = self._saving.open(folder)
        for job in known:
            self._jobs[job.number] = job
            self._by_run.update({(job.uid, run): job.number for run in job.runs})

    def skip_ids(self, ids: Iterable[str]) -> None:
        """Give none of these to a new job: an earlier daemon did, and may have been unable to write that to disk."""
        numbers = [int(each[1:]) for each in ids if each.startswith("j") and each[1:].isdecimal()]
        self._next = max([self._next, *(number + 1 for number in numbers)])

    def _on_start(self) -> None:
        self._take_over()
        open_tasks = self._open_tasks()
        open_tasks.start_soon(self._saving.run)
        open_tasks.start_soon(self._keep_looking)

    def _take_over(self) -> None:
        for job in tuple(self._jobs.values()):
            is_there = job.pid is not None and job.boot == self._boot and self._is_there(job.pid, job.start_ticks)
            if job.is_alive and not job.is_gone and is_there:
                self._watch_soon(job)
            elif job.is_alive:
                self._awaited.add(job.number)
                self._put(job.replace(is_gone=True))
                if not job.is_gone:  # it has ended while no daemon ran
                    self.on_command_end(self._jobs[job.number])
            if job.is_alive and job.boot == self._boot:
                keys = [(name, *name.partition("-")[::2]) for name in job.members]
                self._away.update(
                    {name: (int(pid), int(ticks)) for name, pid, ticks in keys if _are_numbers(pid, ticks)}
                )

    async def _keep_looking(self) -> None:
        """See which jobs without a first process have ended: their agents and operations are gone by then."""
        await anyio.sleep(RETURN_WITHIN_S)
        self._awaited.clear()
        while True:
            self.look_again()
            await anyio.sleep(_LOOK_INTERVAL_S)

    def look_again(self) -> None:
        """End the jobs that are over by now: an operation had the last processes of one, and has ended since."""
        for job in tuple(self._jobs.values()):
            self._end_if_over(job.number)

    def is_away(self, job: JobRecord) -> bool:
        """Return True if a process of it that had an agent lives, and has not connected since this daemon started."""
        return any(name in self._away and self._is_there(*self._away[name]) for name in job.members)

    # -- who is there --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(tuple(self._jobs.values()))

    def numbered(self, number: int | None) -> JobRecord | None:
        """Return the job with that number, if it is remembered."""
        return None if number is None else self._jobs.get(number)

    def with_id(self, job_id: str) -> JobRecord | None:
        """Return the job with that id, if it is remembered."""
        return next((job for job in self._jobs.values() if job.id == job_id), None)

    def of_run(self, uid: int | None, run: str | None) -> JobRecord | None:
        number = None if uid is None or run is None else self._by_run.get((uid, run))
        return self.numbered(number)

    def of_worker(self, worker: AgentConnection) -> JobRecord | None:
        return self.of_run(worker.identity.uid, run_of(worker) or worker.name)

    def workers_of(self, job: JobRecord) -> Iterator[AgentConnection]:
        return (worker for worker in self._workers if (found := self.of_worker(worker)) and found.number == job.number)

    def of_pid(self, pid: int) -> JobRecord | None:
        """Return the job whose first process, worker or supervisor has that pid."""
        first = next((job for job in self._jobs.values() if job.pid == pid and not job.is_gone), None)
        worker, supervisor = self._workers.find(pid), self._supervisors.of_pid(pid)
        if first is None and worker is not None:
            return self.of_worker(worker)
        return first if supervisor is None or first is not None else self.of_run(supervisor.uid, supervisor.run)

    def _begun_by(self, pid: int, ticks: int | None, uid: int) -> JobRecord | None:
        """Return the job whose first process that is: a run within a run takes its place."""
        first = self.of_pid(pid)
        return first if first is not None and (first.pid, first.start_ticks, first.uid) == (pid, ticks, uid) else None

    def named(self, text: str, may: May) -> JobRecord:
        """The job with that id or name: of several that had the name, the one that has not ended.

        Jobs for which the caller may act come first. Raises NOT_FOUND, and BAD_REQUEST with a list to choose from.
        """
        number = job_number(text)
        found = [job for job in self._jobs.values() if job.number == number or job.name == text]
        found = [job for job in found if may(job.uid)] or found
        chosen = [job for job in found if job.is_alive] or found
        if not chosen:
            raise self._not_found(text, may)
        if len(chosen) == 1:
            return chosen[0]
        ends = {job.id: self.describe_end(job) if may(job.uid) else "ended" for job in chosen[-10:] if not job.is_alive}
        listed = ", ".join(f"{job.id} ({ends.get(job.id, 'lives')})" for job in chosen[-10:])
        raise HegmError(
            BAD_REQUEST,
            f"{len(chosen)} jobs were called {text[:60]!r}: {listed}",
            f"write the id of one, such as {chosen[-1].id}; see: hegmctl jobs --all",
            {"jobs": [job.id for job in chosen]},
        )

    def _not_found(self, text: str, may: May) -> HegmError:
        own = [job for job in self._jobs.values() if may(job.uid)]
        living = [job.name for job in own if job.is_alive]
        close = closest(text, living) or closest(text, [job.name for job in own])
        hint = f"did you mean {close}? run: hegmctl jobs" if close else "run: hegmctl jobs --all"
        return HegmError(NOT_FOUND, f"there is no job {text[:60]!r}", hint, {"job": text[:60]})

    def describe_end(self, job: JobRecord) -> str:
        how = job.end or ("its exit status is not known" if job.status is None else status_text(job.status))
        return f"ended {ago(time.time() - (job.ended_utc or 0.0))} ago, {how}"

    # -- who comes and goes --------------------------------------------------------------------------------------------

    async def register(
        self,
        pid: int,
        uid: int,
        request: RegisterJob,
        continued: JobRecord | None = None,
        *,
        priority: int | None = None,
    ) -> JobRecord:
        """Enter the job of a process; its id and name are on disk when this returns. Raises BAD_REQUEST, BUSY.

        `goes_on` is the job from whose state it continues. Without a priority it keeps the one that it has.
        """
        if not 0 < len(request.run) <= MAX_RUN_CHARS:
            raise HegmError(BAD_REQUEST, "a job needs the id of its run", "its processes get it from HEGM_RUN")
        why = None if request.name is None else why_no_name(request.name)
        if why is not None:
            raise HegmError(
                BAD_REQUEST, f"a job cannot be called {str(request.name)[:80]!r}: {why}", "choose another name"
            )
        ticks = self._start_ticks(pid)
        known = self.of_run(uid, request.run) or continued or self._begun_by(pid, ticks, uid)
        if known is None and sum(job.uid == uid and job.is_alive for job in self._jobs.values()) >= MAX_ALIVE_OF_USER:
            raise HegmError(
                BUSY, f"uid {uid} has {MAX_ALIVE_OF_USER} jobs", "run it when some have ended: hegmctl jobs"
            )
        script = script_of(request.command)
        job = self._enter(uid, request.run, request.name or name_of(script), shown_command(script), known, request.name)
        job = job.replace(priority=job.priority if priority is None else priority, slurm_job=request.slurm_job)
        self._put(job)
        self._take_first(job, pid, ticks)
        await self._saving.until_saved()
        return self._jobs[job.number]

    def _enter(
        self, uid: int, run: str, name: str, command: str, known: JobRecord | None = None, given_name: str | None = None
    ) -> JobRecord:
        """Create the record of that run, or add that run to the known job."""
        if known is None:
            job = JobRecord(
                number=self._next,
                name=self._unique(name, None),
                uid=uid,
                runs=(run,),
                command=command,
                started_utc=time.time(),
                boot=self._boot,
                priority=self.default_priority,
            )
            self._next += 1
        else:
            runs = (*(one for one in known.runs if one != run), run)[-MAX_RUNS:]
            kept = known.name if given_name is None else self._unique(given_name, known)
            job = self._back(known).replace(runs=runs, name=kept, command=command)
            self._forget_runs(job, set(known.runs).difference(runs))
        self._by_run[uid, run] = job.number
        self._put(job)
        self._trim()
        return job

    def _unique(self, name: str, but_for: JobRecord | None) -> str:
        """Return that name, with a number appended if a job that has not ended has it."""
        taken = {
            job.name
            for job in self._jobs.values()
            if job.is_alive and (but_for is None or job.number != but_for.number)
        }
        number, made = 1, name
        while made in taken:
            number += 1
            made = f"{name}-{number}"
        return made

    def _back(self, job: JobRecord) -> JobRecord:
        """Reopen the record of a job that is running again after it had ended. Another job may have its name by now."""
        if job.is_alive:
            return job
        return job.replace(ended_utc=None, status=None, end=None, name=self._unique(job.name, job))

    def _on_worker_event(self, event: str, worker: AgentConnection) -> None:
        """An agent came or left, or its process ended. Called in the event loop, must not wait."""
        self._away.pop(worker.name, None)
        job = self.of_worker(worker)
        if event == ENDED:
            if job is not None:
                self._end_if_over(job.number)
        elif job is None and event == CAME and self._tasks is not None:
            self._tasks.start_soon(self._enter_worker, worker)
        elif job is not None and event != LEFT:
            self._take_in(job, worker)

    def _on_supervisor_event(self, supervisor: Supervisor) -> None:
        job = self.of_run(supervisor.uid, supervisor.run)
        if job is not None and supervisor.is_alive:
            self._mark_returned(job, supervisor.pid, supervisor.start_ticks)
        elif job is not None:
            self._end_if_over(job.number)

    def _take_in(self, job: JobRecord, worker: AgentConnection) -> None:
        # A rank that was there before its launcher had ended does not take its place.
        is_orphan = worker.about.rank is not None and worker.name in job.members
        self._mark_returned(job, worker.pid, None if is_orphan else worker.identity.start_ticks)
        job = self._jobs[job.number]
        if worker.boundary:
            self.note_training(job)
            job = self._jobs[job.number]
        if worker.name not in job.members:
            self._put(job.replace(members=(*job.members, worker.name)[-MAX_MEMBERS:]))

    def is_being_written(self, job_id: str) -> bool:
        """Return True if an operation has the job that ends it once its image is written."""
        job = self.with_id(job_id)
        return job is not None and self._operations.is_being_written(job)

    def end_of(self, job_id: str, since_ticks: int) -> str | None:
        """Return how an operation ended the job, by processes that were started since then; None if none did."""
        job = self.with_id(job_id)
        return None if job is None else self._operations.end_of(job, since_ticks)

    async def set_priority(self, number: int, priority: int) -> None:
        """Change the priority of a job; it is on disk when this returns. Raises HegmError, although it is changed."""
        job = self._jobs.get(number)
        if job is not None and job.priority != priority:
            self._put(job.replace(priority=priority))
            if not await self._saving.until_saved():
                message = f"job {job} has priority {priority}, but that cannot be written to disk"
                hint = f"free space in {self._saving.folder}; hegmd writes it as soon as it can. Until then a crash of"
                raise HegmError(UNAVAILABLE, message, f"{hint} hegmd would undo it", {"job": job.id})

    def note_training(self, job: JobRecord) -> None:
        """Note that the job reached a batch."""
        if not job.has_trained:
            self._put(job.replace(has_trained=True))

    def _mark_returned(self, job: JobRecord, pid: int, ticks: int | None) -> None:
        """A process of it exists: it has not ended, and one without a first process has that one; without ticks, none.

        An exit status that is known is the job's and is kept, unless an operation ended the process.
        """
        self._awaited.discard(job.number)
        if not job.is_alive:
            job = self._back(job)
            self._put(job)
        if job.is_gone and (job.status is None or self._operations.end_of(job) is not None):
            self._take_first(job, pid, ticks)

    async def _enter_worker(self, worker: AgentConnection) -> None:
        """Add the job of a worker that was not registered: its `hegmctl run` found no daemon, or an older one."""
        words: Sequence[str] = ()
        with anyio.move_on_after(_COMMAND_WITHIN_S):
            try:
                words = await run_detached(lambda _: read_arguments("/proc", worker.pid), name="hegmd-job")
            except (HegmError, ProcessGone, Unreadable) as error:
                logger.debug("the command of process %d is not known: %s", worker.pid, error)
        if worker.ended or self.of_worker(worker) is not None:
            return
        script, given_name = script_of(words), worker.about.job
        name = given_name if given_name is not None and why_no_name(given_name) is None else name_of(script)
        run = run_of(worker) or worker.name
        same = self._begun_by(worker.pid, worker.identity.start_ticks, worker.identity.uid)
        job = self._enter(worker.identity.uid, run, name, shown_command(script), same)
        self._take_in(job, worker)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _take_first(self, job: JobRecord, pid: int, ticks: int | None) -> None:
        if ticks is None or (job.pid, job.start_ticks, job.is_gone) == (pid, ticks, False):
            return
        job = job.replace(pid=pid, start_ticks=ticks, boot=self._boot, is_gone=False, status=None)
        self._put(job)
        self._watch_soon(job)

    def _watch_soon(self, job: JobRecord) -> None:
        """Watch its first process, and an earlier one no longer: each watch has a descriptor."""
        if self._tasks is not None and job.pid is not None and job.start_ticks is not None:
            if (before := self._watches.get(job.number)) is not None:
                before.cancel()
            scope = self._watches[job.number] = anyio.CancelScope()
            self._tasks.start_soon(self._watch_within, scope, job.number, job.pid, job.start_ticks)

    async def _watch_within(self, scope: anyio.CancelScope, number: int, pid: int, ticks: int) -> None:
        with scope:
            await self._watch(number, pid, ticks)
        if self._watches.get(number) is scope:
            del self._watches[number]

    def _is_there(self, pid: int, ticks: int | None) -> bool:
        """Return True if that process has not ended. One that cannot be inspected now has not."""
        try:
            return self._start_ticks(pid) == ticks
        except HegmError as error:
            limited(logger, "jobs", logging.WARNING, "%s; %s", error.message, error.hint)
            return True

    async def _watch(self, number: int, pid: int, ticks: int) -> None:
        """Wait for the end of a job's first process, and note its exit status."""
        status = pidfd = None
        while pidfd is None and self._is_there(pid, ticks):
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                break
            except OSError:  # no descriptor is free now
                await anyio.sleep(_LOOK_INTERVAL_S)
        if pidfd is not None:
            try:
                if self._is_there(pid, ticks):
                    await anyio.wait_readable(pidfd)
                status = exit_status(pidfd, pid, ticks)
            finally:
                anyio.notify_closing(pidfd)
                os.close(pidfd)
        job = self._jobs.get(number)
        if job is not None and (job.pid, job.start_ticks) == (pid, ticks):
            job = job.replace(is_gone=True, status=status)
            self._put(job)
            self.on_command_end(job)
            self._end_if_over(number)

    def _end_if_over(self, number: int) -> None:
        job = self._jobs.get(number)
        if job is None or not job.is_alive or not job.is_gone or number in self._awaited:
            return
        has_supervisor = any(self._supervisors.find(job.uid, run) is not None for run in job.runs)
        if any(True for _ in self.workers_of(job)) or has_supervisor or self._operations.holds(job):
            return
        end = self._operations.end_of(job)
        status = job.status if end is None else None
        boot_s = seconds_since_boot()
        self._put(job.replace(ended_utc=time.time(), ended_boot_s=boot_s, end=end, status=status, members=()))
        self._trim()

    def _trim(self) -> None:
        """Forget the oldest jobs that have ended, beyond what is remembered."""
        ended = sorted(
            (job for job in self._jobs.values() if not job.is_alive), key=lambda job: -(job.ended_utc or 0.0)
        )
        of_user: dict[int, int] = {}
        for place, job in enumerate(ended):
            of_user[job.uid] = of_user.get(job.uid, 0) + 1
            ended_s = job.ended_boot_s if job.boot == self._boot else None  # of an earlier boot: before this one
            is_old = seconds_since_boot() - (ended_s or 0.0) > MAX_ENDED_S
            if is_old or place >= MAX_ENDED or of_user[job.uid] > MAX_ENDED_OF_USER:
                del self._jobs[job.number]
                self._forget_runs(job, job.runs)

    def _forget_runs(self, job: JobRecord, runs: Iterable[str]) -> None:
        for run in runs:
            if self._by_run.get((job.uid, run)) == job.number:
                del self._by_run[job.uid, run]

    def _put(self, job: JobRecord) -> None:
        self._jobs[job.number] = job
        self._note_change()

    def _note_change(self) -> None:
        self._saving.change(self._next, tuple(self._jobs.values()))
        self.changed.notify_all()


def _are_numbers(*texts: str) -> bool:
    return all(map(str.isdecimal, texts))
