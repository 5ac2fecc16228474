"""Requests about running jobs: migrate, quiesce, suspend, checkpoint, resume and restore them.

And what is asked about that: the operations, their stories, and what no operation has. `messages` gathers them.
"""

from __future__ import annotations

from .operations import Operation, OperationProgress, Orphan, Plan, Reason, StoryLine
from .record import Record, field
from .requests import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class OperationReply(Record):
    """An operation, its current state, and what was planned."""

    operation: Operation | None = field("nil when only the plan was asked for", default=None)
    plan: Plan | None = field("nil where nothing was planned", default=None)


class Migrate(Request, op="migrate", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Move running jobs to another GPU, between two of their batches. A job of several processes moves as one.

    With `wait` the reply comes when the operation has ended; whoever leaves before, or cancels the request, leaves the
    operation going. An operation that is turned back is a reply too: its `phase` and `failure` say so.
    """

    pids: tuple[int | str, ...] = field("the jobs: of each its id, its name, or the pid of one of its processes")
    to: str | None = field(
        "the GPU to go to; of a process on several one for each, `gpu2,gpu3`, or for some, `gpu0=gpu2`; nil only with "
        "a restart, to stay",
        default=None,
    )
    limit_s: float | None = field("how long the wait for a boundary may take; nil for the daemon's own", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)
    carrier: str | None = field(
        "peer, host, worker or driver, where the choice of how the bytes go is not hegmd's", default=None
    )
    via: str | None = field(
        "restart, to have the job leave and be started again from its state; nil for the best way there is",
        default=None,
    )
    allow_restart: bool = field("whether it may be a restart where there is no better way", default=False)
    set: Mapping[str, str] = field("with a restart: variables to set in its environment", default={})
    unset: tuple[str, ...] = field("with a restart: variables to leave out of it", default=())
    python: str | None = field("with a restart: the interpreter to take in the place of its own", default=None)

    def audited(self) -> dict[str, object]:
        """The variables by name: what an environment has is often a key to something."""
        return {**self.to_plain(), "set": sorted(self.set)}


class Quiesce(Request, op="quiesce", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Park running jobs between two batches, with all their memory in place.

    With `wait` the reply comes when they are parked, in phase `holding`. They resume by themselves after `hold_s`, or
    by `resume`. A `suspend`, `migrate` or `checkpoint` meanwhile starts from there, under the same operation.
    """

    pids: tuple[int | str, ...] = field("the jobs: of each its id, its name, or the pid of one of its processes")
    hold_s: float | None = field("how long they are parked at most; nil for the daemon's setting", default=None)
    limit_s: float | None = field("how long the wait for a boundary may take; nil for the daemon's own", default=None)
    wait: bool = field("whether to wait until they are parked", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)


class Suspend(Request, op="suspend", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Take running jobs off their GPUs, between two of their batches, and hold their bytes until a resume.

    With `spill` they go on to disk and take no memory meanwhile; of jobs that are suspended already too. When that
    cannot be, the jobs are suspended with their bytes in memory and the reply is an error that says why.
    """

    pids: tuple[int | str, ...] = field("the jobs: of each its id, its name, or the pid of one of its processes")
    limit_s: float | None = field("how long the wait for a boundary may take; nil for the daemon's own", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)
    carrier: str | None = field(
        "peer, host, worker or driver, where the choice of how the bytes go is not hegmd's", default=None
    )
    spill: bool = field("whether their bytes are to go to disk", default=False)
    keep_context: bool = field(
        "whether the processes keep their CUDA contexts on their GPUs: no driver call is made, communicators stay "
        "connected, and the jobs can resume on the same GPUs only",
        default=False,
    )


class Checkpoint(Request, op="checkpoint", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Write a running job into an image, between two of its batches: its processes and the bytes that it had on GPUs.

    The job ends once the image was read back. With `leave_running` it continues as soon as its processes are
    written; the bytes of its GPUs are written from the pool, and all of it read back, while it trains. Whenever that
    fails there is no image, and the job continues.
    For the owner of all its processes, and for root: an image holds their memory.
    """

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    path: str = field("the directory that the image is to have, absolute; written with the caller's rights")
    leave_running: bool = field("whether the job continues after it", default=False)
    limit_s: float | None = field("how long the wait for a boundary may take; nil for the daemon's own", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)
    carrier: str | None = field("host, worker or driver, where the choice is not hegmd's", default=None)


class Handoff(Request, op="handoff", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Write a suspended job into an image. Its processes end once that was read back; otherwise it stays suspended.

    For the owner of all its processes, and for root.
    """

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    path: str = field("the directory that the image is to have, absolute; written with the caller's rights")
    limit_s: float | None = field("how long that may take; nil for the daemon's own", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)


class Restore(Request, op="restore", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Bring a job back from an image, with its process ids, and resume the job from its next batch.

    For the owner of an image of this node, or of one with its key, and for root. What fails before the processes are
    there leaves only the image, later a suspended job. A refusal's facts name files that are longer, and their former
    sizes, as `grown`. Output of the job that led out of it leads nowhere, but for what `outlets` name.
    """

    path: str = field("the image's directory, absolute; read with the caller's rights")
    to: str | None = field("the GPU to continue on; nil for the former one", default=None)
    as_then: bool = field("whether to refuse it also for longer files to which the job only appends", default=False)
    outlets: tuple[str, ...] = field("which of stdout and stderr go to the descriptors that come along", default=())
    limit_s: float | None = field("after how long to give it up; nil for never", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)


class Resume(Request, op="resume", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Resume a suspended job, or one that is parked at a boundary."""

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    to: str | None = field("the GPU to continue on; nil for the former one", default=None)
    limit_s: float | None = field("after how long to suspend it again, its bytes not back; nil: never", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)


class Drained(Record):
    """What became of what takes several operations."""

    operations: tuple[Operation, ...] = field("those that were begun, one for each job")
    plans: tuple[Plan, ...] = field("for a dry run, what would be done, in order", default=())
    left: tuple[Reason, ...] = field("why others were not moved, one for each job", default=())


class Drain(Request, op="drain", reply=Drained, event=OperationProgress, changes_state=True):
    """Move everything off a GPU, one job after the other. Whoever leaves before the end leaves only the job going
    that is under way; those after it stay. Without `wait`, all are begun at once.
    """

    gpu: str = field("the GPU to be emptied")
    to: tuple[str, ...] = field("the target GPUs; empty for any with enough free memory", default=())
    limit_s: float | None = field("how long each wait for a boundary may take", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plans are wanted", default=False)


class Swap(Request, op="swap", reply=Drained, event=OperationProgress, changes_state=True):
    """Let two jobs, or two processes of one, exchange GPUs. If memory does not suffice for both, one is suspended
    meanwhile. Once started it runs to its end, also without the caller; without `wait`, the reply has its first step.
    """

    first: int | str = field("the one job: its id, its name, or the pid of one of its processes")
    second: int | str = field("the other")
    limit_s: float | None = field("how long each wait for a boundary may take", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plans are wanted", default=False)


class OperationsReply(Record):
    """The operations that the daemon remembers, and what no operation has."""

    operations: tuple[Operation, ...] = field("oldest first")
    orphans: tuple[Orphan, ...] = field("what was found and needs a person", default=())


class Operations(Request, op="operations", reply=OperationsReply):
    """The operations: those under way, the suspended, and the last ones that are over."""


class StoryReply(Record):
    """An operation and its story."""

    operation: Operation = field("its current state")
    story: tuple[StoryLine, ...] = field("what happened to it, oldest first")
    untold: int = field("lines that are no longer remembered", default=0)


class Story(Request, op="operation", reply=StoryReply, event=OperationProgress):
    """One operation and its story. With `follow` the reply comes when it has ended."""

    id: str = field("id of the operation")
    follow: bool = field("whether to wait for its end", default=False)


class CancelOperation(Request, op="operation.cancel", reply=OperationReply, changes_state=True):
    """Roll an operation back. Refused if finishing it takes less time."""

    id: str = field("id of the operation")
    drop: bool = field(
        "whether to drop the state that a suspended one keeps for a process that has ended; anything else is "
        "refused then, and the reply comes once the memory is given back",
        default=False,
    )


class OrphansReply(Record):
    """What was found on the node and no operation has."""

    orphans: tuple[Orphan, ...] = field("bytes, parked processes, and what cannot be read")


class Orphans(Request, op="orphans", reply=OrphansReply):
    """List the orphans: pool bytes and parked processes that belong to no operation, so a person has to decide."""


class Adopt(Request, op="adopt", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Make an operation of a parked process that belongs to none, and resume the job."""

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    to: str | None = field("the GPU to continue on; nil for the one that it was started for", default=None)
    wait: bool = field("whether to wait for the end", default=True)
    dry_run: bool = field("whether only the plan is wanted", default=False)


class Dropped(Record):
    """The orphaned bytes were deleted. They cannot be recovered."""

    name: str = field("what they were called")
    size_bytes: int | None = field("how many; nil if that was not known", default=None)


class DropOrphan(Request, op="orphans.drop", reply=Dropped, changes_state=True):
    """Give bytes that no operation owns back to the node. There is no way back from that."""

    name: str = field("what they are called")
