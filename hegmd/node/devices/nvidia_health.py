"""The health of an NVIDIA GPU: what its driver counts and reports, weighed and put into words.

Pure: facts in, a Health record out. `failed` means that jobs fail or a reset is needed; `warn` needs attention. A job's
own mistakes (an illegal address is an XID too) are noted only. Without facts the state is unknown. Every note is a
sentence that an operator can act on without a manual.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hegmd.node.devices.nvml_gpu import RemappedRows
from hegmd.protocol.snapshots import Health

_OK, _NOTED, _WARN, _FAILED = range(4)

# After NVIDIA's catalogue of XID errors; a number that is not here is a warning without words of its own.
_XIDS: dict[int, tuple[int, str]] = {
    8: (_NOTED, "a job's kernel did not end in time"),
    11: (_NOTED, "a job sent a broken command stream"),
    13: (_NOTED, "a job's kernel raised an exception, usually a bug of the job"),
    31: (_NOTED, "a job accessed memory that is not its own, usually a bug of the job"),
    32: (_NOTED, "a job sent a broken command stream"),
    43: (_NOTED, "a job's work was stopped after its own fault"),
    45: (_NOTED, "a job's work was cleaned up after it was killed or failed"),
    48: (_FAILED, "an uncorrectable memory error: the GPU needs a reset"),
    61: (_WARN, "the GPU's microcontroller reported a breakpoint or warning"),
    62: (_FAILED, "the GPU's microcontroller halted: the GPU needs a reset"),
    63: (_WARN, "a bad memory row or page was recorded and is retired at the next reset"),
    64: (_FAILED, "a bad memory row or page could not be retired"),
    68: (_NOTED, "a job's video decoding raised an exception"),
    69: (_NOTED, "a job's kernel raised an exception, usually a bug of the job"),
    74: (_WARN, "an NVLink error: links to other GPUs may be down until a reset"),
    79: (_FAILED, "the GPU fell off the bus: reseat it or power the node off and on"),
    92: (_WARN, "corrected memory errors come at a high rate"),
    94: (_WARN, "an uncorrectable memory error was contained: only the job that hit it is affected"),
    95: (_FAILED, "an uncorrectable memory error was not contained: the GPU needs a reset"),
    109: (_WARN, "switching between jobs timed out"),
    119: (_FAILED, "the GPU's system processor does not answer: the GPU needs a reset"),
    120: (_FAILED, "the GPU's system processor failed: the GPU needs a reset"),
    140: (_FAILED, "an uncorrectable memory error was not recovered from: the GPU needs a reset"),
    143: (_FAILED, "the GPU could not be initialised"),
}

# What the driver asks for (NVML_GPU_RECOVERY_ACTION_*, since driver 565).
_RECOVERY_ACTIONS = {
    1: "a reset of this GPU (nvidia-smi --gpu-reset -i {index}, with no process on it)",
    2: "a reboot of the node",
    3: "that no peer-to-peer job is started on it until the ones that run have ended",
    4: "that its jobs be drained and the GPU reset (nvidia-smi --gpu-reset -i {index})",
    5: "that its IMEX domain be recovered",
    6: "a reset of its bus",
    7: "a reboot of the node",
}

# NVML_CLOCKS_EVENT_REASON_*: slowdowns that the hardware enforces. Lower clocks by a power cap or at idle are normal.
_SLOWDOWNS = {
    0x40: "the hardware halves the clocks because the GPU is too hot: check fans and airflow",
    0x80: "the hardware halves the clocks because the power supply asks for it: check the node's power",
    0x20: "the driver lowers the clocks because GPU or memory is too hot: check fans and airflow",
    0x08: "the hardware halves the clocks (heat or power)",
}
_HARDWARE_SLOWDOWN = 0x08
_HARDWARE_CAUSES = 0x40 | 0x80

_FABRIC_STATES = {1: "has not started", 2: "is not complete"}


class XidRecord:
    """The XID events of one GPU since the daemon watches it."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self.seen: dict[int, tuple[int, float]] = {}

    def add(self, number: int, now_utc: float) -> None:
        self.newest = number
        self.seen[number] = (self.seen.get(number, (0, 0.0))[0] + 1, now_utc)

    @property
    def count(self) -> int | None:
        """Return the number of events; None for none, because not every driver reports them."""
        return sum(times for times, _ in self.seen.values()) or None


@dataclass(slots=True)
class HealthFacts:
    """The facts about one GPU; None for unknown ones."""

    index: int
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    retired_pending: bool | None = None
    rows: RemappedRows | None = None
    recovery_action: int | None = None
    clocks_event_reasons: int | None = None
    fabric: tuple[int, int] | None = None
    failures: Mapping[str, str] = field(default_factory=dict[str, str])
    processes_untold: bool = False


def judge(facts: HealthFacts, xids: XidRecord) -> Health:
    """The record for these facts."""
    notes: list[tuple[int, str]] = [*_xid_notes(xids), *_memory_notes(facts), *_driver_notes(facts)]
    worst = max((weight for weight, _ in notes), default=_OK)
    told = (facts.ecc_uncorrected, facts.retired_pages, facts.rows, facts.recovery_action, facts.clocks_event_reasons)
    if worst >= _WARN:
        state = "failed" if worst == _FAILED else "warn"
    else:
        state = "ok" if any(fact is not None for fact in told) else "unknown"
    retired = facts.retired_pages
    if facts.rows is not None:
        retired = (retired or 0) + facts.rows.correctable + facts.rows.uncorrectable
    return Health(
        state=state,
        notes=tuple(note for _, note in sorted(notes, key=lambda note: -note[0])),
        ecc_corrected=facts.ecc_corrected,
        ecc_uncorrected=facts.ecc_uncorrected,
        retired_pages=retired,
        last_xid=xids.newest,
        xid_count=xids.count,
    )


def without_answer(state: str, words: str, xids: XidRecord) -> Health:
    """Return the record of a GPU that is lost, or about which the driver reports nothing."""
    notes = [note for _, note in _xid_notes(xids)]
    if state == "lost":
        note = "the GPU fell off the bus; read the kernel log (dmesg | grep -i xid), then reset it or reboot the node"
        return Health(state="failed", notes=(note, *notes), last_xid=xids.newest, xid_count=xids.count)
    note = f"the driver reports nothing about this GPU ({words}); compare with nvidia-smi and the kernel log"
    return Health(state="unknown", notes=(note, *notes), last_xid=xids.newest, xid_count=xids.count)


def _xid_notes(xids: XidRecord) -> list[tuple[int, str]]:
    notes: list[tuple[int, str]] = []
    for number, (count, last_utc) in xids.seen.items():
        weight, words = _XIDS.get(number, (_WARN, "see NVIDIA's catalogue of XID errors"))
        times = "" if count == 1 else f", {count} times"
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last_utc))
        notes.append((weight, f"XID {number}{times}, last seen {when}: {words}"))
    return notes


def _memory_notes(facts: HealthFacts) -> list[tuple[int, str]]:
    notes: list[tuple[int, str]] = []
    if facts.ecc_uncorrected:
        notes.append((_WARN, f"{facts.ecc_uncorrected} uncorrected memory errors since the driver was loaded"))
    if facts.retired_pending:
        notes.append((_WARN, "bad memory pages are retired at the next reset"))
    if facts.rows is not None and facts.rows.pending:
        notes.append((_WARN, "bad memory rows are replaced at the next reset"))
    if facts.rows is not None and facts.rows.failed:
        notes.append((_FAILED, "a bad memory row could not be replaced: no spare rows are left; replace the GPU"))
    return notes


def _driver_notes(facts: HealthFacts) -> list[tuple[int, str]]:
    notes: list[tuple[int, str]] = []
    if facts.recovery_action:
        wanted = _RECOVERY_ACTIONS.get(facts.recovery_action, f"recovery action {facts.recovery_action}")
        notes.append((_FAILED, "the driver asks for " + wanted.format(index=facts.index)))
    reasons = facts.clocks_event_reasons or 0
    if reasons & _HARDWARE_CAUSES:
        reasons &= ~_HARDWARE_SLOWDOWN  # only says again that there is a cause
    notes += [(_WARN, words) for bit, words in _SLOWDOWNS.items() if reasons & bit]
    if facts.fabric is not None and facts.fabric[0] in _FABRIC_STATES:
        wanting = _FABRIC_STATES[facts.fabric[0]]
        notes.append(
            (_WARN, f"its registration with the NVLink switches {wanting}: systemctl status nvidia-fabricmanager")
        )
    elif facts.fabric is not None and facts.fabric[1]:
        notes.append(
            (_WARN, f"the NVLink switches refused it (status {facts.fabric[1]}): journalctl -u nvidia-fabricmanager")
        )
    notes += [(_WARN, f"the driver failed to report: {what} ({words})") for what, words in facts.failures.items()]
    if facts.processes_untold and "processes" not in facts.failures:
        notes.append((_WARN, "the driver does not report which processes use this GPU"))
    return notes
