"""Writes the answers of the stub NVML: the node that a test wants, and its faults.

The stub reads the file again when it was replaced, so a test changes the node by changing the fields here and calling
`write()`. The stub answers NOT_SUPPORTED to a fact that is missing or None. `orders` are lines of their own:

    error FUNCTION[@GPU[/INSTANCE]] CODE    the call fails with that NVML code; * is any function
    delay FUNCTION[@GPU] MICROSECONDS       the call takes so long
    hang  FUNCTION[@GPU]                    the call blocks until the scenario does not say so any more
    hold  FUNCTION[@GPU] FIFO               the call blocks until somebody opens the FIFO for writing and closes it:
                                            opening it returns once the call is in there
    lost_after GPU CALLS                    so many calls about that GPU go well, then it is off the bus
    xid SEQUENCE GPU NUMBER                 an XID event, delivered once; SEQUENCE counts up
    instance GPU INDEX GI CI                a MIG instance
    nvlink GPU LINK PCI VERSION STATE       PCI address of the other end, NVML's version number, active or inactive
    p2p GPU GPU LETTERS                     what the first can do with the second: r read, w write, n NVLink
    process_stride BYTES                    length of an entry in a process list; 24 unless told
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

ENVIRONMENT = "HEGM_NVML_SCENARIO"
MIB = 1 << 20

Facts = dict[str, "str | int | None"]


def uuid(index: int) -> str:
    return f"GPU-5b3a9d10-0000-4000-8000-{index:012d}"


def pci(index: int) -> str:
    return f"{0:08X}:{0x19 + 0x10 * index:02X}:00.0"


def h200(index: int) -> Facts:
    """An idle H200 under driver 580: values of the right form and size, not a recording."""
    return {
        "uuid": uuid(index),
        "pci": pci(index),
        "name": "NVIDIA H200",
        "device_id": "0x233510DE",
        "architecture": 9,
        "compute_capability": "9.0",
        "memory_affinity": 1,
        "memory_total": 143771 * MIB,
        "memory_reserved": 606 * MIB,
        "memory_used": 0,
        "utilisation": 0,
        "temperature": 27,
        "power_mw": 76_540,
        "power_limit_mw": 700_000,
        "persistence": 1,
        "mig": 0,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "remapped_rows": "0 0 0 0",
        "clocks_event_reasons": "0x1",
        "field.230": 0,
        "fabric_state": 3,
        "fabric_status": 0,
    }


@dataclass
class Scenario:
    """The node behind the stub. Making one changes nothing; `write` puts it in force."""

    path: Path
    gpus: list[Facts] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)  # GPU LIST PID BYTES|N/A [GI CI]
    orders: list[str] = field(default_factory=list)
    driver_version: str = "580.159.04"
    nvml_version: str = "13.580.159.04"
    cuda_version: int = 13000
    epoch: int = 1  # another one: the driver was loaded again, and old initialisations count for nothing
    log: Path | None = None  # where the stub writes the name of each function that is called

    @classmethod
    def of_h200s(cls, path: Path, count: int) -> Scenario:
        return cls(path, gpus=[h200(index) for index in range(count)])

    @property
    def driver(self) -> Path:
        """The file that the initialised stub keeps open, as the real library does /dev/nvidiactl."""
        return self.path.with_name("nvidiactl")

    @property
    def kept(self) -> Path:
        """Return the file to which the stub adds its pid and the descriptor that it keeps, each time it is loaded."""
        return self.path.with_name("kept")

    def environment(self) -> dict[str, str]:
        return {ENVIRONMENT: str(self.path)}

    def write(self) -> None:
        """Replace the file as a whole: the stub knows a new one by its inode."""
        lines = [
            f"driver_version {self.driver_version}",
            f"nvml_version {self.nvml_version}",
            f"cuda_version {self.cuda_version}",
            f"epoch {self.epoch}",
            f"driver {self.driver}",
            f"kept {self.kept}",
        ]
        if self.log is not None:
            lines.append(f"log {self.log}")
        for index, facts in enumerate(self.gpus):
            lines += [f"gpu {index} {key} {'N/A' if value is None else value}" for key, value in facts.items()]
        lines += [f"process {process}" for process in self.processes]
        lines += self.orders
        self.driver.touch()
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(fresh, self.path)

    def order(self, *lines: str) -> None:
        """Put these orders in force beside those that are."""
        self.orders += lines
        self.write()

    def mend(self) -> None:
        """Take all orders back."""
        self.orders.clear()
        self.write()

    def link_all(self, remote: str = "switch", *, lanes: int = 18, version: int = 6) -> None:
        """NVLink between all GPUs: through a switch, or for `gpu` in equal shares straight to the others."""
        for a in range(len(self.gpus)):
            others = [b for b in range(len(self.gpus)) if b != a]
            for lane in range(lanes):
                to = "00000000:85:00.0" if remote == "switch" else pci(others[lane % len(others)])
                self.orders.append(f"nvlink {a} {lane} {to} {version} active")
            self.orders += [f"p2p {a} {b} rwn" for b in others]
