"""One operation: what was requested, where each worker and its bytes are, and which effects are running.

Owns the records that the journal keeps; they are the machine's whole memory. Nothing is decided here. Each fact about a
worker is either what an event said or what a requested effect may have done, whichever is worse. So a state read from
the journal after a crash errs on the safe side until `inspected` corrects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.node.gpu_sets import added
from hegmd.protocol.operations import BY_DRIVER, KEEP_CONTEXT
from hegmd.protocol.record import Record, field

MIGRATE, SUSPEND, RESUME, CHECKPOINT, QUIESCE = "migrate", "suspend", "resume", "checkpoint", "quiesce"
# A job restored from an image: suspended at first, then resumed.
RESTORE = "restore"
KINDS = (MIGRATE, SUSPEND, RESUME, CHECKPOINT, QUIESCE, RESTORE)

# The direction of the operation: to the requested state, back to the former one, or nowhere if neither is possible.
FORWARD, BACK, HOLD = "forward", "back", "hold"

# The method of GPUs that are only simulated.
SIMULATED = "simulated"
# Method and carrier of a restart: the process exits with its state saved, and a new one continues from it.
RESTART, BY_STATE = "restart", "state"

# The condition that a worker waits for before the next attempt.
FOR_AGENT, FOR_RETRY = "agent", "retry"


class Limits(Record):
    """The time limits of the parts of an operation."""

    arm_s: float = field(
        "reserving GPU and pool memory; of a restart, again until the next process is ready", default=60.0
    )
    park_s: float = field("stopping at a boundary", default=60.0)
    max_park_s: float = field(
        "parked at a boundary while other threads are busy, before it continues to another one", default=0.5
    )
    hold_s: float = field("of a quiesce: parked at the boundary, before the job resumes by itself", default=60.0)
    connect_s: float = field("taking the communicators of all ranks down, or connecting them again", default=60.0)
    move_s: float = field("taking the bytes out, or putting them back", default=600.0)
    hand_s: float = field("writing an image, from the dump to its verification", default=3600.0)
    resume_s: float | None = field(
        "of a resume: from the request until the bytes are back, however many steps that takes; nil for no more than "
        "these have each",
        default=None,
    )
    verify_s: float = field("reaching the next boundary, before it is reported as late", default=60.0)
    settle_s: float = field(
        "running effects end, and agents that are away connect again: their longest pause, and time for a busy node",
        default=15.0,
    )
    retry_s: float = field("after what time something that does not work or answer is tried again", default=5.0)


class Failure(Record):
    """Why the operation did not do what was requested."""

    code: str = field("code of the error, as in hegmd/errors.py")
    message: str = field("what failed, on which worker")
    hint: str = field("the next step")


class Pending(Record):
    """An effect that was asked for and has not ended."""

    number: int = field("its number")
    effect: str = field("its name")
    worker: str = field("whom it is for")
    gpu: str | None = field("the GPU that it names", default=None)
    size_bytes: int | None = field("the size that it names", default=None)
    at: int | None = field("the boundary that it names", default=None)
    generation: int | None = field("the generation of communicators that it names", default=None)


class ImageRequest(Record):
    """The image to write of a job: where, with whose rights, and how far it is."""

    path: str = field("the directory that the image is to have, absolute")
    uid: int = field("the user whose rights write it")
    gid: int = field("the group of these rights")
    groups: tuple[int, ...] = field("the other groups", default=())
    root_pid: int = field("the process that is taken with all that descend from it", default=0)
    root_ticks: int = field("its start time in clock ticks since boot", default=0)
    leave_running: bool = field("whether the job continues after it; otherwise it ends", default=False)
    begun: bool = field("whether anything may have been written", default=False)
    written: bool = field(
        "if the job continues: whether its processes are written, so that only bytes of the pool are missing",
        default=False,
    )
    unwanted: bool = field("whether the written files are to be removed", default=False)
    whole: bool = field("whether the image has its name, and was read back", default=False)


class Respawn(Record):
    """The differences for the process that a restart starts, while the operation heads forward."""

    set: Mapping[str, str] = field("variables of its environment", default={})
    unset: tuple[str, ...] = field("variables that it is to be without", default=())
    python: str | None = field("the interpreter instead of its own", default=None)


class JobProcess(Record):
    """A process of the job, and where its bytes are."""

    name: str = field("what events and effects call it; unique in the operation")
    pid: int = field("process id")
    start_ticks: int = field("start time in clock ticks since boot: with the pid, its identity")
    token: str = field("the name that its agent reports; empty for a process without one")
    method: str = field(
        "how it leaves its GPU and returns: simulated, driver, keep-context or restart", default="simulated"
    )
    carrier: str = field(
        "how the bytes of its storages go: peer, host, worker, driver with the rest, or state with a restart",
        default="worker",
    )
    rank: int | None = field("its rank in a distributed job", default=None)
    chip: str | None = field("identity of the chip that it began on; it can only go to an equal one", default=None)
    first_gpu: str | None = field("the GPU that it began on, where people expect it back", default=None)
    origin_gpu: str | None = field("the GPU to bring it back to; nil when the way back is to be suspended")
    target_gpu: str | None = field("the GPU that it is to be on; nil for none")
    gpu: str | None = field("the GPU that it is on; nil while it is checkpointed")
    previous_gpu: str | None = field("the GPU that it was taken off last", default=None)
    source_gpu_uuids: tuple[str, ...] = field(
        "UUIDs of all GPUs of the node that the driver took it off on, if that was another: its own first", default=()
    )
    gpu_unknown: bool = field(
        "whether its former GPU is unknown: the driver restores it there, whatever its target", default=False
    )
    size_bytes: int = field("bytes of the storages that its agent vouches for")
    driver_bytes: int = field("what it needs on a GPU besides them: what the driver carries, with a margin", default=0)
    agent_overhead_bytes: int = field(
        "GPU memory that its agent needs besides, when it allocates its storages again", default=0
    )
    driver_bytes_by_gpu: tuple[int, ...] = field(
        "of one on several GPUs: which part of that each of its devices needs, in their order", default=()
    )
    storage_bytes_by_gpu: tuple[int, ...] = field(
        "on several GPUs: memory for the offloaded storages of each device, in their order", default=()
    )
    overlap_bytes: int = field(
        "the part of the memory for its storages that the carrier's own memory on that GPU frees step by step",
        default=0,
    )
    reservations: Mapping[str, int] = field("memory reserved for it, by GPU, its own included; 0: unknown")
    pool_bytes: int = field("bytes of the pool that are held for it", default=0)
    boundary: int | None = field("batch boundaries that it had passed at its last report", default=None)
    park_requested: bool = field("whether it was asked to park and that was not taken back", default=False)
    is_parked: bool = field("whether its training thread is parked", default=False)
    measured: bool = field("whether its bytes were counted while it stood", default=False)
    offloaded: bool = field("whether any of its bytes are out of the process", default=False)
    was_offloaded: bool = field(
        "whether its bytes were ever taken, so that it has to prove that it has them", default=False
    )
    verified: bool = field("whether it passed a boundary after its bytes were reloaded", default=False)
    needs_inspection: bool = field("whether it has to be inspected first", default=False)
    recount_memory: bool = field(
        "whether GPU and pool memory have to be counted again, as after a start of hegmd", default=False
    )
    waits: str | None = field("what it waits for before anything is tried again: agent or retry", default=None)
    stays_bytes: int | None = field(
        "if it keeps its CUDA context: what stays on its GPU, as planned or as measured; nil if unknown", default=None
    )
    kept_gpu: str | None = field("a GPU whose memory stays reserved while it is suspended", default=None)
    communicators: str = field(
        "how its agent disconnects its communicators with other ranks: suspend or replace; empty without any",
        default="",
    )
    is_connected: bool | None = field(
        "whether its communicators are up; nil while an effect may have changed that", default=True
    )
    is_locked: bool = field("whether the driver holds it locked, so that it makes no CUDA call", default=False)
    run: str | None = field("of a restart: the `hegmctl run` whose supervisor starts it", default=None)
    must_exit: bool = field("of a restart: whether it has still to leave, wherever its goal is", default=False)
    successor_ready: bool = field(
        "of a restart: whether it has trained on until the next process was ready", default=False
    )
    state_saved: bool = field(
        "of a restart: whether its whole state is in the pool, so that another process can continue", default=False
    )
    start_count: int = field("of a restart: how many processes have continued from that state", default=0)
    successor_activity: str = field(
        "of a restart, while there is no process: what the next one does; empty before it", default=""
    )
    finished: bool = field("of a restart: whether it finished its training, before or after it left", default=False)
    has_exited: bool = field("whether the process has ended", default=False)
    lost: bool = field("whether it ended while its bytes were out", default=False)

    @property
    def key(self) -> tuple[int, int]:
        """Return what identifies its process."""
        return self.pid, self.start_ticks

    @property
    def has_agent(self) -> bool:
        """Return True if it can be stopped between two batches. Without, the driver alone has a hold on it."""
        return bool(self.token)

    @property
    def is_unlinked(self) -> bool:
        """Return True if it has communicators that are not known to be up."""
        return bool(self.communicators) and self.is_connected is not True

    @property
    def restarts(self) -> bool:
        """True if the process is moved by a restart: it exits, and a new process continues."""
        return self.method == RESTART

    @property
    def keeps_context(self) -> bool:
        """True if it keeps its CUDA context on its GPU while its storages are off it."""
        return self.method == KEEP_CONTEXT

    @property
    def is_absent(self) -> bool:
        """True if no process exists now, and the saved state waits for a new one."""
        return self.restarts and self.state_saved and self.gpu is None and not self.has_exited

    @property
    def is_carried(self) -> bool:
        """Return True if a carrier takes its storages, so that the driver has only the rest."""
        return self.has_agent and self.carrier != BY_DRIVER

    @property
    def carried_bytes(self) -> int:
        """Bytes that are moved: its storages, or everything if the driver carries them."""
        return self.size_bytes if self.is_carried else max(0, self.driver_bytes - RESTORE_MARGIN_BYTES)

    @property
    def reservation_bytes_by_gpu(self) -> tuple[int, ...]:
        """Return what each of several GPUs needs in total, in their order; empty for one GPU."""
        return added(self.driver_bytes_by_gpu, self.storage_bytes_by_gpu)

    @property
    def reservation_bytes(self) -> int:
        """Bytes to reserve on a GPU before the worker may be restored there."""
        return self.driver_bytes + self.agent_overhead_bytes + max(0, self.size_bytes - self.overlap_bytes)


class Operation(Record):
    """An operation on all the workers of a job, which move as one."""

    id: str = field("what people call it")
    kind: str = field("migrate, suspend, checkpoint, quiesce, or resume once a suspended one is resumed")
    phase: str = field("where it is; see STATES.md", default="planned")
    direction: str = field("forward, back or hold", default=FORWARD)
    is_distributed: bool = field("whether the workers are ranks that have to stop at the same boundary", default=False)
    workers: tuple[JobProcess, ...] = field("all of them, also those that only wait")
    limits: Limits = field("how long each part may take", default=Limits())
    owner_uid: int | None = field("whose processes they are", default=None)
    created_utc: float = field("when it was asked for, in seconds since 1970", default=0.0)
    seq: int = field("events that it has taken", default=0)
    next_effect: int = field("number of the next effect", default=1)
    pending: tuple[Pending, ...] = field("effects that have not ended", default=())
    at: int | None = field("the boundary at which ranks are to stop", default=None)
    rounds: int = field("how often that boundary had to be moved", default=0)
    deadline: float | None = field("the monotonic instant at which `deadline-passed` is due", default=None)
    due: float | None = field("of a resume: the monotonic instant at which it turns back", default=None)
    attempts: int = field("how often the deadline passed in this part", default=0)
    reserves_late: bool = field(
        "whether memory on a target is reserved only when all workers have left their GPUs, because they exchange them",
        default=False,
    )
    reversed_at: int = field("number of the first effect of its rollback; those before it began forward", default=0)
    swaps_to: str | None = field(
        "of the first half of a swap: the place where its job is resumed, or to which `swaps_with` moves", default=None
    )
    swaps_with: tuple[int, ...] = field(
        "of the first of two moves of a swap: pid and start time of the process that moves next", default=()
    )
    failed_returns: int = field("of a restart: how many starts of its rollback failed", default=0)
    reconnects: int = field("how often its ranks were to connect their communicators again", default=0)
    failed_reconnects: int = field("how many of these failed one after the other", default=0)
    failure: Failure | None = field("why it does not get to what was asked", default=None)
    waiting_for: Failure | None = field("what it waits for now, such as memory on a GPU", default=None)
    parked_since: float | None = field("the monotonic instant from which its job is parked", default=None)
    downtime_s: float | None = field("how long its job stood, once that is over", default=None)
    spill: bool = field("whether its bytes are to go to disk while it is suspended", default=False)
    lent: bool = field("of a suspend: whether its job lends its memory, and ends that itself", default=False)
    image: ImageRequest | None = field("of a checkpoint: the image", default=None)
    respawn: Respawn | None = field("of a restart: what changes for the new process", default=None)
    hold_expired: bool = field("of a quiesce: whether the job has stood for long enough", default=False)

    @property
    def live(self) -> Iterator[JobProcess]:
        """The workers whose processes have not ended."""
        return (worker for worker in self.workers if not worker.has_exited)

    @property
    def generation(self) -> int:
        """Return a number that differs for each connection of the job's communicators; the same for all ranks."""
        return int(self.created_utc * 1000) + self.reconnects

    @property
    def restarts_together(self) -> bool:
        """Whether its workers are ranks that leave by ending, and are started again by one launcher: all or none."""
        return self.is_distributed and any(worker.restarts for worker in self.workers)

    @property
    def holds(self) -> bool:
        """True while the job is to stay quiesced, until a client or the time limit resumes it."""
        return self.kind == QUIESCE and self.direction == FORWARD and not self.hold_expired

    @property
    def needs_image(self) -> bool:
        """Return True if it is to have an image, and has none yet."""
        return (
            self.kind == CHECKPOINT
            and self.direction == FORWARD
            and self.image is not None
            and not self.is_image_complete
        )

    @property
    def is_image_complete(self) -> bool:
        """True if the image needs nothing more of the job, which then exits or trains on."""
        return self.kind == CHECKPOINT and self.image is not None and (self.image.whole or self.image.written)

    @property
    def ends_workers(self) -> bool:
        """Whether the processes are to end now: they are in an image that is whole."""
        return self.is_image_complete and self.image is not None and not self.image.leave_running

    def worker(self, name: str) -> JobProcess | None:
        return next((worker for worker in self.workers if worker.name == name), None)

    def with_worker(self, changed: JobProcess) -> Operation:
        return self.replace(workers=tuple([changed if w.name == changed.name else w for w in self.workers]))

    def pending_numbered(self, number: int) -> Pending | None:
        """The effect under way that has this number."""
        return next((pending for pending in self.pending if pending.number == number), None)
