"""The NVML calls for one GPU, and their answers as plain values in our units.

One method is one call. An unknown answer (not supported, not permitted, an older driver) is None. So is one that the
driver failed to give, which is then in `failures`. NVML marks some unknown numbers by the highest value of their type:
these are None too. Nothing is kept between calls.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from hegmd.node.devices.nvml import GpuFailed, Nvml, ProcessEntries, known_text

_U32_UNTOLD = 2**32 - 1
_U64_UNTOLD = 2**64 - 1
_RECOVERY_ACTION_FIELD = 230


class Memory(NamedTuple):
    """The values of nvidia-smi: `used` excludes the driver's own reserve (since driver 510)."""

    total_bytes: int
    used_bytes: int
    free_bytes: int | None


class RemappedRows(NamedTuple):
    """Memory rows that were, or are to be, replaced by spare ones."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


class NvLink(NamedTuple):
    """One of a GPU's links that is up. `remote_pci` is None if the other end is unknown."""

    remote_pci: str | None
    version: int | None


class NvmlGpu:
    """One GPU, or one MIG instance, during one snapshot. Any call raises GpuLost or LibraryFailed."""

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self.handle = handle
        self.failures: dict[str, str] = {}  # the driver's error messages, by question

    def _ask(self, what: str, function: str, *arguments: object) -> Any:
        try:
            return self._nvml.answer(function, self.handle, *arguments)
        except GpuFailed as failure:
            self.failures[what] = str(failure)
            return None

    def _number(self, what: str, function: str, *arguments: object, untold: int = _U32_UNTOLD) -> int | None:
        value = self._ask(what, function, *arguments)
        return None if value is None or value == untold else int(value)

    # Identity

    def uuid(self) -> str | None:
        return known_text(self._ask("UUID", "nvmlDeviceGetUUID"))

    def name(self) -> str | None:
        return known_text(self._ask("name", "nvmlDeviceGetName"))

    def pci(self) -> tuple[str, int] | None:
        """Its address as the kernel writes it, and the PCI device id."""
        pci = self._ask("PCI address", "nvmlDeviceGetPciInfo")
        return None if pci is None else (_pci_address(pci), pci.pciDeviceId >> 16)

    def architecture(self) -> int | None:
        return self._number("architecture", "nvmlDeviceGetArchitecture")

    def compute_capability(self) -> tuple[int, int] | None:
        found = self._ask("compute capability", "nvmlDeviceGetCudaComputeCapability")
        return None if found is None else (int(found[0]), int(found[1]))

    def nearest_numa_nodes(self) -> tuple[int, ...]:
        nodes = self._ask("NUMA affinity", "nvmlDeviceGetMemoryAffinity", 4, 0)
        if nodes is None:
            return ()
        return tuple(word * 64 + bit for word, bits in enumerate(nodes) for bit in range(64) if bits >> bit & 1)

    # How it does

    def memory(self) -> Memory | None:
        found = self._ask("memory", "nvmlDeviceGetMemoryInfo", self._nvml.binding.nvmlMemory_v2)
        if found is None and "memory" not in self.failures:
            found = self._ask("memory", "nvmlDeviceGetMemoryInfo")
        if found is None or _U64_UNTOLD in (found.total, found.used):
            return None
        return Memory(int(found.total), int(found.used), None if found.free == _U64_UNTOLD else int(found.free))

    def utilisation_percent(self) -> float | None:
        found = self._ask("utilisation", "nvmlDeviceGetUtilizationRates")
        return float(found.gpu) if found is not None and found.gpu <= 100 else None

    def temperature_celsius(self) -> float | None:
        found = self._ask("temperature", "nvmlDeviceGetTemperature", 0)
        if found is None and "temperature" not in self.failures:
            found = self._ask("temperature", "nvmlDeviceGetTemperatureV", 0)
        return None if found is None or found == _U32_UNTOLD else float(found)

    def power_watts(self) -> float | None:
        milliwatts = self._number("power", "nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def power_limit_watts(self) -> float | None:
        milliwatts = self._number("power limit", "nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1000

    def mig(self) -> bool | None:
        modes = self._ask("MIG mode", "nvmlDeviceGetMigMode")
        return None if modes is None else bool(modes[0])

    def persistence(self) -> bool | None:
        mode = self._number("persistence mode", "nvmlDeviceGetPersistenceMode")
        return None if mode is None else bool(mode)

    def ecc_errors(self, *, corrected: bool) -> int | None:
        """Since the driver was loaded; None with ECC off."""
        return self._number("ECC errors", "nvmlDeviceGetTotalEccErrors", 0 if corrected else 1, 0, untold=_U64_UNTOLD)

    def retired_pages(self) -> int | None:
        """For multiple single-bit and for double-bit errors together (before Ampere; later chips remap rows)."""
        single = self._ask("retired pages", "nvmlDeviceGetRetiredPages", 0)
        double = None if single is None else self._ask("retired pages", "nvmlDeviceGetRetiredPages", 1)
        return None if single is None or double is None else len(single) + len(double)

    def retired_pending(self) -> bool | None:
        pending = self._number("pending page retirements", "nvmlDeviceGetRetiredPagesPendingStatus")
        return None if pending is None else bool(pending)

    def remapped_rows(self) -> RemappedRows | None:
        rows = self._ask("remapped rows", "nvmlDeviceGetRemappedRows")
        return None if rows is None else RemappedRows(int(rows[0]), int(rows[1]), bool(rows[2]), bool(rows[3]))

    def clocks_event_reasons(self) -> int | None:
        """Why the clocks are not higher, as NVML's bits."""
        found = self._number("clock reasons", "nvmlDeviceGetCurrentClocksEventReasons", untold=_U64_UNTOLD)
        if found is None and "clock reasons" not in self.failures:  # named so before driver 535
            found = self._number("clock reasons", "nvmlDeviceGetCurrentClocksThrottleReasons", untold=_U64_UNTOLD)
        return found

    def recovery_action(self) -> int | None:
        """Return what the driver wants done before the GPU is used again (since driver 565); 0 is nothing."""
        values = self._ask("recovery action", "nvmlDeviceGetFieldValues", [_RECOVERY_ACTION_FIELD])
        if values is None or values[0].nvmlReturn:
            return None
        return int(values[0].value.uiVal)

    def fabric(self) -> tuple[int, int] | None:
        """State and status of its registration with the NVLink switches; None without switches."""
        make = getattr(self._nvml.binding, "c_nvmlGpuFabricInfoV_t", None)
        if make is None:
            return None
        info = make()
        if self._ask("NVLink fabric", "nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is None:
            return None
        return int(info.state), int(info.status)

    # Other GPUs and processes

    def nvlink(self, number: int) -> NvLink | None:
        """The link of that number if it is up."""
        if not self._ask("NVLink", "nvmlDeviceGetNvLinkState", number):
            return None
        pci = self._ask("NVLink", "nvmlDeviceGetNvLinkRemotePciInfo", number)
        version = self._number("NVLink", "nvmlDeviceGetNvLinkVersion", number)
        return NvLink(None if pci is None else _pci_address(pci), version)

    def reaches(self, other: NvmlGpu, capability: int) -> bool:
        """Return whether the driver allows that peer-to-peer capability: 0 read, 1 write, 2 over NVLink."""
        return self._number("peer access", "nvmlDeviceGetP2PStatus", other.handle, capability) == 0

    def instances(self) -> list[NvmlGpu]:
        """Its MIG instances."""
        found: list[NvmlGpu] = []
        for index in range(self._number("MIG instances", "nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self._ask("MIG instances", "nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is not None:
                found.append(NvmlGpu(self._nvml, handle))
        return found

    def process_entries(self, kind: str) -> ProcessEntries | None:
        """Return one of PROCESS_LISTS; None if unknown."""
        try:
            return self._nvml.process_entries(self.handle, kind)
        except GpuFailed as failure:
            self.failures["processes"] = str(failure)
            return None


def _pci_address(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
