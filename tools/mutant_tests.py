"""Runs the tests of an area on a mutant: for `make mutants`.

The tests are collected once on a copy of the unchanged tree, and run once under a trace function, to see which of them
run which lines (`forked_tests.py`). The tests of a mutant then run in this order: those that ran its lines, the fastest
first; those that import its module; all others that can notice it. The first failure ends them.

A mutant inside a function is tried in a fork of the process that has collected the tests. One that changes what runs
during an import is tried in a new process. The mutant is in the file of the copy in both cases, for the processes that
tests start.
"""

from __future__ import annotations

import compileall
import concurrent.futures
import contextlib
import itertools
import os
import queue
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.forked_tests import NOT_REPLACED, ForkedTests, changed_functions
from tools.mutations import Mutant

MARKS = "not e2e and not gpu and not bench and not wide"
_NOT_OURS = (".git", ".venv", "build", "dist", "node_modules", "__pycache__", "*_cache", ".hypothesis")
_NO_TESTS = 5
#: The time limit of a test whose duration is unknown.
TEST_LIMIT_S = 120
#: The time limit of a test whose duration is known: so many seconds, and so many times its duration.
_LEAST_LIMIT_S = 15.0
_SLOWER = 20.0
#: The time limit of a test file under the trace function. A file that exceeds it runs again without it.
_TRACED_LIMIT_S = 120.0


class BrokenTestsError(Exception):
    """The tests cannot be collected, or none of them passes on the unchanged tree."""


@dataclass(frozen=True)
class Verdict:
    """Whether a mutant survived, and the first test that failed if it did not."""

    survived: bool
    by: str = ""

    def __str__(self) -> str:
        return "SURVIVED" if self.survived else "found   "


@dataclass
class _Copy:
    """A copy of the tree, and the process that has collected its tests."""

    tree: Path
    forked: ForkedTests


class AreaTests:
    """The tests of an area, which judge mutants of some files."""

    def __init__(self, root: Path, tests: Sequence[str], files: Iterable[Path], folder: Path, limit_s: float) -> None:
        """Copy the tree into `folder` and run the tests once. Raises BrokenTestsError."""
        self._root = root
        self._paths = [str(path.relative_to(root)) for pattern in tests for path in sorted(root.glob(pattern))]
        self._files = sorted(set(files))
        self._folder = folder
        self._limit_s = limit_s
        self._idle: queue.SimpleQueue[_Copy] = queue.SimpleQueue()
        self._copies: list[_Copy] = []
        #: Tests that fail on the unchanged tree. They judge no mutant.
        self.failing: list[str] = []
        self._seconds: dict[str, float] = {}
        #: Test files whose tests do more than what was noted: they start processes, or failed while they were traced.
        self._opaque: set[str] = set()
        self._tests_by_line: dict[tuple[str, int], list[str]] = {}
        try:
            self._watch()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for copy in self._copies:
            copy.forked.close()

    def judge(self, mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, Verdict]]:
        """The verdict on each mutant, in the order in which they come."""
        with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
            runs = {threads.submit(self.verdict, mutant): mutant for mutant in mutants}
            for run in concurrent.futures.as_completed(runs):
                yield runs[run], run.result()

    def verdict(self, mutant: Mutant) -> Verdict:
        """Run the tests on one mutant. If they do not end in time, they have noticed it."""
        with self._copy() as copy, _changed(copy.tree / mutant.path, mutant):
            lines = {(str(mutant.path), line) for line in mutant.lines}
            if changed_functions(mutant.before, mutant.after) and not lines & copy.forked.lines_at_import:
                change = (mutant.path, mutant.before, mutant.after)
                tests = self.tests_of(mutant, in_function=True)
                status, noted = copy.forked.run(tests, self._limit_s, change=change, limits=self._limits())
                if status != NOT_REPLACED:
                    return _verdict(status, noted)
            return self._verdict_of_new_process(copy.tree, mutant)

    def tests_of(self, mutant: Mutant, *, in_function: bool) -> list[str]:
        """The tests that can notice the mutant, those first that most likely do.

        A mutant in a function is noticed by a test that runs its lines, or that starts a process.
        """
        near = set(self._near_files(mutant.path))
        found = [test for line in mutant.lines for test in self._tests_by_line.get((str(mutant.path), line), ())]
        every = sorted(self._seconds, key=lambda test: _file_of(test) not in near)
        if in_function:
            every = [test for test in every if _file_of(test) in self._opaque]
        return list(dict.fromkeys([*sorted(found, key=self._seconds.__getitem__), *every]))

    def _near_files(self, path: Path) -> list[str]:
        """The test files that import that file."""
        package, dotted, stem = ".".join(path.parent.parts), ".".join(path.with_suffix("").parts), path.stem
        names = re.compile(rf"from {re.escape(package)} import [^\n]*\b{stem}\b|(from|import) {re.escape(dotted)}\b")
        files = dict.fromkeys(_file_of(test) for test in self._seconds)
        return [
            file
            for file in files
            if Path(file).stem.startswith(f"test_{stem}") or names.search((self._copies[0].tree / file).read_text())
        ]

    def _limits(self) -> dict[str, float]:
        return {test: _LEAST_LIMIT_S + _SLOWER * seconds for test, seconds in self._seconds.items()}

    def _watch(self) -> None:
        """Run all tests on the unchanged tree, and note what they run."""
        with self._copy() as copy:
            for file, tests in itertools.groupby(copy.forked.tests, _file_of):
                self._watch_file(copy, file, list(tests))
        if not self._seconds:
            raise BrokenTestsError("none of them passes")

    def _watch_file(self, copy: _Copy, file: str, tests: list[str]) -> None:
        _, noted = copy.forked.run(tests, _TRACED_LIMIT_S, is_whole=True, is_traced=True)
        again: dict[str, Any] = {"tests": {}, "failed": []}
        # A test that looks at Python's trace function may fail under ours, and a busy loop may not end.
        doubtful = [test for test in tests if test in noted["failed"] or test not in noted["tests"]]
        if doubtful:
            self._opaque.add(file)
            _, again = copy.forked.run(doubtful, self._limit_s, is_whole=True)
            self.failing += again["failed"]
        for test, ran in {**noted["tests"], **again["tests"]}.items():
            if test in again["failed"]:
                continue
            self._seconds[test] = ran["seconds"]
            if ran["starts_process"]:
                self._opaque.add(file)
            for path, line in ran["lines"]:
                where = str(Path(path).relative_to(copy.tree)), line
                self._tests_by_line.setdefault(where, []).append(test)

    @contextlib.contextmanager
    def _copy(self) -> Iterator[_Copy]:
        try:
            copy = self._idle.get_nowait()
        except queue.Empty:
            copy = self._new_copy()
            self._copies.append(copy)
        try:
            yield copy
        finally:
            self._idle.put(copy)

    def _new_copy(self) -> _Copy:
        tree = Path(tempfile.mkdtemp(dir=self._folder), "tree").resolve()
        shutil.copytree(self._root, tree, ignore=shutil.ignore_patterns(*_NOT_OURS), symlinks=True)
        # Only here and while the tests are collected is bytecode written: that of a mutant looks like that of the next.
        compileall.compile_dir(tree, quiet=2)
        words = [*_words(tree), *self._paths]
        try:
            forked = ForkedTests(words, self._files, tree, _environ(tree, writes=True), self._limit_s)
        except ChildProcessError as error:
            raise BrokenTestsError(str(error)) from error
        return _Copy(tree, forked)

    def _verdict_of_new_process(self, tree: Path, mutant: Mutant) -> Verdict:
        try:
            forked = ForkedTests([*_words(tree), *self._paths], [], tree, _environ(tree), self._limit_s)
        except ChildProcessError:
            return Verdict(survived=False, by="the import of the tests")
        with contextlib.closing(forked):
            tests = [test for test in self.tests_of(mutant, in_function=False) if test in forked.tests]
            return _verdict(*forked.run(tests, self._limit_s, limits=self._limits()))


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _verdict(status: int | None, noted: dict[str, Any]) -> Verdict:
    if status in (0, _NO_TESTS):
        return Verdict(survived=True)
    if noted["failed"] or status is None:
        return Verdict(survived=False, by=(noted["failed"] or ["a test that did not end"])[0])
    # The process of the tests ended before they did. This proves nothing: it may be our fault.
    return Verdict(survived=True, by=f"(no test failed, but their process ended with status {status})")


def _words(tree: Path) -> list[str]:
    return ["-q", "-p", "no:cacheprovider", "-m", MARKS, f"--timeout={TEST_LIMIT_S}", f"--basetemp={tree.parent}/tmp"]


def _environ(tree: Path, *, writes: bool = False) -> dict[str, str]:
    environ = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'client'}:{Path(__file__).resolve().parents[1]}"}
    return environ if writes else environ | {"PYTHONDONTWRITEBYTECODE": "1"}


@contextlib.contextmanager
def _changed(file: Path, mutant: Mutant) -> Iterator[None]:
    """The mutant in this file. Its time is set back afterwards, so that its bytecode is valid again."""
    then = file.stat()
    try:
        file.write_text(mutant.after)
        yield
    finally:
        file.write_text(mutant.before)
        os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
