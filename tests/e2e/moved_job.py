"""Any script under `hegmctl run`: its progress, its operations, and its output.

The scripts in `moved/` know nothing of hegm. Each prints lines that begin with "step" and have every number in full;
those lines are how the test sees its progress and what it compares, beside the files that it wrote into its folder.
Owns the processes; what is done is up to the test.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon
from tests.e2e.forked import not_forked, started
from tests.e2e.references import output_of
from tests.patience import HANG_S

SCRIPTS = Path(__file__).with_name("moved")
LEAVING, RANKED = str(SCRIPTS / "leaving.py"), str(SCRIPTS / "ranked.py")
ROOT = Path(__file__).parents[2]
BRISK = Path(__file__).with_name("brisk")
# For a script that needs nothing of PyTorch's compiler; see brisk/sitecustomize.py.
BARE = {"BARE_TORCH": "1"}
ENDS_WITHIN_S = HANG_S
MARK = "step"
# Between two lines while a command runs, which needs a few boundaries and has time.
PACE_MS = 10
# The same while an agent looks for its daemon, which it does every 5 s at least.
SLOWLY_MS = 50
# The same while something is refused, which is done many times in a row: that must not end the script.
WHILE_REFUSED_MS = 100


def environment(socket_path: Path | None) -> dict[str, str]:
    """A plain environment, and where the daemon listens if there is to be one."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HEGM_", "PYTHON"))}
    paths = [BRISK]
    if socket_path is not None:
        paths = [ROOT, ROOT / "client", BRISK]
        plain["HEGM_SOCKET"] = str(socket_path)
    plain.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1")
    plain["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return plain


class Script:
    """A process that prints, read line by line. Killed at the end of the context, if it has not ended before."""

    # The pipe that it prints to: so large that nothing ever stops it.
    pipe_bytes, pipe_flags = 1 << 20, 0
    # Additional environment variables.
    more: Mapping[str, str] = {}
    # Whether it may be forked from a Python that has imported PyTorch.
    forks = True

    def __init__(self, words: Sequence[str], socket_path: Path | None, folder: Path | None = None) -> None:
        self.environ = {**environment(socket_path), **self.more}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._stdout, stdout = os.pipe2(os.O_CLOEXEC | self.pipe_flags)
        fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, self.pipe_bytes)
        start = started if self.forks else not_forked
        self.process = start(words, env=self.environ, cwd=folder, stdout=stdout, stderr=self._errors)
        os.close(stdout)
        self._begun_line = b""
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()
        os.close(self._stdout)
        self._errors.close()

    def read_steps(self, count: int) -> None:
        """Read until it has printed so many more steps."""
        wanted = len(self._steps()) + count
        while len(self._steps()) < wanted:
            assert self._read(), f"it ended after {len(self.lines)} lines: {self._error_text()}"

    def read_until(self, pidfd: int, pace_ms: int = PACE_MS) -> None:
        """Read on, so that the script does, but not faster than it has to, until that process has ended."""
        end = select.poll()
        end.register(pidfd, select.POLLIN)
        while not end.poll(0):
            self._read_on(pace_ms)

    def steps(self) -> list[str]:
        """Every line of a step, once it has succeeded."""
        while self._read():
            pass
        assert self.process.wait(ENDS_WITHIN_S) == 0, self._error_text()
        return self._steps()

    def _read_on(self, pace_ms: int) -> None:
        """Read a line, if there is one, and let the script go no faster than that."""
        more = select.poll()
        more.register(self._stdout, select.POLLIN)
        if more.poll(0):
            self._read()
        select.poll().poll(pace_ms)

    def _read(self) -> bool:
        """Read what is there, or wait for more; whether there will be more."""
        data = os.read(self._stdout, 4096)
        *whole, self._begun_line = (self._begun_line + data).split(b"\n")
        self.lines += [line.decode() for line in whole]
        return bool(data)

    def _steps(self) -> list[str]:
        return [line for line in self.lines if line.startswith(MARK)]

    def _error_text(self) -> str:
        self._errors.seek(0)
        return self._errors.read()


@cache
def undisturbed_steps(*words: str) -> list[str]:
    """The step lines of a script that writes no files, without hegmd; it is run once for all tests."""
    return steps_alone(words)


def steps_alone(words: Sequence[str], folder: Path | None = None) -> list[str]:
    """The step lines of a Python script without hegmd, in that folder."""
    output = output_of(words[1:], environment(None), folder)
    return [line for line in output.splitlines() if line.startswith(MARK)]


def by_rank(steps: Sequence[str]) -> dict[str, list[str]]:
    """The steps of each of two ranks."""
    return {rank: [step for step in steps if step.split()[1] == rank] for rank in ("0", "1")}


class MovedJob(Script):
    """The same under `hegmctl run`, with the commands about it."""

    # A pipe of one page that keeps writes apart (pipe(2)): it holds one line, so that a script cannot run ahead of its
    # reader or end before the test is done, however slow the machine is.
    pipe_bytes, pipe_flags = 4096, os.O_DIRECT

    def __init__(
        self, words: Sequence[str], daemon: RunningDaemon, folder: Path | None = None, *, gpu: str | None = "gpu0"
    ) -> None:
        on = () if gpu is None else ("--gpu", gpu)
        super().__init__([sys.executable, "-m", "hegmctl", "run", *on, "--", *words], daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0

    def operation(self, *words: str) -> dict[str, Any]:
        """How the operation of a command ended, which has to be well."""
        ended: dict[str, Any] = self.answer(*words)["operation"]
        return ended

    def ended(self, *words: str) -> dict[str, Any]:
        """How the operation of a command ended, well or not."""
        ended: dict[str, Any] = json.loads(self._hegmctl(*words).stdout.splitlines()[-1])["operation"]
        return ended

    def refusal(self, *words: str) -> dict[str, Any]:
        """Why a command was refused, which it has to be: code, message and hint, one reason or several."""
        ran = self._hegmctl(*words, pace_ms=WHILE_REFUSED_MS)
        assert ran.returncode != 0, ran.stdout
        error: dict[str, Any] = json.loads(ran.stderr.splitlines()[-1])["error"]
        assert error["hint"], error
        return error

    def places(self, count: int) -> dict[int, str]:
        """The GPU of each of its processes, by pid, once so many are on one."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while True:
                found = {process.pid: process.gpus[0].gpu for process in hegmd.processes().processes if process.gpus}
                if len(found) >= count:
                    return found
                self._read_on(SLOWLY_MS)  # an agent counts what it holds at a boundary

    def attend(self, daemon: RunningDaemon) -> None:
        """Wait until its agent has found that daemon, which has taken the place of the first."""
        self._daemon = daemon
        with connect(str(daemon.socket_path)) as hegmd:
            while not any(process.pid == self.process.pid and process.agent for process in hegmd.processes().processes):
                self._read_on(SLOWLY_MS)

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
        """Two moves and two suspensions, with as many steps before each as the draw says."""
        for act in (self.move, self.suspend_and_resume) * 2:
            self.read_steps(draw.randint(1, longest_run))
            act(pid)

    def answer(self, *words: str) -> dict[str, Any]:
        """Return the reply of a command, which has to succeed."""
        ran = self._hegmctl(*words)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return answer

    def _hegmctl(self, *words: str, pace_ms: int = PACE_MS) -> subprocess.CompletedProcess[str]:
        self._daemon.read_notices()
        argv = [sys.executable, "-m", "hegmctl", *words, "--json"]
        with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(argv, env=self.environ, stdout=log, stderr=errors) as command:
                pidfd = os.pidfd_open(command.pid)
                try:
                    self.read_until(pidfd, pace_ms)
                finally:
                    os.close(pidfd)
                    command.kill()
            log.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(argv, command.returncode, log.read(), errors.read())


class BareJob(MovedJob):
    """A job that needs nothing of PyTorch's compiler."""

    more = BARE


def files_in(folder: Path) -> dict[str, str]:
    """Every file under the folder, with a digest of what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
