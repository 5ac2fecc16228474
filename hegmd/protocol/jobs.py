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
        "worker; rank: one of several workers; supervisor (`hegmctl run "
        "--allow-restart`); launcher of ranks; command: not known yet"
    )
    rank: int | None = field("rank in a distributed job", default=None)
    gpus: tuple[str, ...] = field("its GPUs", default=())
    vram_bytes: int | None = field("its GPU memory", default=None)
    boundary: int | None = field("batch boundaries passed", default=None)
    framework: str | None = field("training framework with its version", default=None)


class Job(Record):
    """One job."""

    id: str = field("id, such as j7; never used for another job")
    name: str = field("name, unique among the jobs that have not ended")
    state: str = field(
        "starting: before its first batch; training; quiesced; suspended; moving; "
        "waiting: for a GPU, agents or an operation; ended"
    )
    waits: str | None = field("what a waiting or suspended job waits for", default=None)
    uid: int = field("user id of its owner")
    user: str | None = field("name of its owner", default=None)
    gpus: tuple[str, ...] = field("its GPUs; `cpu` for a job that trains on none", default=())
    vram_bytes: int | None = field("its GPU memory in all", default=None)
    held_bytes: int = field("bytes of the job that hegmd holds", default=0)
    boundary: int | None = field("batch boundaries passed", default=None)
    steps_per_s: float | None = field(
        "batches per second of its slowest rank, over the last minute at most", default=None
    )
    command: str | None = field(
        "script and arguments without the interpreter, if the caller may see them", default=None
    )
    started_utc: float = field("when it was started")
    ended_utc: float | None = field("when it ended", default=None)
    status: int | None = field("exit status, or minus the signal that ended it", default=None)
    end: str | None = field("how it ended, in words", default=None)
    pid: int | None = field("the process that `hegmctl run` is or became", default=None)
    processes: tuple[JobProcess, ...] = field("its known processes", default=())
    priority: int = field("0 to 100", default=DEFAULT_PRIORITY)
    operation: str | None = field("the operation that works on it now", default=None)
    notes: tuple[str, ...] = field("what prevents a restart, and other notes", default=())


class JobsReply(Record):
    """The jobs of the node at one moment."""

    taken_utc: float = field("when the reply was made")
    jobs: tuple[Job, ...] = field("ordered by id")


class Jobs(Request, op="jobs", reply=JobsReply):
    """List the jobs that have not ended. With `all` also those that have: the last 100 of each user, for 30 days."""

    jobs: tuple[int | str, ...] = field("only these, by id, name or pid", default=())
    all: bool = field("include jobs that have ended", default=False)


class JobReply(Record):
    """One job."""

    job: Job = field("its current state")


class InspectJob(Request, op="job", reply=JobReply):
    """Return one job, whether it has ended or not."""

    job: int | str = field("the job: its id, its name, or the pid of one of its processes")


class WaitForJob(Request, op="job.wait", reply=JobReply, event=Job):
    """Wait until a job has ended. Its changes until then come as events. Disconnecting does not affect the job."""

    job: int | str = field("the job: its id, its name, or the pid of one of its processes")


class JobRegistered(Record):
    """The daemon knows the job, and its id is on disk."""

    id: str = field("its id")
    name: str = field("the requested name, with a number if another job has it")


class RegisterJob(Request, op="job.register", reply=JobRegistered):
    """Register the calling process, and all that it will start, as a job, as `hegmctl run` does.

    The same run, or one that continues from the state of an operation, gets the same job again.
    """

    run: str = field("id of this `hegmctl run`; its agents send it as HEGM_RUN")
    name: str | None = field("job name; nil: the name of its script", default=None)
    command: tuple[str, ...] = field("the command, one item per argument")
    resumes: str | None = field("the suspended operation from whose state it continues", default=None)
    priority: int | str | None = field(
        "0 to 100, or a priority's name; nil: unchanged, or normal for a new job", default=None
    )
    slurm_job: int | None = field("the Slurm job with which Slurm suspends and resumes it", default=None)
