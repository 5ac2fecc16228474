"""Nodes without the sharing policy: jobs start in the order in which they arrive, and run to their end.

Both take the same snapshots as `hegmd.sharing.policy.decide`. The first in line keeps all others waiting.
"""

from __future__ import annotations

from hegmd.sharing.model import GRANT, PENDING, QUEUED, START, Action, Decision, Snapshot
from hegmd.sharing.room import rooms_of
from hegmd.sharing.wanted import wanted_by, wanted_for


def fifo(snapshot: Snapshot, now: float) -> Decision:
    """Jobs start wherever their memory is free, beside others."""
    return _in_order(snapshot, is_alone=False)


def no_sharing(snapshot: Snapshot, now: float) -> Decision:
    """Each job, and each request for room, has its GPUs for itself."""
    return _in_order(snapshot, is_alone=True)


def _in_order(snapshot: Snapshot, *, is_alone: bool) -> Decision:
    rooms = list(rooms_of(snapshot).values())
    waiting = [wanted_by(job) for job in snapshot.jobs if job.state == QUEUED]
    waiting += [wanted_for(lease) for lease in snapshot.leases if lease.state == PENDING]
    actions: list[Action] = []
    for request in sorted(waiting, key=lambda wanted: wanted.turn[2:]):
        needs_bytes = request.needs_bytes or ()
        fitting = [room for room in rooms if room.now_bytes >= max(needs_bytes) and not (is_alone and room.priorities)]
        if len(fitting) < request.gpu_count:
            break
        chosen = sorted(fitting, key=lambda room: (len(room.priorities), -room.now_bytes))[: request.gpu_count]
        for share, room in enumerate(chosen):
            room.take(request, share, at_once=True)
        kind = GRANT if request.job is None else START
        actions.append(Action(kind, request.id, tuple(room.gpu.id for room in chosen), needs_bytes, "it is the first"))
    return Decision(tuple(actions))
