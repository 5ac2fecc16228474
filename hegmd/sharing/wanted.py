"""The requesters of GPU memory: waiting jobs, pending leases, and jobs that have to leave their GPU.

Owns one value for all three, and the order in which they have their turns. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from hegmd.sharing.model import GRANT, MIGRATE, QUEUED, RESUME, RUNNING, START, SUSPENDED, Gpu, Job, Lease, Rules

# The order among equals: what was interrupted in its turn, then those who wait, then those whose turn has just ended.
_INTERRUPTED, _IN_LINE, _DISPLACED = range(3)
_ACTIONS = {QUEUED: START, SUSPENDED: RESUME, RUNNING: MIGRATE}


class MemoryRequest(NamedTuple):
    """A job or lease that asks for memory. A tuple, since a decision makes a thousand of them."""

    id: str
    name: str
    #: The action once it has the memory.
    action: str
    priority: int
    uid: int
    #: Its place in the order: the smallest is first.
    turn: tuple[int, int, float, str]
    #: The memory that it needs on each of its GPUs; None if unknown.
    needs_bytes: tuple[int, ...] | None
    gpu_count: int
    allowed_gpus: tuple[str, ...] | None
    chip: str | None
    preempts_others: bool
    #: Whether a job of higher priority may suspend it once it runs; never True for a lease.
    is_preemptible: bool
    #: The job; None for a lease.
    job: Job | None = None
    hindrance: str = ""
    retry_at_s: float | None = None

    def may_preempt(self, uid: int) -> bool:
        """Return whether jobs of that user may be suspended for it."""
        return self.preempts_others or uid == self.uid

    @property
    def within(self) -> tuple[str, ...]:
        """The leases whose memory is open to it."""
        return () if self.job is None else self.job.within

    def need_bytes(self, gpu: Gpu, share: int, rules: Rules) -> int:
        """Return the memory that has to be free on `gpu` if that is the GPU number `share` of its GPUs."""
        if self.needs_bytes is None:
            return int(gpu.total_bytes * rules.whole_gpu_share)
        return self.needs_bytes[share]

    def claim_bytes(self, gpu: Gpu, share: int) -> int:
        """Return the memory kept for it there: all of the GPU if its need is unknown."""
        return gpu.total_bytes if self.needs_bytes is None else self.needs_bytes[share]

    def shares(self) -> list[int]:
        """Return the numbers of its GPUs, the one that needs the most first."""
        needs_bytes = self.needs_bytes
        if self.gpu_count == 1:
            return [0]
        numbers = list(range(self.gpu_count))
        return numbers if needs_bytes is None else sorted(numbers, key=lambda share: -needs_bytes[share])

    def kind(self) -> tuple[object, ...]:
        """Return what decides, besides its size, where it may run and which jobs leave for it."""
        return (
            *(self.priority, self.action, self.is_preemptible, None if self.preempts_others else self.uid),
            *(self.allowed_gpus, self.chip, self.gpu_count, self.needs_bytes is None, self.within),
        )


def turn_of(waiting: Job | Lease) -> tuple[int, int, float, str]:
    """Return the place of a waiting job or a pending lease in the order. A lease comes before jobs of its priority."""
    group = _INTERRUPTED
    if isinstance(waiting, Job) and not (waiting.turn_s > 0 and waiting.state == SUSPENDED):
        group = _IN_LINE
    return -waiting.priority, group, waiting.since_s, waiting.id


def request_of(waiting: Job | Lease) -> MemoryRequest:
    """Return what a waiting job or a pending lease asks for."""
    return wanted_by(waiting) if isinstance(waiting, Job) else wanted_for(waiting)


def wanted_by(job: Job, displaced_s: float | None = None) -> MemoryRequest:
    """Return what a waiting job asks for, or one that has to leave its GPU at the instant `displaced_s`."""
    turn = turn_of(job) if displaced_s is None else (-job.priority, _DISPLACED, displaced_s, job.id)
    # Positional: keywords cost half a millisecond for a thousand jobs.
    return MemoryRequest(
        job.id,
        job.name,
        _ACTIONS[job.state],
        job.priority,
        job.uid,
        turn,
        job.needs_bytes,
        job.gpu_count,
        job.allowed_gpus,
        job.chip,
        job.preempts_others,
        job.is_preemptible,
        job,
        job.hindrance,
        job.retry_at_s,
    )


def wanted_for(lease: Lease) -> MemoryRequest:
    """Return what a pending lease asks for."""
    return MemoryRequest(
        id=lease.id,
        name=lease.name,
        action=GRANT,
        priority=lease.priority,
        uid=lease.uid,
        turn=turn_of(lease),
        needs_bytes=(lease.size_bytes,),
        gpu_count=1,
        allowed_gpus=None if lease.gpu is None else (lease.gpu,),
        chip=None,
        preempts_others=lease.preempts_others,
        is_preemptible=False,
        retry_at_s=lease.retry_at_s,
    )
