"""Makes suspended operations of orphaned processes, as if an earlier operation had left them so.

Owns what is known about such a process, which its agent, the driver or both report, and the upper bound of the memory
that it needs if no one measured it. Pure. The machine inspects each process first, and a resume restores it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hegmd.errors import Refused
from hegmd.memory.sizes import LAST_BYTES, UNSEEN_BYTES
from hegmd.migration.machine.next_effects import SUSPENDED as RESTING
from hegmd.migration.machine.operation import SIMULATED, SUSPEND, JobProcess, Operation
from hegmd.protocol.operations import BY_DRIVER, HOST, PEER, WORKER
from hegmd.protocol.record import Record, field

DRIVER = "driver"


class ParkedProcess(Record):
    """A parked process, as its agent reports it."""

    pid: int = field("process id")
    start_ticks: int = field("start time in clock ticks since boot")
    uid: int = field("its owner")
    token: str = field("the name that its agent reports")
    rank: int | None = field("its rank in a distributed job", default=None)
    world_size: int | None = field("how many ranks the job has", default=None)
    gpu: str | None = field("the GPU that it was on or was started for, if anybody knows", default=None)
    boundary: int = field("batch boundaries that it has passed")
    size_bytes: int = field("bytes of the storages that its agent vouches for")
    held_bytes: int = field("bytes of these that are out of the process")
    method: str = field("the method by which it left its GPU and returns", default=SIMULATED)
    carrier: str = field("by which way its bytes went out", default=WORKER)
    at: str | None = field("the GPU that it is on; nil for none, or a simulated one", default=None)
    driver_bytes: int = field("what it may need on a GPU besides its storages", default=0)
    anywhere: bool = field("whether its former GPU is unknown", default=False)
    communicators: str = field("how its agent disconnects its communicators; empty without any", default="")


class DriverProcess(Record):
    """A process on a real GPU, or off it, by the driver."""

    pid: int = field("process id")
    start_ticks: int = field("start time in clock ticks since boot")
    uid: int = field("its owner")
    name: str = field("short name of the program")
    state: str = field("running, locked or checkpointed")
    gpu: str | None = field("the GPU that it is on; nil when it is checkpointed", default=None)
    driver_bytes: int = field("memory that its restore may need; 0 if it is on its GPU", default=0)


def driver_bytes_bound(own_bytes: int, whole_bytes: Iterable[int | None]) -> int:
    """Return the most memory that a checkpointed process can need on a GPU, if no journal has its size.

    Its GPU memory is now in its own memory, so it had at most `own_bytes` plus what the driver creates again. It also
    had at most the largest of `whole_bytes`, the sizes of the GPUs.
    """
    bound_bytes = own_bytes + UNSEEN_BYTES
    known = [size_bytes for size_bytes in whole_bytes if size_bytes is not None]
    return min(bound_bytes, max(known) - LAST_BYTES) if known else bound_bytes


def on_real_gpu(
    parked: ParkedProcess, driven: DriverProcess, mark: str | None, *, in_video: bool = False
) -> ParkedProcess:
    """Return the process on a real GPU. `mark` is its agent's record of the carrier that offloaded its bytes.

    `in_video` is True if GPU memory with the bytes was found: then they were offloaded by peer.

    Raises Refused if the place of the bytes is unknown. A checkpoint by the driver includes the storages' bytes, unless
    they were offloaded before.
    """
    if parked.held_bytes and mark is None:
        raise Refused(
            f"the agent of process {parked.pid} is from an older release that does not report how its tensors were "
            "offloaded",
            "restore operations.journal in the state directory from a copy, then start hegmd",
            {"pid": parked.pid},
        )
    by_itself = WORKER if mark else PEER if in_video else HOST
    return parked.replace(
        method=DRIVER,
        carrier=by_itself if parked.held_bytes else BY_DRIVER,
        gpu=driven.gpu,
        at=driven.gpu,
        size_bytes=parked.size_bytes if parked.held_bytes else 0,
        driver_bytes=driven.driver_bytes,
        anywhere=driven.gpu is None,
    )


def adopted(op_id: str, parked: Iterable[ParkedProcess], *, utc: float) -> Operation:
    """A suspended operation on these processes, which are those of one job."""
    found = tuple(parked)
    # A group that has lost a rank is never connected again.
    is_whole = all(len(found) >= (one.world_size or 1) for one in found)
    return Operation(
        id=op_id,
        kind=SUSPEND,
        phase=RESTING,
        is_distributed=max((one.world_size or 1 for one in found), default=1) > 1,
        workers=tuple([_worker(one if is_whole else one.replace(communicators="")) for one in found]),
        owner_uid=found[0].uid,
        created_utc=utc,
    )


def adopted_of_driver(op_id: str, driven: DriverProcess, *, utc: float) -> Operation:
    """Make a suspended operation of a process that only the driver reports as locked or checkpointed."""
    worker = JobProcess(
        name=str(driven.pid),
        pid=driven.pid,
        start_ticks=driven.start_ticks,
        token="",
        method=DRIVER,
        carrier=BY_DRIVER,
        first_gpu=driven.gpu,
        origin_gpu=None,
        target_gpu=None,
        gpu=driven.gpu,
        size_bytes=0,
        driver_bytes=driven.driver_bytes,
        gpu_unknown=driven.gpu is None,
        reservations={},
        was_offloaded=True,
        needs_inspection=True,
        recount_memory=True,
    )
    return Operation(id=op_id, kind=SUSPEND, phase=RESTING, workers=(worker,), owner_uid=driven.uid, created_utc=utc)


def _worker(one: ParkedProcess) -> JobProcess:
    return JobProcess(
        name=str(one.pid),
        pid=one.pid,
        start_ticks=one.start_ticks,
        token=one.token,
        method=one.method,
        carrier=one.carrier,
        rank=one.rank,
        first_gpu=one.gpu,
        origin_gpu=None,
        target_gpu=None,
        gpu=one.at,
        size_bytes=one.size_bytes,
        driver_bytes=one.driver_bytes,
        gpu_unknown=one.anywhere,
        reservations={},
        boundary=one.boundary,
        communicators=one.communicators,
        is_connected=None if one.communicators else True,
        park_requested=True,
        is_parked=True,
        offloaded=one.held_bytes > 0,
        was_offloaded=True,
        needs_inspection=True,
        recount_memory=True,
    )
