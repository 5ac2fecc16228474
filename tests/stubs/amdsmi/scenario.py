"""Writes the answers of the stub AMD SMI: the node that a test wants, and its faults.

The stub reads the file again when it was replaced, so a test changes the node by changing the fields here and calling
`write()`. The file omits a fact that is None, and the stub then answers as the library does for a chip without it.
`orders` are lines of their own:

    error FUNCTION[@GPU] CODE     the call fails with that status; * is any function
    hang  FUNCTION[@GPU]          the call blocks until the scenario does not say so any more
    hold  FUNCTION[@GPU] FIFO     the call blocks until somebody opens the FIFO for writing and closes it: opening it
                                  returns once the call is in there
    lost_after GPU CALLS          so many calls about that GPU go well, then it is off the bus
    link GPU GPU KIND MB/S LANES  xgmi, pcie, or nop2p for PCIe without peer access
    no_driver                     nothing can be initialised
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

ENVIRONMENT = "HEGM_AMDSMI_SCENARIO"
MIB = 1 << 20
MI300X_BYTES = 196592 * MIB

Facts = dict[str, "str | int | None"]


def pci(index: int) -> str:
    return f"0000:{0x05 + 0x10 * index:02x}:00.0"


def unique_id(index: int) -> int:
    return 0x3CBDE4F0A1B20000 + index


def uuid(index: int) -> str:
    return f"GPU-{unique_id(index):016x}"


def mi300x(index: int) -> Facts:
    """An idle MI300X as amd-smi shows it, but for the identity."""
    return {
        "pci": pci(index),
        "serial": f"0x{unique_id(index):016X}",
        "device_id": "0x74a1",
        "gfx": "0x942",
        "name": "AMD Instinct MI300X OAM",
        "numa": index // 4,
        "memory_total": MI300X_BYTES,
        "memory_used": 298 * MIB,
        "activity": 0,
        "hotspot": 41,
        "power": 133,
        "power_cap": 750_000_000,
        "ecc": "0 0 0",
        "pages": "0 0 0",
    }


@dataclass
class Scenario:
    """The node behind the stub. Making one changes nothing; `write` puts it in force."""

    path: Path
    gpus: list[Facts] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)  # GPU PID BYTES [NAME]
    orders: list[str] = field(default_factory=list)
    version: str = "26 0 2"
    driver_version: str = "6.14.14"
    log: Path | None = None  # where the stub writes the name of each function that is called

    @classmethod
    def of_mi300x(cls, path: Path, count: int) -> Scenario:
        return cls(path, gpus=[mi300x(index) for index in range(count)])

    def environment(self) -> dict[str, str]:
        return {ENVIRONMENT: str(self.path)}

    def write(self) -> None:
        """Replace the file as a whole: the stub knows a new one by its inode."""
        lines = [f"version {self.version}", f"driver_version {self.driver_version}"]
        if self.log is not None:
            lines.append(f"log {self.log}")
        for index, facts in enumerate(self.gpus):
            lines += [f"gpu {index} {key} {value}" for key, value in facts.items() if value is not None]
        lines += [f"process {process}" for process in self.processes]
        lines += self.orders
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogateescape"))
        os.replace(fresh, self.path)

    def order(self, *lines: str) -> None:
        """Put these orders in force beside those that are."""
        self.orders += lines
        self.write()

    def mend(self) -> None:
        """Take all orders back."""
        self.orders.clear()
        self.write()

    def link_all(self, kind: str = "xgmi", mb_per_s: int = 64_000, lanes: int = 1) -> None:
        count = len(self.gpus)
        self.orders += [f"link {a} {b} {kind} {mb_per_s} {lanes}" for a in range(count) for b in range(a + 1, count)]
