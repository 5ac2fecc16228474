"""`python -m tests.bench.failures`: injects each kind of failure so many times and records the outcomes.

Each is a training under `hegmctl run --recover`: one process, or ranks of torchrun over gloo. Cases that do nothing to
their daemon follow each other on one.
With `--gpus real` all ranks are on the node's first GPU; a way that needs a simulated fault stays on simulated GPUs.
With `--gpus real --backend nccl` each rank has a GPU of its own, and only the ways for real GPUs are tried.
The end of a case is `exact` (it made all steps, and every loss, of repeated steps too, is that of an undisturbed run),
`ended` (by a failure from which no recovery is wanted), or WRONG with what was seen. The exit status is 1 if one is
WRONG. `--jobs` cases run at once, and all ways have their first turn before one has its second. With `--budget-s` no
case begins later than so long after the undisturbed runs, and one that has not ended after `--grace-s` more is cut, and
counts as not tried. `--out` has a line of JSON for each case, from its end on; with its log if it is WRONG or was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.failing_ways import (
    CASES,
    LAUNCHER,
    NCCL,
    POLL_INTERVAL_S,
    REAL,
    SIMULATED,
    STEPS,
    Case,
    Cut,
    Options,
    Run,
    UnexpectedEnd,
)
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import BRISK

Steps = set[tuple[int, int, str]]
CUT = "cut"


@dataclass
class Table:
    """The cases in their order, and their results."""

    options: Options
    expected: dict[tuple[int, str], Steps] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    #: Daemons that no case has now, with where they are.
    _spare: list[tuple[str, RunningDaemon]] = field(default_factory=list)
    _nodes: ExitStack = field(default_factory=ExitStack)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def cells(self) -> list[tuple[Case, int]]:
        """Each way with each number of ranks."""
        worlds = list(map(int, self.options.ranks.split(",")))
        on = (None, REAL) if self.options.backend == NCCL else (None, SIMULATED, self.options.gpus)
        cases = [case for case in CASES if self.options.only in case.name and case.only_on in on]
        return [(case, world) for case in cases for world in worlds if world >= case.least_ranks]

    def run(self) -> None:
        """Run all cases until they are done or the time is over."""
        cells = self.cells()
        with self._nodes, ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(self._learn, sorted({(world, self.options.place(case)) for case, world in cells})))
            self.options.begins_until = time.monotonic() + self.options.budget_s
            self.options.ends_at = self.options.begins_until + self.options.grace_s
            turns = [(number, case, world) for number in range(self.options.times) for case, world in cells]
            list(pool.map(lambda turn: self._try(*turn), turns))

    def _learn(self, what: tuple[int, str]) -> None:
        """The steps of a run that nothing disturbs."""
        world, place = what
        case = Case("alone", only_on=place)
        with self._node(case, place) as daemon, folder_of("alone") as folder:
            alone = Run(daemon, folder, case, world, self.options, alone=True)
            try:
                alone.until(lambda: alone.process.poll() is not None, "its end")
            finally:
                alone.end()
            self.expected[what] = set(alone.lines())
            if alone.process.returncode or len(self.expected[what]) != world * STEPS:
                raise SystemExit(f"an undisturbed run ended with {alone.process.returncode}: {alone.story()}")

    def _try(self, number: int, case: Case, world: int) -> None:
        if time.monotonic() > self.options.begins_until:
            return
        place, began = self.options.place(case), time.monotonic()
        row: dict[str, Any] = {"case": case.name, "ranks": world, "turn": number + 1, "gpus": place}
        with self._node(case, place) as daemon, folder_of(f"run-{world}-{number}") as folder:
            run = Run(daemon, folder, case, world, self.options)
            try:
                row["result"] = result_of(run, case, self.expected[world, place])
            except Cut:
                row |= {"result": CUT, "story": run.story()}
            except Exception as error:  # noqa: BLE001 - the other cases are to be tried all the same
                row |= {"result": f"WRONG: {type(error).__name__}: {error}", "story": run.story()}
            finally:
                run.end()
            row |= {"next_step_s": run.next_step_s(), "seconds": round(time.monotonic() - began, 1)}
        self._keep(row)

    @contextmanager
    def _node(self, case: Case, place: str) -> Iterator[RunningDaemon]:
        """A daemon for this case alone, or one that had others before."""
        if not case.shares_daemon:
            with node(place) as daemon:
                yield daemon
            return
        with self._guard:
            found = next((one for one in self._spare if one[0] == place), None)
            if found is not None:
                self._spare.remove(found)
            else:
                found = place, self._nodes.enter_context(node(place))
        try:
            yield found[1]
        finally:
            with self._guard:
                self._spare.append(found)

    def _keep(self, row: dict[str, Any]) -> None:
        with self._guard:
            self.rows.append(row)
            cells = [f"{value}" for key, value in row.items() if key != "story"]
            print(" | ".join(cells), flush=True)
            if "story" in row:
                print(row["story"], flush=True)
            if self.options.out is not None:
                with self.options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")

    def text(self) -> str:
        """Return, for each kind of failure and number of ranks, the count of each outcome and the median seconds to the
        next step.
        """
        worlds = sorted({world for _, world in self.cells()})
        lines = ["| way | GPUs | " + " | ".join(f"{world} ranks" for world in worlds) + " |"]
        lines.append("|---" * (len(worlds) + 2) + "|")
        for name in dict.fromkeys(case.name for case, _ in self.cells()):
            rows = [row for row in self.rows if row["case"] == name]
            places = ", ".join(sorted({row["gpus"] for row in rows}))
            cells = [_cell([row for row in rows if row["ranks"] == world]) for world in worlds]
            lines.append(f"| {name} | {places} | " + " | ".join(cells) + " |")
        wrong, cut = sum(map(is_wrong, self.rows)), sum(row["result"] == CUT for row in self.rows)
        lines.append(f"{len(self.rows) - cut} cases, {wrong} of them WRONG; {cut} were cut")
        return "\n".join(lines)


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    kinds = [str(row["result"]).partition(" ")[0].rstrip(":") for row in rows]
    took = [
        row["next_step_s"]
        for row, kind in zip(rows, kinds, strict=True)
        if row["next_step_s"] is not None and kind in ("exact", "ended")
    ]
    parts = [f"{kinds.count(kind)} {kind}" for kind in ("exact", "ended", "WRONG", CUT) if kind in kinds]
    return ", ".join(parts + ([f"{statistics.median(took):.1f} s"] if took else []))


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether it went wrong."""
    return str(row["result"]).startswith("WRONG")


def result_of(run: Run, case: Case, expected: Steps) -> str:
    """Return the result. Raises UnexpectedEnd and Cut."""
    run.until_protected()
    if case.strike is None:
        run.have_it_fail()
    else:
        run.strike(case.strike)
    run.until(lambda: run.process.poll() is not None, "its end")
    status, lines = run.process.returncode, set(run.lines())
    if not lines <= expected:
        raise UnexpectedEnd(f"{len(lines - expected)} losses differ, such as {min(lines - expected)}")
    if case.is_end and len(run.pids()) == run.world:
        return f"ended with status {status}"
    wanted = {line for line in expected if line[1] <= run.last_step}
    if status or lines != wanted:
        raise UnexpectedEnd(f"status {status}, {len(lines)} of {len(wanted)} steps: {run.last_line()}")
    if len(run.pids()) == run.world:
        raise UnexpectedEnd("it did not fail")
    return "exact"


@contextmanager
def node(place: str) -> Iterator[RunningDaemon]:
    """A daemon with the GPUs of this node, or with two simulated ones."""
    with folder_of("daemon") as folder, RunningDaemon(folder, simulate=place == SIMULATED) as daemon:
        yield daemon


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """A folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"hegm-{name}-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@contextmanager
def forking_python() -> Iterator[Path]:
    """Yield the address of a Python that forks ranks (forking_launcher.py)."""
    with folder_of("forking") as folder:
        address = folder / "sock"
        environ = {**os.environ, "PYTHONPATH": str(BRISK), "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen([sys.executable, str(LAUNCHER), "serve", str(address)], env=environ)
        try:
            while not address.exists():
                if server.poll() is not None:
                    raise SystemExit("the Python that forks ranks has ended")
                threading.Event().wait(POLL_INTERVAL_S)
            yield address
        finally:
            server.kill()
            server.wait()


def parsed(argv: Sequence[str] | None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", choices=(SIMULATED, REAL), default=SIMULATED)
    parser.add_argument("--device", default="cuda", help="of PyTorch, on real GPUs")
    parser.add_argument("--backend", choices=("gloo", NCCL), default="gloo", help="of the ranks")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, help="a file for the results, as lines of JSON")
    parser.add_argument("--hang-limit", default="6s", help="of the trainings that hang")
    parser.add_argument("--case-limit-s", type=float, default=1800.0)
    parser.add_argument("--fork-ranks", action="store_true", help="on simulated GPUs, instead of torchrun: cheaper")
    parser.add_argument("--budget-s", type=float, default=1e9, help="from the end of the undisturbed runs on")
    parser.add_argument("--grace-s", type=float, default=30.0)
    options = parser.parse_args(argv, namespace=Options())
    if options.backend == NCCL and options.gpus != REAL:
        parser.error("--backend nccl needs --gpus real")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; the exit status."""
    table = Table(parsed(argv))
    with ExitStack() as stack:
        table.options.forks = stack.enter_context(forking_python()) if table.options.fork_ranks else None
        table.run()
    print(table.text(), flush=True)
    return int(any(map(is_wrong, table.rows)))


if __name__ == "__main__":
    sys.exit(main())
