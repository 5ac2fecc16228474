"""The values of the sharing policy: the node at one moment as the policy sees it, and what the policy decides.

Owns these values only. Everything is frozen and plain, so a decision can be repeated from a saved snapshot. Times are
seconds of one clock that never goes back; the same clock gives `now` to the policy. Unknown is None, never 0.

Memory of a job is counted per GPU and without what stays there while the job is suspended (with `keep-context`, its
CUDA context): `held_bytes` is what suspending it frees, `needs_bytes` is what it needs in order to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# The states of a job that the policy distinguishes.
QUEUED = "queued"  # it is not started yet
RUNNING = "running"  # it trains; only such a job is suspended or migrated
SUSPENDED = "suspended"  # suspended by the policy, which brings it back
USER_SUSPENDED = "user-suspended"  # suspended by a user, who brings it back
ARRIVING = "arriving"  # it starts, resumes or migrates: its memory on `gpus` is promised to it
LEAVING = "leaving"  # it is being suspended or ends: the memory that it holds becomes free
BUSY = "busy"  # another operation has it, or it is quiesced: it keeps what it holds
JOB_STATES = (QUEUED, RUNNING, SUSPENDED, USER_SUSPENDED, ARRIVING, LEAVING, BUSY)

# The states of a lease.
PENDING = "pending"  # its memory is not free yet
HELD = "held"  # its memory is kept for it

# The actions that the policy can decide on.
START, RESUME, SUSPEND, MIGRATE, GRANT = "start", "resume", "suspend", "migrate", "grant"


class Gpu(NamedTuple):
    id: str
    total_bytes: int
    #: The free memory that the driver reports, less reservations of operations. None if unknown: nothing is placed
    #: there.
    free_bytes: int | None
    chip: str | None = None
    #: The memory that the driver and hegmd keep for themselves: no job and no lease can have it.
    kept_bytes: int = 0
    #: The memory that the GPU helper has there until its copies end.
    copying_bytes: int = 0
    #: The memory that suspended jobs left there with their CUDA contexts.
    contexts_bytes: int = 0
    #: False: nothing is placed there. Jobs that run there are left alone.
    is_healthy: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """A job, with all its processes."""

    id: str
    name: str
    state: str
    priority: int
    uid: int
    #: When it entered this state: since then it runs, or since then it waits.
    since_s: float
    #: The GPUs that it is on, goes to, or was on when it was suspended; none for a job that never ran.
    gpus: tuple[str, ...] = ()
    #: The memory that it needs on each of `gpus`, in the same order; one entry per GPU for a job that never ran. None
    #: if unknown: it then needs a GPU without other jobs, and nothing else is placed beside it.
    needs_bytes: tuple[int, ...] | None = None
    #: The memory that a suspended job had, in the same order. It resumes with that if no GPU has what it asked for.
    least_bytes: tuple[int, ...] | None = None
    #: The memory that its processes and the reservations of its operation take on each GPU now.
    held_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    #: The bytes that its suspension puts into the pool, by its plan. None if unknown: all that it holds.
    pool_bytes: int | None = None
    #: The only GPUs on which it can be: pinned by its user, or its context is kept there. None for any.
    allowed_gpus: tuple[str, ...] | None = None
    #: The chip that it needs. None for any: it has not started yet. All GPUs on which a job starts have one chip.
    chip: str | None = None
    #: True if jobs and leases of higher priority, and the turns of equals, may suspend it.
    is_preemptible: bool = True
    #: True if jobs of other users may be suspended for it.
    preempts_others: bool = False
    #: Seconds of its present turn before `since_s`. 0 once a turn has ended: `Action.ends_turn`.
    turn_s: float = 0.0
    #: The cost of one suspension and one resumption of it, measured or estimated.
    switch_s: float = 1.0
    #: Why the policy can do nothing with it and does not count on it, in words.
    hindrance: str = ""
    #: The policy does nothing with it and does not count on it before this instant. None if no action failed lately.
    retry_at_s: float | None = None
    #: Why the last action failed, until one succeeds.
    failure: str = ""
    #: On how many GPUs a job is to start whose needs are unknown.
    wanted_gpus: int = 1
    #: The ids of the held leases whose process has started it: what they keep is open to it.
    within: tuple[str, ...] = ()

    @property
    def gpu_count(self) -> int:
        """Return on how many GPUs it is."""
        return len(self.gpus or self.needs_bytes or ()) or self.wanted_gpus


class Lease(NamedTuple):
    """Memory of one GPU that is kept, or has to be freed and kept, for one user."""

    id: str
    name: str
    state: str
    priority: int
    uid: int
    since_s: float
    size_bytes: int
    #: The GPU; None while none is chosen for a pending lease on any GPU.
    gpu: str | None = None
    #: How much of a held lease is in use already by the processes that it is for.
    used_bytes: int = 0
    #: True if jobs of other users may be suspended for it.
    preempts_others: bool = False
    #: The Slurm job or process that it ends with, in words. Empty for a lease that ends by itself or by a release.
    ends_with: str = ""
    #: As for a job.
    retry_at_s: float | None = None
    failure: str = ""


class Rules(NamedTuple):
    """The settings of the policy."""

    #: Whether jobs of equal priority that do not fit together take turns.
    slices: bool = True
    min_quantum_s: float = 30.0
    #: A turn is at least so many times as long as its switch: 20 costs at most 5 %.
    quantum_per_switch: float = 20.0
    #: A job that was interrupted in its turn and has resumed runs at least so many times as long as its switch before
    #: anyone has it suspended again. So requests that come and go do not starve it.
    run_per_switch: float = 2.0
    #: A job that was suspended comes back after this time at the earliest.
    settle_s: float = 2.0
    #: Kept free on each GPU: running jobs grow a little.
    headroom_bytes: int = 0
    #: A job of unknown need takes a GPU on which at least this part of all memory is free.
    whole_gpu_share: float = 0.9
    #: At most so many started jobs of equal priority share each GPU by turns; further ones wait until one ends.
    turns_per_gpu: int = 4


class Snapshot(NamedTuple):
    """The node at one moment."""

    gpus: tuple[Gpu, ...]
    jobs: tuple[Job, ...] = ()
    leases: tuple[Lease, ...] = ()
    rules: Rules = Rules()
    #: Free bytes of the pool, to which jobs are suspended. None if unknown: the planner alone refuses.
    pool_free_bytes: int | None = None


class Action(NamedTuple):
    """A step to take now. Actions of one decision can be carried out in any order, and at the same time."""

    kind: str
    #: The id of the job, or of the lease for `grant`.
    subject: str
    #: The GPUs to start, resume or migrate to, in the order of `Job.gpus`; the GPU of a grant; those that a suspended
    #: job leaves.
    gpus: tuple[str, ...]
    #: The bytes to reserve on each of `gpus` before anything else is done; for a suspension, the bytes that it frees.
    size_bytes: tuple[int, ...]
    #: Why, in words.
    reason: str
    #: The id of the job or lease for which a job is suspended or migrated.
    beneficiary: str | None = None
    #: True if the suspension ends the job's turn: `Job.turn_s` starts again from 0. Otherwise add the time it ran.
    ends_turn: bool = False


class WaitReason(NamedTuple):
    """The reason for which a job or a pending lease waits, and the next step, in words.

    A tuple, since a decision makes a thousand of them.
    """

    subject: str
    waits: str
    next: str
    #: When that happens if nothing else changes; None if unknown.
    at_s: float | None = None
    #: The GPUs on which that happens; empty if none is chosen.
    gpus: tuple[str, ...] = ()


class Decision(NamedTuple):
    """The actions to take now, the reasons for waiting, and when to decide again if nothing else changes."""

    actions: tuple[Action, ...] = ()
    waiting: tuple[WaitReason, ...] = ()
    again_at_s: float | None = None

    def waiting_of(self, subject: str) -> WaitReason | None:
        """Return what that job or lease waits for; None if it does not wait."""
        return next((one for one in self.waiting if one.subject == subject), None)
