"""The records of planning: the node at one moment, a request, a plan, and reasons against it.

Owns these records and turning a plan into an operation. Decides nothing. Everything is frozen and plain, so a plan can
be made from a snapshot that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hegmd.memory.sizes import CONTEXT_BYTES
from hegmd.migration.machine.operation import CHECKPOINT, RESTART, JobProcess, Limits, Operation, Respawn
from hegmd.node.gpu_sets import CPU, gpus_of
from hegmd.protocol.messages import Communicators, CudaFacts, LeftAlone
from hegmd.protocol.operations import BY_DRIVER, HOST, PEER, WORKER, PlannedProcess
from hegmd.protocol.proofs import Proof
from hegmd.protocol.record import Record, field
from hegmd.protocol.snapshots import HEALTHY


class CarrierRow(NamedTuple):
    """The properties of a carrier that the planner uses."""

    name: str
    #: Whether the agent shows its storages, and the GPU helper copies them.
    is_helped: bool = False
    #: Whether the bytes wait in the pool until they are reloaded.
    in_pool: bool = False
    #: The fields of `Rates` that hold its throughput, out of the process and into it; None if the driver's figures do.
    rates: tuple[str, str] | None = None


# A row for each carrier that a request can name, the fastest first: its order is the planner's order of preference.
CARRIERS: Mapping[str, CarrierRow] = {
    row.name: row
    for row in (
        CarrierRow(PEER, is_helped=True, rates=("peer_out_bytes_per_s", "peer_in_bytes_per_s")),
        CarrierRow(HOST, is_helped=True, in_pool=True, rates=("host_out_bytes_per_s", "host_in_bytes_per_s")),
        CarrierRow(WORKER, in_pool=True, rates=("cuda_out_bytes_per_s", "cuda_in_bytes_per_s")),
        CarrierRow(BY_DRIVER),
    )
}


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class GpuMemory(Record):
    """The part of a GPU that decides whether something can go there."""

    id: str = field("such as gpu0")
    vendor: str = field("nvidia, amd or simulated")
    chip: str | None = field("identity of the chip", default=None)
    state: str = field("ok, lost or unknown", default="ok")
    condition: str = field("healthy, failing or gone", default=HEALTHY)
    why: str | None = field("of one that is failing or gone: what says so", default=None)
    free_bytes: int | None = field("free memory; nil if unknown")
    total_bytes: int | None = field("memory in all; nil if not known", default=None)
    kept_bytes: int = field("what the driver and hegmd's own processes keep for themselves", default=0)
    copying_bytes: int = field("what the GPU helper has there until its copies end", default=0)
    context_bytes: int = field("what a context that copies takes there", default=CONTEXT_BYTES)
    leased_bytes: int = field("what of the free memory is kept for others, as leases", default=0)
    mig: bool | None = field("whether it is cut into MIG instances", default=None)
    mps: bool | None = field("whether processes share it through MPS", default=None)
    uuid: str = field("what the driver calls it", default="")
    driver_version: str | None = field("version of the kernel driver", default=None)
    nvlinks: tuple[str, ...] = field("the GPUs that it reaches over NVLink", default=())


class AgentSurvey(Record):
    """The latest report of a process's agent."""

    token: str = field("what it calls itself")
    framework_version: str | None = field("version of the training framework; nil if none is loaded yet", default=None)
    size_bytes: int | None = field(
        "bytes of the storages that it vouches for; nil before its first survey", default=None
    )
    left_alone: tuple[LeftAlone, ...] = field("the storages that it does not vouch for", default=())
    boundary: int | None = field("batch boundaries that it has passed", default=None)
    counts: tuple[int, int] | None = field(
        "how many it had passed before and after one instant, which is the same for all ranks of its job; nil if "
        "unknown",
        default=None,
    )
    rank: int | None = field("its rank in a distributed job", default=None)
    world_size: int | None = field("how many ranks the job has", default=None)
    cuda: CudaFacts | None = field("its use of CUDA; nil if it uses none, or the agent does not know", default=None)
    communicators: Communicators | None = field(
        "its groups with other ranks; nil if it has none, or the agent does not know", default=None
    )
    driver_restored: bool = field("whether the driver has ever restored the process", default=False)
    state_bytes: int | None = field("what a restart would carry; nil if it has not said", default=None)
    refusals: tuple[str, ...] = field("what prevents a restart, as its agent reports", default=())
    unweighed: tuple[str, str] | None = field(
        "why it has not said what a restart would carry, and what to do; nil if nothing kept it from it", default=None
    )
    begin_anew: tuple[str, ...] | None = field(
        "variables that a restart would not keep; nil if not known", default=None
    )
    unknown: tuple[str, ...] | None = field(
        "what it cannot know, because it was attached to a process that ran already; nil for any other", default=None
    )


class Surroundings(Record):
    """The visible state of a process that the driver would report too late."""

    stopped: bool = field("whether a signal or a debugger has stopped it", default=False)
    nccl_shared: bool | None = field("whether it maps memory that NCCL shares between ranks", default=None)
    nccl_p2p_disabled: bool = field("whether it was started with NCCL_P2P_DISABLE=1", default=False)
    cgroup_free_bytes: int | None = field("how much its control groups let it grow; nil for no limit", default=None)
    same_ipc: bool | None = field("whether it is in the IPC namespace of hegmd", default=None)


class Candidate(Record):
    """A process that could be moved."""

    pid: int = field("process id")
    start_ticks: int = field("start time in clock ticks since boot")
    uid: int | None = field("its owner", default=None)
    name: str | None = field("short name of the program", default=None)
    job: str | None = field(
        "the `hegmctl run` that it belongs to: one id for each run, whatever it is called", default=None
    )
    gpus: tuple[str, ...] = field("the GPUs that it is on; empty for a rank that is on none yet")
    on_cpu: bool = field("whether it trains without a GPU, as far as it says", default=False)
    kinds: tuple[str, ...] = field("how it uses each of them: compute, graphics or mps", default=())
    vram_bytes: int | None = field("its memory on them as the driver reports it; nil if unknown", default=None)
    driver_bytes_by_gpu: Mapping[str, int] = field(
        "what of that it holds on each, by GPU, as far as it is known", default={}
    )
    parent: int | None = field("the nearest of its ancestors that is a candidate too", default=None)
    around: Surroundings = field("what is seen of it from outside", default=Surroundings())
    stopped: bool = field("whether a signal or a debugger has stopped it: it reaches no boundary", default=False)
    supervisor: int | None = field("the process that would start it again after a restart", default=None)
    launched: bool = field("whether that has started a launcher, which started this rank", default=False)
    apart: bool = field("whether that is not its parent: the parent would take its exit for its end", default=False)
    python: bool = field("whether that would take another Python for it", default=False)
    other_python: str = field("the version that the requested Python reports; empty if unknown", default="")
    no_python: str = field("why that is no Python; empty if it is one or if that is not known", default="")
    agent: AgentSurvey | None = field("its agent, if one is connected", default=None)


class PoolMemory(Record):
    """The pool's size and what is free."""

    budget_bytes: int = field("the most that it may hold")
    free_bytes: int = field("what of that is not taken")
    ready_bytes: int = field("the part of that whose pages are present", default=0)


class Rates(Record):
    """Throughput on this node, measured or assumed."""

    out_bytes_per_s: float = field("out of a worker by its own hands", default=2.0e9)
    in_bytes_per_s: float = field("into a worker by its own hands", default=2.0e9)
    fixed_s: float = field("what a move takes without any bytes", default=0.05)
    peer_out_bytes_per_s: float = field("from GPU to GPU over NVLink", default=3.9e11)
    peer_in_bytes_per_s: float = field("within the target GPU of a process", default=4.5e11)
    host_out_bytes_per_s: float = field("from a GPU to the pool by the helper's hands", default=4.9e10)
    host_in_bytes_per_s: float = field("from the pool to a GPU by the helper's hands", default=4.5e10)
    cuda_out_bytes_per_s: float = field("from a GPU to the pool by the worker's own hands", default=9.2e9)
    cuda_in_bytes_per_s: float = field("from the pool to a GPU by the worker's own hands", default=6.6e9)
    driver_out_bytes_per_s: float = field("by the driver's checkpoint", default=2.4e9)
    driver_in_bytes_per_s: float = field("by the driver's restore", default=6.5e9)
    driver_out_s: float = field("a checkpoint with next to nothing to carry", default=0.33)
    driver_in_s: float = field("a restore with next to nothing to carry", default=0.25)
    beside_s: float = field("how much longer the driver's checkpoint or restore takes while copies run", default=0.1)
    within_bytes_per_s: float = field("within the GPU, while the driver copies too", default=1.0e12)
    exchange_s: float = field("opening and freeing the storages, and opening them again, without any", default=0.04)
    make_bytes_per_s: float = field("making storages on a GPU that has just been left", default=4.3e11)
    round_s: float = field("each round but one of those in which storages are made", default=0.005)
    leave_s: float = field("until the GPU is seen to be free, and that is said", default=0.1)
    arm_s: float = field("making the helper ready to copy, its contexts on the GPUs above all", default=0.3)
    image_out_bytes_per_s: float = field("into an image, until it was read back", default=6.0e8)
    image_left_bytes_per_s: float = field("into an image whose job continues, of its processes", default=1.2e9)
    image_in_bytes_per_s: float = field("out of an image, while CRIU restores", default=1.5e9)
    image_out_s: float = field("a dump, and an image with next to nothing in it", default=1.0)
    image_left_s: float = field("a dump, with next to nothing in it", default=0.8)
    image_in_s: float = field("a restore of processes, with next to nothing to read", default=1.5)


class Unreachable(Record):
    """A process that a driver lists and that cannot be moved, because it has ended or is not visible."""

    pid: int = field("process id, by the driver's word")
    gpus: tuple[str, ...] = field("the GPUs on which the driver lists it")
    vram_bytes: int | None = field("its memory there as the driver reports it; nil if unknown", default=None)
    ended: bool = field("whether it has ended", default=False)
    why: str = field("why it cannot be seen", default="")


class NodeSnapshotForPlan(Record):
    """The state of the node that planning needs, at one moment."""

    gpus: tuple[GpuMemory, ...] = field("all of them")
    candidates: tuple[Candidate, ...] = field("the processes on them, and the ranks of their jobs that are on none yet")
    unreachable: tuple[Unreachable, ...] = field("the processes on them that are no candidates", default=())
    beginning: tuple[int, ...] = field("the named processes that have not reached a first batch yet", default=())
    ended: tuple[int, ...] = field("the named pids that no process has", default=())
    pool: PoolMemory = field("the pool")
    running: tuple[Operation, ...] = field("operations that are not over", default=())
    rates: Rates = field("how fast bytes go", default=Rates())
    uid: int = field("as which user hegmd runs", default=0)
    available_bytes: int | None = field("memory of the node that can still be taken", default=None)
    outlived: bool = field("whether a store keeps the bytes when hegmd ends", default=True)
    proofs: tuple[Proof, ...] = field("the tried combinations of driver, NCCL, PyTorch, chip and links", default=())
    proving: tuple[int, ...] = field("ranks whose jobs try their combination: verdicts are ignored", default=())


class PlanRequest(Record):
    """A request to be planned."""

    kind: str = field("migrate, suspend, resume, checkpoint or quiesce")
    pids: tuple[int, ...] = field("the processes; the others of their jobs come along")
    to: str | None = field(
        "the GPU for all of them, the GPUs of one on several, or cpu; for resume nil is where they were", default=None
    )
    placement: Mapping[str, str] = field("the same for single ones, by pid; before `to`", default={})
    carrier: str | None = field("peer, host, worker or driver; nil to choose one", default=None)
    keep_context: bool = field("whether the processes keep their CUDA contexts on their GPUs", default=False)
    via: str | None = field("restart, where nothing else is to be thought of", default=None)
    allow_restart: bool = field("whether it may be a restart where there is no better way", default=False)
    respawn: Respawn = field("of a restart: what changes for the new process", default=Respawn())
    may_queue: bool = field("whether it can be asked for again so that it waits for room", default=False)


class MigrationPlan(Record):
    """The actions of an operation."""

    kind: str = field("migrate, suspend, resume, checkpoint, restore or quiesce")
    way: str = field("agent, or driver for processes without one")
    workers: tuple[PlannedProcess, ...] = field("one for each process of the job")
    size_bytes: int = field("bytes to carry, in all")
    reservation_bytes: Mapping[str, int] = field("memory to reserve, by GPU")
    gpu_free_bytes: Mapping[str, int] = field("free memory there")
    pool_needed_bytes: int = field("bytes of the pool to take")
    pool_free_bytes: int = field("bytes of the pool that are free")
    estimate_s: float = field("estimated downtime after the wait for its boundary")
    is_distributed: bool = field("whether all have to stop at the same boundary")
    hazards: tuple[str, ...] = field("what to know before saying yes", default=())
    steps: tuple[str, ...] = field("what would be done, in order")
    respawn: Respawn | None = field("of a restart: what is to be different afterwards", default=None)
    image_s: float | None = field("how much of that is for an image", default=None)
    ends: bool = field("whether the job ends with it", default=False)
    pool_ready_bytes: int = field("of the free bytes of the pool, those that take no time to get", default=0)
    reserves_late: bool = field(
        "whether ranks reserve their targets only once all have left, because they exchange GPUs", default=False
    )

    def operation(
        self,
        op_id: str,
        candidates: Iterable[Candidate],
        chips: Mapping[str, str | None],
        *,
        limits: Limits,
        utc: float,
    ) -> Operation:
        """The operation that carries out a migration or a suspension; the machine takes it from there."""
        by_pid = {candidate.pid: candidate for candidate in candidates}
        workers = tuple([_worker(planned, by_pid[planned.pid], chips) for planned in self.workers])
        if self.kind == CHECKPOINT:  # until its image is complete, a rollback is possible
            workers = tuple([worker.replace(kept_gpu=worker.gpu) for worker in workers])
        return Operation(
            id=op_id,
            kind=self.kind,
            is_distributed=self.is_distributed,
            workers=workers,
            limits=limits,
            owner_uid=by_pid[self.workers[0].pid].uid,
            created_utc=utc,
            respawn=self.respawn,
            reserves_late=self.reserves_late,
        )

    @property
    def place(self) -> str | None:
        """The targets of its processes, as `--to` names them; None if a process has no target."""
        return place_of_all([worker.to for worker in self.workers])

    @property
    def source(self) -> str | None:
        """The places of its processes, in the same form."""
        return place_of_all([worker.gpu for worker in self.workers])

    @property
    def destinations(self) -> dict[str, str]:
        """For `resume-requested`: where each worker goes, by its name in the operation."""
        return {str(worker.pid): worker.to for worker in self.workers if worker.to is not None}


def place_of_all(places: Sequence[str | None]) -> str | None:
    """The place of several processes as `--to` names it: one GPU for all, or one for each in the order of the ranks."""
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        return None
    return known[0] if len(set(known)) == 1 else ",".join(known)


def _worker(planned: PlannedProcess, candidate: Candidate, chips: Mapping[str, str | None]) -> JobProcess:
    gpu = planned.gpu
    return JobProcess(
        name=str(planned.pid),
        pid=planned.pid,
        start_ticks=candidate.start_ticks,
        token=candidate.agent.token if candidate.agent else "",
        method=planned.method,
        carrier=planned.carrier if planned.carrier != "none" else "worker" if candidate.agent else "driver",
        rank=candidate.agent.rank if candidate.agent else None,
        chip=chips.get(next(iter(gpus_of(gpu)), "")),
        first_gpu=gpu,
        origin_gpu=gpu,
        target_gpu=planned.to,
        gpu=gpu,
        size_bytes=0 if planned.carrier == BY_DRIVER else planned.size_bytes,
        driver_bytes=planned.driver_bytes,
        agent_overhead_bytes=planned.agent_overhead_bytes,
        driver_bytes_by_gpu=planned.driver_bytes_by_gpu,
        storage_bytes_by_gpu=planned.storage_bytes_by_gpu,
        overlap_bytes=planned.overlap_bytes,
        stays_bytes=planned.stays_bytes,
        communicators=planned.communicators,
        reservations={gpu: planned.reservation_bytes} if gpu and gpu != CPU else {},
        run=candidate.job if planned.method == RESTART else None,
        must_exit=planned.method == RESTART,
    )
