"""Records and requests of jobs. `messages` imports them all.

A job is what one `hegmctl run` started, with all its processes. Its id is never used again. Its name is unique among
the jobs of the node that have not ended.
"""

from __future__ import annotations

from .record import Record, field
from .requests import Request

# The states of a job, as `hegmctl jobs` shows them.
STARTING, TRAINING, QUIESCED, SUSPENDED = "starting", "training", "quiesced", "suspended"
MOVING, WAITING, ENDED = "moving", "waiting", "ended"
JOB_STATES = (STARTING, TRAINING, QUIESCED, SUSPENDED, MOVING, WAITING, ENDED)
# The priority of a job that was started without one: `normal`.
DEFAULT_PRIORITY = 50
# The roles of a process in its job.
COMMAND, SUPERVISOR, LAUNCHER, WORKER, RANK = "command", "supervisor", "launcher", "worker", "rank"


class JobProcess(Record):
    """One process of a job."""

    pid: int = field("process id")
    role: str = field(
        "worker: it trains; rank: one of several that train; supervisor: the `hegmctl run --allow-restart`; launcher:"
        " it started the ranks; command: what `hegmctl run` became, until more is known"
    )
    rank: int | None = field("its rank, in a distributed job", default=None)
    gpus: tuple[str, ...] = field("the GPUs that it is on", default=())
    vram_bytes: int | None = field("its GPU memory; nil if the driver does not report it", default=None)
    boundary: int | None = field("batch boundaries that it has passed; nil without an agent", default=None)
    framework: str | None = field("its training framework, with its version; nil without an agent", default=None)


class Job(Record):
    """One job."""

    id: str = field("its id in commands, such as j7; never used for another job")
    name: str = field("its name; unique among the jobs that have not ended")
    state: str = field(
        "starting: before its first batch; training; quiesced: parked between two batches; suspended: off its GPU; "
        "moving: an operation is under way; waiting: that operation waits for something, or the job has no GPU yet; or "
        "ended"
    )
    waits: str | None = field("what a waiting or suspended job waits for", default=None)
    uid: int = field("user id of its owner")
    user: str | None = field("name of its owner", default=None)
    gpus: tuple[str, ...] = field("the GPUs that its processes are on; `cpu` for a job that trains on none", default=())
    vram_bytes: int | None = field("its GPU memory in all; nil if the driver does not report it", default=None)
    held_bytes: int = field("bytes of the job that hegmd holds", default=0)
    boundary: int | None = field("batch boundaries that it has passed; nil before the first", default=None)
    steps_per_s: float | None = field(
        "batch boundaries per second of its slowest rank, over the last minute at most; nil unless it trains",
        default=None,
    )
    command: str | None = field(
        "its script with its arguments, without the interpreter; nil when the caller may not see it",
        default=None,
    )
    started_utc: float = field("when it was started, in seconds since 1970")
    ended_utc: float | None = field("when it ended; nil before", default=None)
    status: int | None = field(
        "its exit status, or minus the signal that ended it; nil before its end, and if the kernel did not report it",
        default=None,
    )
    end: str | None = field("how it ended, in words", default=None)
    pid: int | None = field("the process that `hegmctl run` is or became; nil if it has exited", default=None)
    processes: tuple[JobProcess, ...] = field("its known processes", default=())
    priority: int = field("its priority when GPUs are shared, 0 to 100", default=DEFAULT_PRIORITY)
    operation: str | None = field("the operation that works on it now", default=None)
    notes: tuple[str, ...] = field("what prevents a restart, and other notes", default=())


class JobsReply(Record):
    """The jobs of the node at one moment."""

    taken_utc: float = field("when, in seconds since 1970")
    jobs: tuple[Job, ...] = field("ordered by id")


class Jobs(Request, op="jobs", reply=JobsReply):
    """List the jobs that have not ended. With `all` also those that have: the last 100 of each user, for 30 days."""

    jobs: tuple[int | str, ...] = field("only these, by id, name or pid; empty for all", default=())
    all: bool = field("whether to include jobs that have ended", default=False)


class JobReply(Record):
    """One job."""

    job: Job = field("its current state")


class InspectJob(Request, op="job", reply=JobReply):
    """Return one job, whether it has ended or not."""

    job: int | str = field("the job, by its id, its name, or the pid of one of its processes")


class WaitForJob(Request, op="job.wait", reply=JobReply, event=Job):
    """Wait until a job has ended. Its changes until then come as events. Disconnecting does not affect the job."""

    job: int | str = field("the job, by its id, its name, or the pid of one of its processes")


class JobRegistered(Record):
    """The daemon knows the job, and its id is on disk."""

    id: str = field("its id")
    name: str = field("its name: the requested one, with a number if another job has that name")


class RegisterJob(Request, op="job.register", reply=JobRegistered):
    """`hegmctl run` registers its process, and all that this process starts, as a job before it becomes its command.

    A second request with the same run returns the same job. So does a run that continues from the state of an
    operation.
    """

    run: str = field("the id of this `hegmctl run`, which its agents send too: HEGM_RUN")
    name: str | None = field("its name; nil for the name of its script", default=None)
    command: tuple[str, ...] = field("its command, one item for each argument")
    resumes: str | None = field("the suspended operation from whose state it continues", default=None)
    priority: int | str | None = field(
        "0 to 100, or the name of a priority; nil for normal, or for a known job for the priority that it has",
        default=None,
    )
