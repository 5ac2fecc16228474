"""The effects of an operation, as data: the machine emits effects, and the runner performs them.

Owns the names, the fields, the events that end each effect, and what happens to one that is cancelled:
- cut: it only reads; drop it, no event is needed;
- finish: it runs to its end, shielded, and its result counts;
- undo: it is dropped, and the effect named in its docstring reverses it.

The restore of a restart may end with `training-ended` instead: then the worker has no running effect left.

Every effect is for one worker and may be requested twice; if its work is done, it succeeds at once. `failed` can end
each of them too. Nothing is performed before the journal has it on disk.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hegmd.migration.machine.tagged import Tagged
from hegmd.protocol.record import field

CUT, FINISH, UNDO = "cut", "finish", "undo"


class Effect(Tagged):
    """Base of all effects."""

    ends: ClassVar[tuple[str, ...]] = ()
    on_cancel: ClassVar[str] = FINISH
    #: True if the worker's agent or the driver performs it; False if the daemon does so by itself.
    in_worker: ClassVar[bool] = True

    number: int = field("counts the effects of the operation; the event that ends it carries it")
    worker: str = field("name of the worker")
    cause: int = field("number of the operation's event that led to it")

    def __init_subclass__(
        cls, *, tag: str = "", ends: tuple[str, ...] = (), on_cancel: str = FINISH, in_worker: bool = True
    ) -> None:
        super().__init_subclass__(tag=tag)
        cls.ends = (*ends, "failed") if ends else ()
        cls.on_cancel = on_cancel
        cls.in_worker = in_worker

    def ending(self) -> dict[str, Any]:
        """Return the fields that every event ending this effect has."""
        return {"effect": self.number, "worker": self.worker, "cause": self.tag}


class Reserve(Effect, tag="reserve", ends=("reserved",), on_cancel=FINISH, in_worker=False):
    """Reserve that much memory on a GPU for the worker, in total, including an existing reservation."""

    gpu: str = field("where")
    size_bytes: int = field("how much, in all")


class ReleaseReservation(
    Effect, tag="release-reservation", ends=("reservation-released",), on_cancel=FINISH, in_worker=False
):
    """Release all memory reserved for the worker on a GPU, by the operation or by the worker itself."""

    gpu: str = field("where")


class ReservePool(Effect, tag="reserve-pool", ends=("pool-reserved",), on_cancel=FINISH, in_worker=False):
    """Reserve that many bytes of the pool for the worker, in total, with their pages present."""

    size_bytes: int = field("how many, in all")


class ReleasePool(Effect, tag="release-pool", ends=("pool-released",), on_cancel=FINISH, in_worker=False):
    """Release the worker's pool memory. Requested only when no process needs the bytes."""


class AwaitSuccessor(Effect, tag="await-successor", ends=("successor-awaited",), on_cancel=CUT):
    """For a restart: let the worker train until its successor has finished its slow imports.

    It also succeeds if no successor is started, or if this takes too long.
    """


class Survey(Effect, tag="survey", ends=("surveyed",), on_cancel=CUT):
    """Ask the agent for its boundary count and for the bytes that it vouches for."""


class Park(Effect, tag="park", ends=("parked", "overran"), on_cancel=UNDO):
    """Park the training thread at a boundary. Undone by `withdraw`.

    Replaces a running or finished park of the same worker, whose thread then runs on to this boundary.
    """

    at: int | None = field("at the boundary of this count, for ranks that have to stop together; nil for the next")
    limit_s: float = field("the time limit; after it the agent withdraws the order itself, and this effect has failed")


class Withdraw(Effect, tag="withdraw", ends=("withdrawn",), on_cancel=FINISH):
    """Cancel a park, whether the thread is parked already or not: afterwards the thread runs."""


class Offload(Effect, tag="offload", ends=("offloaded",), on_cancel=FINISH):
    """Copy the storages' bytes to the worker's bytes of the pool, then free them in the process."""


class Disconnect(Effect, tag="disconnect", ends=("disconnected",), on_cancel=FINISH):
    """Take the communicators with other ranks down. Each rank waits for the others, which get the same order.

    `reconnect` undoes it, even if it was done in part.
    """

    limit_s: float = field("how long it may take; over it this has failed")
    abort: bool = field("abort them even if the library can suspend them; for an image", default=False)


class LockRank(Effect, tag="lock", ends=("locked", "grew"), on_cancel=FINISH):
    """Lock the process by the driver, so that it makes no CUDA call, and measure its GPU memory.

    Requested for every rank before the first is checkpointed. Undone by `unlock`.
    """


class UnlockRank(Effect, tag="unlock", ends=("unlocked",), on_cancel=FINISH):
    """Let the driver unlock the process, which has stayed on its GPU."""


class Checkpoint(Effect, tag="checkpoint", ends=("checkpointed", "grew"), on_cancel=FINISH):
    """Checkpoint the rest of the process by the driver. Does nothing for a simulated one."""


class Hold(Effect, tag="hold", ends=("held",), on_cancel=CUT, in_worker=False):
    """Keep the job quiesced for the requested time. Requested of one worker, for the whole job."""


class Dump(Effect, tag="dump", ends=("dumped",), on_cancel=UNDO, in_worker=False):
    """Write the image of the whole job. Requested of one worker, for the whole job.

    If the job is to end, the image is also verified and named. If it trains on, only the processes are written, and
    `seal` does the rest.

    When dropped, it leaves no image, and the processes as they were: parked, with their agents reconnecting.
    """

    find: bool = field("only check whether the image is complete, and release what is left of it if not")


class Seal(Effect, tag="seal", ends=("sealed",), on_cancel=UNDO, in_worker=False):
    """Write the bytes of a job that trains on from the pool to its image, verify it and name it.

    Requested of one worker, for the whole job. A damaged image is removed. Undone by `scrap`.
    """


class RemoveImageFiles(Effect, tag="scrap", ends=("scrapped",), on_cancel=FINISH, in_worker=False):
    """Remove the incomplete files of an image that is no longer needed."""


class End(Effect, tag="end", ends=("ended",), on_cancel=FINISH, in_worker=False):
    """End a process whose image is complete. Succeeds once the process has exited."""


class Restore(Effect, tag="restore", ends=("restored",), on_cancel=FINISH):
    """Have the driver restore the process on that GPU. The memory reserved there becomes the process's own."""

    gpu: str = field("where")


class Reload(Effect, tag="reload", ends=("reloaded",), on_cancel=FINISH):
    """Make the storages again from the worker's bytes of the pool, which stay."""


class Reconnect(Effect, tag="reconnect", ends=("reconnected",), on_cancel=FINISH):
    """Connect the communicators with other ranks again. Each rank waits for the others, which get the same order."""

    generation: int = field("the same for all ranks, and larger than in every earlier one of this job")
    limit_s: float = field("how long it may take; over it this has failed")


class Release(Effect, tag="release", ends=("released",), on_cancel=FINISH):
    """Resume the training thread. Ends when the agent has the order, without waiting for its effect."""

    abort: bool = field("whether its communicators are given up, because a rank of them has ended", default=False)


class Verify(Effect, tag="verify", ends=("verified",), on_cancel=CUT):
    """Wait until the worker has passed more than that many boundaries."""

    beyond: int = field("the count at which it stood")


class Inspect(Effect, tag="inspect", ends=("inspected",), on_cancel=CUT):
    """Find out the true state of the worker. A process that has exited ends it with the event `worker-exited`."""
