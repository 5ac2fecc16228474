"""Frozen records of operations: plan, state, history, and reasons of a refusal.

They have what people and programs need. The journal keeps more, in its own format.
"""

from __future__ import annotations

from .record import Record, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Reason(Record):
    """Why an operation was refused or failed."""

    code: str = field("one of the codes in the table of errors")
    message: str = field("what is wrong, with numbers")
    hint: str = field("the next step")
    pid: int | None = field("the process concerned", default=None)
    gpu: str | None = field("the GPU concerned", default=None)


# The carriers that a request can name, the fastest first. What each needs is in CARRIERS of hegmd.migration.model.
PEER, HOST, WORKER, BY_DRIVER = "peer", "host", "worker", "driver"
# The method with which a process keeps its CUDA context while its storages are off the GPU.
KEEP_CONTEXT = "keep-context"
CARRIER_NAMES = (PEER, HOST, WORKER, BY_DRIVER)


class PlannedProcess(Record):
    """The plan for one process."""

    pid: int = field("process id")
    name: str = field("its name")
    gpu: str | None = field("the GPU that it is on, or several with commas between them; nil if it is suspended")
    to: str | None = field("its target, one GPU for each of its GPUs, in the same order; nil to suspend it")
    size_bytes: int = field("bytes to transfer")
    left_alone_bytes: int = field("bytes that stay in the process", default=0)
    carrier: str = field(f"how the bytes go: {', '.join(CARRIER_NAMES)}, or none for a process that only waits")
    method: str = field(
        "how it leaves its GPU and returns: simulated, driver, restart, or keep-context", default="simulated"
    )
    stays_bytes: int | None = field(
        "with keep-context, bytes that stay on its GPU: its CUDA context, and memory that its agent does not offload;"
        " nil if unknown",
        default=None,
    )
    driver_bytes: int = field(
        "GPU memory that the driver needs for the process besides its storages, with a margin", default=0
    )
    agent_overhead_bytes: int = field(
        "GPU memory that the agent needs besides its storages when it allocates them again", default=0
    )
    driver_bytes_by_gpu: tuple[int, ...] = field(
        "on several GPUs: the part of `driver_bytes` on each of them, in their order", default=()
    )
    storage_bytes_by_gpu: tuple[int, ...] = field(
        "on several GPUs: memory for the offloaded storages on each of its devices, in their order",
        default=(),
    )
    overlap_bytes: int = field(
        "the part of the memory for its storages that the carrier's own memory on the GPU frees step by step", default=0
    )

    own_bytes: int = field(
        "the part of `size_bytes` that the process copies itself, whatever the carrier: CUDA IPC cannot export it, or"
        " it shares memory with what stays in the process",
        default=0,
    )
    communicators: str = field(
        "how its communicators with other ranks are disconnected: suspend or replace; empty if it has none", default=""
    )
    job: str | None = field("the id of its job; nil if it belongs to none, or the job is forgotten", default=None)
    job_name: str | None = field("the name of that job", default=None)

    @property
    def reservation_bytes(self) -> int:
        """Return the GPU memory to reserve on the target, without the carrier's own memory."""
        stored_bytes = 0 if self.carrier == BY_DRIVER else max(0, self.size_bytes - self.overlap_bytes)
        return stored_bytes + self.agent_overhead_bytes + self.driver_bytes


class Plan(Record):
    """The plan of an operation."""

    kind: str = field("migrate, suspend, resume, checkpoint, restore or quiesce")
    way: str = field("agent, or driver for processes without one")
    workers: tuple[PlannedProcess, ...] = field("one for each process of the job")
    size_bytes: int = field("bytes to transfer, in all")
    reservation_bytes: Mapping[str, int] = field("memory to reserve, by GPU")
    gpu_free_bytes: Mapping[str, int] = field("free memory on these GPUs")
    pool_needed_bytes: int = field("bytes of the pool that it needs")
    pool_free_bytes: int = field("free bytes of the pool")
    estimate_s: float = field(
        "estimated downtime after the wait for its boundary; if the job ends, the time until its end"
    )
    is_distributed: bool = field("whether all processes have to stop at the same boundary")
    hazards: tuple[str, ...] = field("what to consider before confirming", default=())
    steps: tuple[str, ...] = field("the steps, in order", default=())
    image_s: float | None = field(
        "the part of `estimate_s` for writing or reading the image; nil without an image", default=None
    )
    ends: bool = field("whether the job ends with the operation", default=False)
    pool_ready_bytes: int = field("the part of the pool's free bytes that is already allocated", default=0)


# The phases of an operation that is under way, in the order of the machine's stages. A restore starts with `reading`,
# before there is a plan. The progress bar of hegmctl uses this order.
PHASES_IN_ORDER = (
    *("reading", "planned", "settling", "reserving", "readying", "counting", "quiescing", "holding", "measuring"),
    *("disconnecting", "offloading", "locking", "checkpointing", "leaving", "handing", "ending", "spilling"),
    *("restoring", "unlocking", "reloading", "reconnecting", "releasing", "verifying", "tidying"),
)

# The steps of a restart, in order: those of the process that exits, then those of the new process.
SAVING, LEAVING, KEPT = "its state is saved", "it leaves", "its state is kept"
IMPORTING, READIED = "Python starts and imports", "the prestarted Python continues"
LOADING, FIRST_BATCH = "it loads", "it makes its first batch"
RESTART_STEPS = (SAVING, LEAVING, KEPT, IMPORTING, READIED, LOADING, FIRST_BATCH)


class OperationProcess(Record):
    """The state of one process of an operation."""

    pid: int = field("process id")
    rank: int | None = field("its rank in a distributed job", default=None)
    began_on: str | None = field("the GPU that it was on when the operation began", default=None)
    gpu: str | None = field("the GPU that it is on; nil if it is on none", default=None)
    to: str | None = field("its target GPU; nil without one", default=None)
    size_bytes: int = field("bytes to transfer")
    state: str = field(
        "running; parked at a boundary; out: its bytes are in the pool; off: the driver has checkpointed it; gone; lost"
    )
    stays_bytes: int | None = field(
        "GPU memory of a suspended process that keeps its CUDA context; nil if unknown",
        default=None,
    )
    job: str | None = field("the id of its job; nil if it belongs to none, or the job is forgotten", default=None)
    job_name: str | None = field("the name of that job", default=None)


class Wait(Record):
    """The condition that an unfinished operation waits for."""

    why: str = field("what it waits for, or what blocks it")
    next: str = field("the next step, a command if there is one")


class Operation(Record):
    """The state of an operation."""

    id: str = field("its id in commands")
    kind: str = field("migrate, suspend, resume, checkpoint, restore or quiesce")
    phase: str = field(
        "what it does now; at the end done, rolled-back or lost; suspended lasts until a resume, or until the hold ends"
    )
    processes: tuple[OperationProcess, ...] = field("the processes of the job")
    job: str | None = field(
        "the id of the job; nil if the processes belong to none, or the job is forgotten", default=None
    )
    owner_uid: int | None = field("the user id of the processes", default=None)
    created_utc: float = field("when it was requested, in seconds since 1970")
    size_bytes: int = field("bytes to transfer, in all")
    moved_bytes: int = field("bytes that the current step has transferred", default=0)
    downtime_s: float | None = field(
        "how long the training threads were parked; nil until they run again", default=None
    )
    took_s: float | None = field(
        "from the request to the end; nil until the operation ends. Includes writing an image after `downtime_s`",
        default=None,
    )
    failure: Reason | None = field("why it has not reached, or will not reach, its goal", default=None)
    waits: Wait | None = field("what it waits for; nil while it makes progress and once it has ended", default=None)
    way: str = field("agent; driver for processes without one; or restart", default="agent")
    doing: str | None = field("the current step of a running restart, in words", default=None)
    note: str | None = field("a note about the result, in words", default=None)


class Timing(Record):
    """One step of an event: who did it, when, how long it took, and how many bytes it moved."""

    lane: str = field("who did it: agent, helper (the GPU helper), driver (through the helper) or copies")
    name: str = field("the order to the agent, the request to the helper, or out or in for a copy")
    began_utc: float = field("when it started, in seconds since 1970")
    took_s: float = field("how long it took")
    size_bytes: int = field("bytes that it moved; 0 for none", default=0)


class StoryLine(Record):
    """One event in the history of an operation."""

    utc: float = field("when, in seconds since 1970")
    event: str = field("name of the event; empty for the start")
    cause: str = field("the origin of the event", default="")
    detail: str = field("the event's content", default="")
    phase: str = field("the phase after the event")
    effects: tuple[str, ...] = field("the effects that followed", default=())
    timings: tuple[Timing, ...] = field("the steps that ended with this event, by start time", default=())


class OperationProgress(Record):
    """An operation has made progress."""

    id: str = field("id of the operation")
    phase: str = field("what it does now; reading: the image is read before the operation starts")
    moved_bytes: int = field("bytes that the current step has transferred", default=0)
    size_bytes: int = field("bytes to transfer, in all", default=0)
    doing: str | None = field("the current step of a restart, in words; nil if the phase says it", default=None)
    waits: Wait | None = field("what it waits for; nil while it makes progress", default=None)


class Orphan(Record):
    """Bytes or a process on the node that belong to no operation. The daemon does nothing to them unasked."""

    name: str = field("its name in commands: the name of the bytes, or the pid")
    kind: str = field("bytes, process, or unknown: data that looks like the daemon's and cannot be trusted")
    pid: int | None = field("the process, or the process that the bytes belonged to", default=None)
    size_bytes: int | None = field("size of the bytes", default=None)
    where: str = field("where it is")
    why: str = field("why no operation owns it")
    next: str = field("the command that resolves it")
    uid: int | None = field("its owner, if known: the owner can drop it, and so can an administrator", default=None)


class PeriodicImages(Record):
    """Images to make of a running job at intervals, from `hegmctl run --checkpoint-every`."""

    every_s: float = field("interval in seconds")
    keep: int = field("number of images to keep; the oldest one is removed once a new one is complete")
    path: str = field("the directory of the images, absolute")
