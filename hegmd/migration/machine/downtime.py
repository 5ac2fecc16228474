"""The downtime of a job: from the first park or driver lock until all its processes run again.

Users ask for this figure, also for an operation that ended under an earlier daemon, so the operation and its journal
keep it. No stage depends on it. Pure.
"""

from __future__ import annotations

from hegmd.migration.machine import effects, events
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import QUIESCE, Operation

# Events that end a failed attempt to park the job. Each says how long the thread was parked.
_ATTEMPTED = events.PassedBoundary | events.Withdrawn | events.Failed


def timed(event: Event, after: Operation, now: float) -> Operation:
    """Update the downtime of the operation. `now` is monotonic: an instant from before a reboot is dropped."""
    if after.parked_since is not None and after.parked_since > now:
        after = after.replace(parked_since=None)
    alone = not any(member.has_agent for member in after.workers)
    resumed = isinstance(event, events.ResumeRequested) and after.kind != QUIESCE  # a quiesced job was parked before
    if resumed:
        return after.replace(parked_since=now, downtime_s=None)
    if after.parked_since is None and _stops(event, after, alone=alone):
        # Count the time of earlier attempts as if the job had been parked without a break.
        before_s = (event.parked_s if isinstance(event, events.Parked) else 0.0) + (after.downtime_s or 0.0)
        return after.replace(parked_since=now - before_s, downtime_s=None)
    if isinstance(event, _ATTEMPTED):
        after = _attempted(event, after, now)
    started = isinstance(event, events.Restored) and event.pid is not None  # a new process was never parked
    goes_on = isinstance(event, events.Restored if alone else (events.Released, events.Withdrawn))
    if after.parked_since is not None and (started or goes_on):
        is_whole = all(member.gpu is not None if alone else not member.is_parked for member in after.live)
        parked_s = now - after.parked_since
        return after.replace(downtime_s=parked_s, parked_since=None if is_whole else after.parked_since)
    return after


def _attempted(
    event: events.PassedBoundary | events.Withdrawn | events.Failed, after: Operation, now: float
) -> Operation:
    """Add the time of a failed attempt to park. Ranks that were parked with it continue to another boundary."""
    if isinstance(event, events.PassedBoundary) and after.parked_since is not None:
        return after.replace(downtime_s=now - after.parked_since, parked_since=None)
    if event.parked_s and after.parked_since is None:
        return after.replace(downtime_s=(after.downtime_s or 0.0) + event.parked_s)
    return after


def _stops(event: Event, after: Operation, *, alone: bool) -> bool:
    """True if the job stops training with this event. Without an agent it does not train from checkpoint to restore."""
    if alone:
        return any(pending.effect == effects.Checkpoint.tag for pending in after.pending)
    return isinstance(event, events.Parked)
