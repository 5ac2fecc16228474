"""A script of anybody's under `hegmctl run`: how far it is, what is done to it, and what it said in the end.

The scripts in `moved/` know nothing of hegm. Each prints lines that begin with "step" and have every number in full;
those lines are how the test sees its progress and what it compares. Owns the processes; what is done is up to the test.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon

SCRIPTS = Path(__file__).with_name("moved")
ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 60.0
MARK = "step"


def environment(socket_path: Path | None) -> dict[str, str]:
    """A plain environment, and where the daemon listens if there is to be one."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HEGM_", "PYTHON"))}
    plain.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1")
    if socket_path is not None:
        plain.update(HEGM_SOCKET=str(socket_path), PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'client'}")
    return plain


class Script:
    """A process that prints, read line by line. Ended with the context, if it has not ended by itself."""

    def __init__(self, words: Sequence[str], socket_path: Path | None) -> None:
        self.environ = environment(socket_path)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            words,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._stdout = self.process.stdout
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self._stdout.close()
        self._errors.close()

    def read_steps(self, count: int) -> None:
        """Read on until it has told of so many steps more."""
        while count:
            line = self._stdout.readline()
            assert line, f"it ended after {len(self.lines)} lines: {self._error_text()}"
            self.lines.append(line)
            count -= line.startswith(MARK)

    def steps(self) -> list[str]:
        """Every line that tells of a step, once it has ended well."""
        self.lines += self._stdout.readlines()
        assert self.process.wait(ENDS_WITHIN_S) == 0, self._error_text()
        return [line for line in self.lines if line.startswith(MARK)]

    def _error_text(self) -> str:
        self._errors.seek(0)
        return self._errors.read()


class MovedJob(Script):
    """The same under `hegmctl run`, with the commands about it."""

    def __init__(self, words: Sequence[str], daemon: RunningDaemon) -> None:
        super().__init__([sys.executable, "-m", "hegmctl", "run", "--gpu", "gpu0", "--", *words], daemon.socket_path)
        self._daemon = daemon
        self._gpu = 0

    def operation(self, *words: str) -> dict[str, Any]:
        """How the operation of a command ended, which has to be well."""
        ended: dict[str, Any] = self._hegmctl(*words)["operation"]
        return ended

    def pids(self, count: int) -> list[int]:
        """The processes that are on a GPU, as soon as there are so many; their agents tell it in their own time."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while True:
                found = [process.pid for process in hegmd.processes().processes if process.gpus]
                if len(found) >= count:
                    return found

    def move(self, pid: int) -> dict[str, Any]:
        """Move it to the other GPU."""
        self._gpu = 1 - self._gpu
        moved = self.operation("migrate", str(pid), "--to", f"gpu{self._gpu}")
        assert moved["phase"] == "done", moved
        assert {process["gpu"] for process in moved["processes"]} == {f"gpu{self._gpu}"}
        return moved

    def suspend_and_resume(self, pid: int) -> None:
        """Take it off its GPU, and bring it back."""
        out = self.operation("suspend", str(pid))
        assert out["phase"] == "suspended", out
        assert {process["state"] for process in out["processes"]} == {"out"}
        assert self.operation("resume", str(pid))["phase"] == "done"

    def disturb(self, pid: int, draw: random.Random, *, longest_run: int) -> None:
        """Two moves and a suspension, with as many steps before each as the draw says."""
        for act in (self.move, self.suspend_and_resume, self.move):
            self.read_steps(draw.randint(1, longest_run))
            act(pid)

    def _hegmctl(self, *words: str) -> dict[str, Any]:
        self._daemon.read_notices()
        ran = subprocess.run(
            [sys.executable, "-m", "hegmctl", *words, "--json"],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return answer
