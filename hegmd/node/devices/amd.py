"""The provider for AMD GPUs: AMD SMI if it fits, else the kernel's files.

Chooses between the two at each `open`, and combines their answers. The kernel's list of processes is preferred, because
it is exact and cheap. Without the amdgpu driver nothing is loaded, so that other nodes do not pay for AMD's library.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from hegmd.node.devices.amd_binding import DEFAULT_ROCM, AmdSmiUnusable, load_binding
from hegmd.node.devices.amd_facts import VENDOR, AmdFacts, records_of, uuids_of
from hegmd.node.devices.amd_smi import AmdSmi
from hegmd.node.devices.base import DeviceAbsent, DeviceError, VendorSnapshot
from hegmd.node.devices.condition import CorrectedErrors
from hegmd.node.devices.kfd import Kfd

_log = logging.getLogger(__name__)


class AmdProvider:
    """The provider. `sys_root` and `rocm` are the places of the kernel's files and of ROCm; `load` finds the
    binding."""

    vendor = VENDOR

    def __init__(
        self, sys_root: Path = Path("/sys"), rocm: Path | None = None, load: Callable[[Path], ModuleType] = load_binding
    ) -> None:
        self._kfd = Kfd(sys_root)
        self._rocm = rocm or Path(os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH") or DEFAULT_ROCM)
        self._load = load
        self._smi: AmdSmi | None = None
        self._is_open = False
        self._last_reason = ""
        self._corrected: dict[str, CorrectedErrors] = {}

    def open(self) -> None:
        if self._is_open:
            return
        if not self._kfd.driver_is_loaded():
            self._raise_absent()
        try:
            smi = AmdSmi(self._load(self._rocm), self._kfd)
            smi.start()
            self._smi = smi
        except AmdSmiUnusable as unfit:
            self._fall_back(str(unfit))
        self._is_open = True

    def snapshot(self) -> VendorSnapshot:
        if not self._is_open:
            raise DeviceError("the AMD provider is not open", "open it before asking it for a snapshot")
        if not self._kfd.driver_is_loaded():
            self._raise_absent()
        return self._from_kernel() if self._smi is None else self._from_library(self._smi)

    def close(self) -> None:
        self._is_open = False
        if self._smi is not None:
            self._smi.stop()
            self._smi = None

    def _raise_absent(self) -> None:
        cards = self._kfd.cards()
        if cards:
            raise DeviceAbsent(
                f"the driver amdgpu is not loaded, but there is an AMD GPU at {cards[0]}", "sudo modprobe amdgpu"
            )
        raise DeviceAbsent(
            "this node has no AMD GPU with a driver", "check the PCI bus if a GPU should be here: lspci -d 1002:"
        )

    def _fall_back(self, reason: str) -> None:
        if not self._kfd.gpus():
            raise DeviceAbsent(
                f"{reason}, and the kernel lists no GPU in /sys/class/kfd",
                "install AMD SMI (the package amd-smi-lib) of ROCm 7 or later, and run: dmesg | grep -i kfd",
            )
        if reason != self._last_reason:
            self._last_reason = reason
            _log.info("AMD GPUs are read from /sys/class/kfd, because %s", reason)

    def _from_kernel(self) -> VendorSnapshot:
        if not self._kfd.is_there():
            raise DeviceError(
                "the kernel's /sys/class/kfd no longer exists", "run: dmesg | grep -i kfd; hegmd tries again"
            )
        gpus = self._kfd.gpus()
        facts = self._kfd.facts(gpus)
        uuids = uuids_of(facts)
        if not self._kfd.lists_processes():
            for each in facts:
                each.failures["processes"] = "kernels before 5.9 do not list them"
        return VendorSnapshot(
            gpus=records_of(self._with_history(facts), self._kfd.driver_version()),
            uses=self._kfd.uses({gpu.gpu_id: uuids[gpu.pci_address] for gpu in gpus}),
            driver_version=self._kfd.driver_version(),
            library_version=None,
            compute_version=self._rocm_version(),
        )

    def _from_library(self, smi: AmdSmi) -> VendorSnapshot:
        smi.start_again_if_gpus_changed()
        facts = smi.facts()
        uuids = uuids_of(facts)
        if self._kfd.lists_processes():
            known = [gpu for gpu in self._kfd.gpus() if gpu.pci_address in uuids]
            uses = self._kfd.uses({gpu.gpu_id: uuids[gpu.pci_address] for gpu in known})
        else:
            uses = smi.uses(facts, uuids)
        driver_version = smi.driver_version or self._kfd.driver_version()
        return VendorSnapshot(
            gpus=records_of(self._with_history(facts), driver_version),
            uses=uses,
            driver_version=driver_version,
            library_version=smi.library_version,
            compute_version=self._rocm_version(),
        )

    def _with_history(self, gpus: list[AmdFacts]) -> list[AmdFacts]:
        for facts in gpus:
            corrected = self._corrected.setdefault(facts.pci_address, CorrectedErrors())
            facts.risen_corrected = corrected.see(facts.ecc_corrected, time.time())
        return gpus

    def _rocm_version(self) -> str | None:
        try:
            return (self._rocm / ".info" / "version").read_text(encoding="utf-8").strip() or None
        except (OSError, ValueError):
            return None
