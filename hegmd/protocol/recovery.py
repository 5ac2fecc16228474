"""Messages that show and request the recovery of jobs. `messages` re-exports them."""

from __future__ import annotations

from .agents import Noted
from .record import Record, field
from .requests import Request

# States of a job under `hegmctl run --recover`.
STARTING, PROTECTED, UNPROTECTED, RECOVERING, KEPT = "starting", "protected", "unprotected", "recovering", "kept"
# AWAITED: the job's `hegmctl run` has not connected to this daemon yet. LOST: its snapshots are gone.
AWAITED, LOST = "awaited", "lost"
# Results of a recovery.
UNDER_WAY, RECOVERED, FAILED, GIVEN_UP = "under way", "recovered", "failed", "given up"
# The start was ended from outside before the state was restored, which says nothing about its snapshot.
INTERRUPTED = "interrupted"


class Snapshot(Record):
    """One slot of one process."""

    rank: int = field("the rank; 0 for a job of one process")
    slot: int = field("which of its two slots, 0 or 1")
    generation: int | None = field("number of the snapshot; nil: no complete one", default=None)
    step: int | None = field("batch boundaries passed, those before a recovery included", default=None)
    size_bytes: int | None = field("bytes of the state", default=None)
    taken_utc: float | None = field("when it was taken", default=None)
    damaged: bool = field("a start from it has failed", default=False)


class RecoveryAttempt(Record):
    """One recovery of a job."""

    failed_utc: float = field("when its command or one of its ranks failed")
    why: str = field("why it was needed: how the command or a rank ended")
    step: int | None = field("the last known step", default=None)
    from_step: int | None = field("the step from which it was started again", default=None)
    generation: int | None = field("number of the snapshot", default=None)
    gpus: tuple[str, ...] = field("the GPUs that it was started on", default=())
    started_s: float | None = field(
        "from the failure until it was started; in process, until all ranks were started", default=None
    )
    restored_s: float | None = field("from the failure until all processes had their state back", default=None)
    trained_s: float | None = field("from the failure until the first step after it", default=None)
    result: str = field(
        "under way; recovered; failed; interrupted: ended from outside before the state was restored; given up",
        default=UNDER_WAY,
    )
    stacks: str | None = field("where the threads of a hung job were", default=None)


class JobRecovery(Record):
    """How one job is protected, and how it was recovered."""

    id: str = field("the job's id")
    name: str = field("its name")
    uid: int = field("user id of its owner")
    state: str = field(
        "starting: no snapshot yet; protected; unprotected; recovering; kept: the job has ended; awaited: its `hegmctl "
        "run` has not connected to this daemon yet; lost: no memory of its snapshots is left"
    )
    why: str | None = field("what prevents a snapshot or a start, or why its state is kept or lost", default=None)
    interval_s: float | None = field("current time between two snapshots", default=None)
    cost_s: float | None = field("how long the last snapshot parked the training", default=None)
    copied_s: float | None = field("how long its copy took while the training continued", default=None)
    snapshots: int = field("number taken since the daemon started", default=0)
    held_bytes: int = field("host memory of its slots")
    slots: tuple[Snapshot, ...] = field("by rank and slot", default=())
    begins_anew: tuple[str, ...] = field("variables of the script that a recovery does not keep", default=())
    recoveries: tuple[RecoveryAttempt, ...] = field("the last 20, oldest first", default=())


class RecoveryReply(Record):
    """Jobs that are protected, or whose state is kept."""

    taken_utc: float = field("when the reply was made")
    jobs: tuple[JobRecovery, ...] = field("ordered by id")


class Recovery(Request, op="recovery", reply=RecoveryReply):
    """How jobs are protected by snapshots and were recovered. For jobs of other users only the state is shown."""

    jobs: tuple[int | str, ...] = field("only these, by id, name or pid", default=())


class RecoveryDropped(Record):
    """The state of the job is deleted."""

    freed_bytes: int = field("host memory that this freed")


class DropRecovery(Request, op="recovery.drop", reply=RecoveryDropped, changes_state=True):
    """Delete the kept state of a job that has ended. Refused for a job that lives."""

    job: int | str = field("the job: its id or its name")


class SlotMemory(Record):
    """The memory of a slot; its descriptor is sent with the message."""

    size_bytes: int = field("bytes that it has")


class SlotHeld(Record):
    """The slot is held until the launcher has ended."""

    job: str = field("the id of the job that it belongs to")


class HoldSlot(Request, op="recovery.hold", reply=SlotHeld, event=SlotMemory, changes_state=True):
    """A launcher of ranks (`hegmctl run --ranks`) needs memory for the state that its ranks recover from.

    The memory comes as an event with a descriptor. A slot that is too small is replaced, and its content is lost.
    """

    run: str = field("which `hegmctl run` it is")
    slot: int = field("which of the two slots, 0 or 1")
    size_bytes: int = field("bytes that it needs")


class ReportRecovery(Request, op="recovery.report", reply=Noted, changes_state=True):
    """A launcher of ranks reports a recovery in process, or why its job is not protected."""

    run: str = field("which `hegmctl run` it is")
    recovery: RecoveryAttempt | None = field(
        "a recovery that has begun or progressed; `failed_utc` identifies it", default=None
    )
    unprotected: str | None = field("what prevents snapshots; nil once there is one", default=None)


class RankStart(Record):
    """Whether a rank may be started now."""

    may_start: bool = field("false: its job is suspended, and others may have its GPU memory")


class MayStartRank(Request, op="recovery.may-start", reply=RankStart):
    """A launcher of ranks asks before it starts a rank in the place of one that has ended."""

    run: str = field("which `hegmctl run` it is")
