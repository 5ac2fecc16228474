"""A simulated node with NVIDIA GPUs behind the stub libcuda, and its faults.

`CudaNode.make(folder)` builds the library and the node; a process belongs to it once it is started with
`environment()`. Several processes share it as they share a real driver: video memory, contexts, handles, checkpoints.
With `nvml`, the stub libnvidia-ml describes the same node. `orders` are lines, in force once written:

    error FUNCTION[@SUBJECT] CODE [FROM [TO]]   the call fails with that CUresult; * is any function
    delay FUNCTION[@SUBJECT] MICROSECONDS [...] the call takes so long
    hang  FUNCTION[@SUBJECT]                    the call blocks until the scenario does not say so any more
    hold  FUNCTION[@SUBJECT] FIFO [...]         the call blocks until somebody opens the FIFO for writing and closes it
    lose  step:restore[@PID] [CODE]             the restore fails permanently: the job is lost
    fail  step:state[@PID]                      the driver says that it has failed permanently, whatever led there
    was GPU UUID                                that GPU had this UUID where processes were checkpointed: another node
    nccl_p2p PID [CODE]                         that process has peer-to-peer communicators: its restore always fails

It fails as well for a process that was checkpointed while there was a file `communicators/PID` in the node's state.

FUNCTION is the name that libcuda exports (cuMemAlloc_v2); SUBJECT the pid of who calls, or for the checkpoint calls of
whom they are about, or the number of the GPU for calls that take memory or contexts. FROM and TO count that function's
calls in the process that makes them.
`step:state`, `step:lock`, `step:checkpoint`, `step:restore` and `step:unlock` are what the driver does inside the
target: they continue when the caller is killed. Its requirements are in tests/kit/driver.py and video_memory.py: every
row there held on two H200 with driver 580.159.04 on 2026-11-21, after five of them had corrected the stub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.stubs.build import build_stub
from tests.stubs.nvml.scenario import MIB, pci, uuid
from tests.stubs.nvml.scenario import Scenario as NvmlScenario

ENVIRONMENT = "HEGM_CUDA_STUB"
GIB = 1 << 30


class Call(NamedTuple):
    """One line of the log: the function, its caller, and the pid or GPU (-1: none)."""

    pid: int
    function: str
    subject: int


def order_in_force(state: Path, line: str) -> None:
    """Put an order in force on the node with that state, for one who did not make it; it is not remembered."""
    fresh = state / "scenario.new"
    fresh.write_text((state / "scenario").read_text() + line + "\n")
    os.replace(fresh, state / "scenario")


@dataclass
class CudaNode:
    """The node's files. The scenario is in force once it is written."""

    folder: Path
    gpus: int = 2
    gpu_bytes: int = 8 * GIB
    chips: list[str] = field(default_factory=list)  # by GPU; those that are not named are alike
    driver_version: int = 13000
    context_bytes: int = 512 * MIB
    restore_bytes: int = 0  # what a restore needs for a moment beside the memory itself
    # Free memory that a new stream, opening another process's memory, and a checkpoint need for a moment.
    stream_bytes: int = 0
    open_bytes: int = 0
    checkpoint_bytes: int = 0
    orders: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, *, gpus: int = 2, gpu_bytes: int = 8 * GIB, hide: tuple[str, ...] = ()) -> CudaNode:
        """Build the library, without the functions named in `hide`, and put the node in force."""
        node = cls(folder, gpus, gpu_bytes)
        (node.state / "memory").mkdir(parents=True)
        (node.state / "communicators").mkdir()
        for place in (node.state, node.state / "memory"):
            place.chmod(0o777)  # processes of several users share a node
        build_stub("cuda", folder, hide=hide)
        node.write()
        return node

    @property
    def state(self) -> Path:
        return self.folder / "cuda"

    @property
    def log(self) -> Path:
        return self.state / "log"

    @property
    def uuids(self) -> list[str]:
        return [uuid(index) for index in range(self.gpus)]

    def environment(self) -> dict[str, str]:
        """Return the variables that put a process on this node, added to its environment."""
        return {ENVIRONMENT: str(self.state), "LD_LIBRARY_PATH": str(self.folder)}

    def write(self) -> None:
        """Replace the scenario as a whole: the stub knows a new one by its inode."""
        lines = [
            f"driver_version {self.driver_version}",
            f"context_bytes {self.context_bytes}",
            f"restore_bytes {self.restore_bytes}",
            f"stream_bytes {self.stream_bytes}",
            f"open_bytes {self.open_bytes}",
            f"checkpoint_bytes {self.checkpoint_bytes}",
            f"log {self.log}",
        ]
        for index in range(self.gpus):
            chip = self.chips[index] if index < len(self.chips) else "GH100"
            lines.append(f"gpu {index} {uuid(index)} {pci(index)} {self.gpu_bytes} {chip} NVIDIA H200")
        lines += self.orders
        fresh = self.state / "scenario.new"
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(fresh, self.state / "scenario")

    def order(self, *lines: str) -> None:
        """Put these orders in force beside those that are."""
        self.orders += lines
        self.write()

    def mend(self) -> None:
        """Take all orders back."""
        self.orders.clear()
        self.write()

    def calls(self, function: str | None = None) -> list[Call]:
        """Return the calls so far, in order; of one function, or all."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        calls = [Call(int(pid), name, int(subject)) for pid, name, subject in map(str.split, lines)]
        return [call for call in calls if function in (None, call.function)]

    def nvml(self, path: Path) -> NvmlScenario:
        """The same GPUs for the stub libnvidia-ml, all of whose memory is the node's; built into the same folder."""
        build_stub("nvml", self.folder)
        scenario = NvmlScenario.of_h200s(path, self.gpus)
        for facts in scenario.gpus:
            facts.update(memory_total=self.gpu_bytes, memory_reserved=0, memory_used=0)
        scenario.write()
        return scenario
