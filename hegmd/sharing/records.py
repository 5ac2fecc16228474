"""The records of GPU sharing that outlive the daemon: leases, the queue, and the suspended jobs.

Owns the records and their meaning. `state_file` writes them. Pure.
"""

from __future__ import annotations

import re

from hegmd.protocol.record import Record, field


class LeaseRecord(Record):
    """A lease, from its request to its end."""

    number: int = field("the number in its id; counted up from 1 and never used again")
    name: str | None = field("its name", default=None)
    gpu: str | None = field("the GPU that was asked for, or that was chosen; nil while none is chosen", default=None)
    size_bytes: int = field("how much memory is kept")
    priority: int = field("jobs of lower priority leave for it")
    uid: int = field("whose it is")
    is_admin: bool = field("whether its user may act on the jobs of every user", default=False)
    since_utc: float = field("when it was asked for")
    made_ticks: int = field("the same, in clock ticks since boot")
    boot: str = field("the boot of the kernel in which it was made: it ends with that")
    pid: int | None = field("the process with which it ends", default=None)
    start_ticks: int | None = field("the start time of that process", default=None)
    until_s: float | None = field("when it ends at the latest, in seconds since boot", default=None)
    hold_s: float | None = field("how long it lasts from the moment at which its memory is free", default=None)
    waiter_pid: int | None = field("the process that waits until it is held, without which it is dropped", default=None)
    waiter_ticks: int | None = field("the start time of that process", default=None)
    is_held: bool = field("whether its memory was seen free", default=False)
    keeps_context: bool = field("whether jobs leave for it with their contexts kept if that is enough", default=False)

    @property
    def id(self) -> str:
        """Return what people call it."""
        return f"l{self.number}"

    @property
    def slurm_job(self) -> int | None:
        """Return the Slurm job whose Prolog has made the lease: it gives this name. None for any other."""
        found = re.fullmatch(r"slurm-(\d{1,15})(?:-\d{1,4})?", self.name or "") if self.is_admin else None
        return None if found is None else int(found[1])

    @property
    def ends_with(self) -> str:
        """Return what the lease ends with, in words; empty if it ends by itself or by a release."""
        if self.slurm_job is not None:
            return f"Slurm job {self.slurm_job}"
        return "" if self.pid is None else f"process {self.pid}"

    def __str__(self) -> str:
        return self.id if self.name is None else f"{self.id} ({self.name})"


class QueuedRecord(Record):
    """A job that asked for a GPU: it waits for its start, or was given one. Kept until the job ends."""

    job: int = field("the number of the job")
    gpu: str | None = field("the GPU that was asked for; nil for any", default=None)
    gpu_count: int = field("how many GPUs were asked for", default=1)
    size_bytes: int | None = field("the memory that it says it needs on each", default=None)
    since_utc: float = field("when it was asked for")
    placed: str | None = field("the GPU that it was given; several are separated by commas", default=None)
    placed_s: float | None = field("when it was, by the monotonic clock", default=None)
    has_trained: bool = field("whether it was seen to train since", default=False)


class SuspendedRecord(Record):
    """A job that the sharing suspended, and that it resumes by itself."""

    job: int = field("the number of the job")
    operation: str | None = field("the operation; nil until it has begun", default=None)
    gpu: str | None = field("the GPU that it left", default=None)
    size_bytes: int | None = field("the memory that it left", default=None)
    since_utc: float = field("when that was decided")
    turn_s: float = field("how long its present turn had lasted", default=0.0)
    why: str = field("for whom, in words")


class SharingState(Record):
    """The whole state."""

    next_lease: int = field("the number of the next lease", default=1)
    leases: tuple[LeaseRecord, ...] = field("oldest first", default=())
    queue: tuple[QueuedRecord, ...] = field("oldest first", default=())
    suspended: tuple[SuspendedRecord, ...] = field("oldest first", default=())
