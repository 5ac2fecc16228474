"""Requests about sharing GPUs: room for an urgent job, leases, the queue, and priorities. `messages` gathers them.

A lease is memory of one GPU that is kept free for one user. Jobs of lower priority are suspended for it, and resume by
themselves once it has ended.
"""

from __future__ import annotations

from .jobs import JobReply
from .record import Record, field
from .requests import Request

# The value of `gpu` when hegmd chooses one.
AUTO = "auto"
# The priorities that have a name, as a user writes them. The setting of each gives its number.
PRODUCTION, NORMAL, BEST_EFFORT = "production", "normal", "best-effort"
MIN_PRIORITY, MAX_PRIORITY = 0, 100
# A lease waits until its memory is free, and is held from then on.
PENDING, HELD = "pending", "held"
# The state of a job in the queue.
RUNNING, STARTING, MOVING, SUSPENDED, QUEUED = "running", "starting", "moving", "suspended", "waiting"


class Lease(Record):
    """Memory of a GPU that is kept for one user."""

    id: str = field("id in commands, such as l3")
    name: str | None = field("its user's name for it", default=None)
    gpu: str | None = field("the GPU, once chosen", default=None)
    size_bytes: int = field("memory that is kept")
    used_bytes: int = field("the part that its processes have allocated", default=0)
    state: str = field("pending: its memory is not free yet; held")
    priority: int = field("jobs of lower priority are suspended for it")
    uid: int = field("user id of its owner")
    pid: int | None = field("the process with which it ends", default=None)
    slurm_job: int | None = field("the Slurm job whose Prolog has made it, and whose Epilog ends it", default=None)
    until_utc: float | None = field("when it ends at the latest", default=None)
    hold_s: float | None = field("requested duration once its memory is free", default=None)
    since_utc: float = field("when it was requested")
    waits: str | None = field("what a pending lease waits for", default=None)


class RoomStep(Record):
    """One job that has to leave, and how."""

    job: str = field("the job's id")
    name: str = field("its name")
    action: str = field("suspend or migrate")
    gpu: str | None = field("the GPU that it leaves", default=None)
    to: str | None = field("its target GPU; nil: it is suspended", default=None)
    size_bytes: int | None = field("the memory that it frees", default=None)


class RoomProgress(Record):
    """How far a lease is from being held."""

    lease: str = field("id of the lease")
    gpu: str | None = field("the GPU, once chosen", default=None)
    free_bytes: int | None = field("memory there that is free, and kept for no other", default=None)
    size_bytes: int = field("memory that the lease needs")
    waits: str = field("what it waits for")


class RoomReply(Record):
    """The lease, or what would be done for it."""

    lease: Lease | None = field("the lease, except for a dry run", default=None)
    gpu: str | None = field("the GPU, once chosen", default=None)
    steps: tuple[RoomStep, ...] = field("the jobs that have to leave, in order", default=())


class MakeRoom(Request, op="room.make", reply=RoomReply, event=RoomProgress, changes_state=True):
    """Free memory of a GPU, and keep it free as a lease.

    Jobs of lower priority are suspended or migrated, fewest bytes first. The lease ends with the process, after the
    time, with a release, or else after the longest time that the daemon allows. With `until_free` the reply comes once
    the memory is free. After a failure or `limit_s` it is an error, and the lease is dropped; so it is when the client
    disconnects before the reply.
    """

    gpu: str = field("the GPU; auto: the one where the fewest bytes have to leave", default=AUTO)
    size_bytes: int = field("memory to free and keep")
    pid: int | None = field("the lease ends with this process", default=None)
    hold_s: float | None = field("duration of the lease once its memory is free", default=None)
    name: str | None = field("a name for the lease, besides its id", default=None)
    priority: int | str | None = field(
        "0 to 100, or a priority's name; nil: production, or the caller's highest", default=None
    )
    until_free: bool = field("wait until the memory is free", default=False)
    limit_s: float | None = field("longest wait for the memory; nil: no limit", default=None)
    keep_context: bool = field(
        "keep CUDA contexts where that frees enough: faster, but about 0.5 GiB stays", default=False
    )
    dry_run: bool = field("return the plan only", default=False)


class WaitForRoom(Request, op="room.wait", reply=RoomReply, event=RoomProgress):
    """Wait until a lease is held, as `room.make` with `until_free` does, after a connection has ended.

    A failure, or the caller's disconnection, drops the lease.
    """

    lease: str = field("the lease: its id or its name")
    limit_s: float | None = field("longest wait for the memory; nil: no limit", default=None)


class Released(Record):
    """The lease has ended."""

    lease: str = field("its id")
    gpu: str | None = field("the GPU whose memory it kept", default=None)
    size_bytes: int = field("how much it kept")


class Release(Request, op="room.release", reply=Released, changes_state=True):
    """End a lease. The jobs that were suspended for it resume automatically."""

    lease: str = field("the lease: its id or its name")


class QueuedJob(Record):
    """One job as the sharing of GPUs sees it."""

    job: str = field("its id")
    name: str = field("its name")
    uid: int = field("user id of its owner")
    priority: int = field("0 to 100")
    state: str = field("running; starting: not training yet; moving; suspended; waiting: not started yet")
    gpu: str | None = field("its GPU, or the former one of a suspended job", default=None)
    size_bytes: int | None = field("memory that it has or needs", default=None)
    since_utc: float = field("when this state began")
    why: str | None = field("what it waits for", default=None)
    next: str | None = field("what happens next", default=None)


class QueueReply(Record):
    """The running and the waiting jobs, and what they wait for."""

    taken_utc: float = field("when the reply was made")
    jobs: tuple[QueuedJob, ...] = field("the highest priority first")
    leases: tuple[Lease, ...] = field("oldest first")
    slices: bool = field("jobs of equal priority that do not fit together take turns")


class Queue(Request, op="queue", reply=QueueReply):
    """The jobs that share the GPUs, those that wait for one, and the leases."""


class SetPriority(Request, op="job.priority", reply=JobReply, changes_state=True):
    """Change the priority of a job. It is kept with the job."""

    job: int | str = field("the job: its id, its name, or the pid of one of its processes")
    priority: int | str = field("0 to 100, or a priority's name")


class PlaceProgress(Record):
    """A job waits for a GPU."""

    waits: str = field("what it waits for")
    ahead: int = field("number of jobs before it in the queue")


class JobPlaced(Record):
    """A job may start."""

    gpu: str = field("the GPU to start on; several are separated by commas")


class PlaceJob(Request, op="job.place", reply=JobPlaced, event=PlaceProgress, changes_state=True):
    """Wait for a GPU with room, as `hegmctl run --gpu auto` does before it becomes its command.

    The job keeps its place in the queue until it starts or the calling process ends. The reply reserves the memory for
    the job until it trains.
    """

    run: str = field("id of the `hegmctl run`")
    gpu: str = field("the GPU, or auto for any", default=AUTO)
    size_bytes: int | None = field("memory that it needs on each GPU; nil: GPUs without other jobs", default=None)
    gpu_count: int = field("how many GPUs of one chip it gets at once; more than 1 with auto only", default=1)
