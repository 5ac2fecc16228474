"""The health of an NVIDIA GPU: a verdict from what its driver counts and reports.

Pure: facts in, a Health record out. `failed` means that jobs fail or a reset is needed; `warn` needs attention. A job's
own mistakes (an illegal address is an XID too) are noted only. Without facts the state is unknown. Every note is a
sentence that an operator can act on without a manual. A note with a cause makes the GPU failing, or gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hegmd.node.devices.condition import (
    FAILED,
    NOTED,
    OK,
    WARN,
    CorrectedErrors,
    GpuProblem,
    conditioned,
    corrected_note,
)
from hegmd.node.devices.nvml_gpu import RemappedRows
from hegmd.protocol.snapshots import CORRECTED, DRIVER, FAILING, GONE, LINK, LOST, ROWS, UNCORRECTED, Health

# From NVIDIA's catalogue of XID errors; an unknown number becomes a warning without an explanation.
_XIDS: dict[int, tuple[int, str]] = {
    8: (NOTED, "a job's kernel did not end in time"),
    11: (NOTED, "a job sent a broken command stream"),
    13: (NOTED, "a job's kernel raised an exception, usually a bug of the job"),
    31: (NOTED, "a job accessed memory that is not its own, usually a bug of the job"),
    32: (NOTED, "a job sent a broken command stream"),
    43: (NOTED, "a job's work was stopped after its own fault"),
    45: (NOTED, "a job's work was cleaned up after it was killed or failed"),
    48: (FAILED, "an uncorrectable memory error: the GPU needs a reset"),
    61: (WARN, "the GPU's microcontroller reported a breakpoint or warning"),
    62: (FAILED, "the GPU's microcontroller halted: the GPU needs a reset"),
    63: (WARN, "a bad memory row or page was recorded and is retired at the next reset"),
    64: (FAILED, "a bad memory row or page could not be retired"),
    68: (NOTED, "a job's video decoding raised an exception"),
    69: (NOTED, "a job's kernel raised an exception, usually a bug of the job"),
    74: (WARN, "an NVLink error: links to other GPUs may be down until a reset"),
    79: (FAILED, "the GPU fell off the bus: reseat it or power the node off and on"),
    92: (WARN, "corrected memory errors come at a high rate"),
    94: (WARN, "an uncorrectable memory error was contained: only the job that hit it is affected"),
    95: (FAILED, "an uncorrectable memory error was not contained: the GPU needs a reset"),
    109: (WARN, "a kernel did not give way to another process in time"),
    119: (FAILED, "the GPU's system processor does not answer: the GPU needs a reset"),
    120: (FAILED, "the GPU's system processor failed: the GPU needs a reset"),
    140: (FAILED, "an uncorrectable memory error was not recovered from: the GPU needs a reset"),
    143: (FAILED, "the GPU could not be initialised"),
}

# The meaning of an XID for the GPU, apart from the job that it hit. After 79 and 95 no job can continue there.
_CAUSES = {
    **dict.fromkeys((48, 94, 95, 140), UNCORRECTED),
    **dict.fromkeys((63, 64), ROWS),
    **dict.fromkeys((62, 119, 120, 143), DRIVER),
    74: LINK,
    79: LOST,
    92: CORRECTED,
}
_GONE_XIDS = (79, 95)

# The actions that the driver requests (NVML_GPU_RECOVERY_ACTION_*, since driver 565).
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


class ErrorHistory:
    """The errors that one GPU has reported since the daemon started, or since it was reset."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self.counts: dict[int, tuple[int, float]] = {}
        self.is_lost = False
        self._before_reset = 0
        self._corrected = CorrectedErrors()
        self._uncorrected = 0

    def add(self, number: int, now_utc: float) -> None:
        """Note an XID."""
        self.newest = number
        self.counts[number] = (self.counts.get(number, (0, 0.0))[0] + 1, now_utc)

    def answers(self, corrected: int | None, uncorrected: int | None, now_utc: float) -> int:
        """Take its counters. Return how many corrected errors are new, if they are many, or 0.

        A GPU that was lost, or whose counter of uncorrected errors restarted, was reset: earlier XIDs are then dropped.
        """
        if self.is_lost or (uncorrected is not None and uncorrected < self._uncorrected):
            self._before_reset = self.count or 0
            self.counts.clear()
        self.is_lost = False
        self._uncorrected = self._uncorrected if uncorrected is None else uncorrected
        return self._corrected.see(corrected, now_utc)

    @property
    def count(self) -> int | None:
        """Return the number of XIDs; None for none, because not every driver reports them."""
        return self._before_reset + sum(times for times, _ in self.counts.values()) or None


@dataclass(slots=True, eq=False, repr=False)
class HealthFacts:
    """The facts about one GPU; None for unknown ones."""

    index: int
    ecc_corrected: int | None = None
    risen_corrected: int = 0
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    retired_pending: bool | None = None
    rows: RemappedRows | None = None
    recovery_action: int | None = None
    clocks_event_reasons: int | None = None
    fabric: tuple[int, int] | None = None
    failures: Mapping[str, str] = field(default_factory=dict[str, str])
    processes_untold: bool = False


def judge(facts: HealthFacts, history: ErrorHistory) -> Health:
    """The record for these facts."""
    notes = sorted([*_xid_notes(history), *_memory_notes(facts), *_driver_notes(facts)], key=lambda note: -note.weight)
    worst = max((note.weight for note in notes), default=OK)
    told = (facts.ecc_uncorrected, facts.retired_pages, facts.rows, facts.recovery_action, facts.clocks_event_reasons)
    if worst >= WARN:
        state = "failed" if worst == FAILED else "warn"
    else:
        state = "ok" if any(fact is not None for fact in told) else "unknown"
    retired = facts.retired_pages
    if facts.rows is not None:
        retired = (retired or 0) + facts.rows.correctable + facts.rows.uncorrectable
    return conditioned(notes).replace(
        state=state,
        ecc_corrected=facts.ecc_corrected,
        ecc_uncorrected=facts.ecc_uncorrected,
        retired_pages=retired,
        last_xid=history.newest,
        xid_count=history.count,
    )


def without_answer(state: str, words: str, history: ErrorHistory) -> Health:
    """Return the record of a GPU that is lost, or about which the driver reports nothing."""
    if state == "lost":
        note = "the GPU fell off the bus; read the kernel log (dmesg | grep -i xid), then reset it or reboot the node"
        first, state = GpuProblem(FAILED, note, LOST, GONE), "failed"
    else:
        note = f"the driver reports nothing about this GPU ({words}); compare with nvidia-smi and the kernel log"
        first, state = GpuProblem(NOTED, note), "unknown"
    health = conditioned([first, *_xid_notes(history)])
    return health.replace(state=state, last_xid=history.newest, xid_count=history.count)


def _xid_notes(history: ErrorHistory) -> list[GpuProblem]:
    notes: list[GpuProblem] = []
    for number, (count, last_utc) in history.counts.items():
        weight, words = _XIDS.get(number, (WARN, "see NVIDIA's catalogue of XID errors"))
        times = "" if count == 1 else f", {count} times"
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last_utc))
        text = f"XID {number}{times}, last seen {when}: {words}"
        notes.append(GpuProblem(weight, text, _CAUSES.get(number), GONE if number in _GONE_XIDS else FAILING))
    return notes


def _memory_notes(facts: HealthFacts) -> list[GpuProblem]:
    notes: list[GpuProblem] = []
    if facts.ecc_uncorrected:
        words = f"{facts.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
        notes.append(GpuProblem(WARN, words, UNCORRECTED))
    if facts.risen_corrected:
        notes.append(GpuProblem(WARN, corrected_note(facts.risen_corrected), CORRECTED))
    if facts.retired_pending:
        notes.append(GpuProblem(WARN, "bad memory pages are retired at the next reset", ROWS))
    if facts.rows is not None and facts.rows.pending:
        notes.append(GpuProblem(WARN, "bad memory rows are replaced at the next reset", ROWS))
    if facts.rows is not None and facts.rows.failed:
        words = "a bad memory row could not be replaced: no spare rows are left; replace the GPU"
        notes.append(GpuProblem(FAILED, words, ROWS))
    return notes


def _driver_notes(facts: HealthFacts) -> list[GpuProblem]:
    notes: list[GpuProblem] = []
    if facts.recovery_action:
        action = _RECOVERY_ACTIONS.get(facts.recovery_action, f"recovery action {facts.recovery_action}")
        notes.append(GpuProblem(FAILED, "the driver asks for " + action.format(index=facts.index), DRIVER))
    reasons = facts.clocks_event_reasons or 0
    if reasons & _HARDWARE_CAUSES:
        reasons &= ~_HARDWARE_SLOWDOWN  # it only repeats that there is a cause
    notes += [GpuProblem(WARN, words) for bit, words in _SLOWDOWNS.items() if reasons & bit]
    if facts.fabric is not None and facts.fabric[0] in _FABRIC_STATES:
        wanting = _FABRIC_STATES[facts.fabric[0]]
        notes.append(
            GpuProblem(
                WARN, f"its registration with the NVLink switches {wanting}: systemctl status nvidia-fabricmanager"
            )
        )
    elif facts.fabric is not None and facts.fabric[1]:
        notes.append(
            GpuProblem(
                WARN, f"the NVLink switches refused it (status {facts.fabric[1]}): journalctl -u nvidia-fabricmanager"
            )
        )
    notes += [
        GpuProblem(WARN, f"the driver failed to report: {what} ({words})") for what, words in facts.failures.items()
    ]
    if facts.processes_untold and "processes" not in facts.failures:
        notes.append(GpuProblem(WARN, "the driver does not report which processes use this GPU"))
    return notes
