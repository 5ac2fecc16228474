"""Handles the requests on jobs: resolves a job's name to its processes, composes its public record, and ends it.

Combines what the register of jobs, the agents, the operations and the inventory know. Decides nothing about operations.
Agents are asked for their count of boundaries only when a client wants to see jobs, and answer without the training
thread.

Longer than 400 lines because the view of a job is composed in one place.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import anyio

from hegmd.errors import DENIED, NOT_FOUND, HegmError, Refused
from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.next_effects import DONE, SETTLING, SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import JobProcess, Operation
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.migration.run.runner import Runner
from hegmd.node.gpu_sets import CPU
from hegmd.node.inventory import Inventory
from hegmd.operations.survey import May
from hegmd.protocol import jobs as protocol
from hegmd.protocol import operations as told_operations
from hegmd.protocol.messages import RegisterJob
from hegmd.protocol.names import job_number
from hegmd.protocol.snapshots import GpuProcess
from hegmd.workers.job_file import JobRecord
from hegmd.workers.job_names import JobNames, trains
from hegmd.workers.jobs import Jobs
from hegmd.workers.supervisors import Supervisors, go_on_command
from hegmd.workers.workers import AgentConnection, Workers

FRESH_S = 0.25
# How long an agent is waited for that is asked for its count, and at the first look how long until it is asked again.
COUNT_S, APART_S = 0.3, 0.5
# The rate is taken since the oldest of the samples, which are this old at most.
RATE_OVER_S, MAX_SAMPLES = 60.0, 64

_AWAY = "its agents, which have not connected since hegmd was started"
# Commands that take a job, with a pid, as hints contain them.
_COMMAND_WITH_PID = re.compile(r"(hegmctl (?:migrate|suspend|resume|checkpoint|handoff|offload) )(\d{1,10})\b")

# Processes of the operations that are remembered; 100 of them, of few ranks each.
MAX_SEEN_MEMBERS = 4096

Sample = tuple[float, int]
Told = TypeVar("Told", told_operations.OperationProcess, told_operations.PlannedProcess)


class JobOperationsOf:
    """The knowledge about jobs that the operations of a runner have."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def of(self, job: JobRecord) -> Operation | None:
        """Return the operation that has the job, through one of its processes or its run."""
        return self._find(job, lambda op: op.live)

    def _find(self, job: JobRecord, processes: Callable[[Operation], Iterable[JobProcess]]) -> Operation | None:
        known = {*job.members, f"{job.pid}-{job.start_ticks}"}
        for op in self._runner.under_way():
            if op.owner_uid in (None, job.uid):
                for member in processes(op):
                    is_one = f"{member.pid}-{member.start_ticks}" in known
                    if is_one or (member.run and member.run in job.runs):
                        return op
        return None

    def last_of(self, job: JobRecord) -> Operation | None:
        """Return the newest operation that had a process of the job, whether or not it has ended."""
        for op in reversed(self._runner.operations()):
            if any(f"{member.pid}-{member.start_ticks}" in job.members for member in op.workers):
                return op
        return None

    def holds(self, job: JobRecord) -> bool:
        """Return True if an operation that has not ended has the job, even if its processes have ended.

        An image has the last of them before its operation is done, and how the job ended is known by then only.
        """
        return self._find(job, lambda op: op.workers) is not None

    def end_of(self, job: JobRecord, since_ticks: int = 0) -> str | None:
        """Return how an operation ended the job, in words; None if none did. Only processes that were started since
        then count: a job comes back from its image, or continues from a snapshot.
        """
        known = {*job.members, f"{job.pid}-{job.start_ticks}"}
        for op in reversed(self._runner.operations()):
            image = op.image
            if image is None or image.leave_running or op.phase != DONE:
                continue
            ended = [(image.root_pid, image.root_ticks), *((member.pid, member.start_ticks) for member in op.workers)]
            if any(ticks >= since_ticks and f"{pid}-{ticks}" in known for pid, ticks in ended):
                return f"written into the image {image.path} by operation {op.id}"
        return None

    def is_being_written(self, job: JobRecord) -> bool:
        """Return True if an operation has the job that ends it once its image is written."""
        op = self._find(job, lambda op: op.workers)
        return op is not None and op.image is not None and not op.image.leave_running


class _ViewInputs(NamedTuple):
    """The inputs of a view of jobs: the processes that the inventory shows, and held bytes, by pid."""

    processes: Mapping[int, GpuProcess]
    held: Mapping[int, int]
    workers: Mapping[int, Sequence[AgentConnection]]


class JobRequests:
    """Asked with ids, names and pids. `may` is called with the owner of each job."""

    def __init__(
        self,
        jobs: Jobs,
        names: JobNames,
        operations: JobOperationsOf,
        inventory: Inventory,
        workers: Workers,
        supervisors: Supervisors,
        runner: Runner,
    ) -> None:
        self._jobs = jobs
        self._names = names
        self._operations = operations
        self._inventory = inventory
        self._workers = workers
        self._supervisors = supervisors
        self._runner = runner
        #: Describes what a job that shares its GPU waits for; None if it does not wait.
        self.waits_for: Callable[[JobRecord], str | None] = lambda _job: None
        #: Whether a job without a process is started again once its user resumes it.
        self.awaits_resume: Callable[[JobRecord], bool] = lambda _job: False
        #: The jobs of processes, so that operations name their jobs after these have ended.
        self._numbers_by_member: dict[str, int] = {}
        workers.listen(self._note_member)
        self._samples: WeakKeyDictionary[AgentConnection, deque[Sample]] = WeakKeyDictionary()

    # -- lookups -------------------------------------------------------------------------------------------------------

    async def pids(self, job: Sequence[int | str], may: May) -> tuple[int, ...]:
        """Return the processes of these jobs that a command acts on. A pid means itself. Raises HegmError."""
        found: dict[int, None] = {}
        has_looked = False
        for one in dict.fromkeys(job):
            if isinstance(one, int) or (one.isascii() and one.isdigit() and len(one) < 20):
                found[int(one)] = None
                continue
            if not has_looked:
                self._jobs.look_again()
                has_looked = True
            found.update(dict.fromkeys(await self._processes_of(one, may)))
        return tuple(found)

    async def pid(self, job: int | str, may: May) -> int:
        """Return the first process that a command acts on. Raises HegmError."""
        return (await self.pids((job,), may))[0]

    async def _processes_of(self, text: str, may: May) -> tuple[int, ...]:
        job = self._allowed(self._jobs.named(text, may), may)
        if not job.is_alive:
            raise HegmError(
                NOT_FOUND, f"job {job} {self._jobs.describe_end(job)}", "run: hegmctl jobs", {"job": job.id}
            )
        workers = [worker for worker in self._jobs.workers_of(job) if trains(worker)]
        if not workers:  # it may have reached its first batch since the last report of an agent
            await self._sample([worker for worker in self._jobs.workers_of(job) if worker.connected])
            workers = [worker for worker in self._jobs.workers_of(job) if trains(worker)]
        op = self._operations.of(job)
        if op is not None and not workers:
            return tuple([member.pid for member in op.live])
        if workers:
            self._jobs.note_training(job)
            return tuple([worker.pid for worker in sorted(workers, key=_rank)])
        latest = self._inventory.latest
        listed = () if latest is None else latest.processes
        own = {job.pid, *(worker.pid for worker in self._jobs.workers_of(job))}
        on_gpus = tuple([process.pid for process in listed if process.pid in own and process.gpus])
        if on_gpus:
            return on_gpus
        waits = self.waits_for(job)
        if waits is not None:
            raise Refused(f"job {job} has no process now, and waits for {waits}", "run: hegmctl queue", {"job": job.id})
        is_connected = any(worker.connected for worker in self._jobs.workers_of(job))
        if job.pid is not None and not is_connected and is_stopped(job.pid):
            message = f"job {job} has no process that trains, and its command is stopped by a signal or a debugger"
            raise Refused(message, f"run: kill -CONT {job.pid}", {"job": job.id, "pid": job.pid})
        if job.has_trained or (job.members and not is_connected):
            raise Refused(
                f"no process of job {job} is known to train now",
                "retry in a few seconds: it is ending, is started again, or connects to hegmd again after a restart; "
                f"hegmctl inspect {job.id}",
                {"job": job.id},
            )
        raise Refused(
            f"job {job} is starting: it has not reached its first batch",
            "wait until `hegmctl jobs` shows it training; for a hand-written loop, call hegm.boundary() once a batch",
            {"job": job.id},
        )

    async def jobs(self, wanted: Sequence[int | str], may: May, *, ended: bool) -> tuple[protocol.Job, ...]:
        """Return these jobs, or all that have not ended, or all. Raises HegmError for an unknown one."""
        self._jobs.look_again()
        if wanted:
            numbers = {(await self._one(one, may)).number for one in dict.fromkeys(wanted)}
            records = [job for job in self._jobs if job.number in numbers]
        else:
            records = [job for job in self._jobs if ended or job.is_alive]
        return await self._views(sorted(records, key=lambda job: job.number), may)

    async def one(self, job: int | str, may: May) -> protocol.Job:
        """Return that job. Raises HegmError."""
        self._jobs.look_again()
        return (await self._views([self._allowed(await self._one(job, may), may)], may))[0]

    async def wait(self, wanted: int | str, may: May, emit: Callable[[protocol.Job], Awaitable[None]]) -> protocol.Job:
        """Wait until the job has ended and return it; `emit` gets its changes until then. Raises HegmError."""
        number = self._allowed(await self._one(wanted, may), may).number
        state = ""
        while True:
            changed = self._jobs.changed.next
            record = self._jobs.numbered(number)
            if record is None:
                raise HegmError(NOT_FOUND, f"job j{number} has ended and is no longer remembered", "run: hegmctl jobs")
            view = (await self._views([record], may))[0]
            if not record.is_alive:
                return view
            if view.state != state:
                state = view.state
                await emit(view)
            await changed.wait()

    def with_job(self, operation: told_operations.Operation) -> told_operations.Operation:
        """Return the record with the jobs of its processes, by their runs or pids. Hints name the job."""
        op = self._runner.history(operation.id).operation
        jobs: dict[int, JobRecord] = {}
        for member in op.workers:
            job = self._jobs.of_run(op.owner_uid, member.run) or self._of_member(member.pid, member.start_ticks)
            if job is not None:
                jobs[member.pid] = job
        if not jobs:
            return operation
        failure, waits = operation.failure, operation.waits

        def is_owner(uid: int | None) -> bool:
            return uid == op.owner_uid

        processes = [_of_job(process, jobs.get(process.pid)) for process in operation.processes]
        return operation.replace(
            job=next(iter(jobs.values())).id,
            processes=tuple(processes),
            failure=None if failure is None else failure.replace(hint=self.by_name(failure.hint, is_owner)),
            waits=None if waits is None else waits.replace(next=self.by_name(waits.next, is_owner)),
        )

    def plan_with_jobs(self, plan: told_operations.Plan, may: May) -> told_operations.Plan:
        """Return the plan with the jobs of its processes. `may` is as for `by_name`."""
        workers = [_of_job(worker, self._jobs.of_pid(worker.pid)) for worker in plan.workers]
        hazards = tuple([self.by_name(hazard, may) for hazard in plan.hazards])
        return plan.replace(workers=tuple(workers), hazards=hazards)

    def by_name(self, hint: str, may: May) -> str:
        """Return the hint with the name of a job in commands that have the pid of one of its processes.

        `may` tells whether the reader may act on processes of a user: the names of other users' jobs stay hidden. The
        planner and the machine know processes and not jobs.
        """

        def renamed(found: re.Match[str]) -> str:
            job = self._jobs.of_pid(int(found[2]))
            return found[0] if job is None or not may(job.uid) else f"{found[1]}{job.name}"

        return _COMMAND_WITH_PID.sub(renamed, hint)

    def of_process(self, process: GpuProcess) -> GpuProcess:
        """Return the record with the id of its job."""
        job = self._of_member(process.pid, process.start_ticks)
        if job is None:
            return process
        return process.replace(job=job.id, note=process.note or self.without_launcher(job))

    def without_launcher(self, job: JobRecord) -> str | None:
        """Return what suspended ranks wait for whose command has ended; None for other jobs."""
        return _without_launcher(job, self._operations.of(job)) if job.is_gone else None

    def _of_member(self, pid: int, start_ticks: int | None) -> JobRecord | None:
        """Return the job that has this process, or had it."""
        worker = self._workers.find(pid)
        job = None if worker is None else self._jobs.of_worker(worker)
        if job is None:
            job = next((job for job in self._jobs if job.pid == pid), None)
        name = f"{pid}-{start_ticks}"
        if job is not None and name in {*job.members, f"{job.pid}-{job.start_ticks}"}:
            self._remember(name, job)
            return job
        return self._jobs.numbered(self._numbers_by_member.get(name))

    def _note_member(self, _event: str, worker: AgentConnection) -> None:
        if (job := self._jobs.of_worker(worker)) is not None:
            self._remember(worker.name, job)

    def _remember(self, name: str, job: JobRecord) -> None:
        self._numbers_by_member[name] = job.number
        if len(self._numbers_by_member) > MAX_SEEN_MEMBERS:
            del self._numbers_by_member[next(iter(self._numbers_by_member))]

    async def register(
        self, pid: int, uid: int, context: RegisterJob, priority: int | None = None
    ) -> protocol.JobRegistered:
        """Enter the job of a `hegmctl run`. Raises HegmError."""
        goes_on = None
        if context.resumes is not None and job_number(context.resumes) is not None:
            goes_on = self._allowed(
                self._jobs.named(context.resumes, lambda owner: owner == uid), lambda one: one == uid
            )
        elif context.resumes is not None:
            op = self._runner.history(context.resumes).operation
            runs = [member.run for member in op.workers if member.run and op.owner_uid == uid]
            goes_on = self._jobs.of_run(uid, runs[0]) if runs else None
        job = await self._jobs.register(pid, uid, context, goes_on, priority=priority)
        return protocol.JobRegistered(id=job.id, name=job.name)

    async def record(self, job: int | str, may: May) -> JobRecord:
        """Return the record of a job on which the caller may act. Raises HegmError."""
        return self._allowed(await self._one(job, may), may)

    async def _one(self, wanted: int | str, may: May) -> JobRecord:
        if isinstance(wanted, str) and not (wanted.isascii() and wanted.isdigit()):
            return self._jobs.named(wanted, may)
        pid = int(str(wanted)[:20])
        job = self._jobs.of_pid(pid)
        if job is None:
            job = self._jobs.of_run(*(await self._names.job_of(pid) or (None, None)))
        if job is None:
            hint = "run: hegmctl jobs; `hegmctl ps` shows processes on GPUs that no `hegmctl run` started"
            raise HegmError(NOT_FOUND, f"process {pid} belongs to no job", hint, {"pid": pid})
        return job

    def _allowed(self, job: JobRecord, may: May) -> JobRecord:
        if may(job.uid):
            return job
        message = f"job {job} belongs to uid {job.uid}"
        raise HegmError(DENIED, message, "ask its owner, or an administrator of hegmd", {"uid": job.uid})

    # -- views ---------------------------------------------------------------------------------------------------------

    async def _views(self, records: Sequence[JobRecord], may: May) -> tuple[protocol.Job, ...]:
        numbers = {job.number for job in records if job.is_alive}
        workers: dict[int, list[AgentConnection]] = {}
        for worker in self._workers:
            job = self._jobs.of_worker(worker)
            if job is not None and job.number in numbers:
                workers.setdefault(job.number, []).append(worker)
        await self._count([worker for ones in workers.values() for worker in ones])
        snapshot = await self._inventory.fresh(FRESH_S)
        inputs = _ViewInputs(
            {process.pid: process for process in snapshot.processes}, self._runner.held_bytes(), workers
        )
        current = {job.number: job for job in self._jobs}
        views = [self._view(current.get(job.number, job), inputs) for job in records]
        return tuple([view if may(view.uid) else _for_others(view) for view in views])

    def _view(self, job: JobRecord, inputs: _ViewInputs) -> protocol.Job:
        workers = sorted(inputs.workers.get(job.number, ()), key=_rank)
        op = self._operations.of(job) if job.is_alive else None
        processes = tuple(self._processes(job, workers, op, inputs))
        listed = [inputs.processes[process.pid] for process in processes if process.pid in inputs.processes]
        gpus = tuple(dict.fromkeys(gpu for process in processes for gpu in process.gpus))
        on_cpu = any(worker.on_cpu and worker.gpu is None for worker in workers)
        described = None if op is None else self._runner.describe(op.id).waits
        shared = self.waits_for(job) if job.is_alive else None
        orphan = any(worker.parked or worker.held_bytes for worker in workers) and op is None
        boundaries = [worker.boundary for worker in workers if worker.boundary]
        if boundaries:
            self._jobs.note_training(job)
        has_trained = bool(boundaries) or job.has_trained
        away = _AWAY if not has_trained and op is None and job.is_alive and self._jobs.is_away(job) else None
        is_waiting = described is not None or orphan or (op is None and shared is not None) or away is not None
        state = _state(job, op, is_waiting=is_waiting, has_trained=has_trained)
        state = protocol.SUSPENDED if op is None and self.awaits_resume(job) else state
        vram = [use.vram_bytes for process in listed for use in process.gpus]
        return protocol.Job(
            id=job.id,
            name=job.name,
            state=state,
            waits="an orphan: run hegmctl adopt"
            if orphan
            else shared or _without_launcher(job, op) or away or (None if described is None else described.why),
            uid=job.uid,
            user=next((process.user for process in listed if process.uid == job.uid), None),
            gpus=gpus or ((CPU,) if on_cpu else ()),
            vram_bytes=sum(size for size in vram if size is not None) if vram and None not in vram else None,
            held_bytes=sum(inputs.held.get(process.pid, 0) for process in processes),
            boundary=min(boundaries, default=None),
            steps_per_s=self._rate(workers) if state == protocol.TRAINING else None,
            command=job.command,
            started_utc=job.started_utc,
            ended_utc=job.ended_utc,
            status=None if job.is_alive else job.status,
            end=None if job.is_alive else self._jobs.describe_end(job),
            pid=None if job.is_gone else job.pid,
            processes=processes,
            priority=job.priority,
            operation=None if op is None else op.id,
            notes=tuple(dict.fromkeys(note for worker in workers for note in _notes(worker))),
        )

    def _processes(
        self, job: JobRecord, workers: Sequence[AgentConnection], op: Operation | None, inputs: _ViewInputs
    ) -> Iterable[protocol.JobProcess]:
        """Yield its processes: the first one, those with an agent, and those that only an operation knows."""
        members = {} if op is None else {member.pid: member.rank for member in op.live if not member.is_absent}
        by_pid = {worker.pid: worker for worker in workers}
        has_ranks = any(worker.about.rank is not None for worker in workers)
        first = () if job.is_gone or job.pid is None else (job.pid,)
        for pid in dict.fromkeys((*first, *by_pid, *members)):
            worker, listed = by_pid.get(pid), inputs.processes.get(pid)
            rank = members.get(pid) if worker is None else worker.about.rank
            uses = () if listed is None else listed.gpus
            sizes = [use.vram_bytes for use in uses]
            yield protocol.JobProcess(
                pid=pid,
                role=self._role(pid, worker, rank, has_ranks=has_ranks),
                rank=rank,
                gpus=tuple([use.gpu for use in uses]),
                vram_bytes=sum(size for size in sizes if size is not None) if sizes and None not in sizes else None,
                boundary=None if worker is None else worker.boundary,
                framework=None if worker is None or worker.about.framework is None else _framework(worker),
            )

    def _role(self, pid: int, worker: AgentConnection | None, rank: int | None, *, has_ranks: bool) -> str:
        if self._supervisors.of_pid(pid) is not None:
            return protocol.SUPERVISOR
        if rank is not None:
            return protocol.RANK
        if worker is not None and (trains(worker) or not has_ranks):
            return protocol.WORKER
        return protocol.LAUNCHER if has_ranks else protocol.COMMAND

    # -- how fast ------------------------------------------------------------------------------------------------------

    async def _count(self, workers: Sequence[AgentConnection]) -> None:
        """Have each say how many boundaries it has passed; twice at the first look at one, so that it has a rate."""
        connected = [worker for worker in workers if worker.connected]
        await self._sample(connected)
        fresh = [worker for worker in connected if worker.boundary and len(self._samples.get(worker, ())) == 1]
        if fresh:
            await anyio.sleep(APART_S)
            await self._sample(fresh)

    async def _sample(self, workers: Sequence[AgentConnection]) -> None:
        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(self._sample_one, worker)

    async def _sample_one(self, worker: AgentConnection) -> None:
        if not await worker.count_boundaries(COUNT_S) or not worker.boundary:
            return
        now = anyio.current_time()
        samples = self._samples.setdefault(worker, deque(maxlen=MAX_SAMPLES))
        if samples and samples[-1][1] > worker.boundary:
            samples.clear()  # the job went back to an earlier batch
        if samples and samples[0][0] < worker.trains_since:
            samples.clear()  # a rate over the time of an operation is that of no training
        while len(samples) > 1 and now - samples[0][0] > RATE_OVER_S:
            samples.popleft()
        if len(samples) > 1 and now - samples[-1][0] < APART_S / 2:
            samples.pop()  # of two looks at one moment, the later
        if not samples or now - samples[-1][0] >= APART_S / 2:
            samples.append((now, worker.boundary))

    def _rate(self, workers: Sequence[AgentConnection]) -> float | None:
        """Return the boundaries per second of the slowest rank; None if unknown."""
        rates: list[float] = []
        for worker in workers:
            samples = self._samples.get(worker)
            if samples and len(samples) > 1 and samples[-1][1] > samples[0][1]:
                rates.append((samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]))
        return min(rates, default=None)


def _of_job(process: Told, job: JobRecord | None) -> Told:
    return process if job is None else process.replace(job=job.id, job_name=job.name)


def _rank(worker: AgentConnection) -> tuple[bool, int, int]:
    return worker.about.rank is None, worker.about.rank or 0, worker.pid


def _state(job: JobRecord, op: Operation | None, *, is_waiting: bool, has_trained: bool) -> str:
    if not job.is_alive:
        return protocol.ENDED
    if op is not None and op.phase not in TERMINAL:
        # A suspended job stays suspended if its agents have not reconnected to a restarted daemon.
        is_off = op.phase == SETTLING.phase and all(one.gpu is None and one.target_gpu is None for one in op.live)
        at_rest = {HOLDING: protocol.QUIESCED, SUSPENDED: protocol.SUSPENDED}
        phase = SUSPENDED if is_off else op.phase
        return at_rest.get(phase, protocol.WAITING if is_waiting else protocol.MOVING)
    if is_waiting:
        return protocol.WAITING
    return protocol.TRAINING if has_trained else protocol.STARTING


def _framework(worker: AgentConnection) -> str:
    return " ".join(part for part in (worker.about.framework, worker.about.framework_version) if part)


def _without_launcher(job: JobRecord, op: Operation | None) -> str | None:
    """Return what suspended ranks wait for whose command has ended; None for other jobs."""
    if op is None or op.phase != SUSPENDED or not job.is_gone or all(one.rank is None for one in op.live):
        return None
    if any(one.is_absent for one in op.live):
        return (
            f"another command that continues from its saved state: {go_on_command(op.id)}; hegmctl cancel {op.id} "
            "--drop deletes that state"
        )
    return (
        "its command, which has ended: if that was the launcher, which serves the store of the ranks, hegmctl resume "
        f"fails, and hegmctl cancel {op.id} --drop then ends them and frees their memory"
    )


def _notes(worker: AgentConnection) -> Iterable[str]:
    if worker.about.unknown is not None:
        yield f"it was attached while it ran and cannot be restarted; not known: {', '.join(worker.about.unknown)}"
    yield from worker.refusals
    if worker.unweighed is not None:
        yield worker.unweighed[0]
    if worker.begin_anew:
        yield f"a restart does not keep these variables: {', '.join(worker.begin_anew)}"
    if worker.image_missed:
        yield worker.image_missed


def _for_others(job: protocol.Job) -> protocol.Job:
    """Return a job without what only its owner may see: command lines contain secrets."""
    return job.replace(command=None, waits=None, notes=(), end=None, operation=None, processes=())
