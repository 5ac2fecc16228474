"""Training scripts that save their state at a boundary and are restarted from it, as often as needed.

Owns the Python that forks for them and their files. The test decides what to compare.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgpack
from typing_extensions import Self

from hegmd.agent.state.storage import state_file
from tests.e2e.agented import BRISK
from tests.patience import HANG_S

PRELOADED = Path(__file__).with_name("preloaded.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
LEFT_STATUS = 99
UNRESTORED_STATUS = 98
REFUSED_STATUS = 97


class Ended:
    """How one start of a script ended, and the kinds of the boundaries that it passed after the request to park."""

    def __init__(self, status: int, errors: str, kinds: list[str]) -> None:
        self.status = status
        self.errors = errors
        self.kinds = kinds


class Spot(NamedTuple):
    """A boundary that a start is to be ended at: the first of that kind, from that number on."""

    at: int
    kind: str


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
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(BRISK), **ONE_THREAD},
        )
        self._known: dict[tuple[str, bool], tuple[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=HANG_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def undisturbed(self, *argv: str) -> str:
        """The output of the script without an agent; it is run once."""
        return self.computed(*argv)[0]

    def computed(self, *argv: str, is_recorded: bool = False) -> tuple[str, str]:
        """Its output and the record of all that it computes, without an agent; it is run once."""
        # The key is the text of the script: each test writes it to a path of its own.
        key = (Path(argv[0]).read_text(), is_recorded)
        if key not in self._known:
            output, record = self._new("output"), self._new("record")
            ended = self._run(_Start(argv, output, record if is_recorded else None, has_agent=False))
            assert ended.status == 0, ended.errors
            self._known[key] = output.read_text(), record.read_text() if is_recorded else ""
        return self._known[key]

    def kinds_of(self, *argv: str) -> list[str]:
        """The kinds of all boundaries of the script, which passes them with an agent."""
        ended = self._run(_Start(argv, self._new("output"), self._new("record"), at=0))
        assert ended.status == 0, ended.errors
        return ended.kinds

    def restarted(self, *argv: str, at: tuple[int, ...], **environment: str) -> tuple[str, list[Ended]]:
        """The output of all starts one after the other, each but the last ended at that boundary of its own."""
        output = self._new("output")
        starts = [_Start(argv, output, None, at=found, into=self._new("state")) for found in at]
        ends = self._in_turn([*starts, _Start(argv, output, None)], environment)
        return output.read_text(), ends

    def recorded(self, *argv: str, places: list[Spot]) -> tuple[str, str, list[Ended]]:
        """The same with the record of all that they compute; each is ended at one of these boundaries."""
        output, record = self._new("output"), self._new("record")
        starts = [
            _Start(argv, output, record, at=found.at, kind=found.kind, into=self._new("state")) for found in places
        ]
        ends = self._in_turn([*starts, _Start(argv, output, record)], {})
        return output.read_text(), record.read_text(), ends

    def left(self, *argv: str, at: int) -> Any:
        """The state that the script leaves at that boundary."""
        into = self._new("state")
        importlib.import_module("torch")  # which a state with tensors is read beside
        ended = self._run(_Start(argv, self._new("output"), None, at=at, into=into))
        assert ended.status == LEFT_STATUS, ended.errors
        with into.open("rb") as file:
            return state_file.read(file.fileno())

    def _in_turn(self, starts: list[_Start], environment: dict[str, str]) -> list[Ended]:
        """Run them in turn, each from the state that the previous one saved."""
        ends: list[Ended] = []
        state: Path | None = None
        for start in starts:
            ends.append(self._run(start, environment, state))
            if ends[-1].status != LEFT_STATUS:
                break
            state = start.into
        return ends

    def _new(self, what: str) -> Path:
        self._runs += 1
        return self._folder / f"{what}.{self._runs}"

    def _run(self, start: _Start, more: dict[str, str] | None = None, state: Path | None = None) -> Ended:
        environment = dict(more or {})
        if start.has_agent:
            environment.update(HEGM_ALLOW_RESTART="1", HEGM_SOCKET=str(self._folder / "none"))
            environment["HEGM_MSGPACK"] = str(Path(msgpack.__file__).parent)
        if state is not None:
            environment["HEGM_STATE"] = str(state)
        errors, kinds = self._new("errors"), self._new("kinds")
        start.output.touch()
        kinds.touch()
        wanted = {
            **start.wanted(),
            "number": self._runs,
            "environment": environment,
            "errors": str(errors),
            "kinds": str(kinds),
            "folder": str(self._folder),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        while True:
            number, status = self._process.stdout.readline().split()
            if int(number) == self._runs:  # and not of an abandoned one, in a test that took too long
                return Ended(int(status), errors.read_text(), kinds.read_text().splitlines())


@dataclass(frozen=True)
class _Start:
    """One start: the script saves its state at that boundary, if at any."""

    argv: tuple[str, ...]
    output: Path
    record: Path | None
    at: int | None = None
    kind: str | None = None
    into: Path | None = None
    has_agent: bool = True

    def wanted(self) -> dict[str, Any]:
        return {
            "argv": list(self.argv),
            "output": str(self.output),
            "record": None if self.record is None else str(self.record),
            "agent": self.has_agent,
            "at": self.at,
            "kind": self.kind,
            "into": None if self.into is None else str(self.into),
        }
