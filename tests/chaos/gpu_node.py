"""A node with a driver for kills: stub libcuda, real GPU helper, and CUDA programs with and without an agent.

Adds the helper to the victims, and the driver's memory to what must not remain. The stub has the driver's traps, so it
detects a job that was restored without memory, or resumed without its bytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import TracebackType

import psutil
from typing_extensions import Self

from tests.chaos.cells import HELPER, HUNG, STILL
from tests.chaos.jobs import Trainee, descriptors
from tests.chaos.node import Client, Node
from tests.e2e.driven import PROGRAM, DrivenProgram
from tests.stubs.cuda.node import ENVIRONMENT, CudaNode

_SIZES_MIB = ("24", "1", "8")
_PAUSE_S = 0.02  # it would take a whole processor from the processes under test
_SIGNALS = {HELPER: signal.SIGKILL, STILL: signal.SIGSTOP, HUNG: signal.SIGSTOP}


class GpuNode(Node):
    """Two GPUs of one kind, linked, behind the stub libcuda and the stub libnvidia-ml."""

    def __init__(self, folder: Path, *, nameless: bool) -> None:
        self.cuda = CudaNode.make(folder / "node")
        scenario = self.cuda.nvml(folder / "nvml")
        scenario.link_all()
        scenario.write()
        environ = {**self.cuda.environment(), **scenario.environment()}
        super().__init__(folder, nameless=nameless, environ=environ, simulate=False)

    def programs(self, *, with_agent: int, without: int) -> list[Callable[[], Trainee]]:
        """Start so many programs of each kind, in turn, on each GPU."""
        kinds = [
            kind for pair in zip_longest([True] * with_agent, [False] * without) for kind in pair if kind is not None
        ]
        return [partial(GpuJob, self, gpu=index // 2 % 2, has_agent=kind) for index, kind in enumerate(kinds)]

    def helpers(self) -> list[psutil.Process]:
        """Return the daemon's helpers: the one that moves bytes, and briefly one that only queries."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.daemon.process.pid).children()
            return [child for child in children if "hegmd.gpu_helper.child" in _words_of(child)]
        return []

    def strike(self, victim: str, client: Client, pid: int) -> int:
        if victim not in _SIGNALS:
            return super().strike(victim, client, pid)
        struck = 0
        for helper in self.helpers():
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.send_signal(_SIGNALS[victim])
                struck += 1
        return struck

    def heal(self, victim: str, pid: int) -> None:
        super().heal(victim, pid)
        if victim in (STILL, HUNG):
            with self.connection() as hegmd:
                hegmd.operations()  # it answers others meanwhile
        if victim == STILL:
            self.release()

    def release(self) -> None:
        for helper in self.helpers():
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.send_signal(signal.SIGCONT)

    def left(self) -> list[str]:
        """Besides what is left on any node: processes that use its driver and are no job, daemon or helper of that."""
        known = {os.getpid(), self.daemon.process.pid, *(helper.pid for helper in self.helpers())}
        strangers = [one for one in self._on_it() if one.pid not in known and "tests" not in " ".join(_words_of(one))]
        return [*super().left(), *(f"process {stranger.pid}: {_words_of(stranger)}" for stranger in strangers)]

    def _on_it(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(ENVIRONMENT) == str(self.cuda.state):
                    yield process


class GpuJob:
    """One CUDA program. Without an agent it computes continuously; with one, on command."""

    def __init__(self, node: GpuNode, *, gpu: int, has_agent: bool) -> None:
        self.has_agent = has_agent
        self._folder = node.cuda.state
        words = [str(PROGRAM), str(gpu), *_SIZES_MIB]
        if has_agent:
            words = ["-m", "tests.e2e.cuda_agent", str(node.daemon.socket_path), *words[1:]]
        self._program = DrivenProgram(node.cuda, *words)
        self.pid = self._program.pid
        self._digest = self._program.tell("digest")
        self._steps = 0

    def make_steps(self, count: int) -> None:
        """It counts on where it was, in video memory, and has all of its bytes."""
        for _ in range(count):
            word, _, number = self._program.tell("step").partition(" ")
            assert word == "step", f"job {self.pid} ended"
            assert int(number) > self._steps
            self._steps = int(number)
        assert self._program.tell("digest") == self._digest, f"job {self.pid} has other bytes than before"
        if not self.has_agent:
            assert self._program.tell(f"run {_PAUSE_S}") == "running"

    def descriptors(self) -> Counter[str]:
        """Return the descriptors by kind; allocations of video memory are files with new names after each move."""
        self._program.tell("step")  # its current call has ended
        kinds: Counter[str] = Counter()
        for target, count in descriptors(self.pid).items():
            kinds[str(self._folder) if target.startswith(str(self._folder)) else target] += count
        return kinds

    def end(self) -> int:
        self.make_steps(1)
        return self._steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._program.end()


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
