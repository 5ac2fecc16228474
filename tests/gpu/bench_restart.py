"""One command for a machine with an NVIDIA GPU: how long is a training away that is restarted, and what takes it?

    PYTHONPATH=.:client python3 -m tests.gpu.bench_restart [--state FILE] [--budget-s N] [--repeat N] [--gib N]
                                                           [--ready WHEN,...] [--wheel FILE] [--rehearse] [--table]
                                                           [TASK...]

An AdamW training of 810 million parameters (9.1 GiB of weights and moments) under `hegmctl run --allow-restart` is
restarted on its own GPU by `migrate --via restart`. What counts is from asking to the end of the next step, and the
split of that. While it trains on: until it is planned (plan), room and pool are taken (arm), the next Python is ready
(ready), and it stands (park). Then until its state is in the pool (save), its process has ended (leave), another has
begun (start), has PyTorch (import), has made its model and data (build), has its state back (load), and has done a
step. From its standing to that step it `stands`. Beside that at what rate the state went each way, and how fast pinned
memory is copied on this machine.

Tasks: `pinned` (the copies that the state is measured by), `made-there` (the model is made on the GPU), `made-here` (it
is made on the CPU and sent there, as the training that facts.md tells of), `hegm` (HeGM 0.3.3 from its wheel, on that).
With --ready each training is run once for each of these: in-turn, beforehand, always (`hegmctl run --ready`).
With --state it continues where it was cut. Prints every figure as it comes, and Markdown at the end. --rehearse is the
same on simulated GPUs with a small training, where the figures say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hegmd.errors import HegmError
from hegmd.protocol.operations import StoryLine
from tests.gpu import bench_beside
from tests.gpu.bench_record import Record, huge_pages, unwinding
from tests.gpu.moves_jobs import TRAINING
from tests.gpu.moves_node import WentWrongError
from tests.gpu.restart_node import READY_WITHIN_S, RestartedJob, RestartNode

TASKS = ("pinned", "made-there", "made-here", "hegm")
SIZE_GIB, REHEARSED_GIB = 9.1, 0.02
# About what each takes, so that none is begun that would not end.
TAKES_S = {"pinned": 30.0, "made-there": 60.0, "made-here": 90.0, "hegm": 150.0}
STEPS = 10
BUDGET_S, BUDGET_RATE = 7.0, 0.9
WHENS = ("in-turn", "beforehand", "always")
PARTS = ("plan", "arm", "ready", "park", "save", "leave", "start", "import", "build", "load", "step")
_NOTE = re.compile(r"hegm agent \d+ [\d.]+: the state was ([a-z ]+) in ([\d.]+) s(?:: (\d+) bytes)?")


class Restart:
    """One restart: from the request to the next step, its parts, and the agent's figures for the state."""

    def __init__(self, took_s: float, parts: dict[str, float], rates: dict[str, float], state_bytes: int) -> None:
        self.took_s, self.parts, self.rates, self.state_bytes = took_s, parts, rates, state_bytes

    def plain(self) -> dict[str, Any]:
        return vars(self)


class Measurements:
    """The measurements, a line of JSON for each in the state's file, with the other lines of `Record`."""

    def __init__(self, state: Path | None) -> None:
        self.record = Record(state)
        self._path = None if state is None else state.with_suffix(".figures")
        self.restarts: list[dict[str, Any]] = []
        self.pinned: dict[str, float] = {}
        known = self._path.read_text().splitlines() if self._path is not None and self._path.exists() else []
        for line in known:
            self._take(json.loads(line))

    def _take(self, result: dict[str, Any]) -> None:
        if "pinned" in result:
            self.pinned = result["pinned"]
        else:
            self.restarts.append(result)

    def keep(self, result: dict[str, Any]) -> None:
        self._take(result)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")

    def of(self, task: str) -> list[dict[str, Any]]:
        return [restart for restart in self.restarts if restart["task"] == task]

    def markdown(self) -> str:
        """Return the Markdown for docs/benchmarks.md."""
        head = ["training", "asked until the next step", "stands", *PARTS, "budget"]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for task in dict.fromkeys(restart["task"] for restart in self.restarts):
            many = self.of(task)
            took_s = [one["took_s"] for one in many]
            parts = [f"{statistics.median(one['parts'][name] for one in many):.2f}" for name in PARTS]
            middle = statistics.median(took_s)
            parked = f"{statistics.median(parked_s(one['parts']) for one in many):.2f} s"
            whole = f"{middle:.2f} s ({min(took_s):.2f} to {max(took_s):.2f}, {len(many)} times)"
            kept = f"{'within' if middle <= BUDGET_S else 'over'} {BUDGET_S:g} s"
            lines.append("| " + " | ".join([task, whole, parked, *parts, kept]) + " |")
        return "\n".join([*lines, "", *self._rates(), *(f"* {text}" for text in self.record.remarks)])

    def _rates(self) -> list[str]:
        """How fast the state went, beside the pinned copies."""
        messages: list[str] = []
        for what, copy in (("written", "out"), ("put back", "in"), ("checked", "")):
            rates = [restart["rates"][what] for restart in self.restarts if what in restart["rates"]]
            if not rates:
                continue
            text = f"* state {what} at {statistics.median(rates) / 1e9:.1f} GB/s"
            if copy in self.pinned:
                share = statistics.median(rates) / self.pinned[copy]
                text += f", {share:.2f} of the pinned copy's {self.pinned[copy] / 1e9:.1f} (budget {BUDGET_RATE})"
            messages.append(text)
        return messages


# ---- one restart -----------------------------------------------------------------------------------------------------


class Bench:
    """One training after the other, on one GPU."""

    def __init__(self, node: RestartNode, figures: Measurements, options: argparse.Namespace, ends: float) -> None:
        self.node, self.figures, self._options, self._ends = node, figures, options, ends
        self._notes = node.folder / "agent.notes"

    def run(self, tasks: Sequence[str]) -> None:
        record = self.figures.record
        works: dict[str, Callable[[], object]] = {
            "pinned": self._measure_pinned,
            "made-there": partial(self._restart_each, "made-there"),
            "made-here": partial(self._restart_each, "made-here"),
            "hegm": self._run_hegm,
        }
        for name in tasks:
            if record.is_done(name):
                continue
            if name == "hegm" and self._options.wheel is None:
                record.say("HeGM is left out: no --wheel", keep=False)
            elif time.monotonic() + (0 if self._options.rehearse else self._takes_s(name)) > self._ends:
                record.say(f"{name} was left for another time: it takes about {self._takes_s(name):.0f} s", keep=False)
                record.wrong = True
            elif self._guarded(name, works[name]):
                record.done(name)

    def _takes_s(self, name: str) -> float:
        return TAKES_S[name] * (len(self._options.ready) if name.startswith("made") else 1)

    def _guarded(self, name: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except (WentWrongError, HegmError, OSError, ValueError, subprocess.SubprocessError) as error:
            self.figures.record.went_wrong(name, error)
            traceback.print_exc()
            print(self.node.log_tail(), flush=True)
            return False
        return True

    def _measure_pinned(self) -> None:
        ran = subprocess.run(
            [sys.executable, str(TRAINING / "pinned_copies.py"), str(64 if self._options.rehearse else 2048)],
            env=self.node.environ(), capture_output=True, text=True, timeout=READY_WITHIN_S, check=False,
        )  # fmt: skip
        if ran.returncode:
            raise WentWrongError(f"pinned_copies ended with {ran.returncode}: {ran.stderr[-800:]}")
        self.figures.keep({"pinned": json.loads(ran.stdout)})
        rates = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in self.figures.pinned.items())
        print(f"copies by pinned memory: {rates}", flush=True)

    def _restart_each(self, training: str) -> None:
        for when in self._options.ready:
            self._restart_some(training, when)

    def _restart_some(self, training: str, when: str) -> None:
        words, task = [str(TRAINING / "adamw.py"), str(self._options.gib), training], f"{training}, {when}"
        more = {"HEGM_AGENT_DEBUG": str(self._notes)}
        job = RestartedJob(self.node, words, "gpu0", options=("--ready", when), **more)
        with contextlib.closing(job):
            job.read_steps(STEPS)
            job.seen_at("gpu0")
            while len(self.figures.of(task)) < self._options.repeat:
                if when == "always":
                    job.wait_for(partial(self._has_next, job), "no next process is kept ready", READY_WITHIN_S)
                found = self._once(job)
                self.figures.keep({"task": task, **found.plain()})
                parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.parts.items())
                rates = ", ".join(f"{what} at {rate / 1e9:.1f} GB/s" for what, rate in found.rates.items())
                size = f"{found.state_bytes / 1e9:.2f} GB"
                print(
                    f"  {task}: {found.took_s:.2f} s, stands {parked_s(found.parts):.2f} s ({parts}); {size}, {rates}",
                    flush=True,
                )

    def _has_next(self, job: RestartedJob) -> bool:
        """Whether the process that is kept ready has imported all, by the word of its agent."""
        notes = self._notes.read_text() if self._notes.exists() else ""
        return any(re.search(rf"hegm agent {pid} [\d.]+: ready: ", notes) for pid in job.children()[1:])

    def _once(self, job: RestartedJob) -> Restart:
        self._notes.write_text("")
        line_count, pid = len(job.lines), job.worker()
        asked_utc, asked_at = time.time(), time.monotonic()
        operation = job.restart("gpu0")
        job.read_steps(STEPS)
        later = list(zip(list(job.times), list(job.lines), strict=False))[line_count:]
        marks = marks_of([line for _at, line in later if line.startswith("mark ")])
        firsts = [at for at, line in later if line.startswith("step ") and int(line.split()[1]) != pid]
        marks["stepped"] = asked_utc + firsts[0] - asked_at
        parts, ended_utc = split_of(asked_utc, self.node.story(operation.id).story, marks)
        rates, state_bytes = noted(self._notes.read_text())
        return Restart(ended_utc - asked_utc, parts, rates, state_bytes)

    def _run_hegm(self) -> None:
        left_s = self._ends - time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hegm-wheel-") as site:
            bench_beside.unpack(self._options.wheel, Path(site))
            locked, whole = bench_beside.restarted(self.node, self._options.gib, Path(site), left_s)
        name = self._options.wheel.name.partition("-py")[0]
        say, spread = self.figures.record.say, bench_beside.spread
        say(f"made-here by {name}: asked until its lock file {spread(locked)}, until its next step {spread(whole)}")


def marks_of(lines: Sequence[str]) -> dict[str, float]:
    """Return the script's own marks: `mark WHAT UTC`."""
    return {words[1]: float(words[2]) for words in map(str.split, lines)}


def split_of(asked_utc: float, story: Sequence[StoryLine], marks: dict[str, float]) -> tuple[dict[str, float], float]:
    """The parts, and when the first step ended. Raises WentWrongError where the story or the script lacks one."""
    seconds: dict[str, float] = {}
    for line in story:
        seconds.setdefault(line.event, line.utc)
    try:
        ends = [
            seconds["begin"],
            seconds["pool-reserved"],
            seconds["successor-awaited"],
            seconds["parked"],
            seconds["offloaded"],
            seconds["worker-exited"],
            marks["began"],
            marks["imported"],
        ]
        ends += [marks["built"], seconds["restored"], marks["stepped"]]
    except KeyError as error:
        raise WentWrongError(f"nobody told of {error}: {sorted(seconds)}, {sorted(marks)}") from error
    begins = [asked_utc, *ends]
    return {name: ends[place] - begins[place] for place, name in enumerate(PARTS)}, ends[-1]


def parked_s(parts: dict[str, float]) -> float:
    """Return how long the training was parked."""
    return sum(seconds for name, seconds in parts.items() if name not in ("plan", "arm", "ready", "park"))


def noted(text: str) -> tuple[dict[str, float], int]:
    """The rate of each thing that the agents noted of the state, and its size."""
    found = _NOTE.findall(text)
    size_bytes = max([0, *(int(size) for _what, _took, size in found if size)])
    return {what: size_bytes / float(took) for what, took, _size in found if float(took)}, size_bytes


def _whens(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [one for one in found if one not in WHENS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(WHENS)}")
    return found


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], metavar="TASK")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ready", type=_whens, default=["beforehand"], metavar="WHEN,...", help=", ".join(WHENS))
    parser.add_argument("--gib", type=float, help=f"of weights and moments; {SIZE_GIB} if not given")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin nothing that would end after so long")
    parser.add_argument("--state", type=Path, help="a file of what is measured, a line of JSON each; made if not there")
    parser.add_argument("--wheel", type=Path, help="HeGM's wheel as pip downloads it; without it HeGM is left out")
    parser.add_argument("--rehearse", action="store_true", help="on simulated GPUs, with a small training")
    parser.add_argument("--table", action="store_true", help="the tables of the state, and nothing else")
    options = parser.parse_args(argv)
    options.gib = options.gib or (REHEARSED_GIB if options.rehearse else SIZE_GIB)
    return options


def main(argv: Sequence[str]) -> int:
    options = parsed(argv)
    ends = time.monotonic() + options.budget_s
    figures = Measurements(options.state)
    if options.table:
        print(figures.markdown())
        return 0
    with contextlib.ExitStack() as held:
        held.enter_context(unwinding())
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-bench-restart-")))
        node = held.enter_context(RestartNode(folder, rehearsed=options.rehearse))
        if not node.gpus():
            print("there is no GPU here; --rehearse does it on simulated ones", flush=True)
            return 1
        # Two states for a moment, the next one's before the last one's is given back.
        held.enter_context(huge_pages(figures.record, 0 if options.rehearse else int(options.gib * 2.2) + 1))
        Bench(node, figures, options, ends).run(options.tasks or TASKS)
    print("\n" + figures.markdown())
    return int(figures.record.wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
