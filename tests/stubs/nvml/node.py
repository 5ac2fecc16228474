"""A pretend node with NVIDIA GPUs for tests: the stub library, its scenario, and the parts of /sys and /proc beside it.

The provider that it makes is the daemon's own, over the true binding; only the roots and the library's path differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hegmd.devices.nvidia import NvidiaProvider
from hegmd.devices.nvidia_host import NvidiaHost
from tests.stubs.build import build_stub
from tests.stubs.nvml.scenario import Scenario

# 2025-03-09 12:00:00 UTC
NOW_UTC = 1_741_521_600.0


@dataclass
class NvidiaNode:
    """Where everything is. The scenario is in force once it is written."""

    folder: Path
    scenario: Scenario
    library: Path

    @classmethod
    def make(cls, folder: Path, *, gpus: int = 2, hide: Sequence[str] = ()) -> NvidiaNode:
        scenario = Scenario.of_h200s(folder / "scenario", gpus)
        scenario.write()
        node = cls(folder, scenario, build_stub("nvml", folder, hide=hide))
        for index in range(gpus):
            node.plug(f"0000:{0x19 + 0x10 * index:02x}:00.0", numa_node=index)
        return node

    @property
    def sys_root(self) -> Path:
        return self.folder / "sys"

    @property
    def proc_root(self) -> Path:
        return self.folder / "proc"

    @property
    def host(self) -> NvidiaHost:
        return NvidiaHost(self.sys_root, self.proc_root)

    def provider(self, library: Path | str | None = None) -> NvidiaProvider:
        return NvidiaProvider(str(library or self.library), self.host, clock_utc=lambda: NOW_UTC)

    def plug(self, address: str, *, numa_node: int) -> None:
        """Put a card on the PCI bus and have the driver take it, as far as the kernel shows it."""
        device = self.sys_root / "bus" / "pci" / "devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        (device / "numa_node").write_text(f"{numa_node}\n")
        (self.proc_root / "driver" / "nvidia" / "gpus" / address).mkdir(parents=True)

    def is_mapped(self) -> bool:
        """Whether any library from this node's folder is in this process's memory."""
        return str(self.folder) in Path("/proc/self/maps").read_text()
