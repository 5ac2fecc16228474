"""A pretend node with NVIDIA GPUs for tests: the stub library, its scenario, and the parts of /sys and /proc beside it.

The provider that it makes is the daemon's own, over the true binding; only the roots and the library's path differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hegmd.node.devices.nvidia import NvidiaProvider
from hegmd.node.devices.nvidia_host import NvidiaHost
from tests.stubs.build import build_stub
from tests.stubs.nvml.scenario import Scenario

# 2025-03-09 12:00:00 UTC
NOW_UTC = 1_741_521_600.0


@dataclass
class NvidiaNode:
    """The node's files. The scenario is in force once it is written."""

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

    def is_driver_open(self) -> bool:
        """Whether this process has the node's driver open, as an initialised library has."""
        opened = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return str(self.scenario.driver) in [os.readlink(path) for path in opened if os.path.lexists(path)]

    def kept_descriptors(self) -> list[int]:
        """The descriptors that the library leaked in this process: one for each load and initialisation."""
        lines = self.scenario.kept.read_text().splitlines() if self.scenario.kept.exists() else []
        return [int(fd) for pid, fd in map(str.split, lines) if int(pid) == os.getpid()]

    def close(self) -> None:
        """Close what the library never would, so that a test leaves nothing behind."""
        for descriptor in self.kept_descriptors():
            os.close(descriptor)
        self.scenario.kept.unlink(missing_ok=True)


# As the fixture `make_nvidia_node` gives it: called like NvidiaNode.make.
MakeNode = Callable[..., NvidiaNode]
