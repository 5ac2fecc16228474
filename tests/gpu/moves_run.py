"""One command for a machine with two NVIDIA GPUs: are jobs moved there whole, whatever happens meanwhile?

    PYTHONPATH=.:client python3 -m tests.gpu.moves_run [--results FILE] [--budget-s N] [--all] [CASE...]

Starts a hegmd, trainings under `hegmctl run` and programs without an agent; moves, suspends, resumes, swaps and drains
them by hegmctl; kills helper and daemon and cancels in every stage; and lets others take all the memory there is. After
each: is every line that the job said the one of an undisturbed run, has NVML it where it belongs and nowhere else, is
nothing held any more. Prints a table. With --results it goes on where it was cut; CASE, or what the names of several
begin with, runs a part; --all also what is not in the short run; --list only lists. Needs torch, and nvcc and JAX for
what is built on them, but no pytest and no systemd. Runs over the stub driver with the environment of a CudaNode.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from hegmd.errors import HegmError
from tests.gpu.moves_cases import CASES, LAST, Findings, Trial, nothing_left
from tests.gpu.moves_jobs import Jobs
from tests.gpu.moves_node import Account, Node, WentWrongError

CASE_S = 90
# As many of the trainings that are wanted next are on their way meanwhile.
AHEAD = 3
Result = dict[str, Any]


class Overdue(Exception):
    """A case took longer than any may."""


def _overdue(_: int, __: FrameType | None) -> None:
    raise Overdue(f"it took longer than {CASE_S} s")


class Run:
    """The cases one after the other; what was found is written down at once."""

    def __init__(self, results: Path | None, budget_s: float) -> None:
        self._path = results
        self._ends = time.monotonic() + budget_s
        self.results: dict[str, Result] = {}
        if results is not None and results.exists():
            for line in results.read_text().splitlines():
                result = json.loads(line)
                self.results[result["case"]] = result

    def wanted(self, names: list[str], *, everything: bool) -> list[str]:
        """Of the cases those that are asked for and not done yet."""
        chosen = [name for name in CASES if any(_is_meant(name, word) for word in names)]
        if not names:
            chosen = [name for name, case in CASES.items() if everything or case.core]
        return [name for name in chosen if name not in self.results and CASES[name].here]

    def run(self, names: list[str], node: Node, jobs: Jobs, idle: Account) -> None:
        """Run them as far as the time goes."""
        jobs.begin_references({kind for name in names for kind in CASES[name].kinds})
        for index, name in enumerate(names):
            if time.monotonic() > self._ends:
                print(f"cut before {name}: the time is over", flush=True)
                return
            ahead = [kind for later in names[index : index + 24] for kind in CASES[later].kinds]
            for kind in list(dict.fromkeys(ahead))[:AHEAD]:
                jobs.prepare(kind)
            self._run_one(name, node, jobs)
        self._note(LAST, _last(node, jobs, idle), 0.0)

    def _run_one(self, name: str, node: Node, jobs: Jobs) -> None:
        began = time.monotonic()
        trial = Trial(node, jobs)
        wrong = ""
        try:
            for kind in CASES[name].kinds:  # importing what they train with has limits of its own
                jobs.ready(kind)
            signal.alarm(CASE_S)
            CASES[name].run(trial)
        except (WentWrongError, HegmError) as error:
            wrong = str(error)
        except Exception as error:  # noqa: BLE001 - the cases after it are worth their time on such a machine
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        if wrong:
            print(node.log_tail(), flush=True)
            self._clear(name, node, jobs, hung=wrong.startswith("Overdue"))
        self._note(name, (wrong, trial.found), time.monotonic() - began)

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


def _is_meant(name: str, word: str) -> bool:
    """By its whole name, or by what several begin with."""
    return name == word or (word not in CASES and name.startswith(word))


def _last(node: Node, jobs: Jobs, idle: Account) -> tuple[str, Findings]:
    try:
        return "", Findings(account=nothing_left(node, jobs, idle))
    except WentWrongError as error:
        return str(error), Findings()


def _row(result: Result) -> str:
    blackout, gap = ("" if result[name] is None else f"{result[name] * 1e3:.0f} ms" for name in ("blackout_s", "gap_s"))
    told = "; ".join([*(["WRONG: " + " ".join(result["wrong"].split())] if result["wrong"] else []), *result["notes"]])
    cells = [result["case"], "FAILED" if result["wrong"] else "ok", result["carrier"], blackout, gap]
    return "| " + " | ".join([*cells, result["account"], f"{result['took_s']:.1f} s", told]) + " |"


def _table(results: dict[str, Result]) -> str:
    head = (
        "| case | | carrier | stood | longest gap | MiB@GPU; more unowned | took | |\n|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(_row(result) for result in results.values())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--results", type=Path, help="a file of what is done; made if it is not there")
    parser.add_argument("--budget-s", type=float, default=600.0, help="begin no case after so long")
    parser.add_argument("--all", action="store_true", help="also what the short run leaves out")
    parser.add_argument("--list", action="store_true", help="list the cases")
    asked = parser.parse_args()
    run = Run(asked.results, asked.budget_s)
    names = run.wanted(asked.cases, everything=asked.all)
    if asked.list:
        print("\n".join(names))
        return 0
    signal.signal(signal.SIGALRM, _overdue)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-moves-")))
        node = Node(folder)
        idle = node.gpus.account()
        print(f"driver {node.gpus.driver}, {len(node.gpus)} GPUs, {len(names)} cases", flush=True)
        held.enter_context(node)
        jobs = held.enter_context(Jobs(node, folder))
        began = time.monotonic()
        run.run(names, node, jobs, idle)
        print(f"{time.monotonic() - began:.0f} s\n\n{_table(run.results)}\n")
    failed = [name for name, result in run.results.items() if result["wrong"]]
    left = [name for name in names if name not in run.results]
    print(f"{len(run.results) - len(failed)} ok, {len(failed)} failed: {' '.join(failed) or '-'}, {len(left)} not run")
    return bool(failed or left)


if __name__ == "__main__":
    sys.exit(main())
