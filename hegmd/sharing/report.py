"""The public records of sharing: jobs, leases and steps, made from one snapshot of the node. Pure."""

from __future__ import annotations

from collections.abc import Callable

from hegmd.protocol import sharing as protocol
from hegmd.sharing import model
from hegmd.sharing.records import LeaseRecord
from hegmd.sharing.view import JobView, View

_STATES = {
    model.QUEUED: protocol.QUEUED,
    model.SUSPENDED: protocol.SUSPENDED,
    model.USER_SUSPENDED: protocol.SUSPENDED,
    model.LEAVING: protocol.MOVING,
}
_BY_USER = "its user"


def lease_view(
    lease: LeaseRecord, until_utc: float | None, view: View | None, waiting: model.WaitReason | None
) -> protocol.Lease:
    """Return the public record of a lease. `until_utc` is its latest end."""
    seen = () if view is None else view.snapshot.leases
    used_bytes = next((one.used_bytes for one in seen if one.id == lease.id), 0)
    gpu = lease.gpu or (waiting.gpus[0] if waiting is not None and waiting.gpus else None)
    return protocol.Lease(
        id=lease.id,
        name=lease.name,
        gpu=gpu,
        size_bytes=lease.size_bytes,
        used_bytes=used_bytes,
        state=protocol.HELD if lease.is_held else protocol.PENDING,
        priority=lease.priority,
        uid=lease.uid,
        pid=lease.pid,
        slurm_job=lease.slurm_job,
        until_utc=until_utc if lease.is_held or lease.hold_s is None else None,
        hold_s=lease.hold_s,
        since_utc=lease.since_utc,
        waits=None if lease.is_held or waiting is None else waiting.waits,
    )


def steps_for(lease_id: str, view: View, decision: model.Decision) -> tuple[protocol.RoomStep, ...]:
    """The jobs that have to leave for that lease."""
    jobs = {job.id: job for job in view.snapshot.jobs}
    steps: list[protocol.RoomStep] = []
    for action in decision.actions:
        if action.beneficiary == lease_id:
            job = jobs[action.subject]
            is_suspended = action.kind == model.SUSPEND
            steps.append(
                protocol.RoomStep(
                    job=job.id,
                    name=job.name,
                    action=action.kind,
                    gpu=",".join(job.gpus) or None,
                    to=None if is_suspended else ",".join(action.gpus),
                    size_bytes=sum(job.held_bytes.values()),
                )
            )
    return tuple(steps)


def job_views(
    view: View, decision: model.Decision, now_utc: float, may: Callable[[int | None], bool]
) -> tuple[protocol.QueuedJob, ...]:
    """The jobs of the queue: the highest priority first, those that run before those that wait."""
    waiting = {one.subject: one for one in decision.waiting}
    order = sorted(view.snapshot.jobs, key=lambda job: (-job.priority, job.state == model.QUEUED, job.since_s, job.id))
    views = [_job_view(job, view.jobs[job.id], waiting.get(job.id), view.now, now_utc) for job in order]
    return tuple([one if may(one.uid) else one.replace(why=None, next=None) for one in views])


def _job_view(
    job: model.Job, seen: JobView, waiting: model.WaitReason | None, now: float, now_utc: float
) -> protocol.QueuedJob:
    has_operation = seen.operation is not None
    held_bytes = sum(job.held_bytes.values())
    needs_bytes = None if job.needs_bytes is None else sum(job.needs_bytes)
    state = protocol.MOVING if has_operation and job.state != model.RUNNING else protocol.RUNNING
    if job.state == model.ARRIVING and not has_operation:
        state = protocol.STARTING
    state = _STATES.get(job.state, state)
    why = waiting.waits if waiting is not None else _BY_USER if job.state == model.USER_SUSPENDED else None
    if job.state == model.RUNNING and job.hindrance:
        why = f"cannot be suspended: {job.hindrance}"
    if job.state == model.ARRIVING and job.hindrance:
        why = f"{job.hindrance}: no memory is kept for it"
    then = None if waiting is None else waiting.next
    if job.state == model.USER_SUSPENDED:
        then = f"hegmctl resume {job.id}"
        if (slurm_job := seen.record.slurm_job) is not None:
            why, then = (
                f"Slurm job {slurm_job}, which Slurm resumes, or its user",
                f"Slurm resumes it; or by hand: {then}",
            )
    return protocol.QueuedJob(
        job=job.id,
        name=job.name,
        uid=job.uid,
        priority=job.priority,
        state=state,
        gpu=",".join(job.gpus) or None,
        size_bytes=held_bytes or needs_bytes,
        since_utc=now_utc - max(0.0, now - job.since_s),
        why=why,
        next=then,
    )
