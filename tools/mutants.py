"""Changes one place of the product at a time and looks whether a test notices: `make mutants`.

A mutant is one small change to a copy of the tree: an operator exchanged, a number or truth changed, a condition turned
round, a statement left out. The quick tests of each area run once on the unchanged tree, to see which of them run which
lines (`executed_lines.py`). A mutant meets those that ran its lines, the fastest first, then those that import its
module, and in the end all of its area. One that they all pass survives: a test is missing, or the change makes no
difference to anybody. The same seed makes the same mutants from the same tree.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import difflib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.executed_lines import FILES, INTO

ROOT = Path(__file__).resolve().parents[1]
#: What is mutated, by area, and the tests that run on it. A test of the module's own name runs first.
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "migration": (("hegmd/migration/**/*.py",), ("tests/unit/migration", "tests/simulation")),
    "methods": (
        ("hegmd/migration/methods/**/*.py", "hegmd/migration/carriers/**/*.py"),
        (
            "tests/unit/migration/methods",
            "tests/unit/migration/carriers",
            "tests/contract/test_driver_*.py",
            "tests/contract/test_carriers*.py",
        ),
    ),
    "agent": (("hegmd/agent/**/*.py",), ("tests/unit/agent", "tests/contract/test_shown.py")),
    "image": (
        ("hegmd/images/files/**/*.py",),
        ("tests/unit/images/files", "tests/unit/images/test_dump_job.py", "tests/unit/images/test_restore_job.py"),
    ),
    "pool": (
        ("hegmd/memory/pool*.py", "hegmd/memory/spill*.py"),
        (
            "tests/unit/memory/test_pool*.py",
            "tests/unit/test_pool_on_disk.py",
            "tests/unit/memory/test_spill_file.py",
            "tests/unit/test_found_descriptors.py",
        ),
    ),
    "server": (("hegmd/server/**/*.py",), ("tests/unit/server", "tests/unit/test_app.py")),
    "protocol": (
        ("hegmd/protocol/**/*.py",),
        ("tests/unit/protocol", "tests/unit/server", "tests/unit/workers", "tests/unit/hegmctl/test_wire.py"),
    ),
}
MARKS = "not e2e and not gpu and not bench and not wide"
#: By which it is seen who runs which lines.
QUICK = f"{MARKS} and not thorough"
_NOT_OURS = (".git", ".venv", "build", "dist", "node_modules", "__pycache__", "*_cache", ".hypothesis")
_NO_TESTS = 5
#: A test that a mutant has hang is ended after that time.
TEST_LIMIT_S = 120

_EXCHANGED: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of a file: which bytes of its text are replaced, and by what."""

    path: Path
    line: int
    what: str
    before: str
    begin: int
    end: int
    new: str

    @property
    def after(self) -> str:
        """The text of the file with it."""
        whole = self.before.encode()
        return (whole[: self.begin] + self.new.encode() + whole[self.end :]).decode()

    @property
    def lines(self) -> range:
        """The lines of the file that it changes."""
        whole = self.before.encode()
        first, last = (whole[:at].count(b"\n") + 1 for at in (self.begin, self.end))
        return range(min(first, self.line), last + 1)

    @property
    def can_run(self) -> bool:
        """Whether it is another program at all; an operator between brackets makes none."""
        try:
            ast.parse(self.after)
        except SyntaxError:
            return False
        return self.after != self.before

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), str(self.path), "the mutant", n=1, lineterm=""
        )
        return "\n".join(lines)


class _Source:
    """Where the nodes of a file's tree lie in its bytes."""

    def __init__(self, text: str) -> None:
        self._starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end_column

    def between(self, one: ast.expr, other: ast.expr) -> tuple[int, int]:
        return self.span(one)[1], self.span(other)[0]


def _is_told_only(node: ast.stmt) -> bool:
    """Whether a statement changes nothing but a log, or is a docstring."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith(("logger.", "note"))


def _judged(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, no docstrings, nothing for type checkers, nothing that is only logged."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt) and (_is_told_only(node) or isinstance(node, ast.Import | ast.ImportFrom)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name not in {"annotation", "returns", "decorator_list", "type_params"}:
                waiting += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]


def mutants_of(path: Path, text: str) -> list[Mutant]:
    """Every change of one file, in the order of its lines; a few of them cannot run."""
    source = _Source(text)
    found: list[Mutant] = []

    def add(node: ast.expr | ast.stmt, what: str, begin: int, end: int, new: str) -> None:
        found.append(Mutant(path, node.lineno, what, text, begin, end, new))

    for node in _judged(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _EXCHANGED:
            gap = source.between(node.left, node.comparators[0])
            add(node, "comparison", *gap, f" {_EXCHANGED[type(node.ops[0])]} ")
        elif isinstance(node, ast.BinOp) and type(node.op) in _EXCHANGED:
            add(node, "arithmetic", *source.between(node.left, node.right), f" {_EXCHANGED[type(node.op)]} ")
        elif isinstance(node, ast.BoolOp):
            add(node, "and and or", *source.between(node.values[0], node.values[1]), f" {_EXCHANGED[type(node.op)]} ")
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            new = str(not node.value) if isinstance(node.value, bool) else str(int(str(node.value)) + 1)
            add(node, "constant", *source.span(node), new)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            begin, end = source.span(node.test)
            add(node.test, "condition", begin, end, f"not ({text.encode()[begin:end].decode()})")
        elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
            add(node, "result", *source.span(node), "return None")
        elif isinstance(node, ast.Expr | ast.Raise | ast.AugAssign | ast.Delete | ast.Continue | ast.Break):
            add(node, "statement", *source.span(node), "pass")
    return sorted(found, key=lambda mutant: (mutant.line, mutant.begin, mutant.what))


def sample(root: Path, areas: Sequence[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """So many mutants, the same number of each area as far as that goes."""
    chosen: list[tuple[str, Mutant]] = []
    for at, area in enumerate(areas):
        paths = sorted({path for pattern in AREAS[area][0] for path in root.glob(pattern)})
        every = [mutant for path in paths for mutant in mutants_of(path.relative_to(root), path.read_text())]
        share = count // len(areas) + (at < count % len(areas))
        random.Random(f"{seed} {area}").shuffle(every)
        chosen += [(area, one) for one in itertools.islice(filter(lambda one: one.can_run, every), share)]
    return chosen


def tests_of(root: Path, area: str, path: Path) -> list[str]:
    """The tests that run on a mutant of that file, its own ones first."""
    paths = [found for pattern in AREAS[area][1] for found in sorted(root.glob(pattern))]
    own = [found for folder in paths for found in sorted(folder.rglob(f"test_{path.stem}*.py"))]
    return list(dict.fromkeys(str(found.relative_to(root)) for found in [*own, *paths]))


def near_tests(root: Path, area: str, path: Path) -> list[str]:
    """Those of its area that import that file: they find most of what can be found, in a few seconds."""
    package, dotted = ".".join(path.parent.parts), ".".join(path.with_suffix("").parts)
    names = re.compile(rf"from {re.escape(package)} import [^\n]*\b{path.stem}\b|(from|import) {re.escape(dotted)}\b")
    paths = [found for pattern in AREAS[area][1] for found in sorted(root.glob(pattern))]
    files = [file for found in paths for file in (sorted(found.rglob("test_*.py")) if found.is_dir() else [found])]
    near = [file for file in files if file.stem.startswith(f"test_{path.stem}") or names.search(file.read_text())]
    return list(dict.fromkeys(str(file.relative_to(root)) for file in near))


def stages_of(root: Path, area: str, mutant: Mutant, ran: Runs | None) -> list[list[str]]:
    """The tests that run on a mutant, those that most likely find it first."""
    covering = [] if ran is None else ran.of(mutant)
    return [covering, near_tests(root, area, mutant.path), tests_of(root, area, mutant.path)]


class Runs:
    """Which quick tests ran which lines of some files, on the unchanged tree."""

    def __init__(self, found: dict[str, dict[str, Any]], root: Path) -> None:
        self._tests: dict[tuple[str, int], list[str]] = {}
        for test, noted in sorted(found.items(), key=lambda item: float(item[1]["seconds"])):
            for path, line in noted["lines"]:
                self._tests.setdefault((str(Path(path).relative_to(root)), line), []).append(test)

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that ran a line that it changes, the fastest first."""
        return list(
            dict.fromkeys(test for line in mutant.lines for test in self._tests.get((str(mutant.path), line), ()))
        )


class Copies:
    """Copies of the tree, one for each run at a time."""

    def __init__(self, root: Path, folder: Path, limit_s: float) -> None:
        self._root = root
        self._folder = folder
        self._limit_s = limit_s
        self._idle: queue.SimpleQueue[Path] = queue.SimpleQueue()

    @contextlib.contextmanager
    def _copy(self) -> Iterator[Path]:
        try:
            copy = self._idle.get_nowait()
        except queue.Empty:
            copy = Path(tempfile.mkdtemp(dir=self._folder), "tree").resolve()
            shutil.copytree(self._root, copy, ignore=shutil.ignore_patterns(*_NOT_OURS), symlinks=True)
        try:
            yield copy
        finally:
            self._idle.put(copy)

    def watched(self, tests: Sequence[str], files: Sequence[Path]) -> Runs | None:
        """Run these tests on the unchanged tree, and see who runs which lines of those files; None where one fails."""
        with self._copy() as copy:
            into = copy.parent / "lines.json"
            into.unlink(missing_ok=True)
            environ = {FILES: "\n".join(str(copy / file) for file in files), INTO: str(into)}
            self._run(copy, tests, "-p", "tools.executed_lines", "-m", QUICK, **environ)
            if not into.exists():
                return None
            noted = json.loads(into.read_text())
            # Beside the trace function some fail; what they run is left to those that import the module.
            if noted["failed"] and self._run(copy, noted["failed"], "-x") != 0:
                return None
            found = {test: ran for test, ran in noted["tests"].items() if test not in noted["failed"]}
            return Runs(found, copy)

    def passes(self, stages: Sequence[Sequence[str]], change: Mutant | None) -> bool:
        """Whether all of these tests pass with that change, those of the first stage first.

        What does not end in time does not pass.
        """
        with self._copy() as copy:
            try:
                if change is not None:
                    (copy / change.path).write_text(change.after)
                return all(self._run(copy, stage, "-x") in (0, _NO_TESTS) for stage in stages if stage)
            finally:
                if change is not None:
                    (copy / change.path).write_text(change.before)

    def _run(self, copy: Path, tests: Sequence[str], *options: str, **more: str) -> int | None:
        """The status of pytest; None where it did not end in time."""
        named = copy.parent / "tests"
        named.write_text("\n".join(tests))
        words = ["-q", "-p", "no:cacheprovider", "-m", MARKS, f"--timeout={TEST_LIMIT_S}"]
        words += [f"--basetemp={copy.parent}/tmp", *options, f"@{named}"]
        environ = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'client'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"} | more
        argv = [sys.executable, "-m", "pytest", *words]
        with subprocess.Popen(
            argv, cwd=copy, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                return process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing that a mutant left behind in its session
                    os.killpg(process.pid, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Look which small changes of the product no test notices.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", choices=list(AREAS), action="append", help="an area; may be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=900.0, help="a run that takes longer counts as a failure")
    asked = parser.parse_args(argv)
    areas = asked.only or list(AREAS)
    with tempfile.TemporaryDirectory(prefix="hegm-mutants-", ignore_cleanup_errors=True) as folder:
        copies = Copies(ROOT, Path(folder), asked.limit_s)
        with concurrent.futures.ThreadPoolExecutor(asked.jobs) as threads:
            chosen = sample(ROOT, areas, asked.count, asked.seed)
            watched = {
                area: threads.submit(
                    copies.watched,
                    tests_of(ROOT, area, Path("none")),
                    sorted({mutant.path for of, mutant in chosen if of == area}),
                )
                for area in areas
            }
            runs_of = {area: run.result() for area, run in watched.items()}
            broken = [area for area, found in runs_of.items() if found is None]
            if broken:
                print(f"without any change the tests of {', '.join(broken)} fail, or take more than {asked.limit_s} s")
                return 2
            runs = {
                threads.submit(copies.passes, stages_of(ROOT, area, mutant, runs_of[area]), mutant): mutant
                for area, mutant in chosen
            }
            survivors = 0
            for run in concurrent.futures.as_completed(runs):
                mutant = runs[run]
                survivors += run.result()
                verdict = "SURVIVED" if run.result() else "found"
                print(f"{verdict:9} {mutant.path}:{mutant.line} {mutant.what}", flush=True)
                if run.result():
                    print(mutant.diff(), flush=True)
    print(f"{len(runs) - survivors} of {len(runs)} mutants were found, {survivors} survived (seed {asked.seed})")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
