"""One command for a machine with two NVIDIA GPUs: are jobs moved there whole, whatever happens meanwhile?

    PYTHONPATH=.:client python3 -m tests.gpu.moves_run [--state FILE] [--budget-s N] [--quick] [--only NAMES] [CASE...]

Starts a hegmd, trainings under `hegmctl run` and programs without an agent; moves, suspends, resumes, swaps and drains
them by hegmctl; kills helper and daemon and cancels in every stage; and lets others take all the memory there is. After
each: is every line that the job said the one of an undisturbed run, has NVML it where it belongs and nowhere else, is
nothing held any more. Prints a table. With --state it continues where it was cut, and --again does once more what
failed; CASE, or what the names of several begin with, runs a part (--only: the same with commas); --quick the short
run; --list only lists. Cases that want nothing of the node as a whole run side by side. Needs torch, and nvcc and JAX
for what is built on them, but no pytest and no systemd. Runs over the stub driver with the environment of a CudaNode.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from hegmd.errors import HegmError
from tests.gpu.bench_record import unwinding
from tests.gpu.moves_cases import CASES, LAST, LEFT_OUT, nothing_left
from tests.gpu.moves_jobs import Jobs
from tests.gpu.moves_node import Account, Node, WentWrongError
from tests.gpu.moves_trial import Findings, Trial

CASE_S = 90
# As many of the trainings that are wanted next are on their way meanwhile.
AHEAD = 5
BESIDE = 3
# Among so many of the next ones those that run side by side are looked for.
NEXT = 16
Result = dict[str, Any]


class CaseTimeout(Exception):
    """A case took longer than any may."""


def _overdue(_: int, __: FrameType | None) -> None:
    raise CaseTimeout(f"it took longer than {CASE_S} s")


class Run:
    """The cases one after the other, or side by side; what was found is written down at once."""

    def __init__(self, state: Path | None, budget_s: float, *, again: bool = False) -> None:
        self._path = state
        self._ends = time.monotonic() + budget_s
        self.results: dict[str, Result] = {}
        if state is not None and state.exists():
            for line in state.read_text().splitlines():
                result = json.loads(line)
                self.results[result["case"]] = result
        self._again = again

    def wanted(self, names: list[str], *, quick: bool) -> list[str]:
        """Return the requested cases that are not done yet, those with another keeper last."""
        chosen = [name for name in CASES if any(_is_meant(name, word) for word in names)]
        if not names:
            chosen = [name for name, case in CASES.items() if case.quick or not quick]
        left = [name for name in chosen if not self._is_done(name)]
        return sorted(left, key=lambda name: CASES[name].kept_by, reverse=True)

    def _is_done(self, name: str) -> bool:
        return name in self.results and not (self._again and self.results[name]["wrong"])

    def run(self, names: list[str], node: Node, jobs: Jobs, idle: Account) -> list[str]:
        """Run them as far as the time goes; those that are left."""
        jobs.begin_references({kind for name in names for kind in CASES[name].kinds})
        left = list(names)
        while left and time.monotonic() < self._ends:
            group = _group(left)
            self._keep_by(CASES[left[0]].kept_by, node, jobs)
            ahead = [kind for name in [*group, *left[:24]] for kind in CASES[name].kinds]
            for kind in list(dict.fromkeys(ahead))[:AHEAD]:
                jobs.prepare(kind)
            unsaid = self._run_group(group, node, jobs)
            left = [name for name in left if name not in group]
            for name in unsaid:  # another one of the group went wrong, and nothing was seen of these
                self._run_group([name], node, jobs)
        if left:
            print(f"cut before {left[0]}: the time is over", flush=True)
        self._note(LAST, _last(node, jobs, idle), 0.0)
        return left

    def _keep_by(self, kept_by: str, node: Node, jobs: Jobs) -> None:
        if node.kept_by != kept_by:
            jobs.end_all()
            node.renew(kept_by)

    def _run_group(self, names: list[str], node: Node, jobs: Jobs) -> list[str]:
        """Run one case, or several concurrently, and record the results."""
        began = time.monotonic()
        together = threading.Barrier(len(names)) if len(names) > 1 else None
        trials = {name: Trial(node, jobs, together) for name in names}
        wrongs: dict[str, str | None] = {}
        try:
            for kind in dict.fromkeys(kind for name in names for kind in CASES[name].kinds):
                jobs.ready(kind)  # importing what they train with has limits of its own
            signal.alarm(CASE_S)
            wrongs = _try_all(trials, together, node)
        except (WentWrongError, HegmError, CaseTimeout) as error:
            wrongs = {name: f"{type(error).__name__}: {error}" for name in names}
        finally:
            signal.alarm(0)
        took_s = time.monotonic() - began
        if any(wrongs.values()):
            print(node.log_tail(), flush=True)
        unsaid: list[str] = []
        for name, wrong in wrongs.items():
            if wrong:
                self._clear(name, node, jobs, hung=wrong.startswith("CaseTimeout"))
            if wrong is None:
                unsaid.append(name)
            else:
                if len(names) > 1:
                    trials[name].note(f"beside {len(names) - 1} other")
                self._note(name, (wrong, trials[name].found), took_s)
        return unsaid

    def _clear(self, name: str, node: Node, jobs: Jobs, *, hung: bool) -> None:
        """After a failure nothing of its jobs and, where it hung, of its daemon is relied upon."""
        jobs.end(*CASES[name].kinds)
        if hung or node.daemon.poll() is not None:
            jobs.end_all()
            node.renew()

    def _note(self, name: str, outcome: tuple[str, Findings], took_s: float) -> None:
        wrong, found = outcome
        result: Result = {"case": name, "wrong": wrong, "took_s": round(took_s, 2), **asdict(found)}
        self.results[name] = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")
        print(_row(result), flush=True)


def _group(left: list[str]) -> list[str]:
    """The next one, and others of its shape that need other trainings."""
    first = CASES[left[0]]
    group, kinds = [left[0]], set(first.kinds)
    for name in left[1:NEXT] if first.beside else ():
        case = CASES[name]
        if len(group) < BESIDE and case.beside == first.beside and kinds.isdisjoint(case.kinds):
            group.append(name)
            kinds |= set(case.kinds)
    return group


def _try_all(trials: dict[str, Trial], together: threading.Barrier | None, node: Node) -> dict[str, str | None]:
    """Return the failure of each; empty for success, None if unknown."""
    if together is None:
        return {name: _try(name, trial) for name, trial in trials.items()}
    with ThreadPoolExecutor(len(trials)) as pool:
        running = {name: pool.submit(_try, name, trial, together) for name, trial in trials.items()}
        try:
            return {name: future.result() for name, future in running.items()}
        except CaseTimeout:
            together.abort()
            node.kill()  # a process that waits for a reply gets none
            raise


def _try(name: str, trial: Trial, together: threading.Barrier | None = None) -> str | None:
    wrong: str | None = ""
    try:
        CASES[name].run(trial)
    except threading.BrokenBarrierError:
        return None
    except (WentWrongError, HegmError) as error:
        wrong = str(error)
    except Exception as error:  # noqa: BLE001 - the cases after it are worth their time on such a machine
        traceback.print_exc()
        wrong = f"{type(error).__name__}: {error}"
    if wrong and together is not None:
        together.abort()
    return wrong


def _is_meant(name: str, word: str) -> bool:
    """Return whether the name is meant: by its whole name, or by a common prefix."""
    return name == word or (word not in CASES and name.startswith(word))


def _last(node: Node, jobs: Jobs, idle: Account) -> tuple[str, Findings]:
    try:
        return "", Findings(account=nothing_left(node, jobs, idle))
    except WentWrongError as error:
        return str(error), Findings()


def _row(result: Result) -> str:
    downtime, gap = ("" if result[name] is None else f"{result[name] * 1e3:.0f} ms" for name in ("downtime_s", "gap_s"))
    text = "; ".join([*(["WRONG: " + " ".join(result["wrong"].split())] if result["wrong"] else []), *result["notes"]])
    cells = [result["case"], "FAILED" if result["wrong"] else "ok", result["carrier"], downtime, gap]
    return "| " + " | ".join([*cells, result["account"], f"{result['took_s']:.1f} s", text]) + " |"


def _table(results: dict[str, Result]) -> str:
    head = (
        "| case | | carrier | stood | longest gap | MiB@GPU; more unowned | took | |\n|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(_row(result) for result in results.values())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--only", default="", metavar="NAMES", help="the same as CASE..., with commas")
    parser.add_argument("--state", type=Path, help="a file of what is done, a line of JSON each; made if not there")
    parser.add_argument("--again", action="store_true", help="once more what the state says has failed")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin no case after so long")
    parser.add_argument("--quick", action="store_true", help="the most telling only")
    parser.add_argument("--list", action="store_true", help="list the cases, and what is left out")
    parser.add_argument("--table", action="store_true", help="the table of the state, and nothing else")
    options = parser.parse_args()
    run = Run(options.state, options.budget_s, again=options.again)
    names = run.wanted([*options.cases, *filter(None, options.only.split(","))], quick=options.quick)
    if options.list or options.table:
        text = _table(run.results) if options.table else "\n".join([*names, "", "left out:", *LEFT_OUT])
        print(text)
        return 0
    signal.signal(signal.SIGALRM, _overdue)
    with ExitStack() as held:
        held.enter_context(unwinding())
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-moves-")))
        node = Node(folder)
        idle = node.gpus.account()
        print(f"driver {node.gpus.driver}, {len(node.gpus)} GPUs, {len(names)} cases", flush=True)
        held.enter_context(node)
        jobs = held.enter_context(Jobs(node, folder))
        began = time.monotonic()
        left = run.run(names, node, jobs, idle)
        print(f"{time.monotonic() - began:.0f} s\n\n{_table(run.results)}\n")
    failed = [name for name, result in run.results.items() if result["wrong"]]
    print(f"{len(run.results) - len(failed)} ok, {len(failed)} failed: {' '.join(failed) or '-'}, {len(left)} not run")
    return bool(failed or left)


if __name__ == "__main__":
    sys.exit(main())
