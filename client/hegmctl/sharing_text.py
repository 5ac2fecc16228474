"""Leases and the queue as text."""

from __future__ import annotations

from time import time

from hegmctl.inventory_text import below
from hegmctl.jobs_text import user_name
from hegmctl.quantities import binary_size, duration
from hegmctl.tables import UNKNOWN, Column, Style, printable, table, width
from hegmd.protocol.sharing import HELD, MOVING, QUEUED, RUNNING, STARTING, SUSPENDED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from hegmctl.tables import Cell
    from hegmd.protocol.messages import JobReply, QueueReply, Released, RoomProgress, RoomReply
    from hegmd.protocol.sharing import Lease, QueuedJob, RoomStep

_COLOURS = {RUNNING: "green", STARTING: "cyan", MOVING: "cyan", SUSPENDED: "yellow", QUEUED: "yellow"}


def room_text(reply: RoomReply, style: Style) -> list[str]:
    """The id of the lease, for scripts; or what would be done for it."""
    if reply.lease is not None:
        return [reply.lease.id]
    where = printable(reply.gpu or "a GPU")
    if not reply.steps:
        return [f"no further job has to leave {where}", "nothing was changed: this is only the plan"]
    return [*[_step(step) for step in reply.steps], "nothing was changed: this is only the plan"]


def _step(step: RoomStep) -> str:
    size = "" if step.size_bytes is None else f", {binary_size(step.size_bytes)}"
    to = "" if step.to is None else f" to {step.to}"
    return printable(f"{step.action} {step.job} ({step.name}) on {step.gpu or UNKNOWN}{to}{size}")


def room_progress_text(progress: RoomProgress, style: Style) -> list[str]:
    """Return one line: what a lease waits for."""
    free = "" if progress.free_bytes is None else f" ({binary_size(progress.free_bytes)} free)"
    where = f"{progress.gpu or 'a GPU'}{free}"
    size = binary_size(progress.size_bytes)
    return [printable(f"lease {progress.lease}: {size} on {where}, {_awaited(progress.waits)}")]


def lease_note(lease: Lease) -> str:
    """Describe a lease for people; scripts use its id."""
    until = "until it is released"
    if lease.pid is not None:
        until = f"until process {lease.pid} ends"
    elif lease.until_utc is not None:
        until = f"for {duration(max(0.0, lease.until_utc - time()))}"
    elif lease.hold_s is not None:
        until = f"for {duration(lease.hold_s)} after that"
    size, where = binary_size(lease.size_bytes), lease.gpu or "a GPU"
    if lease.state == HELD:
        return f"{size} of {where} are kept free {until}; sooner: hegmctl release {lease.id}"
    return f"{size} of {where} are being freed, and kept {until}: see hegmctl queue"


def released_text(reply: Released, style: Style) -> list[str]:
    where = f" of {printable(reply.gpu)}" if reply.gpu else ""
    return [f"lease {reply.lease} has ended: {binary_size(reply.size_bytes)}{where} are free for jobs again"]


def priority_text(reply: JobReply, style: Style) -> list[str]:
    return [printable(f"{reply.job.id} ({reply.job.name}) has priority {reply.job.priority}")]


def queue_text(reply: QueueReply, style: Style) -> list[str]:
    """Return the table of `hegmctl queue`. Reasons that do not fit into it follow in full."""
    lines = _jobs(reply, style) if reply.jobs else ["No job has or wants a GPU."] if style.remarks else []
    if reply.leases:
        lines += ["", *_leases(reply, style)]
    return lines


def _jobs(reply: QueueReply, style: Style) -> list[str]:
    columns = (
        Column("JOB"),
        Column("NAME", shrink=8),
        Column("PRIORITY", right=True),
        Column("STATE"),
        Column("SINCE", right=True, drop=2),
        Column("GPU", shrink=6),
        Column("SIZE", right=True, drop=3),
        Column("WAITS FOR"),
        Column("NEXT"),
    )
    rows = [_row(job, reply.taken_utc) for job in reply.jobs]
    notes = [
        f"{job.job} ({job.name}){_reason(job)}{f'; next: {job.next}' if job.next else ''}"
        for job in reply.jobs
        if job.why or job.next
    ]
    return _with_reasons(columns, rows, 2, notes, style)


def _with_reasons(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], reasons: int, notes: Sequence[str], style: Style
) -> list[str]:
    """Return the table. In a narrow terminal its last `reasons` columns are left out, and `notes` are below it."""
    whole = table(columns, rows, Style())
    if style.columns is None or max(map(width, whole)) <= style.columns:
        return table(columns, rows, style)
    return [*table(columns[:-reasons], [row[:-reasons] for row in rows], style), *below(notes, style)]


def _awaited(why: str | None) -> str:
    if why is None:
        return "waits for nothing"
    return f"waits {why}" if why.startswith(("until ", "for ")) else f"waits for {why}"


def _reason(job: QueuedJob) -> str:
    """Return the reason as the rest of a sentence. A job that runs or starts waits for nothing."""
    if job.why is None or job.state not in (RUNNING, STARTING):
        return f" {_awaited(job.why)}"
    return f"{':' if job.state == STARTING else ''} {job.why}"


def _row(job: QueuedJob, now_utc: float) -> list[Cell]:
    return [
        job.job,
        job.name,
        str(job.priority),
        (job.state, _COLOURS.get(job.state, "")),
        duration(max(0.0, now_utc - job.since_utc)),
        job.gpu or UNKNOWN,
        UNKNOWN if job.size_bytes is None else binary_size(job.size_bytes),
        job.why or UNKNOWN,
        job.next or UNKNOWN,
    ]


def _leases(reply: QueueReply, style: Style) -> list[str]:
    of_several = any(lease.uid for lease in reply.leases)
    columns = (
        Column("LEASE"),
        Column("NAME", shrink=8),
        *([Column("USER", shrink=6, drop=3)] if of_several else []),
        Column("PRIORITY", right=True, drop=2),
        Column("STATE"),
        Column("SINCE", right=True, drop=3),
        Column("GPU"),
        Column("SIZE", right=True),
        Column("USED", right=True, drop=4),
        Column("ENDS", shrink=12),
        Column("WAITS FOR"),
    )
    rows = [_lease_row(lease, reply.taken_utc, of_several=of_several) for lease in reply.leases]
    notes = [f"{lease.id} {_awaited(lease.waits)}" for lease in reply.leases if lease.waits]
    return _with_reasons(columns, rows, 1, notes, style)


def _lease_row(lease: Lease, now_utc: float, *, of_several: bool) -> list[Cell]:
    ends = UNKNOWN
    if lease.slurm_job is not None:
        ends = f"with Slurm job {lease.slurm_job}"
    elif lease.pid is not None:
        ends = f"with process {lease.pid}"
    elif lease.until_utc is not None:
        ends = f"in {duration(max(0.0, lease.until_utc - now_utc))}"
    elif lease.hold_s is not None:
        ends = f"{duration(lease.hold_s)} after it is held"
    return [
        lease.id,
        lease.name or UNKNOWN,
        *([user_name(lease.uid)] if of_several else []),
        str(lease.priority),
        (lease.state, "green" if lease.state == HELD else "yellow"),
        duration(max(0.0, now_utc - lease.since_utc)),
        lease.gpu or UNKNOWN,
        binary_size(lease.size_bytes),
        binary_size(lease.used_bytes) if lease.used_bytes else UNKNOWN,
        ends,
        lease.waits or UNKNOWN,
    ]
