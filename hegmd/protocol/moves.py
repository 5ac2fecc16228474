"""Requests about running jobs (migrate, quiesce, suspend, checkpoint, resume, restore), operations and orphans.

`messages` imports them all.
"""

from __future__ import annotations

from .operations import Operation, OperationProgress, Orphan, Plan, Reason, StoryLine
from .record import Record, field
from .requests import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class OperationReply(Record):
    """An operation in its current state, or its plan."""

    operation: Operation | None = field("the operation, except for a dry run and if `recovered` is set", default=None)
    plan: Plan | None = field("the plan, if one was made", default=None)
    recovered: str | None = field(
        "of a resume: the job that had failed while it was suspended. It has no process, so there is no operation and "
        "no plan: it is started again from its newest snapshot. With `wait` it trains now; without, it waits for room",
        default=None,
    )


class Migrate(Request, op="migrate", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Migrate running jobs to another GPU, between two batches. All processes of a job are migrated together.

    If the caller disconnects or cancels the request, the operation continues. An operation that was rolled back is a
    reply too: its `phase` and `failure` say so.
    """

    pids: tuple[int | str, ...] = field("the jobs: for each its id, its name, or the pid of one of its processes")
    to: str | None = field(
        "target GPU; for several `gpu2,gpu3` or `gpu0=gpu2`; nil: restart on the same GPU", default=None
    )
    limit_s: float | None = field("longest wait for a boundary; nil: the daemon's setting", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)
    carrier: str | None = field("peer, host, worker or driver; nil: hegmd chooses", default=None)
    via: str | None = field(
        "restart: end the job and start it again from its state; nil: the best method", default=None
    )
    allow_restart: bool = field("restart the job if no better method is possible", default=False)
    set: Mapping[str, str] = field("restart: environment variables to set", default={})
    unset: tuple[str, ...] = field("restart: environment variables to remove", default=())
    python: str | None = field("restart: the interpreter to use", default=None)

    def audited(self) -> dict[str, object]:
        """Return the request with the names of the variables only: their values are often secrets."""
        return {**self.to_plain(), "set": sorted(self.set)}


class Quiesce(Request, op="quiesce", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Park running jobs between two batches. Their memory stays where it is.

    With `wait` the reply comes in phase `holding`. They resume after `hold_s`, or with `resume`. A `suspend`, `migrate`
    or `checkpoint` meanwhile continues the same operation.
    """

    pids: tuple[int | str, ...] = field("the jobs: for each its id, its name, or the pid of one of its processes")
    hold_s: float | None = field("longest time parked; nil: the daemon's setting", default=None)
    limit_s: float | None = field("longest wait for a boundary; nil: the daemon's setting", default=None)
    wait: bool = field("wait until they are parked", default=True)
    dry_run: bool = field("return the plan only", default=False)


class Suspend(Request, op="suspend", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Take running jobs off their GPUs between two batches, and hold their bytes until they are resumed.

    With `spill` the bytes are on disk and take no memory; this works for suspended jobs too. If the disk fails, the
    jobs are suspended with their bytes in memory, and the reply is an error. With `keep_context` the daemon makes no
    driver call, and communicators stay connected.
    """

    pids: tuple[int | str, ...] = field("the jobs: for each its id, its name, or the pid of one of its processes")
    limit_s: float | None = field("longest wait for a boundary; nil: the daemon's setting", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)
    carrier: str | None = field("peer, host, worker or driver; nil: hegmd chooses", default=None)
    spill: bool = field("write the bytes to disk", default=False)
    keep_context: bool = field("keep the CUDA contexts; the jobs can then resume on the same GPUs only", default=False)


class Checkpoint(Request, op="checkpoint", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Write an image of a running job between two batches: its processes and their bytes on GPUs.

    The daemon reads the image back, then ends the job. With `leave_running` the job continues once its processes are
    written, and the rest happens while it trains. After a failure there is no image, and the job continues. Only the
    owner of all its processes and root can request it, because an image contains their memory.
    """

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    path: str = field("absolute path of the image to create; written with the caller's rights")
    leave_running: bool = field("the job continues after its checkpoint", default=False)
    limit_s: float | None = field("longest wait for a boundary; nil: the daemon's setting", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)
    carrier: str | None = field("host, worker or driver; nil: hegmd chooses", default=None)


class Handoff(Request, op="handoff", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Write an image of a suspended job. The daemon reads the image back, then ends the job's processes.

    After a failure the job stays suspended. Only the owner of all its processes and root can ask for it.
    """

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    path: str = field("absolute path of the image to create; written with the caller's rights")
    limit_s: float | None = field("longest time for the image; nil: the daemon's setting", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)


class Restore(Request, op="restore", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Restore a job from an image, with its process ids, and resume it at its next batch.

    The image has to be from this node or signed with its key; only its owner and root can restore it. A failure before
    the processes exist leaves the image only, a later one a suspended job. The facts of a refusal name files that have
    grown, with their former sizes, as `grown`. Output that led outside of the job is discarded, except to `outlets`.
    """

    path: str = field("absolute path of the image; read with the caller's rights")
    to: str | None = field("target GPU; nil: the former one", default=None)
    as_then: bool = field("refuse the restore also if the job's append-only files have grown", default=False)
    outlets: tuple[str, ...] = field(
        "of stdout and stderr, those to connect to the descriptors that come along", default=()
    )
    limit_s: float | None = field("time after which the operation is rolled back; nil: none", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)


class Resume(Request, op="resume", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Resume a suspended job, or a job that is parked at a boundary.

    A job that failed while its user had suspended it is started again from its newest snapshot as soon as there is
    room, with or without `queue`: its reply has `recovered`. With `wait`, the reply comes once the job trains, and an
    error if it ends. If there is no room within `limit_s`, it stays suspended.
    """

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    to: str | None = field("target; nil: the former or a healthy GPU", default=None)
    queue: bool = field(
        "wait in the queue until there is room, for `limit_s` at most; hegmd chooses the GPU. The job keeps its place "
        "if the client disconnects, until it is suspended again",
        default=False,
    )
    limit_s: float | None = field("time after which the operation is rolled back; nil: none", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)


class Drained(Record):
    """The operations of a drain or a swap."""

    operations: tuple[Operation, ...] = field("one for each job")
    plans: tuple[Plan, ...] = field("the plans of a dry run, in order", default=())
    left: tuple[Reason, ...] = field("why other jobs were not migrated, one for each", default=())


class Drain(Request, op="drain", reply=Drained, event=OperationProgress, changes_state=True):
    """Migrate all jobs off a GPU, one after another; without `wait` all at once. If the caller disconnects, the
    current job is still migrated and later ones stay.
    """

    gpu: str = field("the GPU to empty")
    to: tuple[str, ...] = field("allowed target GPUs", default=())
    limit_s: float | None = field("longest wait for a boundary; nil: the daemon's setting", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)


class Swap(Request, op="swap", reply=Drained, event=OperationProgress, changes_state=True):
    """Let two jobs, or two processes of one job, exchange their GPUs, one of them suspended if memory is short. A swap
    that has started continues without the caller. Without `wait`, the reply has its first step.
    """

    first: int | str = field("one job: its id, its name, or the pid of one of its processes")
    second: int | str = field("the other job")
    limit_s: float | None = field("longest wait for a boundary; nil: the daemon's setting", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)


class OperationsReply(Record):
    """The operations that the daemon remembers, and the orphans."""

    operations: tuple[Operation, ...] = field("oldest first")
    orphans: tuple[Orphan, ...] = field("a person has to decide about them", default=())


class Operations(Request, op="operations", reply=OperationsReply):
    """List the operations: those under way, the suspended ones, and the last ones that have ended.

    The messages of another user's job are hidden: they may quote the script.
    """


class StoryReply(Record):
    """An operation and its history."""

    operation: Operation = field("its current state")
    story: tuple[StoryLine, ...] = field("the events, oldest first")
    untold: int = field("number of forgotten older events", default=0)


class Story(Request, op="operation", reply=StoryReply, event=OperationProgress):
    """Return one operation and its history. With `follow` the reply comes when it has ended.

    The messages of another user's job are hidden: they may quote the script.
    """

    id: str = field("id of the operation")
    follow: bool = field("wait until it ends", default=False)


class CancelOperation(Request, op="operation.cancel", reply=OperationReply, changes_state=True):
    """Roll an operation back. Refused if finishing it takes less time."""

    id: str = field("id of the operation")
    drop: bool = field("delete the saved state of an exited process; other operations are refused", default=False)


class OrphansReply(Record):
    """The orphans on the node."""

    orphans: tuple[Orphan, ...] = field("bytes, parked processes, and data that cannot be read")


class Orphans(Request, op="orphans", reply=OrphansReply):
    """List the orphans: pool bytes and parked processes that belong to no operation."""


class Adopt(Request, op="adopt", reply=OperationReply, event=OperationProgress, changes_state=True):
    """Make an operation of a parked process that belongs to none, and resume its job."""

    pid: int | str = field("the job: its id, its name, or the pid of one of its processes")
    to: str | None = field("target GPU; nil: the GPU that the process was started for", default=None)
    wait: bool = field("wait until the operation ends", default=True)
    dry_run: bool = field("return the plan only", default=False)


class Dropped(Record):
    """The orphaned bytes were deleted. They cannot be recovered."""

    name: str = field("their name")
    size_bytes: int | None = field("their number; nil if it was unknown", default=None)


class DropOrphan(Request, op="orphans.drop", reply=Dropped, changes_state=True):
    """Delete bytes that no operation owns. They cannot be recovered."""

    name: str = field("the name of the bytes")
