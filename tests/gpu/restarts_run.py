"""One command for a machine with NVIDIA GPUs: do trainings continue exactly where they were when they are restarted?

    PYTHONPATH=.:client python3 -m tests.gpu.restarts_run [--state FILE] [--budget-s N] [--only NAMES] [--rehearse]
                                                          [--again] [--list] [--table] [CASE...]

Starts a hegmd, and trainings under `hegmctl run --allow-restart`; each is restarted twice by `migrate --via restart`.
From GPU to GPU (another one where there are two, else the same) every line that it says has to be that of an
undisturbed run. `two` is one process on two GPUs: it is restarted on the same GPUs, then with these exchanged, then
exchanged again, and each of its processes has to see its GPUs in the order that was asked for; `two-killed` is killed
where it was restarted, and recovered there from a snapshot. From the CPU to a GPU
and back what it has before a step has to be what it had after the one before, bit for bit, each batch the one that was
due, and its losses close to those of an undisturbed run on the CPU, where numbers are narrow for a while. Prints a
table. With --state it continues where it was cut, and --again does once more what failed. Needs torch, no pytest and no
systemd. --rehearse is all of that on simulated GPUs, where everything has to be exact.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hegmd.errors import HegmError
from tests.gpu.bench_record import unwinding
from tests.gpu.moves_jobs import TRAINING
from tests.gpu.moves_node import WentWrongError, until
from tests.gpu.restart_node import CPU, READY_WITHIN_S, RestartedJob, RestartNode

SCRIPT = str(TRAINING / "restarted.py")
STEPS = 4000
PACE_S = 0.02
RUN_STEPS = 12
CASE_S = 60.0
ALONE_S = 240.0
# Between CPU and GPU sums are made in another order; what that comes to grows with the steps.
TOLERANCE = 2e-3
# A number with 8 bits of bfloat16 on the CPU has 11 of float16 on the GPU, so losses that began alike drift apart:
# 2.3e-3 by step 24, 2.4e-2 by step 267, 7.3e-2 by step 447. These losses are compared for so many steps after the first
# difference; the state and the batches, to the end.
NARROW_TOLERANCE = 2e-2
NARROW_STEPS = 50
# With a snapshot so often that there is one soon.
RECOVERED = ("--recover=2s",)
# The same kernels, chosen the same way, in every process.
EXACTLY = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "2"}


@dataclass(frozen=True)
class Case:
    """A training, and where it is restarted; without `exact` numbers are only to be close."""

    traits: tuple[str, ...]
    by_cpu: bool = False
    exact: bool = True
    tolerance: float = TOLERANCE
    close_steps: int = STEPS
    gpus: int = 1
    killed: bool = False

    def places(self, gpus: Sequence[str], *, rehearsed: bool = False) -> list[str]:
        """Return its first place and its target: between GPUs the other one, if there is another.

        A simulated process is on one GPU.
        """
        if self.gpus > 1 and not rehearsed:
            here, there = ",".join(gpus[:2]), ",".join(gpus[1::-1])
            return [here, there] if self.killed else [here, here, there, here]
        if self.by_cpu:
            return [CPU, gpus[0], CPU]
        return [gpus[0], gpus[min(1, len(gpus) - 1)], gpus[0]]


CASES = {
    "plain": Case(()),
    "random": Case(("dropout", "noise")),
    "amp": Case(("amp", "dropout")),
    "fused": Case(("fused", "dropout")),
    "compiled": Case(("compiled",)),
    "two": Case(("two", "dropout", "noise"), gpus=2),
    "two-killed": Case(("two", "dropout", "noise"), gpus=2, killed=True),
    "cpu": Case((), by_cpu=True, exact=False),
    "cpu-amp": Case(("amp",), by_cpu=True, exact=False, tolerance=NARROW_TOLERANCE, close_steps=NARROW_STEPS),
}


def words_to(before: str, place: str) -> str | None:
    """Return the `--to` of a request for that place: none if the process stays, and pairs of GPUs for a way back."""
    if "," not in place:
        return place
    if place == before:
        return None
    pairs = zip(before.split(","), place.split(","), strict=True)
    return place if before < place else ",".join(f"{old}={new}" for old, new in pairs)


class Run:
    """The cases, side by side; what was found is written down at once."""

    def __init__(self, state: Path | None, *, again: bool) -> None:
        self._path = state
        lines = state.read_text().splitlines() if state is not None and state.exists() else []
        self.results: dict[str, dict[str, Any]] = {reply["case"]: reply for reply in map(json.loads, lines)}
        self._again = again

    def is_done(self, name: str) -> bool:
        return name in self.results and not (self._again and self.results[name]["wrong"])

    def note(self, name: str, wrong: str, seconds: list[float], places: list[str], took_s: float) -> None:
        result = {"case": name, "wrong": wrong, "seconds": seconds, "places": places, "took_s": round(took_s, 1)}
        self.results[name] = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")
        print(row_of(result), flush=True)

    def run(self, names: list[str], node: RestartNode, beside: int, ends: float) -> list[str]:
        """Run them as far as the time goes; those that are left."""
        left = [name for name in names if not self.is_done(name)]
        with ThreadPoolExecutor(beside) as pool:
            running = [pool.submit(self._run_if_time, name, node, ends) for name in left]
            ran = [future.result() for future in running]
        return [name for name, has_run in zip(left, ran, strict=True) if not has_run]

    def _run_if_time(self, name: str, node: RestartNode, ends: float) -> bool:
        if time.monotonic() + CASE_S > ends:
            return False
        began, case, seconds = time.monotonic(), CASES[name], list[float]()
        places = case.places(node.gpus(), rehearsed=node.rehearsed)
        try:
            wrong = try_case(node, case, places, seconds)
        except (WentWrongError, HegmError, OSError) as error:
            wrong = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            print(node.log_tail(), flush=True)
        self.note(name, wrong, seconds, places, time.monotonic() - began)
        return True


def try_case(node: RestartNode, case: Case, places: list[str], seconds: list[float]) -> str:
    """Return the failure; empty for success. Fills in the duration of each restart, from the request to the next
    step.
    """
    with ExitStack() as held:
        words = [SCRIPT, str(STEPS), *case.traits, f"pace={PACE_S}"]
        options = RECOVERED if case.killed else ()
        job = RestartedJob(node, words, places[0], options=options, **EXACTLY)
        held.callback(job.close)
        job.read_steps(RUN_STEPS)
        job.seen_at(places[0])
        for earlier, place in pairwise(places):
            asked_at = time.monotonic()
            before = len(job.steps())
            job.restart(place, words_to(earlier, place))
            job.read_steps(RUN_STEPS)
            seconds.append(round(first_after_gap(job, asked_at, before), 2))
        if case.killed:
            places = [*places, places[-1]]
            seconds.append(round(killed(node, job), 2))
        lines = each_step(job.steps()) if case.killed else job.steps()
        if case.gpus > 1 and not node.rehearsed:
            wrong = wrong_order(job.lines, [node.uuids_at(place) for place in places])
            if wrong:
                return wrong
    return differences(lines, undisturbed(node, case, places[0], len(lines)), case)


def killed(node: RestartNode, job: RestartedJob) -> float:
    """Kill the process once it has a new snapshot. The time until its successor has made steps, in seconds."""

    def snapshots() -> int:
        with node.connect() as connection:
            return sum(job.snapshots for job in connection.recovery().jobs)

    since = snapshots()
    until(lambda: snapshots() > since + 1, "that a snapshot is taken", READY_WITHIN_S)
    pid, began = job.worker(), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: job.children() and job.worker() != pid, "that it is started again", READY_WITHIN_S)
    job.read_steps(RUN_STEPS)
    return time.monotonic() - began


def each_step(lines: Sequence[str]) -> list[str]:
    """The lines, with steps that were done again only once if they were the same again."""
    return [line for place, line in enumerate(lines) if line not in lines[:place]]


def wrong_order(lines: Sequence[str], wanted: Sequence[Sequence[str]]) -> str:
    """Return the difference between the GPUs that its processes have printed, in device order, and those wanted."""
    gpus_by_process = [line.split()[1:] for line in list(lines) if line.startswith("on ")]
    return (
        ""
        if gpus_by_process == list(wanted)
        else f"its processes were on {gpus_by_process}, and had to be on {list(wanted)}"
    )


def undisturbed(node: RestartNode, case: Case, place: str, steps: int) -> list[str]:
    """Return the output of so many steps of an undisturbed run, begun where the other was."""
    _, environ = node.begun_on(place)
    plain = {name: value for name, value in node.environ().items() if name != "HEGM_SOCKET"}
    ran = subprocess.run(
        [sys.executable, SCRIPT, str(steps), *case.traits],
        env={**plain, **environ, **EXACTLY}, capture_output=True, text=True, timeout=ALONE_S, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise WentWrongError(f"undisturbed it ended with {ran.returncode}: {ran.stderr[-800:]}")
    return [line for line in ran.stdout.splitlines() if line.startswith("step ")]


def first_after_gap(job: RestartedJob, asked_at: float, before: int) -> float:
    """From asking to the end of the first step of the other process: that after the longest gap."""
    pairs = [(at, line) for at, line in zip(job.times, job.lines, strict=False) if line.startswith("step ")]
    times = [at for at, _line in pairs][max(0, before - 1) :]
    gaps = [(later - earlier, later) for earlier, later in pairwise(times) if later >= asked_at]
    return max(gaps)[1] - asked_at


def differences(lines: Sequence[str], wanted: Sequence[str], case: Case) -> str:
    """Return the differences between these lines and those of an undisturbed run."""
    after, parted_at = "", len(lines)
    for number, (line, other) in enumerate(zip(lines, wanted, strict=False)):
        fields, due = line.split(), other.split()
        if case.exact and fields != due:
            return f"step {number} said {line.strip()!r}, and undisturbed it is {other.strip()!r}"
        if fields[1] != str(number):
            return f"step {fields[1]} came where step {number} was due"
        if after and fields[3] != after:
            return f"before step {number} it had {fields[3]}, and {after} after the one before"
        if fields[5] != due[5]:
            return f"step {number} had another batch"
        loss, close = float.fromhex(fields[6]), float.fromhex(due[6])
        if loss != close:
            parted_at = min(parted_at, number)
        is_close = math.isclose(loss, close, rel_tol=case.tolerance, abs_tol=case.tolerance)
        if not is_close and number < parted_at + case.close_steps:
            return f"step {number} has the loss {loss:g}, and undisturbed {close:g}"
        after = fields[4]
    return "" if lines else "it printed nothing"


def row_of(result: dict[str, Any]) -> str:
    seconds = ", ".join(f"{took:.1f} s" for took in result["seconds"])
    wrong = " ".join(result["wrong"].split())
    cells = [result["case"], "FAILED" if wrong else "ok", " → ".join(result["places"]), seconds, wrong]
    return "| " + " | ".join(cells) + " |"


def table(results: dict[str, dict[str, Any]]) -> str:
    head = "| case | | where | asked until the next step | |\n|---|---|---|---|---|"
    return "\n".join([head, *map(row_of, results.values())])


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--only", default="", metavar="NAMES", help="the same as CASE..., with commas")
    parser.add_argument("--state", type=Path, help="a file of what is done, a line of JSON each; made if not there")
    parser.add_argument("--again", action="store_true", help="once more what the state says has failed")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin no case that would end after so long")
    parser.add_argument("--beside", type=int, default=4, help="so many cases at a time")
    parser.add_argument("--rehearse", action="store_true", help="on simulated GPUs")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--table", action="store_true", help="the table of the state, and nothing else")
    options = parser.parse_args(argv)
    options.cases = [*options.cases, *filter(None, options.only.split(","))] or list(CASES)
    strange = [name for name in options.cases if name not in CASES]
    if strange:
        parser.error(f"there is no case {strange[0]!r}: there are {', '.join(CASES)}")
    return options


def main(argv: Sequence[str]) -> int:
    options = parsed(argv)
    ends = time.monotonic() + options.budget_s
    run = Run(options.state, again=options.again)
    if options.list or options.table:
        print(table(run.results) if options.table else "\n".join(options.cases))
        return 0
    with unwinding(), tempfile.TemporaryDirectory(prefix="hegm-restarts-") as folder:
        try:
            with RestartNode(Path(folder), rehearsed=options.rehearse) as node:
                gpus = node.gpus()
                if not gpus:
                    print("there is no GPU here; --rehearse does it on simulated ones", flush=True)
                    return 1
                cases = [name for name in options.cases if CASES[name].gpus <= len(gpus)]
                for name in [name for name in options.cases if name not in cases]:
                    print(f"{name} needs {CASES[name].gpus} GPUs, and is left out", flush=True)
                print(f"{len(gpus)} GPUs, {len(cases)} cases", flush=True)
                left = run.run(cases, node, options.beside, ends)
        except WentWrongError as error:
            print(error, flush=True)
            return 1
    print("\n" + table(run.results))
    failed = [name for name, result in run.results.items() if result["wrong"]]
    print(
        f"\n{len(run.results) - len(failed)} ok, {len(failed)} failed: {' '.join(failed) or '-'}, {len(left)} not run"
    )
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
