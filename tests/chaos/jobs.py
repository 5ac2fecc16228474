"""Jobs that train until they get the command to end, each with its own numbers, whose output is read all the time.

Owns the process, the thread that reads what it prints, and the comparison with an undisturbed run. The test acts on the
job meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil
from typing_extensions import Self

from tests.e2e.agented import SCRIPTS
from tests.e2e.forked import started
from tests.e2e.moved_job import environment
from tests.e2e.references import output_of
from tests.patience import HANG_S

WITH_TORCH = SCRIPTS / "chained.py"
BY_HAND = SCRIPTS / "chained_by_hand.py"
PATIENCE_S = HANG_S


class Trainee(Protocol):
    """The interface that a campaign needs of any job. A context manager that leaves nothing behind."""

    pid: int
    has_agent: bool

    def make_steps(self, count: int) -> None:
        """Wait until it has made so many more steps, and check what is visible meanwhile."""

    def descriptors(self) -> Counter[str]: ...

    def end(self) -> int:
        """Check that all output matches an undisturbed run; return the number of steps."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class Job:
    """One script under `hegmctl run`."""

    has_agent = True

    def __init__(self, script: Path, seed: int, gpu: str, socket_path: Path) -> None:
        self.script = script
        self.seed = seed
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the job
        words = [sys.executable, "-m", "hegmctl", "run", "--gpu", gpu, "--", sys.executable, str(script), str(seed)]
        self.process = started(
            words, env=environment(socket_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self.pid = self.process.pid
        self._lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"reader of job {seed}")
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def make_steps(self, count: int) -> None:
        """Wait until it has made so many steps more."""
        with self._news:
            until = len(self._lines) + count
            come = self._news.wait_for(lambda: len(self._lines) >= until or self._ended, PATIENCE_S)
            assert come, f"job {self.seed} (pid {self.pid}) made no step within {PATIENCE_S} s"
            assert not self._ended, f"job {self.seed} ended: {self.error_text()}"

    def output(self) -> list[str]:
        """Send it the command to end; every line, once it has ended well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_S) == 0, self.error_text()
        self._reader.join()
        return self._lines

    def end(self) -> int:
        """Have it end, and see that it has printed what an undisturbed run prints; how many steps that were."""
        lines = self.output()
        assert lines == undisturbed(self.script, self.seed, len(lines)), f"job {self.seed} printed other numbers"
        return len(lines)

    def descriptors(self) -> Counter[str]:
        """Return the open descriptors by kind: numbers and names differ between runs."""
        return descriptors(self.pid)

    def error_text(self) -> str:
        self._errors.seek(0)
        return self._errors.read()


def descriptors(pid: int) -> Counter[str]:
    """Return the open descriptors of a process by kind."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # closed meanwhile
            continue
        kinds[target.split(":")[0] if not target.startswith("/") else target] += 1
    return kinds


def undisturbed(script: Path, seed: int, steps: int) -> list[str]:
    """Return the output of the script after so many steps without hegm."""
    argv = [str(script), "undisturbed", str(seed), str(steps)]
    return output_of(argv, environment(None)).splitlines(keepends=True)


def resident_bytes(pid: int) -> int:
    """Memory that a process has now."""
    size_bytes: int = psutil.Process(pid).memory_info().rss
    return size_bytes
