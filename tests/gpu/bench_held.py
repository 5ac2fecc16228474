"""The trainings that are measured when they are moved: as processes that can be ready before they are wanted.

Importing what they train with takes longer than most of what is measured, so all are started at once and wait, without
anything on a GPU, until it is their turn.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Protocol

from tests.gpu.moves_jobs import TRAINING, Lines, on_stub
from tests.gpu.moves_node import Node, WentWrongError, until

STARTS_WITHIN_S = 120.0
PAUSE_WITHIN_S = 120.0


class ProgramSettings(Protocol):
    """How programs are started."""

    def environ(self) -> dict[str, str]: ...


class Held(Lines):
    """A training with a given size on the GPU. With `rounds` it steps only on command."""

    def __init__(self, node: Node, size_gib: int, *, gpu: int = 0, agent: bool = True, rounds: bool = False) -> None:
        self.node, self.size_gib, self._agent = node, size_gib, agent
        environ = {**node.environ(), "CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        run = [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--"] if agent else []
        script = ["-m", "tests.gpu.training.pretended_held"] if on_stub() else [str(TRAINING / "held.py")]
        words = [str(size_gib), "waits", *(["rounds"] if rounds else [])]
        super().__init__([*run, sys.executable, *script, *words], environ, stdin=subprocess.PIPE)

    def begin(self) -> None:
        """Let it take its memory, and wait until it trains and its agent attends."""
        self.tell("go")
        self.wait_for(lambda: bool(self._digests()), "it did not begin", STARTS_WITHIN_S)
        if self._agent:
            self.wait_for_agent()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def step_s(self, steps: int) -> float:
        """Have it do so many; what one took."""
        count = len(self.lines)
        self.tell(str(steps))
        self.wait_for(lambda: len(self.lines) > count, f"{steps} steps did not end", STARTS_WITHIN_S)
        return float(self.lines[count].split()[1])

    def leave(self) -> None:
        """End it, and wait until its GPUs list nothing of it."""
        pid = self.pid
        self.close()
        until(lambda: not self.node.gpus.account().places(pid), "that what it had is free")

    def close(self) -> None:
        super().close()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def pause_since(self, asked_at: float) -> tuple[float, float]:
        """Return when the longest pause that ended after that moment ended, and how long it was. Checks the training's
        digest. Other load on the machine can delay it too, but not so long.
        """
        self.wait_for(lambda: bool(self._pauses(asked_at)), "it did not stand", PAUSE_WITHIN_S)
        if len(self._digests()) > 1:
            raise WentWrongError(f"it held {sorted(self._digests())} in turn")
        return max(self._pauses(asked_at), key=lambda pause: pause[1])

    def wait_for_agent(self) -> None:
        """Wait until its agent attends; after another daemon was started it does so again."""
        until(self._attends, "that its agent attends")

    def _attends(self) -> bool:
        with self.node.connect() as connection:
            return any(there.pid == self.pid and there.agent for there in connection.processes().processes)

    def _digests(self) -> set[str]:
        return {line for line in self.lines if line.startswith("digest")}

    def _pauses(self, asked_at: float) -> list[tuple[float, float]]:
        """Return the pauses after which it printed its digest."""
        lines = self.lines[: len(self.lines) - (self.lines[-1:] != [] and self.lines[-1].startswith("pause"))]
        printed = [line.split() for line in lines if line.startswith("pause")]
        return [(float(ended), float(took)) for _, ended, took in printed if float(ended) >= asked_at]


class Adamw(Lines):
    """An AdamW training by its lines: the process, the step and the loss, of which each has a time."""

    def __init__(
        self, node: ProgramSettings, size_gib: float, run: list[str], more: dict[str, str], *, gpu: int = 0
    ) -> None:
        environ = {**node.environ(), **more, "CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        script = [sys.executable, "-u", str(TRAINING / "adamw.py"), str(size_gib)]
        super().__init__([*run, *script], environ)

    def wait_for_steps(self, count: int) -> int:
        """Wait until it has done so many in all; the process that did the last."""
        self.wait_for(lambda: len(self._steps()) >= count, f"{count} steps did not come", STARTS_WITHIN_S)
        return int(self.lines[self._steps()[-1]].split()[1])

    def next_step_s(self, asked_at: float, *, of_another_than: int | None = None) -> float:
        """From that moment until the first step after: of another process, or after the longest gap."""
        if of_another_than is not None:
            self.wait_for(lambda: self._other(of_another_than) is not None, "no step came after it", PAUSE_WITHIN_S)
            index = self._other(of_another_than)
            assert index is not None
            return self.times[index] - asked_at
        count = len(self.lines)
        self.wait_for(lambda: len(self.lines) > count + 3, "no step came after it", PAUSE_WITHIN_S)
        after = [index for index in range(1, len(self.lines)) if self.times[index] >= asked_at]
        longest = max(after, key=lambda index: self.times[index] - self.times[index - 1])
        return self.times[longest] - asked_at

    def _steps(self) -> list[int]:
        """Return the indices of the lines of steps: its starter may print other lines."""
        return [index for index, line in enumerate(self.lines) if line.startswith("step ")]

    def _other(self, pid: int) -> int | None:
        """Return the index of the last line if another process printed it than the first."""
        lines = self._steps()
        before = max((index for index in lines if int(self.lines[index].split()[1]) == pid), default=-1)
        return next((index for index in lines if index > before), None)
