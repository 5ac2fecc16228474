"""Records of operations: plan, state, history, and reasons of a refusal. Frozen.

They say what people and programs need, and not all that the daemon keeps: the journal has its own form.
"""

from __future__ import annotations

from .record import Record, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Reason(Record):
    """One reason against an operation."""

    code: str = field("one of the codes in the table of errors")
    message: str = field("what, with numbers")
    hint: str = field("the next step")
    pid: int | None = field("the process that it is about", default=None)
    gpu: str | None = field("the GPU that it is about", default=None)


# The carriers that a request can name, the fastest first. What each needs is in CARRIERS of hegmd.migration.model.
PEER, HOST, WORKER, BY_DRIVER = "peer", "host", "worker", "driver"
# The method with which a process keeps its CUDA context while its storages are off the GPU.
KEEP_CONTEXT = "keep-context"
CARRIER_NAMES = (PEER, HOST, WORKER, BY_DRIVER)


class PlannedProcess(Record):
    """What is planned for one process."""

    pid: int = field("process id")
    name: str = field("what people know it by")
    gpu: str | None = field("where it is; several GPUs with commas between them; nil if it is suspended")
    to: str | None = field("where it is to go, each of its devices in the same order; nil to be suspended")
    size_bytes: int = field("bytes to carry")
    left_alone_bytes: int = field("bytes that stay in the process", default=0)
    carrier: str = field(f"how the bytes go: {', '.join(CARRIER_NAMES)}, or none for a process that only waits")
    method: str = field(
        "how it leaves its GPU and comes back: simulated, driver, restart, or keep-context", default="simulated"
    )
    stays_bytes: int | None = field(
        "with keep-context, what stays on its GPU: its CUDA context, and memory that its agent does not offload; nil "
        "if that is not known",
        default=None,
    )
    driver_bytes: int = field(
        "GPU memory that it needs besides its storages: what the driver carries, with a margin", default=0
    )
    agent_overhead_bytes: int = field(
        "GPU memory that its agent needs besides, when it allocates its storages again", default=0
    )
    driver_bytes_by_gpu: tuple[int, ...] = field(
        "of one on several GPUs: which part of that each of its devices needs, in their order", default=()
    )
    storage_bytes_by_gpu: tuple[int, ...] = field(
        "on several GPUs: memory for the offloaded storages on each of its devices, in their order",
        default=(),
    )
    overlap_bytes: int = field(
        "the part of the memory for its storages that the carrier's own memory there frees step by step", default=0
    )

    own_bytes: int = field(
        "of the bytes to carry, those that go by the process's own copies whatever the carrier: they share memory with "
        "what stays in the process, or CUDA IPC cannot show them",
        default=0,
    )
    communicators: str = field(
        "how its communicators with other ranks are disconnected: suspend or replace; empty if it has none", default=""
    )

    @property
    def reservation_bytes(self) -> int:
        """Room to take where it goes, the carrier's own memory left out."""
        stored_bytes = 0 if self.carrier == BY_DRIVER else max(0, self.size_bytes - self.overlap_bytes)
        return stored_bytes + self.agent_overhead_bytes + self.driver_bytes


class Plan(Record):
    """What would be done."""

    kind: str = field("migrate, suspend, resume, checkpoint, restore or quiesce")
    way: str = field("agent, or driver for processes without one")
    workers: tuple[PlannedProcess, ...] = field("one for each process of the job")
    size_bytes: int = field("bytes to carry, in all")
    reservation_bytes: Mapping[str, int] = field("memory to reserve, by GPU")
    gpu_free_bytes: Mapping[str, int] = field("free memory there")
    pool_needed_bytes: int = field("bytes of the pool to take")
    pool_free_bytes: int = field("bytes of the pool that are free")
    estimate_s: float = field(
        "estimated downtime after the wait for its boundary; if the job ends, the time until its end"
    )
    is_distributed: bool = field("whether all have to stop at the same boundary")
    hazards: tuple[str, ...] = field("what to know before saying yes", default=())
    steps: tuple[str, ...] = field("what would be done, in order", default=())
    image_s: float | None = field(
        "how much of that is for writing or reading the image; nil where there is none", default=None
    )
    ends: bool = field("whether the job ends with it", default=False)
    pool_ready_bytes: int = field("of the free bytes of the pool, those that take no time to get", default=0)


# The phases of an operation that is under way, in their order: that of the machine's stages. `reading` is a restore's
# first, before there is a plan. hegmctl's bar shows by them how far an operation is.
PHASES_IN_ORDER = (
    *("reading", "planned", "settling", "reserving", "readying", "counting", "quiescing", "holding", "measuring"),
    *("disconnecting", "offloading", "locking", "checkpointing", "leaving", "handing", "ending", "spilling"),
    *("restoring", "unlocking", "reloading", "reconnecting", "releasing", "verifying", "tidying"),
)

# What is done now by a restart, in its order: of the process that is to leave, of nobody, and of the one that comes.
SAVING, LEAVING, KEPT = "its state is saved", "it leaves", "its state is kept"
IMPORTING, READIED = "Python starts and imports", "Python was ready, and goes on"
LOADING, FIRST_BATCH = "it loads", "it makes its first batch"
RESTART_STEPS = (SAVING, LEAVING, KEPT, IMPORTING, READIED, LOADING, FIRST_BATCH)


class OperationProcess(Record):
    """The state of one process of an operation."""

    pid: int = field("process id")
    rank: int | None = field("its rank in a distributed job", default=None)
    began_on: str | None = field("the GPU that it was on when the operation began", default=None)
    gpu: str | None = field("the GPU that it is on; nil for none", default=None)
    to: str | None = field("its target GPU; nil for none", default=None)
    size_bytes: int = field("bytes to carry")
    state: str = field(
        "running; parked at a boundary; out: its bytes are in the pool; off: the driver has taken it off "
        "its GPU; gone; lost"
    )
    stays_bytes: int | None = field(
        "what it has on its GPU if it keeps its CUDA context while it is suspended; nil if unknown",
        default=None,
    )


class Wait(Record):
    """What an operation that is not over waits for."""

    why: str = field("what it waits for, or what blocks it")
    next: str = field("what can be done about it, a command where there is one")


class Operation(Record):
    """The state of an operation."""

    id: str = field("what to call it in commands")
    kind: str = field("migrate, suspend, resume, checkpoint, restore or quiesce")
    phase: str = field(
        "what is done now; at the end done, rolled-back or lost; suspended lasts until a resume or until the hold ends"
    )
    processes: tuple[OperationProcess, ...] = field("the processes of the job")
    job: str | None = field("the id of their job; nil if they belong to none or it is forgotten", default=None)
    owner_uid: int | None = field("whose they are", default=None)
    created_utc: float = field("when it was asked for, in seconds since 1970")
    size_bytes: int = field("bytes to carry, in all")
    moved_bytes: int = field("of these, how many are through the step that is under way", default=0)
    downtime_s: float | None = field(
        "how long the training threads stood; nil as long as that is not over", default=None
    )
    took_s: float | None = field(
        "from the request to the end; nil until the operation ends. Includes writing an image after `downtime_s`",
        default=None,
    )
    failure: Reason | None = field("why it did not, or will not, get to what was asked", default=None)
    waits: Wait | None = field("what it waits for; nil while it makes progress and when it has ended", default=None)
    way: str = field("agent; driver for processes without one; or restart", default="agent")
    doing: str | None = field("the current step of a running restart, in words", default=None)
    note: str | None = field("a note about the result, in words", default=None)


class Timing(Record):
    """One step that an event reports: who did it, from when to when, and how many bytes it moved."""

    lane: str = field("who: agent, helper (the GPU helper), driver (by the helper) or copies")
    name: str = field("what was done: the order to the agent, the request to the helper, or out or in for a copy")
    began_utc: float = field("when it began, in seconds since 1970")
    took_s: float = field("how long it took")
    size_bytes: int = field("bytes that it moved; 0 if it moves none", default=0)


class StoryLine(Record):
    """One event in an operation's life."""

    utc: float = field("when, in seconds since 1970")
    event: str = field("name of the event; empty for the beginning")
    cause: str = field("where it came from", default="")
    detail: str = field("what it said", default="")
    phase: str = field("where the operation was after it")
    effects: tuple[str, ...] = field("what was to be done then", default=())
    timings: tuple[Timing, ...] = field("the steps of what has ended with this event, by their begin", default=())


class OperationProgress(Record):
    """An operation came on."""

    id: str = field("which one")
    phase: str = field("what is done now; reading: of an image, before its operation has begun")
    moved_bytes: int = field("bytes that are through the step that is under way", default=0)
    size_bytes: int = field("bytes to carry, in all", default=0)
    doing: str | None = field("the current step of a restart, in words; nil if the phase says it", default=None)
    waits: Wait | None = field("what it waits for; nil while it makes progress", default=None)


class Orphan(Record):
    """Something that was found on the node and that no operation has. Nothing is done to it unasked."""

    name: str = field("what to call it in commands: of bytes their name, of a process its pid")
    kind: str = field("bytes, process, or unknown: something that looks like bytes of ours and cannot be believed")
    pid: int | None = field("the process that it is, or whose bytes they were", default=None)
    size_bytes: int | None = field("bytes that are held", default=None)
    where: str = field("where it is")
    why: str = field("why no operation owns it")
    next: str = field("the command that does something about it")
    uid: int | None = field("whose it is, if that is known: they may give it up, as an administrator may", default=None)


class PeriodicImages(Record):
    """Images that are to be taken of a job while it runs, as `hegmctl run --checkpoint-every` was told."""

    every_s: float = field("seconds from one to the next")
    keep: int = field("how many are kept; the oldest is removed once a new one is complete")
    path: str = field("the directory that they are in, absolute")
