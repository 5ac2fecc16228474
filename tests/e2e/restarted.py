"""Training scripts that leave their state at a boundary and are started again from it, as often as is wanted.

Owns the Python that forks for them and their files. What is compared is up to the test.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack
from typing_extensions import Self

from hegmd.agent.restart import plain

PRELOADED = Path(__file__).with_name("preloaded.py")
LEFT_STATUS = 99
UNRESTORED_STATUS = 98
REFUSED_STATUS = 97


class Ended:
    """How one start of a script ended."""

    def __init__(self, status: int, errors: str) -> None:
        self.status = status
        self.errors = errors


class Restarts:
    """A Python with PyTorch and those modules in it, and a folder for its scripts' output. Ended with the context."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self._folder = folder
        self._runs = 0
        self._process = subprocess.Popen(
            [sys.executable, str(PRELOADED), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._known: dict[tuple[str, ...], str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def undisturbed(self, *argv: str) -> str:
        """The output of the script without an agent; it is run once."""
        if argv[:1] not in self._known:
            output = self._new("output")
            ended = self._run(argv, output, agent=False)
            assert ended.status == 0, ended.errors
            self._known[argv[:1]] = output.read_text()
        return self._known[argv[:1]]

    def restarted(self, *argv: str, at: tuple[int, ...], **environment: str) -> tuple[str, list[Ended]]:
        """The output of all starts one after the other, each but the last ended at that boundary of its own."""
        output = self._new("output")
        ends: list[Ended] = []
        state: Path | None = None
        for boundary in (*at, None):
            into = None if boundary is None else self._new("state")
            ends.append(self._run(argv, output, agent=True, at=boundary, into=into, state=state, more=environment))
            if ends[-1].status != LEFT_STATUS:
                break
            state = into
        return output.read_text(), ends

    def left(self, *argv: str, at: int) -> Any:
        """The state that the script leaves at that boundary."""
        into = self._new("state")
        importlib.import_module("torch")  # which a state with tensors is read beside
        ended = self._run(argv, self._new("output"), agent=True, at=at, into=into)
        assert ended.status == LEFT_STATUS, ended.errors
        with into.open("rb") as file:
            return plain.read(file.fileno())

    def _new(self, what: str) -> Path:
        self._runs += 1
        return self._folder / f"{what}.{self._runs}"

    def _run(
        self,
        argv: tuple[str, ...],
        output: Path,
        *,
        agent: bool,
        at: int | None = None,
        into: Path | None = None,
        state: Path | None = None,
        more: dict[str, str] | None = None,
    ) -> Ended:
        environment = dict(more or {})
        if agent:
            environment.update(HEGM_ALLOW_RESTART="1", HEGM_SOCKET=str(self._folder / "none"))
            environment["HEGM_MSGPACK"] = str(Path(msgpack.__file__).parent)
        if state is not None:
            environment["HEGM_STATE"] = str(state)
        errors = self._new("errors")
        output.touch()
        wanted = {
            "number": self._runs,
            "argv": list(argv),
            "environment": environment,
            "output": str(output),
            "errors": str(errors),
            "agent": agent,
            "at": at,
            "into": None if into is None else str(into),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        while True:
            number, status = self._process.stdout.readline().split()
            if int(number) == self._runs:  # and not of one that nobody waited for, in a test that took too long
                return Ended(int(status), errors.read_text())
