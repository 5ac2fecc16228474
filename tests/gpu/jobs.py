"""Starts real torch jobs that hold video memory, and ends them whatever happens."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

HOLD = Path(__file__).with_name("hold_vram.py")
# Importing torch from a cold disk is what takes long.
WITHIN_S = 120.0


class VramJob:
    """A process that holds so many bytes on that GPU (by PCI order); a context manager."""

    def __init__(self, gpu: int, held_bytes: int) -> None:
        self.gpu, self.held_bytes = gpu, held_bytes
        self._process = subprocess.Popen(
            [sys.executable, str(HOLD), str(gpu), str(held_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def held_at(self) -> float:
        """Wait until it has its memory; when that was, by the monotonic clock."""
        return self._value("held")

    def free(self) -> float:
        """Have it give its memory back; when it had done so."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._value("freed")

    def end(self) -> None:
        """End it and wait for its end; twice is fine."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()

    def _value(self, word: str) -> float:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], WITHIN_S)
        line = self._process.stdout.readline() if ready else ""
        if not line.startswith(word):
            raise RuntimeError(f"the job on GPU {self.gpu} did not say '{word}' within {WITHIN_S:.0f} s but {line!r}")
        return float(line.split()[1])
