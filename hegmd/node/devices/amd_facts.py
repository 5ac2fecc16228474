"""The facts of one AMD GPU, from AMD SMI or the kernel's files, and its record.

Owns what must not depend on the source: the GPU's identity, its name, and its health. So GPUs keep their identities if
the library breaks. Pure: facts in, records out; None is unknown.

The UUID is that of HIP: `GPU-` and the chip's unique id, which ROCR_VISIBLE_DEVICES accepts and both sources report.
Parts of one card share that id, so theirs includes the PCI address. A card without an id is known by its PCI address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hegmd.node.devices.condition import FAILED, WARN, GpuProblem, conditioned, corrected_note
from hegmd.protocol.snapshots import CORRECTED, GONE, LOST, ROWS, UNCORRECTED, Gpu, Health, PeerLink

VENDOR = "amd"
PCI_VENDOR_ID = 0x1002


class AmdLink(NamedTuple):
    """A link to another GPU, given by its PCI address."""

    to_pci_address: str
    kind: str
    lanes: int | None = None
    bytes_per_s: int | None = None


class BadPages(NamedTuple):
    """Counts of bad memory pages: retired, to be retired at the next reset, and impossible to retire."""

    retired: int
    pending: int
    failed: int


@dataclass(slots=True, eq=False, repr=False)
class AmdFacts:
    """The facts of one GPU; None for unknown ones."""

    pci_address: str
    unique_id: int | None = None
    device_id: int | None = None
    gfx: str | None = None
    name: str | None = None
    numa_node: int | None = None
    state: str = "ok"
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    ecc_corrected: int | None = None
    risen_corrected: int = 0
    ecc_uncorrected: int | None = None
    ecc_deferred: int | None = None
    bad_pages: BadPages | None = None
    links: tuple[AmdLink, ...] = ()
    failures: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def memory_free_bytes(self) -> int | None:
        if self.memory_total_bytes is None or self.memory_used_bytes is None:
            return None
        return self.memory_total_bytes - self.memory_used_bytes


def records_of(gpus: Sequence[AmdFacts], driver_version: str | None) -> tuple[Gpu, ...]:
    """The records of these GPUs, whose order gives the index."""
    uuids = uuids_of(gpus)
    return tuple(_record(facts, index, uuids, driver_version) for index, facts in enumerate(gpus))


def uuids_of(gpus: Sequence[AmdFacts]) -> dict[str, str]:
    """The UUID of each GPU by its PCI address."""
    shared = Counter(facts.unique_id for facts in gpus if facts.unique_id)
    uuids: dict[str, str] = {}
    for facts in gpus:
        if not facts.unique_id:
            uuids[facts.pci_address] = f"PCI-{facts.pci_address}"
        elif shared[facts.unique_id] > 1:
            uuids[facts.pci_address] = f"GPU-{facts.unique_id:016x}@{facts.pci_address}"
        else:
            uuids[facts.pci_address] = f"GPU-{facts.unique_id:016x}"
    return uuids


def percent(value: float | None) -> float | None:
    """Return None for values out of range: libraries report those for unknown numbers."""
    return float(value) if value is not None and 0 <= value <= 100 else None


def celsius(value: float | None) -> float | None:
    """Return None for values that no powered chip has."""
    return float(value) if value is not None and 0 < value <= 150 else None


def watts(value: float | None) -> float | None:
    """Return None for 0: a running chip draws power."""
    return float(value) if value is not None and 1 <= value <= 5000 else None


def gfx_name(target_version: int) -> str | None:
    """Return the compilers' name of the chip: gfx942 for 90402, which the kernel writes, and gfx90a for 90010."""
    if target_version <= 0:
        return None
    major, minor, step = target_version // 10000, target_version // 100 % 100, target_version % 100
    return f"gfx{major}{minor:x}{step:x}"


def _record(facts: AmdFacts, index: int, uuids: dict[str, str], driver_version: str | None) -> Gpu:
    known = Gpu(
        id=str(index),
        index=index,
        uuid=uuids[facts.pci_address],
        pci_address=facts.pci_address,
        name=facts.name or f"AMD {facts.gfx or 'GPU'}",
        vendor=VENDOR,
        chip=_chip(facts),
        state=facts.state,
        numa_node=facts.numa_node,
        driver_version=driver_version,
        health=judge(facts),
    )
    if facts.state != "ok":
        return known
    return known.replace(
        memory_total_bytes=facts.memory_total_bytes,
        memory_used_bytes=facts.memory_used_bytes,
        memory_free_bytes=facts.memory_free_bytes,
        utilisation_percent=facts.utilisation_percent,
        temperature_celsius=facts.temperature_celsius,
        power_watts=facts.power_watts,
        power_limit_watts=facts.power_limit_watts,
        links=tuple(
            PeerLink(to_uuid=uuids[link.to_pci_address], kind=link.kind, lanes=link.lanes, bytes_per_s=link.bytes_per_s)
            for link in facts.links
            if link.to_pci_address in uuids
        ),
    )


def _chip(facts: AmdFacts) -> str | None:
    """Return a text that is equal for GPUs of the same kind: PCI product and instruction set."""
    if facts.device_id is None or facts.gfx is None:
        return None
    return f"{PCI_VENDOR_ID:04x}:{facts.device_id:04x} {facts.gfx}"


def judge(facts: AmdFacts) -> Health:
    """Return the GPU's health, with a sentence for each problem."""
    if facts.state == "lost":
        note = "the GPU fell off the bus; read the kernel log (dmesg | grep -i amdgpu), then reset or reboot the node"
        return conditioned([GpuProblem(FAILED, note, LOST, GONE)]).replace(state="failed")
    failures = [f"{what} ({words})" for what, words in facts.failures.items()]
    if facts.state == "unknown":
        note = (
            f"the driver reports nothing about this GPU: {', '.join(failures)}; compare with amd-smi and the kernel log"
        )
        return Health(state="unknown", notes=(note,))
    notes = [GpuProblem(WARN, f"the driver failed to report its {each}") for each in failures]
    if facts.ecc_uncorrected:
        words = f"{facts.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
        notes.append(GpuProblem(WARN, words, UNCORRECTED))
    if facts.ecc_deferred:
        words = f"{facts.ecc_deferred} memory errors will hit the next process that reads that memory"
        notes.append(GpuProblem(WARN, words, UNCORRECTED))
    if facts.risen_corrected:
        notes.append(GpuProblem(WARN, corrected_note(facts.risen_corrected), CORRECTED))
    pages = facts.bad_pages
    if pages is not None and pages.pending:
        notes.append(GpuProblem(WARN, f"{pages.pending} bad memory pages are retired at the next reset", ROWS))
    if pages is not None and pages.failed:
        notes.append(GpuProblem(FAILED, f"{pages.failed} bad memory pages could not be retired; reset the GPU", ROWS))
    failed = any(note.weight == FAILED for note in notes)
    doubtless = facts.ecc_uncorrected is not None or pages is not None
    return conditioned(notes).replace(
        state="failed" if failed else "warn" if notes else "ok" if doubtless else "unknown",
        ecc_corrected=facts.ecc_corrected,
        ecc_uncorrected=facts.ecc_uncorrected,
        retired_pages=None if pages is None else pages.retired,
    )
