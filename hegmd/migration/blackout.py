"""How long a job stood: from its first thread's stop, or its first process's lock, until all go on again.

A figure that users ask for, also of an operation that ended under an earlier daemon; so it is in the operation, and
with it in the journal. Decides nothing: no stage looks at it. Pure.
"""

from __future__ import annotations

from hegmd.migration import effects, events
from hegmd.migration.events import Event
from hegmd.migration.operation import QUIESCE, Operation


def timed(event: Event, after: Operation, now: float) -> Operation:
    """The operation with what the event says of that. `now` is monotonic: an instant from before a reboot is none."""
    if after.stood_since is not None and after.stood_since > now:
        after = after.replace(stood_since=None)
    alone = not any(member.has_agent for member in after.workers)
    resumed = isinstance(event, events.ResumeAsked) and after.kind != QUIESCE  # one that was held has stood before
    if resumed or (after.stood_since is None and _stops(event, after, alone=alone)):
        return after.replace(stood_since=now, blackout_s=None)
    started = isinstance(event, events.Restored) and event.pid is not None  # a process that never stood
    if after.stood_since is not None and (started or isinstance(event, events.Restored if alone else events.Released)):
        goes_on = all(member.at is not None if alone else not member.parked for member in after.live)
        stood_s = now - after.stood_since
        return after.replace(blackout_s=stood_s, stood_since=None if goes_on else after.stood_since)
    return after


def _stops(event: Event, after: Operation, *, alone: bool) -> bool:
    """Whether somebody stands from here on: without an agent, that is from the checkpoint to the restore."""
    if alone:
        return any(pending.effect == effects.Checkpoint.tag for pending in after.pending)
    return isinstance(event, events.Parked)
