"""The events of an operation, as data: requests, reports of workers, results of effects, deadlines.

Owns the names and fields of the events; machine.py decides what follows from one. A result carries the number of its
effect, so a result that arrives twice, late or after a restart is recognised as obsolete. Progress in bytes is not an
event: it decides nothing, so the runner sends it straight to the clients that follow the operation.
"""

from __future__ import annotations

from collections.abc import Mapping

from hegmd.migration.machine.operation import ImageRequest, Operation
from hegmd.migration.machine.tagged import Tagged
from hegmd.protocol.record import field

# Why an effect failed, as far as the machine distinguishes the causes.
REFUSED, DISCONNECTED, BROKEN, OUT_OF_MEMORY = "refused", "disconnected", "broken", "out-of-memory"
# The driver found no GPU memory for a call of its own. The worker's reservation is unchanged.
DRIVER_OUT_OF_MEMORY = "driver-out-of-memory"


class Event(Tagged):
    """Base of all events."""

    cause: str = field("where it comes from: a request, an effect, an agent or the clock; for the story", default="")


# ---- what people ask -------------------------------------------------------------------------------------------------


class Begin(Event, tag="begin"):
    """Start the planned operation."""


class CancelRequested(Event, tag="cancel-requested"):
    """A client cancelled the operation."""

    by: str = field("who, for the story", default="")


class DropRequested(Event, tag="drop-requested"):
    """For a restart: a client discards the saved state, which no successor uses."""

    by: str = field("who, for the story", default="")


class ResumeRequested(Event, tag="resume-requested"):
    """A client resumes a suspended job."""

    to: Mapping[str, str] = field("the target GPU of each worker, by its name; none if it only waits")
    limit_s: float | None = field("the time limit of all steps together; nil for the limits of the steps", default=None)


class Repurposed(Event, tag="taken-up"):
    """A client requested another operation on a quiesced job: the operation becomes that one, and the job stays parked.

    This is one step, so that the parked job belongs to an operation at every moment.
    """

    into: Operation = field("the operation that it becomes, as planned")


class ImageRequested(Event, tag="image-requested"):
    """A client requested an image of a suspended job."""

    handoff: ImageRequest = field("where to, and for whom")
    limit_s: float | None = field("its time limit; nil for the limit of images", default=None)


# ---- what happens by itself ------------------------------------------------------------------------------------------


class WorkerExited(Event, tag="worker-exited"):
    """The process has ended, for certain: by its pidfd, or by a start time that is not its own."""

    worker: str = field("name of the worker")
    why: str = field("how it ended, as far as is known", default="it ended")
    finished: bool = field("of a restart: whether it finished its training, as its supervisor reports", default=False)
    stateless: bool = field("of a restart: whether its state no longer exists, as after a reboot", default=False)


class TrainingEnded(Event, tag="training-ended"):
    """For a restart: the successor finished its training, whether or not a boundary was seen."""

    worker: str = field("name of the worker")


class SuccessorProgress(Event, tag="came-on"):
    """For a restart: the supervisor or the agent reports the successor's progress."""

    worker: str = field("name of the worker")
    doing: str = field("what it does now")


class AgentLost(Event, tag="agent-lost"):
    """The connection of the worker's agent ended; the process may well live on."""

    worker: str = field("name of the worker")


class AgentBack(Event, tag="agent-back"):
    """An agent attends from that process again, after a break of its connection."""

    worker: str = field("name of the worker")
    token: str = field("what the agent calls itself; another one means that the process has replaced itself")


class DeadlinePassed(Event, tag="deadline-passed"):
    """The instant that the operation names as its deadline is over."""


class Recovered(Event, tag="recovered"):
    """The daemon has restarted and read this operation from its journal. The outcome of running effects is unknown."""


# ---- how effects end -------------------------------------------------------------------------------------------------


class Ending(Event):
    """Base of the events that end an effect."""

    effect: int = field("number of the effect that this ends")
    worker: str = field("name of the worker that it was for")


class Failed(Ending, tag="failed"):
    """The effect failed. `inspect` finds out what it changed."""

    fault: str = field(
        "refused: it was understood and nothing changed; out-of-memory: refused because a GPU has none; disconnected; "
        "or broken: anything else"
    )
    code: str = field("code of the error, as in hegmd/errors.py", default="refused")
    message: str = field("what failed, with numbers")
    hint: str = field("the next step")
    parked_s: float = field("how long its training thread stood for it", default=0.0)


class Reserved(Ending, tag="reserved"):
    """The memory is reserved on the GPU."""


class ReservationReleased(Ending, tag="reservation-released"):
    """Nothing is reserved on the GPU for this worker."""


class PoolReserved(Ending, tag="pool-reserved"):
    """The pages are present and reserved."""


class PoolReleased(Ending, tag="pool-released"):
    """The pages are the node's again."""


class SuccessorAwaited(Ending, tag="successor-awaited"):
    """For a restart: the wait for the successor is over."""

    ready: bool = field("whether it is", default=False)


class Surveyed(Ending, tag="surveyed"):
    """The agent's boundary count and tensor bytes."""

    boundary: int = field("batch boundaries that it has passed")
    size_bytes: int = field("bytes of the storages that it vouches for")


class Parked(Ending, tag="parked"):
    """The training thread is parked at a boundary."""

    boundary: int = field("which one")
    parked_s: float = field("how long it stood until now, in all attempts", default=0.0)


class PassedBoundary(Ending, tag="overran"):
    """The worker passed the boundary that the order to park named, and runs; no order is pending.

    Either the order came too late, or another of its threads was busy.
    """

    boundary: int = field("batch boundaries that it has passed")
    parked_s: float = field("how long its training thread stood there", default=0.0)
    why: str = field("what kept it from being parked; empty if the order came too late", default="")


class Withdrawn(Ending, tag="withdrawn"):
    """No order to park is pending, and the worker's training thread runs."""

    parked_s: float = field("how long it stood for what was asked", default=0.0)


class Offloaded(Ending, tag="offloaded"):
    """The bytes are in the pool and were freed in the process."""

    size_bytes: int = field("how many")


class Disconnected(Ending, tag="disconnected"):
    """The communicators of the rank are down, and so are those of all others."""


class Locked(Ending, tag="locked"):
    """The driver has locked the process, whose GPU memory does not exceed the plan."""


class Unlocked(Ending, tag="unlocked"):
    """The process can make CUDA calls again."""


class Checkpointed(Ending, tag="checkpointed"):
    """The process has no GPU memory; with keep-context, only what it keeps."""

    reserved_bytes: int | None = field(
        "memory reserved for it on the GPU that it left; nil if it still has all of it", default=None
    )
    driver_bytes: int | None = field(
        "what it had there besides its storages, with a margin; nil if it was not measured", default=None
    )
    driver_bytes_by_gpu: tuple[int, ...] = field(
        "of a process on several GPUs: the part of that on each, in order", default=()
    )
    stays_bytes: int | None = field(
        "if it keeps its CUDA context: what it has on its GPU; nil if unknown", default=None
    )


class GrewBeyondPlan(Ending, tag="grew"):
    """The process was not checkpointed: it has more GPU memory than planned, which must be journalled first.

    After the checkpoint its need can no longer be measured.
    """

    driver_bytes: int = field("what it has there besides its storages, with a margin")
    driver_bytes_by_gpu: tuple[int, ...] = field(
        "of a process on several GPUs: the part of that on each, in order", default=()
    )


class Held(Ending, tag="held"):
    """The job was quiesced for the requested time."""


class Dumped(Ending, tag="dumped"):
    """The image of the job is complete, verified and named; if the job trains on, its processes are written."""


class Sealed(Ending, tag="sealed"):
    """The image of a job that trained on is complete, verified and named."""


class ImageFilesRemoved(Ending, tag="scrapped"):
    """Nothing is left of the image."""


class Ended(Ending, tag="ended"):
    """The process has ended, as intended."""


class Restored(Ending, tag="restored"):
    """The process can use its GPU again."""

    landed: str | None = field("its GPU, if it could only be restored on its former one", default=None)
    pid: int | None = field("of a restart: the process that replaces it", default=None)
    start_ticks: int = field("of a restart: its start time in clock ticks since boot", default=0)
    token: str = field("of a restart: the name that its agent reports", default="")
    run: str | None = field("of a restart: the `hegmctl run` that started it", default=None)
    boundary: int = field("of a restart: batch boundaries that it has passed", default=0)
    is_earlier: bool = field(
        "of a restart: whether it comes from a retry of the start before the current one", default=False
    )


class Reloaded(Ending, tag="reloaded"):
    """The bytes are in the process again, and still in the pool."""


class Reconnected(Ending, tag="reconnected"):
    """The communicators of the rank are up again."""


class Released(Ending, tag="released"):
    """The agent has the order to resume the training thread."""


class Verified(Ending, tag="verified"):
    """The training thread has reached a boundary after the one at which it was parked."""

    boundary: int = field("batch boundaries that it has passed")


class Inspected(Ending, tag="inspected"):
    """The true state of a worker, according to its agent, the driver and the daemon."""

    parked: bool = field("whether its training thread is parked")
    boundary: int = field("batch boundaries that it has passed")
    out_bytes: int = field("bytes of its storages that are not in the process now")
    gpu: str | None = field("the GPU that the process is on; nil when it is checkpointed")
    reservations: Mapping[str, int] = field("memory reserved for it now, by GPU, its own included")
    pool_bytes: int = field("bytes of the pool that are held for it now")
    busy: bool = field("whether an order is still under way in it", default=False)
    failed: str = field("why it can never be restored; empty if it can", default="")
    locked: bool = field("of a rank with communicators: whether the driver holds it locked", default=False)
