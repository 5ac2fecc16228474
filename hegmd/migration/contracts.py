"""What methods and carriers are, as the performer of operations calls them.

A **method** takes a process off its GPU and brings it back: the driver's own checkpoint, or books for GPUs that are
only simulated. It also holds the room that this needs, because what room is differs: video memory that is really taken,
or a line in a book. A **carrier** takes the bytes of the storages that an agent vouches for out of the process before
that, and puts them back after; what it leaves, the method carries.

Neither decides anything: when what is done is the machine's, which of them is the plan's. Each call may come a second
time after it was done, or after an earlier run of the daemon began it, and finds its work done. One that fails raises
HegmError: Refused says that nothing has changed, NoRoom that room has to be found first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from hegmd.errors import Refused
from hegmd.node.gpu_sets import shared_out
from hegmd.workers.agent_orders import AgentAway
from hegmd.workers.workers import AgentConnection

__all__ = [
    "DriverOutOfMemory",
    "OverlappedCopy",
    "Carrier",
    "CheckpointResult",
    "Made",
    "Making",
    "Method",
    "OutOfMemory",
    "GrewBeyondPlan",
    "TrainingFinished",
    "Progress",
    "Rank",
    "ReplacedBy",
    "Respawn",
    "ProcessState",
    "MigratedProcess",
]

Progress = Callable[[int], object]
#: Called when storages are made: nobody is held still from then on. Whether there is so much room that what is held
#: besides need not be given back before the process goes on.
Made = Callable[[], bool]
#: A block in which storages are made.
Making = Callable[[], AbstractAsyncContextManager[Made]]


class OutOfMemory(Refused):
    """The room that is needed is not there now. Nothing has changed, and it can be asked again when there is some."""


class DriverOutOfMemory(OutOfMemory):
    """A call of the driver found no memory for itself. Nothing has changed, the process's own room included."""


class GrewBeyondPlan(Refused):
    """The process has more on its GPU than was planned for. It was left as it was: this has to be on disk first."""

    def __init__(
        self, pid: int, planned_bytes: int, driver_bytes: int, driver_bytes_by_gpu: tuple[int, ...] = ()
    ) -> None:
        super().__init__(
            f"process {pid} has come to need {driver_bytes} bytes on its GPU, and {planned_bytes} were planned for",
            "it is tried again with as much room",
            {"pid": pid, "planned_bytes": planned_bytes, "driver_bytes": driver_bytes},
        )
        self.driver_bytes = driver_bytes
        self.driver_bytes_by_gpu = driver_bytes_by_gpu


@dataclass(frozen=True, slots=True)
class Respawn:
    """What is different for a process that is started anew."""

    set: Mapping[str, str] = field(default_factory=dict[str, str])
    unset: tuple[str, ...] = ()
    python: str | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """One of several that are started again together: its name in the operation, its number, where it is to be."""

    name: str
    number: int
    target_gpu: str | None


@dataclass(frozen=True, slots=True)
class MigratedProcess:
    """The process that is moved, as its operation knows it now. GPUs are named as people name them, such as gpu0.

    One that is on several is at a place of several, such as `gpu0,gpu1` (`hegmd.node.gpu_sets`).
    """

    operation: str
    name: str
    pid: int
    start_ticks: int
    #: The GPU that it is on; None while it is off all of them.
    gpu: str | None
    #: The GPU that it is to be on; None to be off all of them.
    target_gpu: str | None
    #: The GPU that it was taken off last.
    previous_gpu: str | None
    #: Bytes of the storages that its agent vouches for; room that is needed for them; what is needed besides them.
    size_bytes: int = 0
    storage_reservation_bytes: int = 0
    driver_bytes: int = 0
    #: Of the room for its storages, what its agent takes besides them.
    agent_overhead_bytes: int = 0
    #: Of one on several GPUs: which part of that each of its devices needs, in their order.
    driver_bytes_by_gpu: tuple[int, ...] = ()
    #: Of one on several GPUs whose storages are carried: room for those of each device, in their order.
    storage_bytes_by_gpu: tuple[int, ...] = ()
    #: Whether there is not room for all of its storages before its carrier gives memory back.
    in_rounds: bool = False
    #: Whether the room on the GPU that it leaves is to be kept for the way back.
    keeps_reservation: bool = True
    #: Whether it goes on as soon as it has its bytes, whatever becomes of others and of an image.
    goes_on: bool = False
    #: UUIDs of all GPUs of the node on which it was taken off, its own first, where that was not this one.
    source_gpu_uuids: tuple[str, ...] = ()
    #: Whether nobody knows on which GPU the driver had it: it comes back there, and that may be any.
    gpu_unknown: bool = False
    #: Of a restart: its owner, the `hegmctl run` that it belongs to, and what is different for who goes on.
    uid: int | None = None
    run: str | None = None
    respawn: Respawn = Respawn()
    #: Of a restart: what tells one start of its operation from others, such as that of the way back.
    start: str = ""
    #: Of a restart of ranks: which of them it is, and all of them, itself among them.
    rank: int | None = None
    ranks: tuple[Rank, ...] = ()
    #: Its agent, if it has one that has attended since the daemon was started.
    agent: AgentConnection | None = None

    @property
    def owner_key(self) -> tuple[int, int]:
        """Its identity."""
        return self.pid, self.start_ticks

    def needs(self, place: str | None) -> dict[str, int]:
        """What it needs on each GPU of that place besides its storages."""
        return shared_out(place, self.driver_bytes_by_gpu, self.driver_bytes)

    def storages(self, place: str | None) -> dict[str, int]:
        """The room for its storages on each GPU of that place. What has come since they were counted may be on any."""
        more_bytes = max(0, self.storage_reservation_bytes - sum(self.storage_bytes_by_gpu))
        shares = tuple([share_bytes + more_bytes for share_bytes in self.storage_bytes_by_gpu])
        return shared_out(place, shares, self.storage_reservation_bytes)

    def wholes(self, place: str | None) -> dict[str, int]:
        """All that it needs on each GPU of that place."""
        storages = self.storages(place)
        return {gpu: driver_bytes + storages[gpu] for gpu, driver_bytes in self.needs(place).items()}

    @property
    def worker(self) -> AgentConnection:
        """Its agent. Raises AgentAway."""
        if self.agent is None:
            raise AgentAway(self.pid, "it has not attended since hegmd was started")
        return self.agent


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """What a checkpoint came to."""

    #: Room that is held for the process on the GPU that it left; None if all that it had there is still its own.
    reserved_bytes: int | None = None
    #: What it had on that GPU when it was taken off, with a margin; None if nothing was measured.
    driver_bytes: int | None = None
    #: Of one on several GPUs: the part of that which each of its devices had, in their order.
    driver_bytes_by_gpu: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplacedBy:
    """Another process goes on in its place: where, and who it is."""

    gpu: str
    pid: int
    start_ticks: int
    token: str
    run: str | None
    boundary: int
    #: Whether it comes of an earlier start than the one that is wanted now: its supervisor tries again by itself.
    is_earlier: bool = False


def start_key(kind: str, heading: str, goals: Sequence[str | None]) -> str:
    """What tells one start of an operation from its others."""
    return f"{kind} {heading} {' '.join(map(str, goals))}"


def goal_of_start(key: str) -> str:
    """Where the only process of that start was to be."""
    return key.rpartition(" ")[2]


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """There is nothing to come back for: the process that went on has come to the end of what it was for."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """How it stands with a process by the method's own knowledge."""

    #: The GPU that it is on; None when it is off all of them.
    gpu: str | None
    #: Whether something is being done to it this moment, so that none of this lasts.
    busy: bool = False
    #: Whether it can never be brought back any more; then why.
    failed: str = ""


@dataclass(slots=True)
class OverlappedCopy:
    """What was copied beside a step of the driver, as far as it is over."""

    size_bytes: int = 0
    took_s: float = 0.0


class Method(Protocol):
    """One way of taking a process off its GPU and of bringing it back."""

    name: str

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        """Hold so much there for it from now on, in all. Raises NoRoom or another HegmError with nothing changed."""
        ...

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        """Hold nothing there for it any more. Fine when nothing is held."""
        ...

    def reservations(self, subject: MigratedProcess) -> Mapping[str, int]:
        """What is held for it, by GPU, its own share of the GPU that it is on included."""
        ...

    def note_size(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Its agent has counted so many bytes on the GPU that it is on."""
        ...

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        """Take it off its GPU. Raises GrewBeyondPlan."""
        ...

    async def restore(self, subject: MigratedProcess, gpu: str) -> str | ReplacedBy | TrainingFinished | None:
        """Bring it back on that GPU; what is held for it there becomes its own. Raises NoRoom before it is too late.

        Gives the GPU that it is on, where that was not to be chosen, or the process that goes on in its place.
        """
        ...

    def storage_allocation(self, subject: MigratedProcess) -> AbstractAsyncContextManager[Made]:
        """In the block its storages are made: the room that is held for them on its GPU, until then, becomes its own.

        Nobody else is to get it meanwhile, as far as that can be seen to, until the block's value is called. Of one
        that goes on at once it may be held until `verify`, where there is room for both.
        """
        ...

    async def verify(self, subject: MigratedProcess) -> None:
        """Wait until it is seen to run on the GPU that it is believed to be on."""
        ...

    async def note_resumed(self, subject: MigratedProcess) -> None:
        """It was seen at a boundary beyond the one that it was brought back at. Raises AgentAway where that is too late
        to count: it has ended since."""
        ...

    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        """How it really stands. A step that an earlier caller left half way is finished, as far as that is safe."""
        ...


class Carrier(Protocol):
    """One way for the bytes of an agent's storages out of its process and back."""

    name: str

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Hold memory for so many bytes from now on, in all. Raises HegmError; what it held before stays then."""
        ...

    async def release(self, subject: MigratedProcess) -> None:
        """Give that memory back. Fine when there is none."""
        ...

    def held_bytes(self, subject: MigratedProcess) -> int:
        """For how many bytes of storages it holds memory."""
        ...

    async def fetch(self, subject: MigratedProcess, on_progress: Progress) -> None:
        """Have the bytes, which may have been put on disk meanwhile, where they can be carried from.

        Fine when they are. Raises HegmError; then they are where they were.
        """
        ...

    async def prepare(self, subject: MigratedProcess) -> None:
        """Be ready to carry, with all that this takes on GPUs, before room is relied upon. Raises HegmError."""
        ...

    async def await_successor(self, subject: MigratedProcess, on_progress: Progress) -> bool:
        """Wait, while the process trains on, until another that is to go on in its place is ready; whether it is.

        Bounded, and may be cancelled. `on_progress` is called as it takes longer.
        """
        ...

    def doing(self, subject: MigratedProcess) -> str | None:
        """What is waited for so, and for how long, in words; None while nothing is."""
        ...

    async def abandon(self, subject: MigratedProcess) -> None:
        """Have nothing on any GPU any more but the memory that is held."""
        ...

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        """Have the bytes in that memory and no longer in the process; how many."""
        ...

    def is_staged(self, subject: MigratedProcess) -> bool:
        """Whether bytes that were taken out have still to come to where they may stay: `settling` does it."""
        ...

    def staged(self, subject: MigratedProcess) -> OverlappedCopy | None:
        """What of bytes that are out is on the GPU that the process has come to, or on its way; None where nothing is.

        How long it took is in it at the latest when they are back.
        """
        ...

    def overlap_checkpoint(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """Beside the block, in which the process is taken off its GPU, its bytes come to where they may stay.

        They are there when the block is over. Raises HegmError, and they are where they were. Fine when they are there.
        """
        ...

    def overlap_restore(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """Beside the block, in which the process is restored, its bytes come nearer to it, as far as that can be.

        They may do so still when it is over: `put_back` waits for them. What of that comes to nothing is no failure,
        and nothing of it is in the way of the block.
        """
        ...

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        """Have the bytes in the process again; how many. Its storages are made in blocks of `making` alone.

        What is held beside one that goes on at once may be so until `gone_on`, where there is room for both.
        """
        ...

    async def resumed(self, subject: MigratedProcess) -> None:
        """Its thread goes on: give back what was still held beside it. Raises nothing, and is fine where nothing is."""
        ...
