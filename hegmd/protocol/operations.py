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

    code: str = field("one of the [error codes](#error-codes)")
    message: str = field("what is wrong, with numbers")
    hint: str = field("the next step")
    pid: int | None = field("the process concerned", default=None)
    gpu: str | None = field("the GPU concerned", default=None)


# The carriers that a request can name, the fastest first. CARRIERS of hegmd.migration.model says what each needs.
PEER, HOST, WORKER, BY_DRIVER = "peer", "host", "worker", "driver"
# The method with which a process keeps its CUDA context while its storages are off the GPU.
KEEP_CONTEXT = "keep-context"
CARRIER_NAMES = (PEER, HOST, WORKER, BY_DRIVER)


class PlannedProcess(Record):
    """The plan for one process."""

    pid: int = field("process id")
    name: str = field("its name")
    gpu: str | None = field("its GPUs, separated by commas")
    to: str | None = field("its target GPUs in the same order; nil: suspend it")
    size_bytes: int = field("bytes to transfer")
    left_alone_bytes: int = field("bytes that stay in the process", default=0)
    carrier: str = field(f"{', '.join(CARRIER_NAMES)}, or none if the process only waits")
    method: str = field("simulated, driver, restart or keep-context", default="simulated")
    stays_bytes: int | None = field("keep-context: bytes that stay on its GPU", default=None)
    driver_bytes: int = field("GPU memory for the driver besides the storages, with a margin", default=0)
    agent_overhead_bytes: int = field(
        "GPU memory that the agent needs besides the storages to allocate them again", default=0
    )
    driver_bytes_by_gpu: tuple[int, ...] = field("the part of `driver_bytes` on each of several GPUs", default=())
    storage_bytes_by_gpu: tuple[int, ...] = field(
        "bytes for the offloaded storages on each of several GPUs", default=()
    )
    overlap_bytes: int = field("storage memory that the carrier frees step by step on the GPU", default=0)

    own_bytes: int = field("the part of `size_bytes` that the process copies itself", default=0)
    communicators: str = field("how it disconnects from other ranks: suspend or replace", default="")
    job: str | None = field("id of its job", default=None)
    job_name: str | None = field("name of that job", default=None)

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
    size_bytes: int = field("bytes to transfer in all")
    reservation_bytes: Mapping[str, int] = field("memory to reserve, by GPU")
    gpu_free_bytes: Mapping[str, int] = field("free memory on these GPUs")
    pool_needed_bytes: int = field("bytes of the pool that it needs")
    pool_free_bytes: int = field("free bytes of the pool")
    estimate_s: float = field("estimated downtime, without the wait for the boundary")
    is_distributed: bool = field("all processes stop at the same boundary")
    hazards: tuple[str, ...] = field("what to consider before confirming", default=())
    steps: tuple[str, ...] = field("the steps, in order", default=())
    image_s: float | None = field("the part of `estimate_s` for the image", default=None)
    ends: bool = field("the job ends with the operation", default=False)
    pool_ready_bytes: int = field("the allocated part of the pool's free bytes", default=0)


# In the progress of a resume that waits for room, besides the phases.
WAITS_IN_QUEUE = "queued"
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
    rank: int | None = field("rank in a distributed job", default=None)
    began_on: str | None = field("its GPU when the operation began", default=None)
    gpu: str | None = field("its current GPU", default=None)
    to: str | None = field("its target GPU", default=None)
    size_bytes: int = field("bytes to transfer")
    state: str = field("running; parked; out: its bytes are in the pool; off: checkpointed by the driver; gone; lost")
    stays_bytes: int | None = field("GPU memory of a suspended process that keeps its CUDA context", default=None)
    job: str | None = field("id of its job", default=None)
    job_name: str | None = field("name of that job", default=None)


class Wait(Record):
    """The condition that an unfinished operation waits for."""

    why: str = field("what it waits for, or what blocks it")
    next: str = field("the next step, a command if possible")


class Operation(Record):
    """The state of an operation."""

    id: str = field("id in commands")
    kind: str = field("migrate, suspend, resume, checkpoint, restore or quiesce")
    phase: str = field("current phase; at the end done, rolled-back or lost")
    processes: tuple[OperationProcess, ...] = field("the processes of the job")
    job: str | None = field("id of the job", default=None)
    owner_uid: int | None = field("user id of the processes", default=None)
    created_utc: float = field("when it was requested")
    size_bytes: int = field("bytes to transfer in all")
    moved_bytes: int = field("bytes that the current step has transferred", default=0)
    downtime_s: float | None = field("how long the training threads were parked, once they run again", default=None)
    took_s: float | None = field("from the request to the end, with writing an image", default=None)
    failure: Reason | None = field("why it does not reach its goal", default=None)
    waits: Wait | None = field("what it waits for, if it makes no progress", default=None)
    way: str = field("agent; driver: processes without an agent; restart", default="agent")
    doing: str | None = field("current step of a restart, in words", default=None)
    note: str | None = field("a note about the result", default=None)


class Timing(Record):
    """One step of an event: who did it, when, how long it took, and how many bytes it moved."""

    lane: str = field("agent, helper (the GPU helper), driver (through the helper) or copies")
    name: str = field("order to the agent, request to the helper, or out or in for a copy")
    began_utc: float = field("when it started")
    took_s: float = field("how long it took")
    size_bytes: int = field("bytes that it moved", default=0)


class StoryLine(Record):
    """One event in the history of an operation."""

    utc: float = field("time of the event")
    event: str = field("name of the event; empty for the start")
    cause: str = field("the origin of the event", default="")
    detail: str = field("the event's content", default="")
    phase: str = field("the phase after the event")
    effects: tuple[str, ...] = field("the effects that followed", default=())
    timings: tuple[Timing, ...] = field("the steps that ended with this event, by start time", default=())


class OperationProgress(Record):
    """An operation has made progress."""

    id: str = field("id of the operation")
    phase: str = field("current phase; reading: of an image, before the operation starts; queued: it waits for room")
    moved_bytes: int = field("bytes that the current step has transferred", default=0)
    size_bytes: int = field("bytes to transfer in all", default=0)
    doing: str | None = field("current step of a restart, in words", default=None)
    waits: Wait | None = field("what it waits for, if it makes no progress", default=None)


class Orphan(Record):
    """Bytes or a process on the node that belong to no operation. The daemon does nothing to them unasked."""

    name: str = field("name in commands: of the bytes, or the pid")
    kind: str = field("bytes, process, or unknown: data that cannot be trusted")
    pid: int | None = field("the process, or the former owner of the bytes", default=None)
    size_bytes: int | None = field("size of the bytes", default=None)
    where: str = field("where it is")
    why: str = field("why no operation owns it")
    next: str = field("the command that resolves it")
    uid: int | None = field("its owner, who can drop it", default=None)


class PeriodicImages(Record):
    """Images to make of a running job at intervals, from `hegmctl run --checkpoint-every`."""

    every_s: float = field("interval in seconds")
    keep: int = field("number of images to keep; the oldest one is removed once a new one is complete")
    path: str = field("the directory of the images, absolute")
