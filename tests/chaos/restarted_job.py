"""A training that is killed, exits, and is started again, under supervisors that are killed too; and its output.

Owns its processes, its input and its files. All its starts append to one file, each line with the process and the step,
so that the file shows which process made which step, and that never two trained at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from time import monotonic
from types import TracebackType

import psutil
from typing_extensions import Self

from tests.chaos.jobs import PATIENCE_S
from tests.e2e.agented import SCRIPTS
from tests.e2e.forked import Forked, started
from tests.e2e.moved_job import BARE, environment
from tests.e2e.references import output_of

SCRIPT = SCRIPTS / "chained_leaving.py"
LOOK_AGAIN_MS = 10
# The undisturbed run is made once for all jobs that come so far.
RUN_STEPS = 400
_GO_ON = re.compile(r"hegmctl run --allow-restart --resume (\S+) -- COMMAND")


class RestartedJob:
    """The training and its current supervisor. A context manager that leaves none of them."""

    def __init__(self, folder: Path, gpu: str, socket_path: Path) -> None:
        self.folder = folder
        self._environ = {**environment(socket_path), **BARE}
        self._output = folder / "output"
        self._errors = folder / "errors"
        self._stdin, self._end = os.pipe()
        self._killed: set[int] = set()
        #: Supervisors, one after the other.
        self.supervisor = self._supervised("--gpu", gpu)

    def _supervised(self, *words: str) -> subprocess.Popen[str] | Forked:
        command = [sys.executable, str(SCRIPT), str(self.folder), "0"]
        with self._output.open("ab") as output, self._errors.open("ab") as errors:
            return started(
                [sys.executable, "-m", "hegmctl", "run", "--allow-restart", *words, "--", *command],
                env=self._environ,
                stdin=self._stdin,
                stdout=output,
                stderr=errors,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.tell_to_end()
        os.close(self._stdin)
        self.supervisor.kill()
        self.supervisor.wait()
        for pid in self.started():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if str(self.folder) in process.cmdline():
                    process.kill()

    # -- its progress --------------------------------------------------------------------------------------------------

    def started(self) -> list[int]:
        """The pid of each start."""
        return [int(pid) for pid, where in self._starts() if where == "started"]

    def _starts(self) -> list[list[str]]:
        starts = self.folder / "starts"
        return [line.split() for line in starts.read_text().splitlines()] if starts.exists() else []

    def process(self) -> psutil.Process | None:
        """The start that lives, if one does."""
        for pid in reversed(self.started()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and str(self.folder) in process.cmdline():
                    return process
        return None

    def steps(self) -> list[tuple[int, int, str]]:
        """Return every step: the process that made it, its number, and its loss."""
        text = self._output.read_text()
        found = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [(int(pid), int(number), loss) for pid, number, loss in found]

    def await_steps(self, count: int) -> int:
        """Wait until one process has made so many more; its pid."""
        pid = self.await_steps_or_end(count, may_end=False)
        assert pid is not None
        return pid

    def await_steps_or_end(self, count: int, *, may_end: bool = True) -> int | None:
        """The same; None if it has ended instead, and so has every process that would and may start it again."""
        before = len(self.steps())
        until = monotonic() + PATIENCE_S
        while len(self.steps()) < before + count:
            if may_end and self.supervisor.poll() is not None and self.process() is None:
                return None
            assert monotonic() < until, f"it made no step within {PATIENCE_S} s: {self.errors()}; {self._processes()}"
            select.poll().poll(LOOK_AGAIN_MS)
        return self.steps()[-1][0]

    def _processes(self) -> str:
        """Its living processes with their states, for the report of a failed round."""
        process = self.process()
        supervised = "runs" if self.supervisor.poll() is None else f"has ended with {self.supervisor.returncode}"
        there = "none lives" if process is None else f"process {process.pid} is {process.status()}"
        return f"its supervisor {supervised}, of {self.started()} {there}, killed were {sorted(self._killed)}"

    def errors(self) -> str:
        return self._errors.read_text()[-3000:]

    # -- what is done to it --------------------------------------------------------------------------------------------

    def hold_at(self, where: str) -> None:
        """Have the next start wait once it is there."""
        os.mkfifo(self.folder / f"gate-{where}")

    def await_held(self, where: str) -> None:
        """Wait until one is."""
        known = self.started()
        until = monotonic() + PATIENCE_S
        while not any(at == where and int(pid) not in known[:-1] for pid, at in self._starts()[self._marks :]):
            assert monotonic() < until, f"nobody came to {where} within {PATIENCE_S} s: {self.errors()}"
            select.poll().poll(LOOK_AGAIN_MS)
            known = self.started()

    def note_starts(self) -> None:
        """From now on, wait for processes other than the current ones."""
        self._marks = len(self._starts())

    def let_in(self, where: str) -> None:
        """Let it continue, and all after it."""
        gate = self.folder / f"gate-{where}"
        with contextlib.suppress(OSError):  # the process that waited there was killed
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        gate.unlink()

    def kill(self) -> int:
        """Kill the process that lives; how many that were."""
        process = self.process()
        if process is None:
            return 0
        self._killed.add(process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            return 1
        return 0

    def kill_supervisor(self) -> int:
        self.supervisor.kill()
        self.supervisor.wait()
        return 1

    def go_on(self, message: str) -> None:
        """Type the command that was printed for this, with its own command in it."""
        found = _GO_ON.search(message) or _GO_ON.search(self.errors())
        assert found is not None, f"no message has the command to continue with: {message!r}, {self.errors()!r}"
        self.supervisor.kill()  # which has given up, or is dead
        self.supervisor.wait()
        self.supervisor = self._supervised("--resume", found[1])

    # -- the end -------------------------------------------------------------------------------------------------------

    def tell_to_end(self) -> None:
        """It makes no further step."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def end(self) -> None:
        """Have it end."""
        self.tell_to_end()
        until = monotonic() + PATIENCE_S
        while self.process() is not None:
            assert monotonic() < until, f"it does not end: {self.errors()}"
            select.poll().poll(LOOK_AGAIN_MS)
        self.supervisor.wait(PATIENCE_S)

    def check(self) -> int:
        """See that each step is as in an undisturbed run, in its order, and never two processes at once; how many."""
        made = self.steps()
        wanted = undisturbed(max((number for _pid, number, _loss in made), default=0) + 1)
        last = -1
        over: list[int] = []
        for pid, number, loss in made:
            assert loss == wanted[number], f"process {pid} made another step {number} than an undisturbed run"
            if not over or pid != over[-1]:
                assert pid not in over, f"process {pid} makes steps while process {over[-1]} does"
                again = bool(over) and over[-1] in self._killed  # steps after the saved state are repeated
                assert number == last + 1 or (again and number <= last), f"{pid} began at {number} after {last}"
                over.append(pid)
            else:
                assert number == last + 1, f"process {pid} made step {number} after {last}"
            last = number
        return len(made)


def undisturbed(steps: int) -> list[str]:
    """The loss of each step without hegm, and of some more."""
    return _undisturbed(steps + -steps % RUN_STEPS)


@cache
def _undisturbed(steps: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        output = output_of([str(SCRIPT), folder, str(steps)], {**environment(None), **BARE})
    return [line.split()[2] for line in output.splitlines()]
