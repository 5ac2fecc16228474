"""The handler of each request: translates between messages and the parts of the daemon, decides nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hegmd import __version__
from hegmd.errors import INCOMPATIBLE, NOT_FOUND, HegmError
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.operations.image_requests import Checkpoints
from hegmd.operations.job_requests import JobRequests
from hegmd.operations.operations import Operations
from hegmd.operations.orphans import Orphans
from hegmd.operations.proofs import ProofRequests
from hegmd.operations.restart_requests import Restarts
from hegmd.operations.sequences import MultiStepOperations
from hegmd.operations.survey import May, deny_all
from hegmd.protocol import messages as m
from hegmd.protocol.names import gpu_named, place_named
from hegmd.protocol.snapshots import AgentInfo, Check, Gpu, GpuProcess, Way
from hegmd.recovery.service import Recoveries
from hegmd.server.auth import Policy
from hegmd.server.dispatch import Handler
from hegmd.server.operation_handlers import OperationHandlers
from hegmd.server.session import Call
from hegmd.server.sharing_handlers import SharingHandlers
from hegmd.sharing.requests import SharingRequests
from hegmd.sharing.resumes import QueuedResumes
from hegmd.telemetry.events import EventLog, require_kinds
from hegmd.workers.workers import Workers

if TYPE_CHECKING:
    from hegmd.node.devices.simulated import SimulatedProvider

# An answer may be this old, so that concurrent callers share one snapshot.
FRESH_S = 0.25


class Services(NamedTuple):
    """The parts of the daemon that handlers use, and a few of its actions as plain calls."""

    policy: Policy
    inventory: Inventory
    events: EventLog
    workers: Workers
    operations: Operations
    ways: Callable[[NodeSnapshot, Sequence[GpuProcess], May], Awaitable[Mapping[int, tuple[Way, ...]]]]
    sequences: MultiStepOperations
    checkpoints: Checkpoints
    orphans: Orphans
    restarts: Restarts
    jobs: JobRequests
    recoveries: Recoveries
    proving: ProofRequests
    sharing: SharingRequests
    queued_resumes: QueuedResumes
    simulator: SimulatedProvider | None
    limits: m.Limits
    doctor: Callable[[Callable[[Check], Awaitable[None]]], Awaitable[tuple[Check, ...]]]
    show_config: Callable[[], m.ConfigReply]
    reload: Callable[[], Awaitable[m.ReloadReply]]
    metrics: Callable[[], Awaitable[str]]


class Handlers:
    """A method per message."""

    def __init__(self, services: Services) -> None:
        self._s = services
        self._sharing = SharingHandlers(services.policy, services.sharing)

    def table(self) -> Mapping[type[m.Request], Handler]:
        return {
            m.Hello: self.hello,
            m.Ping: self.ping,
            m.Gpus: self.gpus,
            m.Processes: self.processes,
            m.Events: self.events,
            m.Doctor: self.doctor,
            m.ShowConfig: self.show_config,
            m.Reload: self.reload,
            m.Metrics: self.metrics,
            m.SimulateHold: self.simulate_hold,
            m.SimulateFault: self.simulate_fault,
            m.AgentAttend: self.agent_attend,
            m.AgentReport: self.agent_report,
            m.Supervise: self.supervise,
            m.SuperviseReport: self.supervise_report,
            m.RegisterJob: self.register_job,
            m.Jobs: self.jobs,
            m.InspectJob: self.inspect_job,
            m.WaitForJob: self.wait_for_job,
            m.Recovery: self.recovery,
            m.DropRecovery: self.drop_recovery,
            m.HoldSlot: self.hold_slot,
            m.ReportRecovery: self.report_recovery,
            m.MayStartRank: self.may_start_rank,
            m.BeginProof: self.begin_proof,
            m.EndProof: self.end_proof,
            **self._sharing.table(),
            **OperationHandlers(
                *(self._s.policy, self._s.operations, self._s.sequences, self._s.checkpoints, self._s.orphans),
                *(self._s.jobs, self._s.inventory, self._s.workers, self._s.queued_resumes),
            ).table(),
        }

    async def hello(self, call: Call, hello: m.Hello) -> m.Welcome:
        return m.Welcome(
            version=call.session.protocol.version,
            daemon_version=__version__,
            node=socket.gethostname(),
            simulated=self._s.simulator is not None,
            capabilities=("simulate",) if self._s.simulator is not None else (),
            limits=self._s.limits,
            you=self._s.policy.describe(call.peer),
            run=self._s.events.run,
        )

    async def agent_attend(self, call: Call, request: m.AgentAttend) -> m.AgentDismissed:
        hello = call.session.hello
        program = AgentInfo(name=hello.name if hello else "agent", version=hello.program_version if hello else "")
        peer = call.peer
        await self._s.workers.attend(call.session, peer.pid, peer.uid, program, request, call.emit)
        return m.AgentDismissed()

    async def agent_report(self, call: Call, report: m.AgentReport) -> m.Noted:
        self._s.workers.report(call.session, report)
        return m.Noted()

    async def supervise(self, call: Call, request: m.Supervise) -> m.SupervisionEnded:
        peer = call.peer
        await self._s.restarts.attend(call.session, peer.pid, peer.uid, request, call.emit)
        return m.SupervisionEnded()

    async def supervise_report(self, call: Call, report: m.SuperviseReport) -> m.Noted:
        self._s.restarts.report(call.session, report)
        return m.Noted()

    async def ping(self, call: Call, _: m.Ping) -> m.Pong:
        return m.Pong()

    async def gpus(self, call: Call, _: m.Gpus) -> m.GpusReply:
        snapshot = await self._s.inventory.fresh(FRESH_S)
        return m.GpusReply(taken_utc=snapshot.taken_utc, gpus=snapshot.gpus, vendors=snapshot.vendors)

    async def processes(self, call: Call, request: m.Processes) -> m.ProcessesReply:
        snapshot = await self._s.inventory.fresh(FRESH_S)
        # Sets, because a peer may name 65,536 of them, and each would be compared with each process of the node.
        gpus = frozenset(gpu_named(gpu, snapshot.gpus) for gpu in request.gpus)
        pids = frozenset(await self._s.jobs.pids(request.pids, partial(self._s.policy.may_act_on, call.peer)))
        _check_known(pids, snapshot)
        matching = [process for process in snapshot.processes if _is_wanted(process, pids, gpus)]
        may = partial(self._s.policy.may_act_on, call.peer) if request.ways else deny_all
        ways = await self._s.ways(snapshot, matching, may)
        matching = [process.replace(ways=ways[process.pid]) for process in matching]
        return m.ProcessesReply(
            taken_utc=snapshot.taken_utc,
            processes=tuple(
                self._s.policy.visible(call.peer, self._s.jobs.of_process(process)) for process in matching
            ),
            vendors=snapshot.vendors,
        )

    async def register_job(self, call: Call, request: m.RegisterJob) -> m.JobRegistered:
        priority = self._s.sharing.priority(request.priority, self._sharing.caller(call))
        return await self._s.jobs.register(call.peer.pid, call.peer.uid, request, priority)

    async def jobs(self, call: Call, request: m.Jobs) -> m.JobsReply:
        may = partial(self._s.policy.may_act_on, call.peer)
        jobs = await self._s.jobs.jobs(request.jobs, may, ended=request.all)
        return m.JobsReply(taken_utc=time.time(), jobs=jobs)

    async def inspect_job(self, call: Call, request: m.InspectJob) -> m.JobReply:
        return m.JobReply(job=await self._s.jobs.one(request.job, partial(self._s.policy.may_act_on, call.peer)))

    async def wait_for_job(self, call: Call, request: m.WaitForJob) -> m.JobReply:
        may = partial(self._s.policy.may_act_on, call.peer)
        return m.JobReply(job=await self._s.jobs.wait(request.job, may, call.emit))

    async def events(self, call: Call, request: m.Events) -> m.EventsReply:
        require_kinds(request.kinds)
        if not request.follow:
            next_seq = self._s.events.next_seq
            for event in self._s.events.remembered(request.since, request.kinds, request.run):
                await call.emit(self._s.policy.visible_event(call.peer, event))
            return m.EventsReply(next_seq=next_seq)
        async with self._s.events.subscribe(request.since, request.kinds, request.run) as subscription:
            async for event in subscription:
                await call.emit(self._s.policy.visible_event(call.peer, event))
        return m.EventsReply(next_seq=self._s.events.next_seq)

    async def doctor(self, call: Call, _: m.Doctor) -> m.DoctorReply:
        return m.DoctorReply(checks=await self._s.doctor(call.emit))

    async def show_config(self, call: Call, _: m.ShowConfig) -> m.ConfigReply:
        return self._s.show_config()

    async def reload(self, call: Call, _: m.Reload) -> m.ReloadReply:
        return await self._s.reload()

    async def metrics(self, call: Call, _: m.Metrics) -> m.MetricsReply:
        return m.MetricsReply(text=await self._s.metrics())

    async def simulate_hold(self, call: Call, request: m.SimulateHold) -> m.HoldReply:
        simulator = self._simulator()
        gpu = place_named(request.gpu, self._gpus())
        held_bytes = simulator.hold(call.session, call.peer.pid, gpu, request.vram_bytes)

        def give_back() -> None:
            simulator.release(call.session)
            self._s.inventory.expire()

        call.session.at_end("simulate.hold", give_back)
        self._s.inventory.expire()
        return m.HoldReply(gpu=gpu, vram_bytes=held_bytes)

    async def simulate_fault(self, call: Call, request: m.SimulateFault) -> m.FaultReply:
        faults = self._simulator().set_fault(place_named(request.target, self._gpus()), request.fault)
        self._s.inventory.expire()
        return m.FaultReply(faults=faults)

    def _gpus(self) -> Sequence[Gpu]:
        latest = self._s.inventory.latest
        return () if latest is None else latest.gpus

    async def recovery(self, call: Call, request: m.Recovery) -> m.RecoveryReply:
        return await self._s.recoveries.show(request.jobs, partial(self._s.policy.may_act_on, call.peer))

    async def drop_recovery(self, call: Call, request: m.DropRecovery) -> m.RecoveryDropped:
        may = partial(self._s.policy.may_act_on, call.peer)
        return m.RecoveryDropped(freed_bytes=await self._s.recoveries.drop(request.job, may))

    async def hold_slot(self, call: Call, request: m.HoldSlot) -> m.SlotHeld:
        job, memory = await self._s.recoveries.in_process.hold(call.peer.pid, call.peer.uid, request)
        await call.emit(m.SlotMemory(size_bytes=memory.size_bytes), (memory.fd,))
        return m.SlotHeld(job=job)

    async def report_recovery(self, call: Call, request: m.ReportRecovery) -> m.Noted:
        self._s.recoveries.in_process.report(call.peer.uid, request)
        return m.Noted()

    async def may_start_rank(self, call: Call, request: m.MayStartRank) -> m.RankStart:
        return m.RankStart(may_start=self._s.recoveries.in_process.may_start(call.peer.uid, request.run))

    async def begin_proof(self, call: Call, request: m.BeginProof) -> m.Proof:
        return await self._s.proving.begin(request.pid, partial(self._s.policy.may_act_on, call.peer))

    async def end_proof(self, call: Call, request: m.EndProof) -> m.Proof:
        return self._s.proving.end(request.proof)

    def _simulator(self) -> SimulatedProvider:
        if self._s.simulator is None:
            raise HegmError(
                INCOMPATIBLE,
                "the GPUs of this daemon are real",
                "start another daemon for simulation: hegmd --simulate 2x8GiB --socket PATH --state-dir DIR",
            )
        return self._s.simulator


def _check_known(pids: frozenset[int], snapshot: NodeSnapshot) -> None:
    """Raise NOT_FOUND for pids that are on no GPU."""
    present = {process.pid for process in snapshot.processes}
    missing = sorted(pids - present)
    if missing:
        some = ", ".join(str(pid) for pid in missing[:10])
        raise HegmError(
            NOT_FOUND,
            f"process {some} is on no GPU of this node",
            "run: hegmctl ps; a job is listed once it has opened a GPU",
            {"pids": missing[:100]},
        )


def _is_wanted(process: GpuProcess, pids: frozenset[int], gpus: frozenset[str]) -> bool:
    if pids and process.pid not in pids:
        return False
    return not gpus or any(use.gpu in gpus for use in process.gpus)
