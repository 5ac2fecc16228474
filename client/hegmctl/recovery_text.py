"""Text about the protection of jobs and their recoveries."""

from __future__ import annotations

from time import localtime, strftime

from hegmctl.inventory_text import gpus_as_text
from hegmctl.quantities import binary_size, duration
from hegmctl.tables import UNKNOWN, Column, Style, printable, table
from hegmd.protocol.recovery import KEPT, LOST, PROTECTED, RECOVERED, RECOVERING, STARTING, UNDER_WAY, UNPROTECTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hegmd.protocol.recovery import JobRecovery, RecoveryAttempt, RecoveryDropped, RecoveryReply, Snapshot

_COLOURS = {PROTECTED: "green", STARTING: "cyan", RECOVERING: "yellow", UNPROTECTED: "red", LOST: "red", KEPT: "dim"}
_SLOTS = (
    Column("RANK", right=True),
    Column("SLOT", right=True),
    Column("STEP", right=True),
    Column("AGE", right=True),
    Column("SIZE", right=True),
    Column("STATE"),
)
_RECOVERIES = (
    Column("FAILED"),
    Column("HOW", shrink=12),
    Column("AT STEP", right=True),
    Column("FROM STEP", right=True),
    Column("GPU", shrink=6),
    Column("STARTED", right=True),
    Column("RESTORED", right=True),
    Column("NEXT STEP", right=True),
    Column("RESULT"),
)


def recovery_text(reply: RecoveryReply, style: Style) -> list[str]:
    """Each job with its slots and its recoveries."""
    if not reply.jobs:
        hint = "; start one with: hegmctl run --recover -- COMMAND" if style.remarks else ""
        return [f"No job is protected here, and no state of one is kept{hint}."]
    lines: list[str] = []
    for job in reply.jobs:
        lines += [*([""] if lines else []), *_job(job, reply.taken_utc, style)]
    return lines


def _job(job: JobRecovery, now_utc: float, style: Style) -> Iterator[str]:
    state = style.paint(job.state, _COLOURS.get(job.state, ""))
    yield f"{job.id} ({printable(job.name)}): {state}{'' if job.why is None else f': {printable(job.why)}'}"
    if job.interval_s is not None and job.cost_s is not None:
        copied_s = job.copied_s or 0.0
        share = job.cost_s / max(job.interval_s + job.cost_s + copied_s, 1e-9)
        beside = "" if job.copied_s is None else f", and was copied for {duration(copied_s)} while the training ran"
        yield (
            f"  a snapshot every {duration(job.interval_s)}; the last one cost {duration(job.cost_s)} ({share:.2%} of "
            f"the time){beside}; {binary_size(job.held_bytes)} of host memory"
        )
    if job.begins_anew:
        yield f"  start over after a recovery: {printable(', '.join(job.begins_anew))}"
    if job.slots:
        yield from ("  " + line for line in table(_SLOTS, [_slot(slot, now_utc) for slot in job.slots], style))
    if job.recoveries:
        yield from ("  " + line for line in table(_RECOVERIES, [_attempt(one) for one in job.recoveries], style))
    for one in job.recoveries:
        if one.stacks:
            yield f"  where its threads were at {_time(one.failed_utc)}:"
            yield from (f"    {printable(line)}" for line in one.stacks.splitlines())


def _slot(slot: Snapshot, now_utc: float) -> list[str]:
    if slot.taken_utc is None:
        return [str(slot.rank), str(slot.slot), UNKNOWN, UNKNOWN, UNKNOWN, "no complete snapshot"]
    return [
        str(slot.rank),
        str(slot.slot),
        str(slot.step),
        duration(max(0.0, now_utc - slot.taken_utc)),
        binary_size(slot.size_bytes or 0),
        "could not be restored" if slot.damaged else "whole",
    ]


def _attempt(one: RecoveryAttempt) -> list[str | tuple[str, str]]:
    colour = {RECOVERED: "green", UNDER_WAY: "yellow"}.get(one.result, "red")
    return [
        _time(one.failed_utc),
        one.why,
        _number(one.step),
        _number(one.from_step),
        gpus_as_text(one.gpus) if one.gpus else UNKNOWN,
        _seconds(one.started_s),
        _seconds(one.restored_s),
        _seconds(one.trained_s),
        (one.result, colour),
    ]


def _time(utc: float) -> str:
    return strftime("%H:%M:%S", localtime(utc))


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} s"


def dropped_text(reply: RecoveryDropped, _style: Style) -> list[str]:
    return [f"deleted: {binary_size(reply.freed_bytes)} of host memory"]
