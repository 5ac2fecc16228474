"""A daemon that asks NVML: the stub library in place of a driver's, or the library of this machine.

With the stub everything above the library is the real thing: the daemon's provider, NVIDIA's own binding, ctypes. The
stub's answers cost next to nothing, where a driver's cost system calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.daemon import RunningDaemon
from tests.stubs.build import build_stub
from tests.stubs.nvml.scenario import MIB, Scenario

STUB_GPUS = 8


class NvmlDaemon(RunningDaemon):
    """hegmd with GPUs that it has to find by itself."""

    def command(self) -> list[str]:
        paths = ("--socket", str(self.socket_path), "--state-dir", str(self.folder / "state"))
        return [sys.executable, "-m", "hegmd", *paths]


def stubbed(folder: Path, pids: Sequence[int] = (), vram_bytes: int = 256 * MIB) -> NvmlDaemon:
    """A daemon, not started yet, on a node with 8 GPUs and these processes spread over them."""
    scenario = Scenario.of_h200s(folder / "scenario", STUB_GPUS)
    scenario.processes += [f"{number % STUB_GPUS} compute {pid} {vram_bytes}" for number, pid in enumerate(pids)]
    scenario.link_all()
    scenario.write()
    build_stub("nvml", folder)
    libraries = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)
    return NvmlDaemon(folder, environ={**scenario.environment(), "LD_LIBRARY_PATH": libraries})


def has_driver() -> bool:
    """Whether this machine has NVIDIA's driver."""
    return Path("/dev/nvidiactl").exists()
