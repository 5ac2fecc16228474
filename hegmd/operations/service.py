"""Builds and runs everything behind the requests: pool, reservations, executor, runner and services.

Owns the order of the start (the journal is read before a request is accepted, and its reservations are made before an
agent connects) and of the shutdown. Decides nothing itself.

Longer than 400 lines because each part is created in one place, in the order of their dependencies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread

from hegmd.errors import Bug, HegmError
from hegmd.gpu_helper.link import Link
from hegmd.gpu_helper.ready_helper import OFF, ReadyHelper
from hegmd.images.dump_job import JobDumper
from hegmd.images.dump_records import DumpRecords
from hegmd.images.files.images import Images
from hegmd.images.hegm_lock_files import LockFiles
from hegmd.images.manifests import is_unrevived
from hegmd.images.rendezvous import Rendezvous
from hegmd.images.restore_job import JobRestorer
from hegmd.images.restore_records import RestoreRecords
from hegmd.memory.pool import Key, MemoryKeeping, Pool
from hegmd.memory.pool_found import find_pieces
from hegmd.memory.video_memory import VideoMemory
from hegmd.migration.carriers.driver import DriverCarrier
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.carriers.peer import PeerCarrier
from hegmd.migration.carriers.prestart import PrestartPolicy, PrestartService
from hegmd.migration.carriers.state import StateCarrier
from hegmd.migration.carriers.worker import WorkerCarrier
from hegmd.migration.contracts import Carrier, Method
from hegmd.migration.journal.disk import Disk
from hegmd.migration.machine.next_effects import SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import Operation
from hegmd.migration.machine.stages import SEALING, lets_train
from hegmd.migration.methods.driver import DriverMethod
from hegmd.migration.methods.driver_calls import Steps
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.keep_context import KeepContextMethod, SimulatedKeepContext
from hegmd.migration.methods.other_processes import MAX_PAUSE_S, OtherProcesses
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.migration.methods.restart import RestartMethod
from hegmd.migration.methods.restore_lock import forget_claims, has_finished, lock_path
from hegmd.migration.methods.simulated import SimulatedMethod
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.migration.plan.throughput import Throughputs
from hegmd.migration.run.executor import EffectExecutor
from hegmd.migration.run.runner import Runner
from hegmd.migration.run.task import reservations_to_restore
from hegmd.node.criu_program import Criu, find, rights_missing
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.operations.driver_orphans import DriverOrphans
from hegmd.operations.evacuation import Evacuation
from hegmd.operations.image_requests import Checkpoints
from hegmd.operations.job_requests import JobOperationsOf, JobRequests
from hegmd.operations.operations import Operations
from hegmd.operations.orphaned_memory import OrphanedMemory, VideoOrphans
from hegmd.operations.orphans import Orphans, ParkedOrphans, PoolOrphans, Source, UntrustedFiles
from hegmd.operations.prestarted import PrestartedJobs
from hegmd.operations.proofs import ProofRequests, Proofs
from hegmd.operations.request_context import OperationResult, RequestContext, refusal
from hegmd.operations.restart_requests import Restarts
from hegmd.operations.scheduled_images import ScheduledImages
from hegmd.operations.sequences import MultiStepOperations
from hegmd.operations.simulated_placement import SimulatedPlacement
from hegmd.operations.survey import PlanSurvey
from hegmd.operations.suspended import ASKED, SuspendedOperations
from hegmd.protocol.snapshots import AgentInfo, Gpu
from hegmd.recovery.service import Recoveries
from hegmd.system.programs import Rights
from hegmd.telemetry.events import EventLog
from hegmd.workers.job_file import JobRecord
from hegmd.workers.job_names import JobNames
from hegmd.workers.jobs import Jobs
from hegmd.workers.supervisors import SupervisorAway, Supervisors
from hegmd.workers.workers import AgentConnection, Workers

if TYPE_CHECKING:
    from hegmd.node.devices.simulated import SimulatedProvider


class ImageSettings(NamedTuple):
    """The settings for writing images: the socket directory of agents, and a CRIU and a key if not the default ones."""

    socket_path: Path
    #: Whether the service manager can be asked for units, outside of the daemon's own.
    in_unit: bool = False
    criu: Path | None = None
    key_file: Path | None = None
    #: Directory for lock files that controllers of HeGM read, for jobs in images.
    lock_dir: Path | None = None
    #: Whether users other than root may have CRIU bring their images back.
    by_owner: bool = False
    #: Whether a new image is read back from the disk before its job ends.
    read_back: bool = True


class OperationsService:
    """The parts behind the requests. Created once, opened once, then run while the daemon serves."""

    def __init__(  # noqa: PLR0913 - the parts that it is made of, each named, put together in one place only
        self,
        *,
        state_dir: Path,
        pool: Pool,
        simulator: SimulatedProvider | None,
        inventory: Inventory,
        workers: Workers,
        events: EventLog,
        start_ticks: Callable[[int], int | None],
        spill: str = ASKED,
        max_pause_s: float = MAX_PAUSE_S,
        max_park_s: float | None = None,
        restart_always: bool = False,
        ready: PrestartPolicy | None = None,
        ready_helper: str = OFF,
        images_by: ImageSettings | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._state_dir, self._images_by = state_dir, images_by or ImageSettings(state_dir / "hegmd.sock")
        self.workers = self._workers = workers
        self._inventory, self._events = inventory, events
        self._start_ticks, self._ready, self.pool = start_ticks, ready or PrestartPolicy(), pool
        self.simulated_memory = SimulatedMemory(simulator, gpus=self._gpus, changed=inventory.expire)
        self.helper, self.supervisors = Link(), Supervisors(start_ticks)
        self._ready_helper = ReadyHelper(
            self.helper,
            OFF if simulator else ready_helper,
            self._job_gpus,
            lambda use: pool.with_memory_at_rest(self._is_suspended, use),
            self._is_moving,
        )
        pool.ready.pinning = self._ready_helper
        self.memory = VideoMemory(self.helper, pool.keep.store)
        self._other_processes = OtherProcesses(
            self.helper, state_dir, start_ticks=start_ticks, is_stopped=is_stopped, max_pause_s=max_pause_s
        )
        simulated = simulator is not None
        handoff, self._reviving = self._make_imaging(simulated=simulated)
        performer, ended_well = self._make_performer(handoff, simulated=simulated), self.supervisors.exited_cleanly
        self.runner = Runner(state_dir, performer, events, disk=disk, ended_well=ended_well)
        self.attendance = SimulatedPlacement(
            workers,
            self.simulated_memory,
            in_hand=self._is_busy,
            last_place=self.runner.last_place,
            out_bytes=self.runner.held_bytes,
            changed=inventory.expire,
            supervised=lambda worker: self.supervisors.find(worker.identity.uid, worker.about.run),
        )
        self._by_driver = None if simulated else self._driver_orphans()
        self.orphans = self._make_orphans(events)
        self.suspended_operations = SuspendedOperations(workers, pool, self.runner, performer, events, when=spill)
        self.survey = self._make_survey()
        self._make_authorities(self.survey, handoff, restart_always=restart_always, max_park_s=max_park_s)
        for part in (self.attendance, self.runner, self.suspended_operations, self.orphans, self.periodic):
            workers.listen(part.on_event)

    def _make_survey(self) -> PlanSurvey:
        """Create what plans look at, and the service that proves combinations with NCCL."""
        proofs = Proofs(self._state_dir)
        lookout = PlanSurvey(
            self._inventory,
            self._workers,
            self.suspended_operations.pool_memory,
            count=self.attendance.count,
            running=self.runner.as_held,
            parked_orphans=self._parked_orphans.connections,
            rates=self._paces.rates,
            outlives=lambda: self.memory.store is not None,
            supervisors=self.supervisors,
            criu=self._images_by.criu,
            proofs=proofs.all,
            proving=proofs.proving,
            own_pids=lambda: (self.helper.pid,),
            copying_pids=lambda: () if self._ready_helper.keeps_contexts else (self.helper.pid,),
        )
        self.proving = ProofRequests(lookout, proofs)
        return lookout

    def _make_jobs(self) -> None:
        """Create the register of jobs, and the service that shows and names them."""
        workers, supervisors, operations = self._workers, self.supervisors, JobOperationsOf(self.runner)
        self.jobs = Jobs(workers, supervisors, self._start_ticks, operations)
        self._names = JobNames(workers, supervisors)
        self.job_requests = JobRequests(
            self.jobs, self._names, operations, self._inventory, workers, supervisors, self.runner
        )
        self.jobs.on_command_end = self._note_command_end

    def _note_command_end(self, job: JobRecord) -> None:
        message = self.job_requests.without_launcher(job)
        if message is not None:
            self._events.record(
                "job.launcher-ended", "warning", f"job {job} waits for {message}", facts={"job": job.id}
            )

    def _make_authorities(
        self, lookout: PlanSurvey, handoff: JobDumper, *, restart_always: bool, max_park_s: float | None
    ) -> None:
        """Create the services that accept requests."""
        self._make_jobs()
        self.pool.ready.job_bytes = self._job_bytes
        self.periodic = self._make_periodic(self._events)
        self.runner.over = self.attendance.drop_ended
        self.operations = Operations(
            self._inventory,
            self._workers,
            lookout,
            self.runner,
            found=self._found,
            suspended=self.suspended_operations,
            parked_orphans=self._parked_orphans,
            restart_allowed=lambda: restart_always,
            jobs=self._names,
            max_park_s=max_park_s,
        )
        self.recoveries = Recoveries(
            workers=self._workers,
            supervisors=self.supervisors,
            jobs=self.jobs,
            pool=self.pool,
            events=self._events,
            state_dir=self._state_dir,
            gpus=self._gpus,
            take_snapshot=self._look,
            variables=self._restart.variables_for,
            is_in_hand=self._is_in_hand,
            is_kept_from_training=self._is_kept_from_training,
        )
        self.restarts = Restarts(
            self.supervisors,
            self._workers,
            self.runner,
            self.operations,
            forget=self._forget_claim,
            is_over=partial(has_finished, self._state_dir),
            require_kept=self.recoveries.require_kept,
        )
        self.sequences = MultiStepOperations(lookout, self.operations, self._events)
        self.evacuation = Evacuation(self.sequences.drain, self._events)
        self.checkpoints = Checkpoints(self.operations, lookout, handoff, self._reviving, self._paces)

    def _means(self, *, simulated: bool) -> tuple[Mapping[str, Method], Mapping[str, Carrier]]:
        """Return the methods and the carriers of this daemon, by name."""
        by_worker = WorkerCarrier(self.pool)
        if simulated:
            books = SimulatedMethod(self.simulated_memory)
            restarting, by_state = self._restarting(books)
            carried: dict[str, Carrier] = {by_worker.name: by_worker, by_state.name: by_state}
            keeping = SimulatedKeepContext(self.simulated_memory)
            return {method.name: method for method in (books, restarting, keeping)}, carried
        gpus = Gpus(self._look, self._inventory.expire)
        steps = Steps(self.helper, gpus, self._other_processes)
        method = DriverMethod(steps, self.memory, gpus, self._other_processes)
        restarting, by_state = self._restarting(method)
        host = HostCarrier(self.helper, gpus, self.pool, self.memory)
        self.memory.free_memory = partial(self._free_memory, host, gpus)
        peer = PeerCarrier(self.helper, gpus, self.memory, self.pool)
        carriers: tuple[Carrier, ...] = (by_worker, by_state, DriverCarrier(), host, peer)
        methods: tuple[Method, ...] = (method, restarting, KeepContextMethod(gpus))
        return {one.name: one for one in methods}, {carrier.name: carrier for carrier in carriers}

    async def _free_memory(self, host: HostCarrier, gpus: Gpus, uuid: str) -> bool:
        """Free memory on that GPU, before a reservation is refused. Returns True if more may be free now."""
        has_ended = await self._workers.wait_for_snapshots({gpus.name_of(uuid)})
        return await host.free_memory(uuid) or has_ended

    def _restarting(self, by: Method) -> tuple[RestartMethod, StateCarrier]:
        workers, supervisors, pool = self._workers, self.supervisors, self.pool
        method = RestartMethod(workers, supervisors, pool, by=by, gpus=self._gpus, folder=self._state_dir)
        self._restart = method
        readying = PrestartService(supervisors, method.surroundings_of, self._ready)
        self._kept_ready = PrestartedJobs(supervisors, workers, readying, self._events, in_hand=self._is_busy)
        return method, StateCarrier(pool, supervisors, readying)

    def _forget_claim(self, op_id: str) -> None:
        lock_path(self._state_dir, op_id).unlink(missing_ok=True)

    def agents(self) -> Mapping[int, AgentInfo]:
        """Every connected agent by pid, and whether it has a supervisor, which keeps a Python ready or does not."""
        found = dict(self._workers.agents())
        for worker in self._workers:
            supervisor = self.supervisors.find(worker.identity.uid, worker.about.run) if worker.pid in found else None
            if supervisor is not None:
                kept = supervisor.keeps and supervisor.offer.pid == worker.pid
                found[worker.pid] = found[worker.pid].replace(supervised=True, kept=kept)
        return found

    def _make_orphans(self, events: EventLog) -> Orphans:
        """Create the list of orphans of all kinds."""
        self._in_video = VideoOrphans(self.memory, self._is_claimed, self._why_orphan, self._gpu_named, self._workers)
        self._found = OrphanedMemory(self.pool, self.memory, self._in_video)
        self._parked_orphans = ParkedOrphans(self._workers, self._is_busy, self._by_driver, self._found)
        self._distrusted = UntrustedFiles()
        pieces = PoolOrphans(self.pool, self._why_orphan)
        sources: list[Source] = [pieces, self._in_video, self._distrusted, self._parked_orphans]
        if self._by_driver is None:
            return Orphans(sources, events)
        orphans = Orphans([*sources, self._by_driver], events, self._by_driver)
        self._by_driver.changed = orphans.tell
        return orphans

    def _is_claimed(self, key: Key) -> bool:
        """True if the operation has claimed that worker's memory from the operation of that number."""
        return self._owned(key) or self.pool.was_claimed_from(key)

    def _driver_orphans(self) -> DriverOrphans:
        """Asked by a helper of their own: one of them that does not answer is to cost no operation its helper."""
        asking = Link()

        def is_taken(pid: int) -> bool:
            worker = self._workers.find(pid)
            return self.runner.of_process(pid) is not None or (
                worker is not None and self._parked_orphans.is_orphan(worker)
            )

        return DriverOrphans(
            asking, self._other_processes, self._look, is_taken=is_taken, own_pids=lambda: (self.helper.pid, asking.pid)
        )

    def _make_performer(self, handoff: JobDumper, *, simulated: bool) -> EffectExecutor:
        means = self._means(simulated=simulated)
        ticks, paces = self._start_ticks, self._paces
        slot_for = self._slot_beside_image
        return EffectExecutor(self._workers, *means, start_ticks=ticks, imager=handoff, paces=paces, slot_for=slot_for)

    async def _slot_beside_image(self, operation: str, worker: AgentConnection) -> tuple[int, int] | None:
        return await self.recoveries.slot_beside_image(operation, worker)

    def _make_imaging(self, *, simulated: bool) -> tuple[JobDumper, JobRestorer]:
        """Create the services that write jobs into images and restore them."""
        self._images: Images | None = None
        self._paces = Throughputs()
        self._half_revived = RestoreRecords(self._state_dir)
        self.places = Rendezvous(self._images_by.socket_path)
        parts = (self._opened_images, self.places, self._workers, self.pool)
        by: dict[str, Any] = {"criu": self._criu, "take_snapshot": self._look, "in_unit": self._images_by.in_unit}
        locks = LockFiles(self._images_by.lock_dir)
        self._standing_notes = DumpRecords(self._state_dir)
        self._handoff = JobDumper(*parts, **by, locks=locks, notes=self._standing_notes, noted=self._paces.note_image)
        return self._handoff, JobRestorer(
            *parts, **by, simulated=simulated, notes=self._half_revived, by_owner=self._images_by.by_owner
        )

    def _make_periodic(self, events: EventLog) -> ScheduledImages:
        take, trim = self._take_image, self._trim_images
        return ScheduledImages(self._workers, self.runner, events, take=take, trim=trim, note=self._notify_supervisor)

    async def _take_image(self, pid: int, path: str, rights: Rights, context: RequestContext) -> OperationResult:
        return await self.checkpoints.checkpoint(pid, path, rights, context, leave_running=True)

    async def _notify_supervisor(self, worker: AgentConnection, message: str, hint: str) -> None:
        """Have the `hegmctl run` that stays with that job say it, where one does."""
        supervisor = self.supervisors.find(worker.identity.uid, worker.about.run)
        if supervisor is not None:
            with suppress(SupervisorAway):
                await supervisor.tell("note", "", message=message, hint=hint)

    async def _trim_images(self, path: str, series: str, keep: int, rights: Rights) -> list[str]:
        return await self._opened_images().trim(path, series, keep, rights)

    def _is_moving(self) -> bool:
        """Return True if an operation is at work, and not only suspended."""
        return any(op.phase != SUSPENDED for op in self.runner.under_way())

    def pool_figures(self) -> Mapping[str, int]:
        """Return bytes of the pool by use, for monitoring."""
        return {**self.pool.figures(), "pinned": self._ready_helper.pinned_bytes}

    def _is_suspended(self, key: Key) -> bool:
        return any(op.id == key.operation and op.phase == SUSPENDED for op in self.runner.under_way())

    def _job_bytes(self) -> list[int]:
        return [worker.size_bytes or 0 for worker in self._workers if worker.connected and not worker.held_bytes]

    def _job_gpus(self) -> list[str]:
        """The UUIDs of the GPUs on which a process with an agent was seen last."""
        latest = self._inventory.latest
        if latest is None:
            return []
        pids = {worker.pid for worker in self._workers if worker.connected}
        names = {use.gpu for process in latest.processes if process.pid in pids for use in process.gpus}
        return [gpu.uuid for gpu in latest.gpus if gpu.id in names]

    def _is_busy(self, pid: int) -> bool:
        """Return True if an operation has that process, or is about to."""
        return self.runner.of_process(pid) is not None or self._reviving.is_coming(pid)

    def _is_in_hand(self, pid: int) -> bool:
        """Return True if an operation may give orders to the agent of that process."""
        op = self.runner.of_process(pid)
        return self._reviving.is_coming(pid) or (op is not None and op.phase != SEALING)

    def _is_kept_from_training(self, pid: int) -> bool:
        """Return True if an operation has that process, and has not let it train on."""
        op = self.runner.of_process(pid)
        return self._reviving.is_coming(pid) or (op is not None and not lets_train(op))

    def _opened_images(self) -> Images:
        if self._images is None:
            raise Bug("images are asked for before the state directory is open")
        return self._images

    async def _criu(self) -> Criu:
        """Find the CRIU to use, every time: the operator may have followed the doctor's advice. Raises HegmError."""
        missing, criu = rights_missing(os.geteuid()), self._images_by.criu
        found = (missing,) if missing is not None else await find(None if criu is None else str(criu))
        if isinstance(found, Criu):
            return found
        raise refusal(found)

    async def _look(self) -> NodeSnapshot:
        """Return a new snapshot of the node: steps on real processes must not rely on an older one."""
        self._inventory.expire()
        return await self._inventory.fresh(0.0)

    def _gpus(self) -> tuple[Gpu, ...]:
        latest = self._inventory.latest
        return () if latest is None else latest.gpus

    def _gpu_named(self, uuid: str) -> str:
        return next((gpu.id for gpu in self._gpus() if gpu.uuid == uuid), uuid)

    def keep_by(self, keep: MemoryKeeping) -> None:
        """Set what keeps memory of jobs beyond the life of the daemon. Call it before anything is reserved."""
        self.pool.keep = keep
        self.memory.store = keep.store

    async def open(self) -> None:
        """Read the journal, and make its reservations again. Raises HegmError if it cannot be trusted.

        A simulated driver loses its reservations with the daemon. Bytes that no operation owns are kept.
        """
        await anyio.to_thread.run_sync(self.runner.open)
        await anyio.to_thread.run_sync(self.jobs.open, self._state_dir)
        await anyio.to_thread.run_sync(self.recoveries.open)
        by = self._images_by
        self._images = Images(self._state_dir, in_unit=by.in_unit, key_file=by.key_file, read_back=by.read_back)
        self.places.open()
        unended = [op.id for op in self.runner.operations() if op.phase not in TERMINAL]
        forget_claims(self._state_dir, {*unended, *self.recoveries.job_ids})
        self._standing_notes.keep_only(unended)
        findings = await find_pieces(self.pool.keep, self.memory.adopt)
        self.pool.enter(findings.pieces, self._owned)
        # Snapshots of another job with the same id could be taken for its own.
        self.jobs.skip_ids([*self.recoveries.job_ids, *(piece.name.key.operation for piece in findings.pieces)])
        begun = self.runner.operations()
        taken = {member.key for op in begun for member in op.workers}
        await self._half_revived.clear({op.id for op in begun if not is_unrevived(op)}, taken, self.pool)
        self._distrusted.found = findings.distrusted
        self.orphans.tell()
        for member, gpu, size_bytes in reservations_to_restore(self.runner.operations()):
            if self._start_ticks(member.pid) == member.start_ticks:
                self.simulated_memory.hold_what_fits(member.key, gpu, size_bytes)

    def _owned(self, key: Key) -> bool:
        """True if a running operation owns that segment, or it is a slot of a protected job."""
        return self.recoveries.owns(key) or any(
            op.id == key.operation and op.worker(key.worker) is not None
            for op in self.runner.operations()
            if op.phase not in TERMINAL
        )

    def _why_orphan(self, op_id: str) -> str:
        for op in self.runner.operations():
            if op.id == op_id:
                return f"operation {op_id} is {op.phase} and does not have it"
        return f"operation {op_id} is not in the journal"

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the workers and run the operations, until cancelled."""
        over = anyio.Event()
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._keep_helper, over)
            if self.pool.keep.store is not None:
                tasks.start_soon(self.pool.keep.store.run)
            try:
                async with anyio.create_task_group() as inner:
                    if self._by_driver is not None and any(map(soon_needs_helper, self.runner.operations())):
                        inner.start_soon(self._start_helper)
                    inner.start_soon(self._other_processes.run)
                    await inner.start(self._workers.run)
                    await inner.start(self._opened_images().run)
                    await inner.start(self.runner.run)
                    await inner.start(self.jobs.run)
                    await inner.start(self.restarts.run)
                    await inner.start(self.recoveries.run)
                    inner.start_soon(self.recoveries.keep_looking)
                    await inner.start(self.suspended_operations.run)
                    inner.start_soon(self.pool.keep_ready, self._is_moving)
                    inner.start_soon(self._ready_helper.run)
                    await inner.start(self.sequences.run)
                    await inner.start(self.evacuation.run)
                    await inner.start(self.periodic.run)
                    inner.start_soon(self.attendance.run)
                    inner.start_soon(self._kept_ready.run)
                    if self._by_driver is not None:
                        await inner.start(self._by_driver.run)
                    task_status.started()
            finally:
                over.set()

    async def _start_helper(self) -> None:
        """Start the helper for operations that another daemon began, beside the rest of the start."""
        with suppress(HegmError):  # what calls it reports that
            await self.helper.start()

    async def _keep_helper(
        self, over: anyio.Event, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the helper until the operations are over: one that is interrupted must unlock its process first."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                await tasks.start(self.helper.run)
                task_status.started()
                await over.wait()
                tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """Called before `run` is cancelled: running operations are left to the next daemon where that is possible."""
        self._handoff.stop()

    def close(self) -> None:
        """Close all memory held here. Memory with a name or in a store remains."""
        self.pool.close()
        self.memory.close()
        self.supervisors.close()

    @property
    def busy(self) -> bool:
        """True if there is a job, or an operation that has not ended."""
        return any(True for _ in self._workers) or bool(self.runner.under_way())


def soon_needs_helper(op: Operation) -> bool:
    """Return True if the driver is called for an operation that an earlier daemon began, once the runner takes it up.

    A restart needs no driver: on a node without NVIDIA's, the helper would fail.
    """
    is_at_work = op.phase not in TERMINAL and op.phase != SUSPENDED
    return is_at_work and any(not worker.restarts for worker in op.live)
