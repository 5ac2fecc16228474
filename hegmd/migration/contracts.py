"""The interfaces of methods and carriers, as the executor calls them.

A **method** takes a process off its GPU and restores it: the driver's checkpoint, or records for simulated GPUs. It
also makes the reservations for this, since they differ: allocated GPU memory, or an entry in a table. A **carrier**
offloads the bytes of the storages that an agent reports before that, and reloads them afterwards; the method carries
the rest.

Neither decides anything: the machine says when, the plan says which. Each call may be repeated after it succeeded, or
after an earlier run of the daemon began it, and then finds its work done. A failure raises HegmError: Refused means
that nothing has changed, OutOfMemory that memory must be freed first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hegmd.errors import Refused
from hegmd.node.gpu_sets import shared_out
from hegmd.workers.agent_orders import AgentAway
from hegmd.workers.workers import AgentConnection

Progress = Callable[[int], object]
#: Called when the storages are allocated; other processes are resumed then. Returns True if enough memory is free that
#: the reservation need not be released before the process resumes.
Made = Callable[[], bool]
#: A block in which storages are made.
Making = Callable[[], AbstractAsyncContextManager[Made]]


class OutOfMemory(Refused):
    """Too little GPU memory is free for the reservation. Nothing has changed, and the call can be retried."""


class DriverOutOfMemory(OutOfMemory):
    """A driver call found no GPU memory for itself. Nothing has changed, including the process's reservation."""


class NoContext(DriverOutOfMemory):
    """There is no GPU memory for the context that would copy. The process can copy its bytes itself."""


class GrewBeyondPlan(Refused):
    """The process uses more GPU memory than planned. It was not changed: the new size must first be on disk."""

    def __init__(
        self, pid: int, planned_bytes: int, driver_bytes: int, driver_bytes_by_gpu: tuple[int, ...] = ()
    ) -> None:
        super().__init__(
            f"process {pid} needs {driver_bytes} bytes on its GPU, more than the {planned_bytes} that were reserved",
            "wait: hegmd tries again with a larger reservation",
            {"pid": pid, "planned_bytes": planned_bytes, "driver_bytes": driver_bytes},
        )
        self.driver_bytes = driver_bytes
        self.driver_bytes_by_gpu = driver_bytes_by_gpu


@dataclass(frozen=True, slots=True)
class Respawn:
    """The differences for a process that a restart starts."""

    set: Mapping[str, str] = field(default_factory=dict[str, str])
    unset: tuple[str, ...] = ()
    python: str | None = None


class Rank(NamedTuple):
    """A rank of a job that restarts together: its name in the operation, its number, its target GPU."""

    name: str
    number: int
    target_gpu: str | None


@dataclass(frozen=True, slots=True)
class MigratedProcess:
    """The process that is migrated, as its operation knows it now. GPUs have their names, such as gpu0.

    A process on several GPUs has a place of several names, such as `gpu0,gpu1` (`hegmd.node.gpu_sets`).
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
    #: Bytes of the storages that its agent offloads; the reservation for them; the driver's reservation besides.
    size_bytes: int = 0
    storage_reservation_bytes: int = 0
    driver_bytes: int = 0
    #: The agent's own part of the storages' reservation.
    agent_overhead_bytes: int = 0
    #: Driver bytes on each of several GPUs, in their order.
    driver_bytes_by_gpu: tuple[int, ...] = ()
    #: Reservations for its storages on each of several GPUs, in their order, if a carrier moves them.
    storage_bytes_by_gpu: tuple[int, ...] = ()
    #: The devices of a process on several GPUs that a copy session serves; None for the whole process.
    device: int | None = None
    #: True if the process keeps its CUDA context on its GPU. Also the GPU memory that should remain there, None if
    #: unknown.
    keeps_context: bool = False
    stays_bytes: int | None = None
    #: True if its storages only fit in rounds, as its carrier frees memory.
    in_rounds: bool = False
    #: True if memory on the GPU that it leaves is to be reserved for a rollback.
    keeps_reservation: bool = True
    #: Whether memory on its target is taken only when it has left: until then another rank of its job has that.
    reserves_late: bool = False
    #: True for a rank with communicators: an inspection leaves it locked until `unlock`.
    stays_locked: bool = False
    #: True if it resumes as soon as it has its bytes, independent of other processes and of an image.
    goes_on: bool = False
    #: UUIDs of all GPUs of the node on which it was taken off, its own first, where that was not this one.
    source_gpu_uuids: tuple[str, ...] = ()
    #: True if its former GPU is unknown: the driver restores it there, and that may be any.
    gpu_unknown: bool = False
    #: For a restart: its owner, its `hegmctl run`, and what differs for the successor.
    uid: int | None = None
    run: str | None = None
    respawn: Respawn = Respawn()
    #: For a restart: identifies one start of its operation, such as that of a rollback.
    start: str = ""
    #: For a restart of ranks: its rank, and all ranks including itself.
    rank: int | None = None
    ranks: tuple[Rank, ...] = ()
    #: Its agent, if one has connected since the daemon was started.
    agent: AgentConnection | None = None

    @property
    def owner_key(self) -> tuple[int, int]:
        return self.pid, self.start_ticks

    def needs(self, place: str | None) -> dict[str, int]:
        """Return what it needs on each GPU of that place in addition to its storages."""
        return shared_out(place, self.driver_bytes_by_gpu, self.driver_bytes)

    def storages(self, place: str | None) -> dict[str, int]:
        """Return the reservation for its storages on each GPU of that place. Later growth may be on any of them."""
        more_bytes = max(0, self.storage_reservation_bytes - sum(self.storage_bytes_by_gpu))
        shares = tuple([share_bytes + more_bytes for share_bytes in self.storage_bytes_by_gpu])
        return shared_out(place, shares, self.storage_reservation_bytes)

    def wholes(self, place: str | None) -> dict[str, int]:
        """Return all that it needs on each GPU of that place."""
        storages = self.storages(place)
        return {gpu: driver_bytes + storages[gpu] for gpu, driver_bytes in self.needs(place).items()}

    @property
    def worker(self) -> AgentConnection:
        """Its agent. Raises AgentAway."""
        if self.agent is None:
            raise AgentAway(self.pid, "it has not connected since hegmd was started")
        return self.agent


class CheckpointResult(NamedTuple):
    """The result of a checkpoint."""

    #: Memory reserved for the process on the GPU that it left; None if it still has all its memory there.
    reserved_bytes: int | None = None
    #: GPU memory that it had when it was checkpointed, with a margin; None if it was not measured.
    driver_bytes: int | None = None
    #: The part of that on each of several GPUs, in their order.
    driver_bytes_by_gpu: tuple[int, ...] = ()
    #: With keep-context, what it has on its GPU now; None if the vendor's library does not say.
    stays_bytes: int | None = None


class ReplacedBy(NamedTuple):
    """A new process has replaced it: which, and where."""

    gpu: str
    pid: int
    start_ticks: int
    token: str
    run: str | None
    boundary: int
    #: True if it comes from an earlier start than the present one, which its supervisor retried.
    is_earlier: bool = False


def start_key(kind: str, heading: str, goals: Sequence[str | None], failed: int = 0) -> str:
    """Return the key that identifies one start of an operation, after so many that failed in this direction."""
    return f"{kind} {heading}{failed or ''} {' '.join(map(str, goals))}"


def goal_of_start(key: str) -> str:
    """Return the target of the only process of that start."""
    return key.rpartition(" ")[2]


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """Nothing needs to be restored: the successor has finished its training."""


class ProcessState(NamedTuple):
    """The state of a process as far as the method knows it."""

    #: The GPU that it is on; None when it is off all of them.
    gpu: str | None
    #: True while a call works on it, so that its state is about to change.
    busy: bool = False
    #: For a rank with communicators: whether the driver holds it locked.
    locked: bool = False
    #: Why it can never be restored; empty if it can.
    failed: str = ""


@dataclass(slots=True, eq=False, repr=False)
class OverlappedCopy:
    """The bytes that were copied during a driver call, and the time that took."""

    size_bytes: int = 0
    took_s: float = 0.0


class Method(Protocol):
    """A way to take a process off its GPU and to restore it."""

    name: str

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        """Reserve that much there for it, in total. Raises NoRoom or another HegmError; then nothing changed."""
        ...

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        """Release its reservation there. Does nothing if there is none."""
        ...

    def reservations(self, subject: MigratedProcess) -> Mapping[str, int]:
        """Return its reservations by GPU, including its own memory on its present GPU."""
        ...

    def note_size(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Record the bytes that its agent counted on its GPU."""
        ...

    async def lock(self, subject: MigratedProcess) -> None:
        """Keep it from making CUDA calls until it is checkpointed or unlocked. Raises GrewBeyondPlan; it runs then."""
        ...

    async def unlock(self, subject: MigratedProcess) -> None:
        """Let a process that stayed on its GPU make CUDA calls again. Does nothing if it can."""
        ...

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        """Take it off its GPU. Raises GrewBeyondPlan."""
        ...

    async def restore(self, subject: MigratedProcess, gpu: str) -> str | ReplacedBy | TrainingFinished | None:
        """Restore it on that GPU; its reservation there becomes its own. Raises OutOfMemory before it is too late.

        Returns the GPU that it is on, if that could not be chosen, or the process that replaced it.
        """
        ...

    def storage_allocation(self, subject: MigratedProcess) -> AbstractAsyncContextManager[Made]:
        """Run a block in which its storages are allocated: their reservation on its GPU becomes its own.

        No other process should get the memory until the yielded callable is called. If the process resumes at once, the
        reservation may stay until `verify`, if both fit.
        """
        ...

    async def verify(self, subject: MigratedProcess) -> None:
        """Wait until it is confirmed on the GPU where it is expected."""
        ...

    async def note_resumed(self, subject: MigratedProcess) -> None:
        """Record that it passed a boundary after its restore. Raises AgentAway if it has exited since."""
        ...

    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        """Return the true state. Finishes a call that an earlier caller left incomplete, if that is safe."""
        ...


class Carrier(Protocol):
    """A way for the bytes of an agent's storages out of the process and back."""

    name: str

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Reserve memory for that many bytes, in total. Raises HegmError; then the former reservation stays."""
        ...

    async def release(self, subject: MigratedProcess) -> None:
        """Release that memory. Does nothing if there is none."""
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
        """Prepare the copies, including their GPU memory, before the process is reserved for. Raises HegmError."""
        ...

    async def await_successor(self, subject: MigratedProcess, on_progress: Progress) -> bool:
        """Wait, while the process trains, until its successor is ready. Returns True if it is.

        Bounded, and may be cancelled. `on_progress` is called as the wait lasts.
        """
        ...

    def doing(self, subject: MigratedProcess) -> str | None:
        """Return what it waits for and for how long, in words; None if nothing is."""
        ...

    async def abandon(self, subject: MigratedProcess) -> None:
        """Release all GPU memory except the reservations."""
        ...

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        """Move the bytes from the process to that memory, and return their number."""
        ...

    def is_staged(self, subject: MigratedProcess) -> bool:
        """True if offloaded bytes must still be copied to their final place, which `overlap_checkpoint` does."""
        ...

    def staged(self, subject: MigratedProcess) -> OverlappedCopy | None:
        """Return how many of the offloaded bytes are on the process's GPU or being copied there; None if none.

        Its duration is known at the latest when the bytes are reloaded.
        """
        ...

    def overlap_checkpoint(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """During the block, in which the process is taken off its GPU, move its bytes to their final place.

        They are there when the block is over. Raises HegmError, and they are where they were. Fine when they are there.
        """
        ...

    def overlap_restore(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """Copy the bytes towards the process during the block, in which the process is restored.

        The copy may continue after the block; `reload` waits for it. A failed copy is no error and does not affect the
        block.
        """
        ...

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        """Reload the bytes and return how many. Storages are allocated only in blocks of `making`.

        If the process resumes at once, memory held besides may stay until `resumed`, if both fit.
        """
        ...

    async def resumed(self, subject: MigratedProcess) -> None:
        """Release what is still reserved, once its thread runs. Raises nothing; does nothing if nothing is reserved."""
        ...


class NoCopy:
    """Base class of carriers whose bytes are in their final place as soon as they have left the process."""

    async def await_successor(self, subject: MigratedProcess, on_progress: Progress) -> bool:
        """Return False: there is no successor."""
        return False

    def doing(self, subject: MigratedProcess) -> str | None:
        return None

    def is_staged(self, subject: MigratedProcess) -> bool:
        return False

    def staged(self, subject: MigratedProcess) -> OverlappedCopy | None:
        return None

    async def resumed(self, subject: MigratedProcess) -> None:
        """Nothing is held besides it."""

    def overlap_checkpoint(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """They are where they may stay."""
        return nullcontext(OverlappedCopy())

    def overlap_restore(self, subject: MigratedProcess) -> AbstractAsyncContextManager[OverlappedCopy]:
        """They are where they are carried from."""
        return nullcontext(OverlappedCopy())
