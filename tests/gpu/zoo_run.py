"""One command for a machine with two NVIDIA GPUs: does every kind of training survive every carrier, bit for bit?

    PYTHONPATH=.:client python3 -m tests.gpu.zoo_run [--state FILE] [--budget-s N] [--only NAMES] [--beside N]
                                                     [--moves N] [--carriers NAMES] [--table] [NAME...]

Each training of `training/zoo.py` runs under `hegmctl run`, is moved from GPU to GPU six times, by each carrier that
can take it in turn, and is suspended and resumed. After each, every line that it has said has to be the one of a run
that nobody disturbs. Several run side by side; one of them is four processes on one GPU at once. Prints a table: what
was carried how, what of it by the process's own copies, how long it stood, and how many of its tensors' addresses were
the same afterwards. With --state it continues where it was cut. Runs over the stub driver with the environment of a
CudaNode. On a machine with one GPU, `--moves 0` leaves the suspends and resumes.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from hegmd.errors import HegmError
from hegmd.protocol.messages import Migrate, OperationReply, Resume, Suspend
from tests.gpu.bench_record import unwinding
from tests.gpu.moves_jobs import TRAINING, Lines, on_stub, visible
from tests.gpu.moves_node import Node, WentWrongError, until

STEPS, PACE_S, DIGEST_EVERY = (2500, 0.03, 5) if on_stub() else (4000, 0.04, 5)
READY_WITHIN_S, STEP_WITHIN_S, REFERENCE_WITHIN_S = 240.0, 60.0, 120.0
MOVES = 6
CARRIERS = ("peer", "host", "worker")
BY_DRIVER = ("driver",)
Result = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A kind. `carriers` can take it; `count` processes of it are there at once; `words` are for the stub's program.

    One that compiles goes `after` its undisturbed run has: what is the fastest is settled then.
    """

    name: str
    carriers: tuple[str, ...] = CARRIERS
    count: int = 1
    kind: str = ""
    words: tuple[str, ...] = ()
    after: bool = False

    def command(self, pace_s: float, addresses: Path | None) -> list[str]:
        given = [f"pace={pace_s}", f"digest={DIGEST_EVERY}"]
        if on_stub():
            words = [*self.words, *(["fact=hazards=graphs,"] if self.carriers == BY_DRIVER else [])]
            return [sys.executable, "-m", "tests.gpu.training.pretended", str(STEPS), "2", *words, *given, "gpus=1"]
        given += [] if addresses is None else [f"addresses={addresses}"]
        return [sys.executable, str(TRAINING / "zoo.py"), self.kind or self.name, str(STEPS), *given]


# As beside what cuDNN keeps for dropout where Python does not see it.
_STAYS = ("stay=0",)
ZOO = {
    training.name: training
    for training in (
        Training("lstm", words=_STAYS),
        Training("gru", words=_STAYS),
        Training("compile-autotune", BY_DRIVER, after=True),
        Training("compile-no-graphs", after=True),
        Training("compile-overhead", BY_DRIVER, after=True),
        Training("compile", after=True),
        Training("several", count=4, kind="ema"),
        Training("conv"),
        Training("pointer"),
        Training("sparse"),
        Training("flash"),
        Training("efficient"),
        Training("fp16"),
        Training("fused"),
        Training("foreach"),
        Training("capturable"),
        Training("graphed", BY_DRIVER),
        Training("eight-bit"),
        Training("lbfgs"),
        Training("ema"),
        Training("lora"),
        Training("pinned"),
        Training("streams"),
    )
}


@dataclass
class Findings:
    """The findings of one training."""

    moves: list[str] = field(default_factory=list)
    own_bytes: int = 0
    size_bytes: int = 0
    downtimes_s: dict[str, list[float]] = field(default_factory=dict)
    addresses: dict[str, list[float]] = field(default_factory=dict)
    lines: int = 0
    notes: list[str] = field(default_factory=list)


class References:
    """Undisturbed runs, one for each kind, on the GPUs in turn."""

    def __init__(self, node: Node, cache: Path) -> None:
        self._node, self._cache = node, cache
        self._lines: dict[str, Lines] = {}
        self._guard = threading.Lock()

    def of(self, training: Training) -> Lines:
        key = training.kind or training.name
        with self._guard:
            if key not in self._lines:
                environ = environ_of(self._node, len(self._lines) % len(self._node.gpus), self._cache)
                del environ["HEGM_SOCKET"]
                self._lines[key] = Lines(training.command(0.0, None), environ)
            return self._lines[key]

    def close(self) -> None:
        for lines in self._lines.values():
            lines.close()


def environ_of(node: Node, gpu: int, cache: Path) -> dict[str, str]:
    return {**node.environ(), **visible(gpu, 1), "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "2"}


class Job:
    """One process that is moved, and the run it is compared with."""

    def __init__(self, node: Node, training: Training, reference: Lines, folder: Path, number: int) -> None:
        self.node, self.training, self.reference = node, training, reference
        self.addresses = folder / f"{training.name}-{number}.addresses"
        run = [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--"]
        command = [*run, *training.command(PACE_S, self.addresses)]
        self.lines = Lines(command, environ_of(node, 0, folder / "compiled"))
        self.gpu = 0

    def ready(self) -> None:
        self.lines.wait_for(lambda: len(self.lines.lines) >= 2 * DIGEST_EVERY, "it did not train", READY_WITHIN_S)
        self.node.wait_for_agent(self.lines.pid)
        self.gpu = self.node.gpu_of(self.lines.pid)

    def is_whole(self) -> int:
        """It continues, and every line so far is what an undisturbed run says; how many. Raises WentWrongError."""
        after = len(self.lines.lines)
        digests = f"no step and digest came after line {after}"
        self.lines.wait_for(lambda: self._digests(after) >= 2, digests, STEP_WITHIN_S)
        observed, wanted = list(self.lines.lines), self.reference
        wanted.wait_for(lambda: len(wanted.lines) >= len(observed), "the undisturbed run is late", REFERENCE_WITHIN_S)
        for number, (line, right) in enumerate(zip(observed, wanted.lines, strict=False)):
            if line != right:
                raise WentWrongError(f"line {number} is {line.strip()[:90]!r}, and undisturbed {right.strip()[:90]!r}")
        return len(observed)

    def _digests(self, after: int) -> int:
        return sum(line.startswith("digest") for line in self.lines.lines[after:])

    def places(self) -> list[str]:
        """Return the devices of its tensors, as it prints them."""
        with contextlib.suppress(FileNotFoundError):
            return self.addresses.read_text().split()
        return []


class Trial:
    """One training under way."""

    def __init__(self, node: Node, training: Training, references: References, folder: Path) -> None:
        self.node, self.training, self.found = node, training, Findings()
        self._references, self._folder = references, folder
        self._jobs: list[Job] = []

    def run(self, carriers: tuple[str, ...], moves: int) -> None:
        """Raises WentWrongError, HegmError."""
        reference = self._references.of(self.training)
        if self.training.after:
            reference.wait_for(lambda: len(reference.lines) > DIGEST_EVERY, "it was not compiled", READY_WITHIN_S)
        numbers = range(self.training.count)
        self._jobs = [Job(self.node, self.training, reference, self._folder, number) for number in numbers]
        for job in self._jobs:
            job.ready()
            until(partial(self._is_known, job.lines.pid), "that its agent says what it has", READY_WITHIN_S)
        usable = [carrier for carrier in carriers if carrier in self.training.carriers] or list(self.training.carriers)
        for carrier in islice(cycle(usable), moves):
            self._all(lambda job, by=carrier: self._move(job, by))
        for carrier in [one for one in usable if one != "peer"][:2]:
            self._all(lambda job, by=carrier: self._rest(job, by))

    def _is_known(self, pid: int) -> bool:
        """Return whether its agent has reported its memory; before that the daemon plans nothing."""
        try:
            self.node.ask(Suspend(pids=(pid,), dry_run=True))
        except HegmError as error:
            if "has not said yet" in error.message:
                return False
            raise
        return True

    def _all(self, do: Any) -> None:
        """All processes at once."""
        with ThreadPoolExecutor(len(self._jobs)) as pool:
            for done in [pool.submit(do, job) for job in self._jobs]:
                done.result()

    def _move(self, job: Job, carrier: str) -> None:
        before, to = job.places(), 1 - job.gpu
        reply = self._asked(Migrate(pids=(job.lines.pid,), to=f"gpu{to}", carrier=carrier), "done")
        self._note(carrier, reply)
        job.gpu = to
        self._see(job, carrier, before)

    def _rest(self, job: Job, carrier: str) -> None:
        before = job.places()
        self._note(f"{carrier} out", self._asked(Suspend(pids=(job.lines.pid,), carrier=carrier), "suspended"))
        job.gpu = (job.gpu + 1) % len(self.node.gpus)
        self._note(f"{carrier} in", self._asked(Resume(pid=job.lines.pid, to=f"gpu{job.gpu}"), "done"))
        self._see(job, carrier, before)

    def _asked(self, request: Any, phase: str) -> OperationReply:
        reply = self.node.ask(request)
        assert reply.operation is not None
        if reply.operation.phase != phase:
            why = [reply.operation.failure, reply.operation.waits]
            raise WentWrongError(f"operation {reply.operation.id} is {reply.operation.phase}: {why}")
        return reply

    def _note(self, what: str, reply: OperationReply) -> None:
        if reply.plan is not None and reply.plan.kind != "resume":
            planned = reply.plan.workers[0]
            self.found.size_bytes = max(self.found.size_bytes, planned.size_bytes)
            self.found.own_bytes = max(self.found.own_bytes, getattr(planned, "own_bytes", 0))
        if reply.operation is not None and reply.operation.downtime_s is not None:
            self.found.downtimes_s.setdefault(what, []).append(round(reply.operation.downtime_s, 3))

    def _see(self, job: Job, carrier: str, before: list[str]) -> None:
        if self.node.gpu_of(job.lines.pid) != job.gpu:
            raise WentWrongError(f"it is not on gpu{job.gpu} alone")
        self.found.lines = max(self.found.lines, job.is_whole())
        self.found.moves.append(carrier)
        after = job.places()
        if len(after) == len(before) > 0:
            same = sum(one == other for one, other in zip(before, after, strict=True))
            self.found.addresses.setdefault(carrier, []).append(same / len(before))

    def close(self) -> None:
        for job in self._jobs:
            job.lines.close()


class Run:
    """All of them; what was found is written down at once."""

    def __init__(self, state: Path | None) -> None:
        self._path, self._guard = state, threading.Lock()
        self.results: dict[str, Result] = {}
        for line in state.read_text().splitlines() if state is not None and state.exists() else ():
            self.results[json.loads(line)["training"]] = json.loads(line)

    def note(self, result: Result) -> None:
        with self._guard:
            self.results[result["training"]] = result
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            print(row_of(result), flush=True)

    def table(self) -> str:
        head = "| training | moved by | carried | own copies | stood, s (median) | same addresses | lines | |\n"
        return head + "|---|---|---:|---:|---|---|---:|---|\n" + "\n".join(map(row_of, self.results.values()))


def row_of(result: Result) -> str:
    moves = ", ".join(f"{result['moves'].count(move)} {move}" for move in dict.fromkeys(result["moves"]))
    stood = ", ".join(f"{what} {median(several):.2f}" for what, several in result["downtimes_s"].items())
    same = ", ".join(f"{carrier} {min(several):.0%}" for carrier, several in result["addresses"].items())
    cells = [result["training"], moves, f"{result['size_bytes'] / 2**20:.1f} MiB"]
    cells += [f"{result['own_bytes'] / 2**20:.2f} MiB", stood, same, str(result["lines"])]
    return f"| {' | '.join(cells)} | {result['wrong'] or 'same bits'} |"


def tried(trial: Trial, options: argparse.Namespace) -> Result:
    began, wrong = time.monotonic(), ""
    try:
        trial.run(tuple(options.carriers.split(",")), options.moves)
    except (WentWrongError, HegmError) as error:
        wrong = f"{type(error).__name__}: {error}"[:400]
        print(f"{trial.training.name}: {wrong}\n{trial.node.log_tail(30)}", flush=True)
    finally:
        trial.close()
    took_s = round(time.monotonic() - began, 1)
    return {"training": trial.training.name, "wrong": wrong, "took_s": took_s, **vars(trial.found)}


def nothing_left(node: Node) -> str:
    """Check that nothing is held once every job has ended."""
    try:
        until(lambda: not node.keeper.stored(), "that the keeper has nothing more")
        until(lambda: not any(node.gpus.account().by_process), "that no process is on any GPU", 60.0)
    except WentWrongError as error:
        return str(error)
    return ""


def go_through(run: Run, names: list[str], options: argparse.Namespace, held: ExitStack) -> Iterator[str]:
    """Have them tried side by side; what is left when the time is over."""
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-zoo-")))
    ends = time.monotonic() + options.budget_s
    node = held.enter_context(Node(folder))
    print(f"driver {node.gpus.driver}, {len(node.gpus)} GPUs, {len(names)} trainings", flush=True)
    references = References(node, folder / "compiled")
    with contextlib.closing(references), ThreadPoolExecutor(options.beside) as pool:
        for name in names:
            if ZOO[name].after:
                references.of(ZOO[name])  # what compiles begins at once

        def one(name: str) -> str:
            if time.monotonic() > ends:
                return name
            run.note(tried(Trial(node, ZOO[name], references, folder), options))
            return ""

        yield from filter(None, list(pool.map(one, names)))
    if wrong := nothing_left(node):
        run.note({"training": "nothing-left", "wrong": wrong, "took_s": 0.0, **vars(Findings())})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--only", default="", metavar="NAMES", help="the same as NAME..., with commas")
    parser.add_argument("--state", type=Path, help="a file of what is done, a line of JSON each; made if not there")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin no training after so long")
    parser.add_argument("--beside", type=int, default=2 if on_stub() else 8, help="so many side by side")
    parser.add_argument("--moves", type=int, default=MOVES, help="so many of each")
    parser.add_argument("--carriers", default=",".join(CARRIERS), help="in this order")
    parser.add_argument("--again", action="store_true", help="once more what the state says has failed")
    parser.add_argument("--table", action="store_true", help="the table of the state, and nothing else")
    options = parser.parse_args()
    run = Run(options.state)
    chosen = [*options.names, *filter(None, options.only.split(","))] or list(ZOO)
    done = {name for name, result in run.results.items() if not (options.again and result["wrong"])}
    left: list[str] = []
    if not options.table:
        with ExitStack() as held:
            held.enter_context(unwinding())
            left = list(go_through(run, [name for name in chosen if name not in done], options, held))
    print(f"\n{run.table()}\n")
    failed = [name for name, result in run.results.items() if result["wrong"]]
    print(f"{len(run.results) - len(failed)} ok, {len(failed)} failed: {' '.join(failed) or '-'}, {len(left)} not run")
    return bool(failed or left)


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    sys.exit(main())
