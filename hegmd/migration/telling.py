"""An operation as people and programs are told of it, from the one that the machine keeps. Pure."""

from __future__ import annotations

from hegmd.migration.operation import Operation
from hegmd.migration.operation import Worker as Member
from hegmd.protocol import operations as told


def description(op: Operation, *, moved_bytes: int = 0, blackout_s: float | None = None) -> told.Operation:
    """How it stands; the two figures are the runner's, who has the clock and the reports."""
    failure = op.failure or op.lacks
    return told.Operation(
        id=op.id,
        kind=op.kind,
        phase=op.phase,
        processes=tuple(process_of(member) for member in op.workers),
        owner_uid=op.owner_uid,
        created_utc=op.created_utc,
        size_bytes=sum(member.carried_bytes for member in op.workers),
        moved_bytes=moved_bytes,
        blackout_s=blackout_s,
        failure=None if failure is None else told.Reason(code=failure.code, message=failure.message, hint=failure.hint),
    )


def process_of(member: Member) -> told.OperationProcess:
    if member.lost:
        state = "lost"
    elif member.gone:
        state = "gone"
    else:
        standing = "parked" if member.parked else "running" if member.at is not None else "off"
        state = "out" if member.out else standing
    return told.OperationProcess(
        pid=member.pid,
        rank=member.rank,
        began_on=member.was_on,
        gpu=member.at,
        to=member.goal,
        size_bytes=member.carried_bytes,
        state=state,
    )
