"""Operations made of processes that were found standing: suspended ones, as if an operation of before had left them so.

Owns what is believed of such a process, which is what its agent says of it. Pure. From there the machine knows the way:
each is looked at first, and a resume brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable

from hegmd.migration.course import SUSPENDED as RESTING
from hegmd.migration.operation import SUSPEND, Operation, Worker
from hegmd.protocol.record import Record, field


class Standing(Record):
    """A process that stands, by its agent."""

    pid: int = field("process id")
    start_ticks: int = field("start time in clock ticks since boot")
    uid: int = field("its owner")
    token: str = field("what its agent calls itself")
    rank: int | None = field("its rank in a distributed job", default=None)
    world_size: int | None = field("how many ranks the job has", default=None)
    gpu: str | None = field("the GPU that it was on or was started for, if anybody knows", default=None)
    boundary: int = field("batch boundaries that it has passed")
    size_bytes: int = field("bytes of the storages that its agent vouches for")
    held_bytes: int = field("bytes of these that are out of the process")


def adopted(op_id: str, standing: Iterable[Standing], *, utc: float) -> Operation:
    """A suspended operation on these processes, which are those of one job."""
    found = tuple(standing)
    return Operation(
        id=op_id,
        kind=SUSPEND,
        phase=RESTING,
        lockstep=max((one.world_size or 1 for one in found), default=1) > 1,
        workers=tuple([_worker(one) for one in found]),
        owner_uid=found[0].uid,
        created_utc=utc,
    )


def _worker(one: Standing) -> Worker:
    return Worker(
        name=str(one.pid),
        pid=one.pid,
        start_ticks=one.start_ticks,
        token=one.token,
        rank=one.rank,
        was_on=one.gpu,
        origin=None,
        goal=None,
        at=None,
        size_bytes=one.size_bytes,
        rooms={},
        boundary=one.boundary,
        asked=True,
        parked=True,
        out=one.held_bytes > 0,
        touched=True,
        unsure=True,
        recount=True,
    )
