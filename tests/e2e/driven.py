"""A node with stub CUDA GPUs, a daemon that moves processes on it by the driver, and programs without an agent.

Everything above libcuda and libnvidia-ml is the real thing: daemon, helper, binding, sockets, processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from hegmctl.connection import Connection, connect
from tests.e2e.daemon import RunningDaemon
from tests.stubs.cuda.node import CudaNode

PROGRAM = Path(__file__).parents[1] / "stubs/cuda/program.py"
MIB = 1 << 20
GIB = 1 << 30


class DrivenProgram:
    """A CUDA program that was not started by us: it does what it is told, line by line."""

    def __init__(self, node: CudaNode, gpu: int, *sizes_mib: int) -> None:
        environ = {**os.environ, **node.environment()}
        words = [sys.executable, str(PROGRAM), str(gpu), *map(str, sizes_mib)]
        self.process = subprocess.Popen(
            words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        assert self._stdout.readline().startswith("ready")

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> str:
        """Have it do something; what it answers."""
        self._stdin.write(f"{line}\n")
        self._stdin.flush()
        return self._stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()


class DrivenNode:
    """The node, and a daemon on it that can be killed and started again."""

    def __init__(self, folder: Path, *, gpus: int = 2, gpu_bytes: int = 8 * GIB) -> None:
        self.folder = folder
        self.cuda = CudaNode.make(folder / "node", gpus=gpus, gpu_bytes=gpu_bytes)
        scenario = self.cuda.nvml(folder / "nvml")
        environ = {**self.cuda.environment(), **scenario.environment()}
        self.daemon = RunningDaemon(folder, environ=environ, simulate=False)

    def program(self, gpu: int = 0, *sizes_mib: int) -> DrivenProgram:
        return DrivenProgram(self.cuda, gpu, *(sizes_mib or (48, 16)))

    def connect(self) -> Connection:
        return connect(str(self.daemon.socket_path))

    def vram(self, pid: int) -> dict[str, int]:
        """What NVML shows of a process, by GPU."""
        with self.connect() as connection:
            found = [process for process in connection.processes().processes if process.pid == pid]
        return {use.gpu: use.vram_bytes or 0 for process in found for use in process.gpus}

    def used(self) -> dict[str, int]:
        with self.connect() as connection:
            return {gpu.id: gpu.memory_used_bytes or 0 for gpu in connection.gpus().gpus}

    def __enter__(self) -> Self:
        self.daemon.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.daemon.__exit__(kind, error, tb)
