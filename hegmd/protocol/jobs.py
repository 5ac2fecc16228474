"""Jobs: what people name, watch and wait for. `messages` gathers these.

A job is what one `hegmctl run` started, with all processes of it. Its id is never used again. Its name is unique among
the jobs of the node that have not ended.
"""

from __future__ import annotations

from .record import Record, field
from .requests import Request

# What a job does now, as `hegmctl jobs` shows it.
STARTING, TRAINING, QUIESCED, SUSPENDED = "starting", "training", "quiesced", "suspended"
MOVING, WAITING, ENDED = "moving", "waiting", "ended"
JOB_STATES = (STARTING, TRAINING, QUIESCED, SUSPENDED, MOVING, WAITING, ENDED)
# The priority of a job of which nothing was said: `normal`.
DEFAULT_PRIORITY = 50
# What a process is for its job.
COMMAND, SUPERVISOR, LAUNCHER, WORKER, RANK = "command", "supervisor", "launcher", "worker", "rank"


class JobProcess(Record):
    """One process of a job."""

    pid: int = field("process id")
    role: str = field(
        "worker: it trains; rank: the same, of several; supervisor: the `hegmctl run --allow-restart`; launcher: it "
        "started the ranks; command: what `hegmctl run` became, of which no more is known"
    )
    rank: int | None = field("its rank, in a distributed job", default=None)
    gpus: tuple[str, ...] = field("the GPUs that it is on", default=())
    vram_bytes: int | None = field("its video memory on them; nil where the driver does not say", default=None)
    boundary: int | None = field("batch boundaries that it has passed; nil without an agent", default=None)
    framework: str | None = field("what trains in it, with its version; nil without an agent", default=None)


class Job(Record):
    """One job."""

    id: str = field("what to call it in commands, such as j7; it is never used for another job")
    name: str = field("the same, for people; unique among the jobs that have not ended")
    state: str = field(
        "starting: before its first batch; training; quiesced: parked between two batches; suspended: off its GPU; "
        "moving: an operation is under way; waiting: that operation waits for something, or the job has no GPU yet; or "
        "ended"
    )
    waits: str | None = field("what a waiting or suspended job waits for", default=None)
    uid: int = field("whose it is")
    user: str | None = field("the name of that user", default=None)
    gpus: tuple[str, ...] = field("the GPUs that its processes are on; `cpu` for one that trains on none", default=())
    vram_bytes: int | None = field("its video memory on all of them; nil where the driver does not say", default=None)
    held_bytes: int = field("bytes that hegmd holds for it outside of its processes", default=0)
    boundary: int | None = field("batch boundaries that it has passed; nil before the first", default=None)
    steps_per_s: float | None = field(
        "batch boundaries in a second, of its slowest rank, since it was last looked at and for a minute at most; nil "
        "unless it trains",
        default=None,
    )
    command: str | None = field(
        "its script and the arguments of that, without the interpreter; nil when the caller may not see it",
        default=None,
    )
    started_utc: float = field("when it was started, in seconds since 1970")
    ended_utc: float | None = field("when it ended; nil before", default=None)
    status: int | None = field(
        "its exit status, or minus the signal that ended it; nil before, and where the kernel no longer told",
        default=None,
    )
    end: str | None = field("how it ended, in words", default=None)
    pid: int | None = field("the process that `hegmctl run` became or is; nil if it has ended", default=None)
    processes: tuple[JobProcess, ...] = field("its processes that are known", default=())
    priority: int = field("its priority when GPUs are shared, 0 to 100", default=DEFAULT_PRIORITY)
    operation: str | None = field("the operation that has it now", default=None)
    notes: tuple[str, ...] = field("what prevents a restart, and other notes", default=())


class JobsReply(Record):
    """The jobs of the node at one moment."""

    taken_utc: float = field("when, in seconds since 1970")
    jobs: tuple[Job, ...] = field("ordered by id")


class Jobs(Request, op="jobs", reply=JobsReply):
    """The jobs that have not ended, and with `all` those that have: of each user the last 100, for 30 days."""

    jobs: tuple[int | str, ...] = field("only these, by id, name or pid; empty for all", default=())
    all: bool = field("whether jobs that have ended are wanted too", default=False)


class JobReply(Record):
    """One job."""

    job: Job = field("its current state")


class InspectJob(Request, op="job", reply=JobReply):
    """One job, whether it has ended or not."""

    job: int | str = field("the job, by its id, its name, or the pid of one of its processes")


class WaitForJob(Request, op="job.wait", reply=JobReply, event=Job):
    """Wait until a job has ended. Its states until then come as events. Whoever leaves earlier leaves it as it is."""

    job: int | str = field("the job, by its id, its name, or the pid of one of its processes")


class JobRegistered(Record):
    """The job is known, and its id is on disk."""

    id: str = field("its id")
    name: str = field("its name: what was asked for, with a number where another job had that")


class RegisterJob(Request, op="job.register", reply=JobRegistered):
    """What `hegmctl run` says before it becomes its command: the calling process and all that it starts are a job.

    The same run again is the same job. So is another run that goes on from the state of an operation.
    """

    run: str = field("which `hegmctl run` it is, as its agents say it too: HEGM_RUN")
    name: str | None = field("its name; nil for the name of its script", default=None)
    command: tuple[str, ...] = field("its command, in words")
    resumes: str | None = field("the suspended operation from whose state it continues", default=None)
    priority: int | str | None = field(
        "0 to 100, or the name of a priority; nil for normal, and for the one that a known job has", default=None
    )
