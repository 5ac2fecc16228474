"""A node with stub CUDA GPUs, a daemon that moves processes on it by the driver, and programs without an agent.

Everything above libcuda and libnvidia-ml is the real thing: daemon, helper, binding, sockets, processes.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import psutil
from typing_extensions import Self

from hegmctl.connection import Connection, connect
from hegmd.protocol import operations as protocol
from hegmd.protocol.messages import Operations, OperationsReply, Story, StoryReply
from tests.e2e.daemon import RunningDaemon
from tests.looks import pause
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/stubs/cuda/program.py"
MIB = 1 << 20
GIB = 1 << 30
# As often is a figure asked for again.
LOOKS = 3000
ANSWER_LIMIT_S = HANG_S


class DrivenProgram:
    """A CUDA program that was not started by us: it executes the commands that it gets, line by line."""

    def __init__(self, node: CudaNode, *words: str, **more: str) -> None:
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
        environ = {**os.environ, **node.environment(), **paths, **more}
        self.process = subprocess.Popen(
            [sys.executable, *words], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        output = self._stdout.readline()
        if not output.startswith("ready"):
            self.end()
            raise AssertionError(f"the program said {output!r} and not that it is ready")

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> str:
        """Have it do something; what it answers. Fails when it does not: its calls of CUDA may wait forever."""
        self._stdin.write(f"{line}\n")
        self._stdin.flush()
        answers = select.select([self._stdout], [], [], ANSWER_LIMIT_S)[0]
        assert answers, f"process {self.pid} has not answered {line!r} within {ANSWER_LIMIT_S:g} s"
        return self._stdout.readline().strip()

    def end(self) -> None:
        """Kill it, and remove everything of it."""
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()


class DrivenNode:
    """The node, and a daemon on it that can be killed and started again."""

    def __init__(self, folder: Path, *, gpus: int = 2, gpu_bytes: int = 8 * GIB, linked: bool = True) -> None:
        self.folder = folder
        self.cuda = CudaNode.make(folder / "node", gpus=gpus, gpu_bytes=gpu_bytes)
        scenario = self.cuda.nvml(folder / "nvml")
        if linked:
            scenario.link_all()
        scenario.write()
        environ = {**self.cuda.environment(), **scenario.environment()}
        self.daemon = RunningDaemon(folder, environ=environ, simulate=False)

    def program(self, gpu: int | str = 0, *sizes_mib: int) -> DrivenProgram:
        return DrivenProgram(self.cuda, str(PROGRAM), str(gpu), *map(str, sizes_mib or (12, 4)))

    def agented(self, gpu: int | str = 0, *sizes_mib: int, **more: str) -> DrivenProgram:
        """The same with an agent in it, once the daemon knows what it holds. `more` goes into its environment."""
        sizes = map(str, sizes_mib or (12, 1, 4))
        words = ["-m", "tests.e2e.cuda_agent", str(self.daemon.socket_path), str(gpu), *sizes]
        program = DrivenProgram(self.cuda, *words, **more)
        try:
            self.wait_for_agents(program.pid)
        except BaseException:
            program.end()  # or the warning about it fails whichever test comes next
            raise
        return program

    def wait_for_agents(self, *pids: int) -> None:
        """Until the daemon knows the agents of all these."""
        for _ in range(LOOKS):
            with self.connect() as connection:
                found = connection.processes().processes
            if len([there for there in found if there.pid in pids and there.agent is not None]) == len(pids):
                return
            pause()
        raise AssertionError(f"the agents in the processes {pids} do not attend")

    def connect(self) -> Connection:
        """Patient: the machine may have other things to do than these tests."""
        return connect(str(self.daemon.socket_path), timeout_s=HANG_S)

    def vram(self, pid: int) -> dict[str, int]:
        """Return the process's memory by NVML, by GPU."""
        with self.connect() as connection:
            found = [process for process in connection.processes().processes if process.pid == pid]
        return {use.gpu: use.vram_bytes or 0 for process in found for use in process.gpus}

    def used(self) -> dict[str, int]:
        """The used memory of each GPU, once the service manager has handled every report."""
        self.daemon.read_notices()
        with self.connect() as connection:
            return {gpu.id: gpu.memory_used_bytes or 0 for gpu in connection.gpus().gpus}

    def __enter__(self) -> Self:
        self.daemon.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.daemon.__exit__(kind, error, tb)


class Watched:
    """A program that has worked, and what it has to say after whatever was done to it."""

    def __init__(self, program: DrivenProgram) -> None:
        self.program = program
        self.pid = program.pid
        self.digest = program.tell("digest")
        self.steps = 1
        assert program.tell("step") == "step 1"

    def is_whole(self) -> None:
        """It continues where it was, with all its memory."""
        self.steps += 1
        assert self.program.tell("step") == f"step {self.steps}"
        assert self.program.tell("digest") == self.digest


def at_rest(node: DrivenNode) -> protocol.Operation:
    """The newest operation, once it is over or suspended."""
    with node.connect() as connection:
        newest = connection.call(Operations(), OperationsReply).operations[-1]
        return connection.call(Story(id=newest.id, follow=True), StoryReply).operation


def only_its_own(node: DrivenNode, watched: Watched) -> None:
    """No video memory is held but the program's, on one GPU; the daemon's figures may be some looks behind."""
    own = node.vram(watched.pid)
    assert len(own) == 1
    used: dict[str, int] = {}
    for _ in range(LOOKS):
        used = node.used()
        if used == {"gpu0": 0, "gpu1": 0, **own}:
            return
        pause()
    raise AssertionError(f"{used} is in use, of which {own} is the program's")


def helper_of(node: DrivenNode) -> psutil.Process:
    """The current one: on a machine that is busy, one before it may be dying of its deadline yet."""
    return max(helpers_of(node), key=psutil.Process.create_time)


def helpers_of(node: DrivenNode) -> list[psutil.Process]:
    children = psutil.Process(node.daemon.process.pid).children()
    return [child for child in children if "hegmd.gpu_helper.child" in child.cmdline()]
