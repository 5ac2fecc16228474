"""The kernel's facts about NVIDIA GPUs, without NVML: reads /sys and /proc.

Answers where NVML cannot: before it is loaded (is there a card?), after it failed (the version of the kernel module),
and for what it does not report (the nearest NUMA node, GPUs that came or left since it was initialised). Both roots are
arguments, for tests. Unreadable facts are None or empty.
"""

from __future__ import annotations

import os
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


class NvidiaHost:
    """The kernel's files about NVIDIA's driver and GPUs on this machine."""

    def __init__(self, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> None:
        self._sys = sys_root
        self._proc = proc_root

    def cards(self) -> tuple[str, ...]:
        """Return the PCI addresses of all NVIDIA GPUs on the bus, with any driver."""
        devices = self._sys / "bus" / "pci" / "devices"
        return tuple(
            name
            for name in _names(devices)
            if _line(devices / name / "vendor") == _NVIDIA
            and (_line(devices / name / "class") or "").startswith(_DISPLAY_CLASS)
        )

    def module_version(self) -> str | None:
        return _line(self._sys / "module" / "nvidia" / "version")

    def numa_node(self, pci_address: str) -> int | None:
        """Return the GPU's NUMA node. A machine with one node has that one, even if the firmware does not report it."""
        text = _line(self._sys / "bus" / "pci" / "devices" / pci_address / "numa_node")
        if text is None or not text.lstrip("-").isdigit():
            return None
        if int(text) >= 0:
            return int(text)
        return 0 if _line(self._sys / "devices" / "system" / "node" / "online") == "0" else None

    def driven_gpus(self) -> tuple[str, ...]:
        """Return the driver's current GPUs. NVML only knows those of its initialisation."""
        return _names(self._proc / "driver" / "nvidia" / "gpus")


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None
