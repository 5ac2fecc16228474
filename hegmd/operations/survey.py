"""Takes the snapshot for planning: GPUs, processes, the pool, and what the jobs' agents report.

Owns how current it is: the agents of the job are asked, with a time limit, so that a plan's sizes are current and no
rank is missing. Decides nothing about operations.

Longer than 400 lines because everything that a snapshot consists of is here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import anyio

from hegmd.errors import NOT_FOUND, HegmError
from hegmd.memory.pool import read_available_bytes
from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import Operation, Respawn
from hegmd.migration.machine.wording import no_such_gpu
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.migration.model import (
    AgentSurvey,
    Candidate,
    GpuMemory,
    NodeSnapshotForPlan,
    PoolMemory,
    Rates,
    Surroundings,
    Unreachable,
)
from hegmd.migration.plan.driver_rules import contexts_of
from hegmd.migration.plan.migration_options import ways_of
from hegmd.node.criu_program import usable_path
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.node.processes.roll import has_ended
from hegmd.node.processes.surroundings import nearest_ancestor, parent_of, read_outside
from hegmd.protocol.proofs import Proof
from hegmd.protocol.snapshots import Gpu, GpuProcess, GpuUse, Way
from hegmd.system.threads import BoundedReads, run_detached
from hegmd.workers.job_names import run_of
from hegmd.workers.supervisors import Supervisor, SupervisorAway, Supervisors
from hegmd.workers.workers import AgentConnection, Workers

FRESH_S = 0.0
# The look that begins with a survey counts for this long; after a longer survey the GPUs are read again.
LOOK_AGE_S = 0.25
# Time limit of a survey, which waits for the job's next boundary. The agents get a little less, so that they report a
# missing boundary.
SURVEY_S = 1.0
AGENT_SHARE = 0.8
# The same for a process that trains and has not reported its memory to this daemon: else the driver would copy it all.
FIRST_SURVEY_S = 10.0
# The job's own thread measures its state, between two batches, within the limit of the request. A process that is
# stopped at two checks, this long apart, is not waited for.
_STOPPED_FOR_S = 1.0
# How long a Python program may take to report its version: the supervisor's limit and the time for the messages.
ASK_S = 6.0
# Time limit to inspect processes from outside; one that cannot be inspected in time stays unknown.
OUTSIDE_S = 2.0
MAX_LOOKS = 4
# How often a snapshot is taken again because an operation began, ended or turned meanwhile.
MAX_SNAPSHOTS = 5
# Time limit of a count, which the agent's own thread answers.
COUNT_S = 0.3
NVIDIA = "nvidia"

May = Callable[[int | None], bool]
Leased = Callable[[Sequence[int], Sequence[Candidate]], Mapping[str, int]]
# The boundaries that each rank had passed before and after one instant, by pid.
Counts = Mapping[int, tuple[int, int]]
# The processes inspected from outside, by pid: the nearest ancestor among them, and the surroundings.
InspectedTree = dict[int, tuple[int | None, Surroundings]]
InspectProcesses = Callable[[Sequence[int], InspectedTree], Coroutine[object, object, None]]


def deny_all(_uid: int | None) -> bool:
    """The default `may`: no agent or supervisor is asked if the caller acts on no process."""
    return False


class PlanSurvey:
    """Takes snapshots on request.

    `pool` returns its free memory, `count` surveys one worker within a limit, `running` returns the operations with
    their reservations, `parked_orphans` the parked workers that belong to none, and `outlives` whether memory of jobs
    outlives the daemon. `criu` is the configured program, if any. `proofs` are the tried combinations with NCCL.
    `proving` are ranks whose job tries its combination.
    `own_pids` are hegmd's own processes on GPUs, which no plan moves. `copying_pids` are those of them that use a GPU
    only while they copy.
    """

    def __init__(  # noqa: PLR0913 - each source is named
        self,
        inventory: Inventory,
        workers: Workers,
        pool: Callable[[], PoolMemory],
        *,
        count: Callable[[AgentConnection, float], Coroutine[object, object, None]],
        running: Callable[[], tuple[Operation, ...]],
        parked_orphans: Callable[[], Iterable[AgentConnection]] = tuple,
        rates: Callable[[], Rates] = Rates,
        outlives: Callable[[], bool] = lambda: True,
        supervisors: Supervisors,
        criu: Path | None = None,
        proofs: Callable[[], tuple[Proof, ...]] = tuple,
        proving: Callable[[], tuple[int, ...]] = tuple,
        own_pids: Callable[[], Collection[int | None]] = tuple,
        copying_pids: Callable[[], Collection[int | None]] = tuple,
    ) -> None:
        self._inventory = inventory
        self._workers = workers
        self._pool = pool
        self._count = count
        self._running = running
        self._parked_orphans = parked_orphans
        self._rates = rates
        self._outlives = outlives
        self._supervisors = supervisors
        self._criu = criu
        self._proofs = proofs
        self._proving = proving
        self._own_pids = own_pids
        self._copying_pids = copying_pids
        #: How much memory of each GPU leases keep for others than these processes, by GPU; sharing sets it.
        self.leased: Leased = lambda _pids, _candidates: {}
        #: The memory of a CUDA context on each GPU, by the smallest measurement. So a job's need does not grow while it
        #: is suspended, and only processes with more memory of their own are left there.
        self._contexts: dict[str, int] = {}
        self._looks = BoundedReads(OUTSIDE_S, MAX_LOOKS)

    async def snapshot(
        self,
        pids: Collection[int],
        *,
        may: May = deny_all,
        weighed_within_s: float | None = None,
        respawn: Respawn | None = None,
        leases_of: Sequence[int] = (),
        first_s: float = FIRST_SURVEY_S,
    ) -> NodeSnapshotForPlan:
        """Return the node for a plan on those processes, with their current memory if they answer in time.

        `first_s` is the limit for those that have not answered yet. Leases of `pids` and of `leases_of` keep nothing.

        Only processes of users that `may` accepts are asked. It is called at that moment, since a pid that was unknown
        before may connect meanwhile and belong to another user.

        With `weighed_within_s`, they report what a restart would carry. Another Python in `respawn` tells its version.
        """
        before, max_age_s = _stages(self._running()), LOOK_AGE_S
        counts: Counts = {}
        async with anyio.create_task_group() as tasks:  # the GPUs are read while agents come to a boundary
            tasks.start_soon(self._inventory.refresh)
            counts = await self._survey(pids, may, first_s)
        if weighed_within_s is not None:
            await self._weigh(pids, may, weighed_within_s)
        pythons = {} if respawn is None or respawn.python is None else await self._ask_python(pids, may, respawn)
        left = MAX_SNAPSHOTS
        while True:  # until the memory of GPUs and the operations are of one moment
            left, node = left - 1, await self._inventory.settled(max_age_s)
            snapshot = await self._snapshot_of(node, pids, pythons, counts, inspect_outside, leases_of)
            if not left or before == _stages(self._running()):
                return snapshot
            before, max_age_s = _stages(self._running()), 0.0

    async def ways(
        self, node: NodeSnapshot, processes: Sequence[GpuProcess], may: May = deny_all
    ) -> Mapping[int, tuple[Way, ...]]:
        """Return the ways in which each of those processes could be moved, by pid.

        Agents of users that `may` accepts are first asked what their processes hold now.
        """
        if not processes:
            return {}
        pids = [process.pid for process in processes]
        counts = await self._survey(pids, may)
        snapshot = await self._snapshot_of(node, pids, {}, counts, self._inspect_outside)
        return ways_of(snapshot, processes, usable_path(self._criu))

    async def _inspect_outside(self, pids: Sequence[int], inspected: InspectedTree) -> None:
        """Call `inspect_outside` in few threads, because a hanging process blocks one at each request."""
        with contextlib.suppress(HegmError):
            await self._looks.at(lambda _: _look_at(pids, inspected), name="hegmd-outside")

    async def _snapshot_of(
        self,
        node: NodeSnapshot,
        pids: Collection[int],
        pythons: Mapping[int, tuple[str, bool]],
        counts: Counts,
        inspect: InspectProcesses,
        leases_of: Sequence[int] = (),
    ) -> NodeSnapshotForPlan:
        running, pool = self._running(), self._pool()  # before anything is waited for: of the same moment
        candidates = await _seen_from_outside(
            _without_idle(tuple(self._candidates(node, pythons, counts))), node, inspect
        )
        candidates = _with_stopped(candidates, pids)
        leased = self.leased((*pids, *leases_of), candidates)
        kept, copying = self.kept_bytes(node), _used_by(self._copying_pids(), node)
        gpus = [_gpu_memory(gpu, node.gpus, kept.get(gpu.id, 0)) for gpu in node.gpus]
        for gpu_id, size_bytes in contexts_of(gpus, candidates).items():
            self._contexts[gpu_id] = min(size_bytes, self._contexts.get(gpu_id, size_bytes))
        return NodeSnapshotForPlan(
            gpus=tuple(
                [
                    gpu.replace(
                        copying_bytes=copying.get(gpu.id, 0),
                        leased_bytes=leased.get(gpu.id, 0),
                        context_bytes=self._contexts.get(gpu.id, gpu.context_bytes),
                    )
                    for gpu in gpus
                ]
            ),
            candidates=candidates,
            unreachable=tuple(_unreachable(node)),
            beginning=tuple(pid for pid in pids if self._begins(pid)),
            ended=tuple(pid for pid in pids if start_ticks_of(pid) is None),
            pool=pool,
            running=running,
            rates=self._rates(),
            proofs=self._proofs(),
            proving=self._proving(),
            outlived=self._outlives(),
            uid=os.geteuid(),
            available_bytes=read_available_bytes(),
        )

    def kept_bytes(self, node: NodeSnapshot) -> dict[str, int]:
        """Return what the driver and hegmd's own processes keep for themselves, by GPU, even if nothing is copied."""
        kept = _used_by(set(self._own_pids()) - set(self._copying_pids()), node)
        for gpu in node.gpus:
            parts = gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_free_bytes
            known = [size_bytes for size_bytes in parts if size_bytes is not None]
            driver_bytes = max(0, known[0] - known[1] - known[2]) if len(known) == len(parts) else 0
            kept[gpu.id] = kept.get(gpu.id, 0) + driver_bytes
        return kept

    async def snapshot_for(self, gpu: str, *, may: May) -> NodeSnapshotForPlan:
        """Return the node for plans on every process of that GPU. Raises NOT_FOUND if there is no such GPU.

        As in `snapshot`, processes of other users are not asked.
        """
        node = await self._inventory.fresh(FRESH_S)
        names = [known.id for known in node.gpus]
        if gpu not in names:
            raise HegmError(NOT_FOUND, *no_such_gpu(gpu, names))
        return await self.snapshot([p.pid for p in node.processes if any(use.gpu == gpu for use in p.gpus)], may=may)

    async def _survey(self, pids: Collection[int], may: May, first_s: float = SURVEY_S) -> Counts:
        """Survey the named processes and the others of their jobs concurrently.

        A process that reaches no boundary in time keeps its latest report. One that has never reached one is only asked
        if it was named or is a missing rank: launchers and loader workers would never answer.

        Return the counts of ranks that may train without one another.
        """
        context: list[AgentConnection] = []
        jobs = self._jobs(pids)
        missing = set(self._missing_ranks({worker.pid for worker in self._workers if worker.boundary}))
        async with anyio.create_task_group() as tasks:
            for worker in self._workers:
                is_one = _job(worker) in jobs and (worker.boundary or worker in missing)
                if worker.connected and (worker.pid in pids or is_one) and may(worker.identity.uid):
                    context.append(worker)
                    tasks.start_soon(self._survey_one, worker, first_s)
        return await _counts_of([worker for worker in context if _may_be_alone(worker)])

    async def _survey_one(self, worker: AgentConnection, first_s: float) -> None:
        is_known = worker.is_surveyed or worker.parked or not worker.boundary or is_stopped(worker.pid)
        with anyio.move_on_after(within_s := SURVEY_S if is_known else first_s):
            await self._count(worker, within_s * AGENT_SHARE)

    async def _weigh(self, pids: Collection[int], may: May, within_s: float) -> None:
        """Ask the supervised ones, and their jobs' ranks, how much a restart would carry, at their next boundary."""
        jobs = self._jobs(pids)
        async with anyio.create_task_group() as tasks:
            for worker in self._workers:
                is_one = worker.pid in pids or (worker.about.rank is not None and _job(worker) in jobs)
                is_one = is_one and may(worker.identity.uid)
                if is_one and worker.connected and not worker.parked and self._supervised(worker):
                    tasks.start_soon(_weigh_one, worker, within_s)

    def _jobs(self, pids: Collection[int]) -> set[tuple[int, str] | None]:
        return {_job(worker) for worker in self._workers if worker.pid in pids} - {None}

    def _begins(self, pid: int) -> bool:
        """True if the process belongs to a job that has not reached its first batch, or is its supervisor."""
        worker = self._workers.find(pid)
        if worker is not None:
            return worker.connected and not worker.boundary
        return any(one.offer.pid and pid in (one.pid, one.offer.pid) and one.is_alive for one in self._supervisors)

    def _supervised(self, worker: AgentConnection) -> Supervisor | None:
        return self._supervisors.find(worker.identity.uid, worker.about.run)

    async def _ask_python(self, pids: Collection[int], may: May, respawn: Respawn) -> dict[int, tuple[str, bool]]:
        """Have the supervisors of those processes run the Python: they have the job's user, environment and files.

        A supervisor runs that program with the variables of the request, so none is asked of a user for whom the caller
        may not act. Returns its answer by supervisor, and whether it is a Python. Supervisors that cannot ask, or do
        not answer, are missing.
        """
        found: dict[int, tuple[str, bool]] = {}

        async def ask(supervisor: Supervisor, python: str) -> None:
            with contextlib.suppress(SupervisorAway):
                found[supervisor.pid] = await supervisor.ask_python(python, respawn.set, respawn.unset)

        supervised = [self._supervised(worker) for worker in self._workers if worker.pid in pids]
        supervisors = {one.pid: one for one in supervised if one is not None and one.offer.asks and may(one.uid)}
        with anyio.move_on_after(ASK_S):
            async with anyio.create_task_group() as tasks:
                for one in supervisors.values():
                    tasks.start_soon(ask, one, respawn.python or "")
        return found

    def _candidates(
        self, node: NodeSnapshot, pythons: Mapping[int, tuple[str, bool]], counts: Counts
    ) -> Iterable[Candidate]:
        attending: set[int] = set()
        own_pids = self._own_pids()
        for process in node.processes:
            if process.start_ticks is None or process.pid in own_pids:
                continue
            worker = self._workers.find(process.pid)
            if worker is not None and (not worker.connected or worker.identity.start_ticks != process.start_ticks):
                worker = None
            if worker is not None:
                attending.add(worker.pid)
            supervisor = None if worker is None else self._supervised(worker)
            uses = _in_device_order(process.gpus, worker, node)
            python, is_python = ("", True) if supervisor is None else pythons.get(supervisor.pid, ("", True))
            yield Candidate(
                pid=process.pid,
                start_ticks=process.start_ticks,
                uid=process.uid,
                name=process.name,
                job=None if worker is None else run_of(worker),
                gpus=tuple(use.gpu for use in uses),
                on_cpu=worker is not None and bool(worker.on_cpu),
                kinds=tuple(use.kind for use in uses),
                vram_bytes=_sum([use.vram_bytes for use in process.gpus]),
                driver_bytes_by_gpu={use.gpu: use.vram_bytes for use in process.gpus if use.vram_bytes is not None},
                supervisor=None if supervisor is None else supervisor.pid,
                launched=supervisor is not None and _is_launched(process.pid, worker, supervisor),
                apart=supervisor is not None and parent_of(process.pid) not in (None, supervisor.pid),
                python=supervisor is not None and supervisor.offer.python,
                other_python=python if is_python else "",
                no_python="" if is_python else python,
                agent=None if worker is None else _agent_survey(worker, counts.get(worker.pid)),
            )
        for worker in self._parked_orphans():  # off its GPU, and in no operation that would have it shown there
            if worker.pid not in attending:
                attending.add(worker.pid)
                yield _candidate_without_gpu(worker)
        for worker in self._missing_ranks(attending):
            yield _candidate_without_gpu(worker)

    def _missing_ranks(self, there: Collection[int]) -> Iterator[AgentConnection]:
        """Yield ranks that no pid in `there` belongs to: they have not reached their first batch, and are on no GPU
        yet.

        Processes that a rank starts, such as loader workers, report the same rank; so one process of a rank suffices.
        """
        present = {(_job(worker), worker.about.rank) for worker in self._workers if worker.pid in there}
        for worker in self._workers:
            rank = worker.about.rank
            if worker.connected and rank is not None and (_job(worker), rank) not in present:
                yield worker


def _without_idle(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return the candidates without processes on the CPU whose job has others on a GPU: they move with none."""
    on_gpus = {(candidate.uid, candidate.job) for candidate in candidates if candidate.gpus}
    return tuple([one for one in candidates if one.gpus or not one.on_cpu or (one.uid, one.job) not in on_gpus])


def _with_stopped(candidates: tuple[Candidate, ...], pids: Collection[int]) -> tuple[Candidate, ...]:
    """The same, and of those processes, and the others of their jobs, whether they are stopped."""
    jobs = {(one.uid, one.job) for one in candidates if one.pid in pids and one.job is not None}
    meant = [one.pid for one in candidates if one.pid in pids or (one.uid, one.job) in jobs]
    stopped = {pid for pid in meant if is_stopped(pid)}
    return tuple([one.replace(stopped=True) if one.pid in stopped else one for one in candidates])


def _in_device_order(uses: Sequence[GpuUse], worker: AgentConnection | None, node: NodeSnapshot) -> tuple[GpuUse, ...]:
    """Return the GPUs of a process in the order of its devices, if its agent reports on which each of them is."""
    cuda = None if worker is None else worker.cuda
    names = {gpu.uuid: gpu.id for gpu in node.gpus}
    order = [names.get(device.uuid) for device in (() if cuda is None else cuda.devices)]
    if sorted(use.gpu for use in uses) != sorted(map(str, order)):
        return tuple(uses)
    return tuple(sorted(uses, key=lambda use: order.index(use.gpu)))


def _job(worker: AgentConnection) -> tuple[int, str] | None:
    """Return the job that it belongs to; None for a process that is a job by itself."""
    run = run_of(worker)
    return None if run is None else (worker.identity.uid, run)


def _candidate_without_gpu(worker: AgentConnection) -> Candidate:
    """Return the process as a candidate that is on no GPU."""
    return Candidate(
        pid=worker.pid,
        start_ticks=worker.identity.start_ticks,
        uid=worker.identity.uid,
        job=run_of(worker),
        gpus=(),
        agent=_agent_survey(worker),
    )


def _is_launched(pid: int, worker: AgentConnection | None, supervisor: Supervisor) -> bool:
    return worker is not None and worker.about.rank is not None and supervisor.offer.pid != pid


def _agent_survey(worker: AgentConnection, counts: tuple[int, int] | None = None) -> AgentSurvey:
    return AgentSurvey(
        token=worker.token,
        framework_version=worker.about.framework_version,
        size_bytes=worker.size_bytes,
        left_alone=worker.left_alone,
        boundary=worker.boundary,
        counts=counts,
        rank=worker.about.rank,
        world_size=worker.about.world_size,
        cuda=worker.cuda,
        communicators=worker.communicators,
        driver_restored=worker.driver_restored,
        state_bytes=worker.state_bytes,
        refusals=worker.refusals,
        unweighed=worker.unweighed,
        begin_anew=worker.begin_anew,
        unknown=worker.about.unknown,
    )


def _may_be_alone(worker: AgentConnection) -> bool:
    """Return True if it is one of several ranks, and has reported no group that connects them."""
    groups = worker.communicators
    return (worker.about.world_size or 1) > 1 and (groups is None or not groups.groups)


async def _counts_of(ranks: Sequence[AgentConnection]) -> Counts:
    """Return of each rank, by pid, how many boundaries it had passed before and after an instant of all of them.

    One that does not answer in time is missing.
    """
    before = {worker.pid: worker.boundary for worker in ranks}
    counts: dict[int, tuple[int, int]] = {}

    async def one(worker: AgentConnection) -> None:
        if await worker.count_boundaries(COUNT_S):
            counts[worker.pid] = (before[worker.pid], worker.boundary)

    async with anyio.create_task_group() as tasks:
        for worker in ranks if len(ranks) > 1 else ():
            tasks.start_soon(one, worker)
    return counts


async def _weigh_one(worker: AgentConnection, within_s: float) -> None:
    """Have one worker report the size of its state. Raises nothing: a failure is stored as a reason against a restart.

    If another request asks them already, wait for its result within the limit of this one.
    """
    with anyio.move_on_after(within_s) as waiting:
        await worker.weighing.acquire()
    if waiting.cancelled_caught:
        return
    try:
        await _ask_weight(worker, within_s)
    finally:
        worker.weighing.release()


async def _ask_weight(worker: AgentConnection, within_s: float) -> None:
    """Ask for the size of the state. The previous answer stays until this one, since another plan may be using it."""
    answered, why = False, None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_for_a_stop, worker.pid, tasks.cancel_scope)
        try:
            await worker.order("weigh", limit_s=within_s)
            answered = True
        except HegmError as error:
            why = (error.message, error.hint)
        tasks.cancel_scope.cancel()
    if answered:
        return
    worker.state_bytes, worker.refusals, worker.begin_anew, worker.imports = None, (), None, ()
    # Check it now: a process stopped only briefly, as by a profiler, has answered.
    if is_stopped(worker.pid):
        message = f"process {worker.pid} is stopped by a signal or a debugger, and its agent cannot report its memory"
        why = (message, f"run: kill -CONT {worker.pid}")
    worker.unweighed = why


async def _watch_for_a_stop(pid: int, scope: anyio.CancelScope) -> None:
    """Cancel that once the process is stopped at two checks."""
    was_stopped = False
    while True:
        await anyio.sleep(_STOPPED_FOR_S)
        stopped = is_stopped(pid)
        if stopped and was_stopped:
            scope.cancel()
        was_stopped = stopped


def _sum(sizes: Sequence[int | None]) -> int | None:
    """All of them together; unknown if any is."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


async def _seen_from_outside(
    candidates: tuple[Candidate, ...], node: NodeSnapshot, inspect: InspectProcesses
) -> tuple[Candidate, ...]:
    """Return the candidates. Those that the driver would move also get what could be inspected from outside in time."""
    driven = {gpu.id for gpu in node.gpus if gpu.vendor == NVIDIA}
    pids = [candidate.pid for candidate in candidates if driven.intersection(candidate.gpus)]
    if not pids:
        return candidates
    inspected: InspectedTree = {}
    await inspect(pids, inspected)
    found = dict(inspected)  # the thread may still be running
    return tuple([_with(candidate, found) for candidate in candidates])


async def inspect_outside(pids: Sequence[int], inspected: InspectedTree) -> None:
    """Fill `inspected` with what could be inspected of each of those processes in time."""
    with anyio.move_on_after(OUTSIDE_S):
        await run_detached(lambda _: _look_at(pids, inspected), name="hegmd-outside")


def _look_at(pids: Sequence[int], inspected: InspectedTree) -> None:
    """Fills `inspected`, one after the other, so that what hangs leaves the others known. Blocks."""
    for pid in pids:
        inspected[pid] = (nearest_ancestor(pid, pids), Surroundings(**read_outside(pid)._asdict()))


def _with(candidate: Candidate, found: Mapping[int, tuple[int | None, Surroundings]]) -> Candidate:
    if candidate.pid not in found:
        return candidate
    parent, around = found[candidate.pid]
    return candidate.replace(parent=parent, around=around)


def _unreachable(node: NodeSnapshot) -> Iterator[Unreachable]:
    for process in node.processes:
        if process.start_ticks is None and process.gpus:
            yield Unreachable(
                pid=process.pid,
                gpus=tuple([use.gpu for use in process.gpus]),
                vram_bytes=_sum([use.vram_bytes for use in process.gpus]),
                ended=has_ended(process),
                why=process.note or "hegmd cannot see it",
            )


def _stages(operations: Iterable[Operation]) -> list[tuple[str, str, bool]]:
    """Return what of the operations decides who has their processes' GPU memory."""
    return [(op.id, op.direction, op.phase in (SUSPENDED, HOLDING)) for op in operations]


def _used_by(pids: Collection[int | None], node: NodeSnapshot) -> dict[str, int]:
    """Return the memory that these processes have, by GPU."""
    used: dict[str, int] = {}
    for process in node.processes:
        for use in process.gpus if process.pid in pids else ():
            used[use.gpu] = used.get(use.gpu, 0) + (use.vram_bytes or 0)
    return used


def _gpu_memory(gpu: Gpu, gpus: Sequence[Gpu], kept_bytes: int) -> GpuMemory:
    known = gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None
    left_bytes = (gpu.memory_total_bytes or 0) - (gpu.memory_used_bytes or 0) if known else None
    reached = {link.to_uuid for link in gpu.links if link.kind == "nvlink"}
    return GpuMemory(
        id=gpu.id,
        vendor=gpu.vendor,
        chip=gpu.chip,
        state=gpu.state,
        condition=gpu.health.condition,
        why=gpu.health.reason,
        free_bytes=gpu.memory_free_bytes if gpu.memory_free_bytes is not None else left_bytes,
        total_bytes=gpu.memory_total_bytes,
        kept_bytes=kept_bytes,
        mig=gpu.mig,
        mps=gpu.mps,
        uuid=gpu.uuid,
        driver_version=gpu.driver_version,
        nvlinks=tuple(other.id for other in gpus if other.uuid in reached),
    )
