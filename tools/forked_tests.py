"""Runs chosen tests in forks of one pytest that has collected them all: for `make mutants`.

To import and collect an area's tests takes seconds; the tests of one function mostly take milliseconds. This program is
started with the number of a socket and the words for pytest. It collects, sends what it has collected, and then reads
requests, one JSON object per line. It forks for each: the child replaces the functions that a mutant changes, runs the
requested tests in the requested order, and ends. This module also notes which test runs which lines.

It must not run a test itself, so that each child starts from the same state.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

#: An environment variable: the files whose lines are noted, one per line.
FILES = "LINES_OF"
#: Audit events of a new process.
_NEW_PROCESS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}
#: A child's status when it could not replace a function.
NOT_REPLACED = 77
#: The wait for an answer is longer than the time limit of what is asked.
_MARGIN_S = 60.0
#: A function of a file: its first line and its name.
_Key = tuple[int, str]


def changed_functions(before: str, after: str) -> dict[_Key, CodeType] | None:
    """The new code of each function that differs, by first line and name in `before`.

    None if something differs that runs when the module is imported, or if two functions have the same key.
    """
    found: dict[_Key, CodeType] = {}
    modules = [compile(text, "", "exec", dont_inherit=True) for text in (before, after)]
    waiting: list[tuple[CodeType, CodeType, bool]] = [(modules[0], modules[1], False)]
    while waiting:
        old, new, is_in_function = waiting.pop()
        old_inner, new_inner = _inner(old), _inner(new)
        if not is_in_function and (len(old_inner) != len(new_inner) or _own(old) != _own(new)):
            return None
        if is_in_function and old != new:
            key = (old.co_firstlineno, old.co_name)
            if key in found or old.co_freevars != new.co_freevars:
                return None
            found[key] = new
        for one, other in zip(old_inner, new_inner, strict=False):
            # The body of a class that a module defines runs during the import.
            waiting.append((one, other, is_in_function or bool(one.co_flags & inspect.CO_NEWLOCALS)))
    return found


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _own(code: CodeType) -> tuple[object, ...]:
    """Return all of it that does not belong to inner code, without line numbers."""
    consts = [(type(constant), constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
    return code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def _replace(path: str, before: str, after: str) -> bool:
    """Give each existing function of that file its new code; False if the module is imported and none was found."""
    codes = changed_functions(before, after)
    if codes is None:
        return False
    # isinstance would ask each object for its class, and a dead weak proxy raises an exception then.
    functions = [
        function
        for function in gc.get_objects()
        if type(function) is FunctionType and function.__code__.co_filename == path
    ]
    replaced = 0
    for function in functions:
        new = codes.get((function.__code__.co_firstlineno, function.__code__.co_name))
        if new is not None:
            function.__code__ = new.replace(co_filename=path)
            replaced += 1
    return replaced > 0 or not functions


class LineNotes:
    """A trace function that notes the lines that run in some files."""

    def __init__(self, files: frozenset[str]) -> None:
        self._files = files
        self._now: set[tuple[str, int]] = set()

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, _event: str, _arg: object) -> Any:
        self._now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @contextlib.contextmanager
    def noted(self) -> Iterator[set[tuple[str, int]]]:
        """The lines that run meanwhile; complete at the end."""
        self._now = found = set[tuple[str, int]]()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield found
        finally:
            sys.settrace(None)
            threading.settrace(None)


class _Server:
    """The plugin of pytest. In the process that collects, it takes the place of the loop over all tests."""

    def __init__(self, line: socket.socket, notes: LineNotes) -> None:
        self._line = line
        self._notes = notes
        self._at_import: set[tuple[str, int]] = set()
        self._request: dict[str, Any] = {}
        self._tests: dict[str, dict[str, Any]] = {}
        self._has_started_process = False
        self._failed: dict[str, None] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:  # collecting failed; pytest has the words for it
            return None
        sys.settrace(None)
        threading.settrace(None)
        self._answer({"tests": [item.nodeid for item in session.items], "lines": [*self._at_import]})
        with self._line.makefile() as requests:
            for line in requests:
                self._request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    self._become_child(session)
                    return None  # pytest runs the tests that are left
                self._answer({"status": _wait(pid, self._request["limit_s"])})
        return True

    def on_audit_event(self, event: str, _words: object) -> None:
        """Note that this process starts another one."""
        if event in _NEW_PROCESS:
            self._has_started_process = True

    def collected_with(self, lines: set[tuple[str, int]]) -> None:
        """Take the set of lines that run until the first request."""
        self._at_import = lines

    def _answer(self, words: Mapping[str, object]) -> None:
        self._line.sendall(json.dumps(words).encode() + b"\n")

    def _become_child(self, session: pytest.Session) -> None:
        os.setsid()
        self._line.close()
        request = self._request
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        gc.unfreeze()  # what is frozen is not listed
        if request["path"] and not _replace(request["path"], request["before"], request["after"]):
            os._exit(NOT_REPLACED)
        gc.freeze()
        items = {item.nodeid: item for item in session.items}
        session.items = [items[name] for name in request["tests"]]
        for item in session.items:
            if item.nodeid in request["limits"]:
                item.add_marker(pytest.mark.timeout(request["limits"][item.nodeid]), append=False)
        session.config.option.maxfail = 0 if request["is_whole"] else 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._has_started_process = False
        begun_s, lines = time.monotonic(), set[tuple[str, int]]()
        with self._notes.noted() if self._request["is_traced"] else contextlib.nullcontext(lines) as lines:
            answer = yield
        self._tests[item.nodeid] = {
            "seconds": time.monotonic() - begun_s,
            "lines": sorted(lines),
            "starts_process": self._has_started_process,
        }
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        if self._request:
            Path(self._request["into"]).write_text(json.dumps({"tests": self._tests, "failed": [*self._failed]}))


def _wait(pid: int, limit_s: float) -> int | None:
    """The status of a child; None if it did not end in time. Nothing of its session is left."""
    descriptor = os.pidfd_open(pid)
    try:
        has_ended = bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)
    os.kill(pid, signal.SIGKILL)  # it may not have its session yet
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if has_ended else None


class ForkedTests:
    """Such a pytest, from its caller's side."""

    def __init__(
        self, words: Sequence[str], files: Sequence[Path], folder: Path, environ: Mapping[str, str], limit_s: float
    ) -> None:
        """Collect in `folder`. Raises ChildProcessError if that fails, or takes longer than `limit_s`."""
        self._folder = folder
        self._into = folder.parent / "ran.json"
        self._log = os.memfd_create("log")
        ours, theirs = socket.socketpair()
        ours.settimeout(limit_s + _MARGIN_S)
        argv = [sys.executable, "-m", "tools.forked_tests", str(theirs.fileno()), *words]
        noted = {FILES: "\n".join(str(folder / file) for file in files)}
        self._process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**environ, **noted},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._line = ours
        self._answers = ours.makefile()
        collected = self._answer()
        self.tests: list[str] = collected["tests"]
        #: The tests that ran before the first.
        self.lines_at_import = {(str(Path(path).relative_to(folder)), line) for path, line in collected["lines"]}

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.readline()
        except TimeoutError:
            line = ""
        if not line:
            self._process.kill()
            words = os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace")
            self.close()
            raise ChildProcessError(words[-2000:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(
        self,
        tests: Sequence[str],
        limit_s: float,
        *,
        limits: Mapping[str, float] | None = None,
        change: tuple[Path, str, str] | None = None,
        is_whole: bool = False,
        is_traced: bool = False,
    ) -> tuple[int | None, dict[str, Any]]:
        """The status of these tests, and what was noted: `failed`, and of each test its seconds and lines.

        They stop at the first that fails, unless the whole is wanted. Lines are noted if they are traced. The status is
        None if they did not end in time.
        """
        self._into.unlink(missing_ok=True)
        path, before, after = change or (None, "", "")
        request = {
            "tests": [*tests],
            "limits": dict(limits or {}),
            "limit_s": limit_s,
            "path": path and str(self._folder / path),
            "before": before,
            "after": after,
            "is_whole": is_whole,
            "is_traced": is_traced,
            "into": str(self._into),
        }
        self._line.sendall(json.dumps(request).encode() + b"\n")
        status = self._answer()["status"]
        noted = json.loads(self._into.read_text()) if self._into.exists() else {"tests": {}, "failed": []}
        return status, noted

    def close(self) -> None:
        self._answers.close()
        self._line.close()
        self._process.wait()
        os.close(self._log)


def main(argv: Sequence[str]) -> int:
    line = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(line.fileno(), False)
    notes = LineNotes(frozenset(os.environ.pop(FILES).splitlines()))
    server = _Server(line, notes)
    sys.addaudithook(server.on_audit_event)
    with notes.noted() as lines:
        server.collected_with(lines)
        status = pytest.main([*argv[1:]], plugins=[server])
    return int(status)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # a thread that a mutant left must not hold the child
