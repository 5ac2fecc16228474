"""Changes of the node between two snapshots, as events.

Owns which differences are events, their kinds and their words. Compares with what was last reported, not with the last
snapshot: so a GPU's counters from before it was lost can still be compared, and a library that failed for an hour does
not report all its GPUs as new.

The first snapshot gives no events: `inventory.ready` sums it up. The same holds for the processes of a vendor whose
library answers for the first time later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hegmd.node.processes.roll import ProcessList
from hegmd.protocol.snapshots import GONE, HEALTHY, Gpu, GpuProcess, Health, Vendor
from hegmd.telemetry.events import EventLog

_SEVERITY_OF_HEALTH = {"failed": "error", "warn": "warning"}
_RANK = ("info", "warning", "error")
_UNANSWERED = ("failed", "absent")
_ROLL = "processes"


@dataclass(slots=True, eq=False, repr=False)
class _LastReport:
    """The last report about a GPU; None for a fact that was never known."""

    state: str
    health: str
    condition: str = HEALTHY
    last_xid: int | None = None
    xid_count: int | None = None
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    mig: bool | None = None
    mps: bool | None = None
    persistence: bool | None = None


_MODES = (("mig", "MIG mode"), ("mps", "MPS"), ("persistence", "persistence mode"))


class Changes:
    """Compares each snapshot with what was reported before, and records the differences as events."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._ready = False
        self._gpus: dict[str, _LastReport] = {}
        self._processes: dict[int, GpuProcess] = {}
        self._answered: set[str] = set()
        self._stale: set[str] = set()
        self._failed: set[str] = set()

    def tell(self, gpus: Sequence[Gpu], roll: ProcessList, vendors: Sequence[Vendor], *, roll_is_late: bool) -> None:
        """Record an event for each difference."""
        for vendor in vendors:
            self._tell_vendor(vendor)
        self._record_late_roll(roll_is_late)
        unanswered = {vendor.vendor for vendor in vendors if vendor.state in _UNANSWERED}
        for gpu in gpus:
            if gpu.vendor not in unanswered:
                self._tell_gpu(gpu)
        self._tell_processes(roll, {gpu.id: gpu.vendor for gpu in gpus})
        self._answered.update(v.vendor for v in vendors if v.state in ("ok", "stale") and v.age_s is not None)
        if not self._ready:
            self._ready = True
            self._events.record(
                "inventory.ready",
                "info",
                f"the node has {len(gpus)} GPUs with {len(roll.processes)} processes",
                facts={"gpus": len(gpus), "processes": len(roll.processes)},
            )

    # ---- vendors ----------------------------------------------------------------------------------------------------

    def _tell_vendor(self, vendor: Vendor) -> None:
        name, facts = vendor.vendor, {"vendor": vendor.vendor, "state": vendor.state}
        if vendor.state == "stale" and name not in self._stale:
            self._stale.add(name)
            self._events.record("inventory.stale", "warning", vendor.message, facts=facts)
        was_there = name in self._answered and vendor.state == "absent"
        if (vendor.state == "failed" or was_there) and name not in self._failed:
            self._failed.add(name)
            self._events.record("vendor.failed", "error", vendor.message, facts=facts)
        if vendor.state == "ok" and name in self._stale:
            self._stale.discard(name)
            self._events.record("inventory.fresh", "info", f"the {name} library answers again", facts=facts)
        if vendor.state == "ok" and name in self._failed:
            self._failed.discard(name)
            self._events.record("vendor.recovered", "info", f"the {name} library works again", facts=facts)

    def _record_late_roll(self, late: bool) -> None:
        if late and _ROLL not in self._stale:
            self._stale.add(_ROLL)
            text = "/proc could not be read in time; the list of processes is old"
            self._events.record("inventory.stale", "warning", text, facts={"part": _ROLL})
        if not late and _ROLL in self._stale:
            self._stale.discard(_ROLL)
            self._events.record("inventory.fresh", "info", "/proc is read in time again", facts={"part": _ROLL})

    # ---- GPUs -------------------------------------------------------------------------------------------------------

    def _tell_gpu(self, gpu: Gpu) -> None:
        known = self._gpus.get(gpu.uuid)
        if known is None:
            known = self._gpus[gpu.uuid] = _LastReport(state=gpu.state, health=gpu.health.state)
            if self._ready:
                text = f"{gpu.id} was found: {gpu.name or 'a GPU without a name'}"
                self._record_gpu("gpu.found", "info", text, gpu)
        elif gpu.state != known.state:
            self._tell_gpu_state(gpu, known.state)
        if gpu.state == "ok":
            self._tell_gpu_health(gpu, known)
            self._tell_gpu_modes(gpu, known)
        _remember(known, gpu)

    def _tell_gpu_state(self, gpu: Gpu, before: str) -> None:
        if gpu.state == "lost":
            xid = gpu.health.last_xid
            self._record_gpu("gpu.lost", "error", f"{gpu.id} is lost{_why(gpu)}", gpu, {"last_xid": xid})
        elif gpu.state == "ok" and before == "lost":
            self._record_gpu("gpu.back", "info", f"{gpu.id} is back", gpu)
        elif gpu.state == "ok":
            self._record_gpu("gpu.health", "info", f"{gpu.id} answers again", gpu)
        else:
            self._record_gpu("gpu.health", "warning", f"{gpu.id} does not answer{_why(gpu)}", gpu)

    def _tell_gpu_health(self, gpu: Gpu, known: _LastReport) -> None:
        """Record one event for all changes of a GPU's health: an XID seldom comes alone."""
        health, found = gpu.health, list[tuple[str, str]]()
        if health.last_xid is not None and (
            health.last_xid != known.last_xid or _grew(known.xid_count, health.xid_count)
        ):
            found.append(("warning", f"XID {health.last_xid}"))
        if _grew(known.ecc_uncorrected, health.ecc_uncorrected):
            found.append(
                ("error", f"{health.ecc_uncorrected} uncorrected memory errors, {known.ecc_uncorrected} before")
            )
        if _grew(known.retired_pages, health.retired_pages):
            found.append(("warning", f"{health.retired_pages} retired memory pages, {known.retired_pages} before"))
        if health.state != known.health and known.state == "ok":
            severity = _SEVERITY_OF_HEALTH.get(health.state, "info")
            found.append((severity, f"health is {health.state}, was {known.health}{_why(gpu)}"))
        if health.condition != known.condition:
            found.append(_condition_news(health))
        if found:
            severity = max((severity for severity, _ in found), key=_RANK.index)
            text = f"{gpu.id}: {'; '.join(text for _, text in found)}"
            facts: dict[str, object] = {"state": health.state, "last_xid": health.last_xid}
            facts["condition"] = health.condition
            facts["xid_count"] = health.xid_count
            facts |= {"ecc_uncorrected": health.ecc_uncorrected, "retired_pages": health.retired_pages}
            self._record_gpu("gpu.health", severity, text, gpu, facts)

    def _tell_gpu_modes(self, gpu: Gpu, known: _LastReport) -> None:
        changed: dict[str, object] = {}
        for field, _ in _MODES:
            before, now = getattr(known, field), getattr(gpu, field)
            if before is not None and now is not None and before != now:
                changed[field] = now
        if changed:
            words = [f"{name} is {'on' if changed[field] else 'off'} now" for field, name in _MODES if field in changed]
            self._record_gpu("gpu.mode", "info", f"{gpu.id}: {', '.join(words)}", gpu, changed)

    def _record_gpu(
        self, kind: str, severity: str, text: str, gpu: Gpu, facts: dict[str, object] | None = None
    ) -> None:
        self._events.record(kind, severity, text, gpu=gpu.id, facts={"uuid": gpu.uuid, **(facts or {})})

    # ---- processes --------------------------------------------------------------------------------------------------

    def _tell_processes(self, roll: ProcessList, vendor_of: dict[str, str]) -> None:
        reported, running = self._processes, {p.pid: p for p in roll.processes if p.pid not in roll.ended}
        for pid in reported.keys() - running.keys():
            self._tell_end(reported[pid], lives=pid in roll.departed)
        for pid, process in running.items():
            before = reported.get(pid)
            if before is process:
                continue
            if before is None:
                if self._is_news(process, vendor_of):
                    self._tell_start(process)
            elif _differs(before.start_ticks, process.start_ticks):
                self._tell_end(before, lives=False)
                self._tell_start(process)
        self._processes = running

    def _is_news(self, process: GpuProcess, vendor_of: dict[str, str]) -> bool:
        """Return True if the process can have come since the last snapshot: its GPUs were readable then."""
        return any(vendor_of.get(use.gpu) in self._answered for use in process.gpus)

    def _tell_start(self, process: GpuProcess) -> None:
        text = f"{_called(process)} is on {_listed(process)}"
        self._events.record("process.started", "info", text, gpu=_gpu(process), pid=process.pid, facts=_facts(process))

    def _tell_end(self, process: GpuProcess, *, lives: bool) -> None:
        text = f"{_called(process)} left {_listed(process)}" if lives else f"{_called(process)} has ended"
        facts = {**_facts(process), "let_go": lives}
        self._events.record("process.ended", "info", text, gpu=_gpu(process), pid=process.pid, facts=facts)


def _remember(known: _LastReport, gpu: Gpu) -> None:
    """Store what is known now; what is unknown now keeps its old value."""
    known.state = gpu.state
    for field in ("last_xid", "xid_count", "ecc_uncorrected", "retired_pages"):
        if (value := getattr(gpu.health, field)) is not None:
            setattr(known, field, value)
    for field, _ in _MODES:
        if (mode := getattr(gpu, field)) is not None:
            setattr(known, field, mode)
    if gpu.state == "ok":
        known.health = gpu.health.state
        known.condition = gpu.health.condition


def _condition_news(health: Health) -> tuple[str, str]:
    """The severity and the words of a condition that has changed."""
    if health.condition == HEALTHY:
        return "info", "it is healthy again"
    return "error" if health.condition == GONE else "warning", f"it is {health.condition}"


def _grew(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _differs(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and before != now


def _why(gpu: Gpu) -> str:
    return f": {'; '.join(gpu.health.notes)}" if gpu.health.notes else ""


def _called(process: GpuProcess) -> str:
    return f"process {process.pid}" if process.name is None else f"process {process.pid} ({process.name})"


def _listed(process: GpuProcess) -> str:
    return ", ".join(_unique(use.gpu for use in process.gpus)) or "no GPU"


def _gpu(process: GpuProcess) -> str | None:
    """Return the GPU to name in an event, if there is only one."""
    names = _unique(use.gpu for use in process.gpus)
    return names[0] if len(names) == 1 else None


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _facts(process: GpuProcess) -> dict[str, object]:
    """Return the event's data. No command line: events go to all users, and command lines contain secrets."""
    return {
        "start_ticks": process.start_ticks,
        "uid": process.uid,
        "name": process.name,
        "gpus": _unique(use.gpu for use in process.gpus),
    }
