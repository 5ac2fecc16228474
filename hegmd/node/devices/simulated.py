"""Simulated GPUs for a node without any: the contract of a vendor's library, and faults on request.

Owns the memory reserved on the GPUs and the current faults. Used memory is the sum of what is reserved; what nothing
measures, such as power, is unknown. Does not look at processes: the owner of memory is a connection, and `release`
frees it, as a driver frees memory when a process closes its descriptors.

Any thread may call its methods at any time: the server reserves and frees memory while a snapshot hangs in the
inventory's thread. One condition guards everything, and only a hanging snapshot waits on it.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from hegmd.errors import BAD_REQUEST, NOT_FOUND, HegmError, Refused
from hegmd.node.devices.base import DeviceAbsent, DeviceError, ProcessUse, VendorSnapshot
from hegmd.node.devices.condition import FAILED, OK, WARN, GpuProblem, conditioned
from hegmd.node.devices.node_spec import GPU_FAULTS, VENDOR, VENDOR_FAULTS, GpuSpec, Topology, gpu_id, write_size
from hegmd.protocol.snapshots import GONE, LINK, LOST, UNCORRECTED, Gpu, GpuUse, Health, PeerLink

MEND = "none"
# The XIDs that NVIDIA's driver would report: 48 for an uncorrectable memory error, 74 for an error of a link, 79 for a
# GPU that fell off the bus.
_XIDS = {"ecc": 48, "xid": 74, "xid79": 79}
_XID_NOTES = {
    48: GpuProblem(FAILED, "the driver reported XID 48, an uncorrectable memory error", UNCORRECTED),
    74: GpuProblem(WARN, "the driver reported XID 74, an error of a link", LINK),
    79: GpuProblem(FAILED, "the driver reported XID 79: it fell off the bus", LOST, GONE),
}
_SHUTS_OUT = ("lost", "error", "hang", "xid79")
_MENDING = "repair it with the fault `none`"


class _SimulatedHold(NamedTuple):
    pid: int
    vram_bytes: int


class SimulatedProvider:
    """A node of simulated GPUs, called `gpu0`, `gpu1` and so on, in the order of the topology."""

    vendor = "simulated"

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._changed = threading.Condition()
        self._opened = 0  # counts the times it was opened, so that a hanging snapshot notices a close in between
        self._is_open = False
        self._snapshots = 0
        self._holds: dict[object, dict[int, _SimulatedHold]] = {}
        self._set_faults: dict[str, str] = {}
        self._coming_faults = list(topology.faults)

    # ---- the provider's contract ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Always succeeds. Errors come from `snapshot`, so that scheduled faults can end."""
        with self._changed:
            if not self._is_open:
                self._is_open = True
                self._opened += 1

    def close(self) -> None:
        """A hanging snapshot ends with DeviceError. Reserved memory stays reserved."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def snapshot(self) -> VendorSnapshot:
        """Read everything. Waits while the fault `hang` is set."""
        with self._changed:
            opened = self._opened
            if self._is_open:
                self._snapshots += 1
            while self._is_open and self._opened == opened and "hang" in self._faults().values():
                self._changed.wait()
            if not self._is_open or self._opened != opened:
                raise DeviceError("the simulated driver is not open", "open it before asking it for a snapshot")
            faults = self._faults()
            if faults.get(VENDOR) == "lost":
                raise DeviceAbsent("the simulated driver is absent, as requested", _MENDING)
            if faults.get(VENDOR) == "error":
                raise DeviceError("the simulated driver answers with an error, as requested", _MENDING)
            return self._read(faults)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def hold(self, owner: object, pid: int, gpu: str, vram_bytes: int) -> int:
        """Reserve that much on the GPU for this owner and process in total; returns its bytes there.

        The GPU is named by id, index or UUID. Raises HegmError NOT_FOUND for an unknown one, and Refused if the memory
        is not free or the GPU does not answer; then nothing changes.
        """
        if vram_bytes < 0:
            raise HegmError(BAD_REQUEST, f"{vram_bytes} bytes cannot be reserved", "ask for 0 bytes or more")
        with self._changed:
            index = self._index_of(gpu)
            held = self._holds.get(owner, {}).get(index, _SimulatedHold(pid, 0)).vram_bytes
            if vram_bytes > held:
                self._refuse_unless_it_answers(index)
                self._refuse_unless_it_fits(index, vram_bytes, held)
            if vram_bytes:
                self._holds.setdefault(owner, {})[index] = _SimulatedHold(pid, vram_bytes)
            else:
                self._give_back(owner, index)
            return vram_bytes

    def release(self, owner: object) -> None:
        """Free everything of the owner. Does nothing if it has nothing."""
        with self._changed:
            self._holds.pop(owner, None)

    def _give_back(self, owner: object, index: int) -> None:
        holds = self._holds.get(owner, {})
        holds.pop(index, None)
        if not holds:
            self._holds.pop(owner, None)

    def _index_of(self, gpu: str) -> int:
        for index, spec in enumerate(self._topology.gpus):
            if gpu in {gpu_id(index), str(index), spec.uuid}:
                return index
        raise HegmError(NOT_FOUND, f"there is no GPU {gpu!r}", f"use one of {self._names()}")

    def _names(self) -> str:
        last = len(self._topology.gpus) - 1
        return gpu_id(0) if last == 0 else f"{gpu_id(0)} to {gpu_id(last)}"

    def _refuse_unless_it_answers(self, index: int) -> None:
        faults = self._faults()
        for target in (gpu_id(index), VENDOR):
            fault = faults.get(target)
            if fault in _SHUTS_OUT:
                name = gpu_id(index) if target != VENDOR else "the simulated driver"
                raise Refused(f"{name} has the fault `{fault}` and allocates no memory", _MENDING, {"fault": fault})

    def _refuse_unless_it_fits(self, index: int, asked_bytes: int, held_bytes: int) -> None:
        total_bytes = self._topology.gpus[index].memory_bytes
        free_bytes = total_bytes - self._used_bytes(index)
        if asked_bytes - held_bytes <= free_bytes:
            return
        most_bytes = held_bytes + free_bytes
        faults = self._faults()
        hint = f"ask for at most {write_size(most_bytes)}, or end a process that holds memory there"
        free_elsewhere = {
            other: spec.memory_bytes - self._used_bytes(other)
            for other, spec in enumerate(self._topology.gpus)
            if other != index and faults.get(gpu_id(other)) not in _SHUTS_OUT
        }
        freest = max(free_elsewhere, key=lambda other: free_elsewhere[other], default=index)
        if free_elsewhere.get(freest, 0) >= asked_bytes:
            hint = f"use {gpu_id(freest)}, where {write_size(free_elsewhere[freest])} are free, or " + hint
        raise Refused(
            f"{gpu_id(index)} has {write_size(free_bytes)} of {write_size(total_bytes)} free, "
            f"and {write_size(asked_bytes - held_bytes)} more were requested",
            hint,
            {
                "gpu": gpu_id(index),
                "total_bytes": total_bytes,
                "free_bytes": free_bytes,
                "held_bytes": held_bytes,
                "asked_bytes": asked_bytes,
            },
        )

    def _used_bytes(self, index: int) -> int:
        there_already = sum(process.vram_bytes or 0 for process in self._topology.gpus[index].processes)
        return there_already + sum(holds[index].vram_bytes for holds in self._holds.values() if index in holds)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def set_fault(self, target: str, fault: str) -> dict[str, str]:
        """Set a fault of a GPU, or with `vendor` of the whole library, or clear it with `none`; returns all faults."""
        with self._changed:
            name = VENDOR if target == VENDOR else gpu_id(self._index_of(target))
            possible = VENDOR_FAULTS if name == VENDOR else GPU_FAULTS
            if fault not in possible and fault != MEND:
                raise HegmError(
                    BAD_REQUEST,
                    f"{name} cannot have the fault {fault!r}",
                    f"use {', '.join(possible)}, or {MEND} to repair it",
                )
            self._set_faults.pop(name, None)
            self._coming_faults = [
                each for each in self._coming_faults if each.target != name or each.after_snapshots >= self._snapshots
            ]
            if fault != MEND:
                self._set_faults[name] = fault
            self._changed.notify_all()
            return self._faults()

    def _faults(self) -> dict[str, str]:
        """Return every current fault by target. A requested one overrides a scheduled one."""
        came = {
            each.target: each.fault
            for each in self._coming_faults
            if each.after_snapshots < self._snapshots
            and (each.for_snapshots is None or self._snapshots <= each.after_snapshots + each.for_snapshots)
        }
        return {**came, **self._set_faults}

    # ---- what a snapshot shows --------------------------------------------------------------------------------------

    def _read(self, faults: dict[str, str]) -> VendorSnapshot:
        gpus: list[Gpu] = []
        uses: list[ProcessUse] = []
        for index, spec in enumerate(self._topology.gpus):
            fault = faults.get(gpu_id(index))
            known = self._identity(index, spec)
            if fault == "lost":
                note = GpuProblem(FAILED, "it fell off the bus, as requested", LOST, GONE)
                health = conditioned([note]).replace(state="failed")
                gpus.append(known.replace(state="lost", health=health))
            elif fault == "error":
                health = Health(state="unknown", notes=("it answers with an error, as requested",))
                gpus.append(known.replace(state="unknown", health=health))
            else:
                gpus.append(self._answering(known, index, spec, fault))
                uses += self._uses(index, spec, hide_memory=fault == "unknown-memory")
        return VendorSnapshot(
            gpus=tuple(gpus),
            uses=tuple(uses),
            driver_version=self._topology.driver_version,
            library_version=self._topology.library_version,
            compute_version=self._topology.compute_version,
        )

    def _identity(self, index: int, spec: GpuSpec) -> Gpu:
        """Return the fields that stay known for a GPU that does not answer."""
        return Gpu(
            id=str(index),
            index=index,
            uuid=spec.uuid,
            pci_address=spec.pci_address,
            name=spec.name,
            vendor=self.vendor,
            chip=spec.chip,
            plays=spec.plays,
            numa_node=spec.numa_node,
            driver_version=self._topology.driver_version,
        )

    def _answering(self, known: Gpu, index: int, spec: GpuSpec, fault: str | None) -> Gpu:
        used_bytes = None if fault == "unknown-memory" else self._used_bytes(index)
        return known.replace(
            memory_total_bytes=spec.memory_bytes,
            memory_used_bytes=used_bytes,
            memory_free_bytes=None if used_bytes is None else spec.memory_bytes - used_bytes,
            utilisation_percent=_as_float(spec.utilisation_percent),
            temperature_celsius=_as_float(spec.temperature_celsius),
            power_watts=_as_float(spec.power_watts),
            power_limit_watts=_as_float(spec.power_limit_watts),
            links=self._links(index),
            mig=spec.mig,
            mps=spec.mps,
            persistence=spec.persistence,
            health=_health(spec, fault),
        )

    def _links(self, index: int) -> tuple[PeerLink, ...]:
        return tuple(
            PeerLink(
                to_uuid=self._topology.gpus[link.ends[link.ends[0] == index]].uuid,
                kind=link.kind,
                lanes=link.lanes,
                bytes_per_s=link.bytes_per_s,
            )
            for link in self._topology.links
            if index in link.ends
        )

    def _uses(self, index: int, spec: GpuSpec, *, hide_memory: bool) -> list[ProcessUse]:
        """Sum a process's memory over its connections: the driver knows processes only."""
        shares: dict[int, tuple[int | None, str]] = {
            process.pid: (process.vram_bytes, process.kind) for process in spec.processes
        }
        for holds in self._holds.values():
            if index in holds:
                pid, vram_bytes = holds[index].pid, holds[index].vram_bytes
                before, kind = shares.get(pid, (0, "compute"))
                shares[pid] = (None if before is None else before + vram_bytes, kind)
        return [
            ProcessUse(pid, GpuUse(gpu=spec.uuid, vram_bytes=None if hide_memory else vram_bytes, kind=kind))
            for pid, (vram_bytes, kind) in sorted(shares.items())
        ]


def _as_float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _health(spec: GpuSpec, fault: str | None) -> Health:
    uncorrected = (spec.ecc_uncorrected or 0) + 1 if fault == "ecc" else spec.ecc_uncorrected
    last_xid = _XIDS.get(fault or "", spec.last_xid)
    notes: list[GpuProblem] = []
    if uncorrected:
        notes.append(GpuProblem(WARN, f"uncorrected memory errors: {uncorrected}", UNCORRECTED))
    if last_xid is not None:
        notes.append(_XID_NOTES.get(last_xid, GpuProblem(WARN, f"the driver reported XID {last_xid}")))
    worst = max((note.weight for note in notes), default=OK)
    return conditioned(notes).replace(
        state={FAILED: "failed", OK: "ok"}.get(worst, "warn"),
        ecc_corrected=spec.ecc_corrected,
        ecc_uncorrected=uncorrected,
        retired_pages=spec.retired_pages,
        last_xid=last_xid,
    )
