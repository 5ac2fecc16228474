"""The trainings that are moved, each with its undisturbed run to compare with.

Owns their processes. Every kind prints a line for each step and, after some steps, digests of all that it has on its
GPU; with a pace, so that one process lasts for many moves, and without one where it is only to be compared with. On a
stub node a program of ours stands in for all kinds, and says of itself what the real ones are like.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from typing_extensions import Self

from tests.gpu.moves_node import ROOT, Node, WentWrongError
from tests.patience import HANG_S

TRAINING = Path(__file__).with_name("training")
STUB = "HEGM_CUDA_STUB"
STEPS = 2500 if STUB in os.environ else 6000
PACE_S = 0.03
DIGEST_EVERY = 10
# The end of a run is not used: what is begun has to have time to be seen through.
LAST_STEPS = 800
READY_WITHIN_S = 120.0
STEP_WITHIN_S = 30.0
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
CUDA_MALLOC_ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


@dataclass(frozen=True)
class Kind:
    """A kind of training. `carrier` is the one that the plan has to choose for a migration; `facts` are for the stub. A
    kind that builds something at first use runs `after_reference`; an `alone` one leaves no memory for its undisturbed
    run.
    """

    name: str
    carrier: str
    traits: tuple[str, ...] = ()
    program: str = "mixed.py"
    pad_mib: int = 1024
    environ: dict[str, str] = field(default_factory=dict)
    agent: bool = True
    after_reference: bool = False
    alone: bool = False
    steps: int = STEPS
    gpus: int = 1
    facts: tuple[str, ...] = ()

    @property
    def suspended_by(self) -> str:
        """The carrier that the plan is to choose for a suspension."""
        return "host" if self.carrier == "peer" else self.carrier


KINDS = {
    kind.name: kind
    for kind in (
        Kind("plain", "peer"),
        Kind("cuda", "driver", program="steps", agent=False),
        Kind("graph", "driver", ("graph",), facts=("hazards=graphs,",)),
        Kind("expandable", "worker", ("small",), environ=EXPANDABLE, facts=("expandable=yes",)),
        Kind("async", "worker", ("streams",), environ=CUDA_MALLOC_ASYNC, facts=("allocator=cudaMallocAsync",)),
        Kind("amp", "peer", ("amp", "ema")),
        Kind("streams", "peer", ("streams",)),
        Kind("small", "peer", ("small",)),
        Kind("workers", "peer", ("workers",)),
        Kind("compiled", "peer", ("compiled",), after_reference=True),
        Kind("jax", "driver", program="with_jax.py", agent=False),
        Kind("jax-boundary", "driver", ("boundary",), program="with_jax.py", facts=("hazards=graphs,",)),
        Kind("two", "peer", program="two.py", gpus=2),
        Kind("large", "peer", ("single",), pad_mib=40 << 10, alone=True, steps=min(STEPS, 3000)),
    )
}


def on_stub() -> bool:
    return STUB in os.environ


def command_of(kind: Kind, built: Path, pace_s: float) -> list[str]:
    """How it is started."""
    settings = [f"pace={pace_s}", f"digest={DIGEST_EVERY}"]
    if on_stub():
        facts = [f"fact={fact}" for fact in kind.facts]
        sized = "24" if kind.name == "large" else "2"
        settings += [f"gpus={kind.gpus}"]
        return [sys.executable, "-m", "tests.gpu.training.pretended", str(kind.steps), sized, *facts, *settings]
    program = [str(built)] if kind.program == "steps" else [sys.executable, str(TRAINING / kind.program)]
    return [*program, str(kind.steps), str(kind.pad_mib), *kind.traits, *settings]


def visible(first: int, count: int) -> dict[str, str]:
    """Return the setting that shows a process so many GPUs, from that one on."""
    numbers = ",".join(str(number) for number in range(first, first + count))
    return {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class Lines:
    """A process, and what it prints with the time at which each line came."""

    def __init__(self, command: list[str], environ: dict[str, str], stdin: int = subprocess.DEVNULL) -> None:
        self.lines: list[str] = []
        self.times: list[float] = []
        self._news = threading.Condition()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            command, env=environ, cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._reader = threading.Thread(target=self._read, name="lines", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.times.append(time.monotonic())
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, fact: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait until its lines make it so. Raises WentWrongError when it ends, or falls silent, before that."""
        with self._news:
            came = self._news.wait_for(lambda: fact() or not self._reader.is_alive() or not self.alive, within_s)
            if came and fact():
                return
        if not self.alive:
            self._reader.join(HANG_S)
            if fact():
                return
            raise WentWrongError(f"process {self.pid} ended with {self.process.returncode}: {self.error_text()}")
        raise WentWrongError(f"process {self.pid}: {what} within {within_s:g} s, after {len(self.lines)} lines")

    def error_text(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-1500:]

    def end(self) -> None:
        """Twice is fine."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        self._reader.join(HANG_S)

    def close(self) -> None:
        self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


class Job(Lines):
    """A training that is moved."""

    def __init__(self, node: Node, kind: Kind, reference: Lines, built: Path) -> None:
        self.node, self.kind, self.reference = node, kind, reference
        environ = {**node.environ(), **kind.environ, **visible(0, kind.gpus)}
        command = command_of(kind, built, PACE_S)
        run = [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--", *command] if kind.agent else command
        super().__init__(run, environ)

    @property
    def spent(self) -> bool:
        """Whether it is over, or so near its end that nothing is to be begun with it."""
        return not self.alive or len(self.lines) > self.kind.steps - LAST_STEPS

    def ready(self) -> None:
        """Wait until it trains, the driver shows it, and its agent attends."""
        self.wait_for(lambda: len(self.lines) >= 3 * DIGEST_EVERY, "it did not train", READY_WITHIN_S)
        if self.kind.agent:
            self.node.wait_for_agent(self.pid)

    @property
    def gpu(self) -> int:
        """The GPU that it is on, by NVML."""
        return self.node.gpu_of(self.pid)

    def is_whole(self) -> None:
        """Check that it continues, and that its output since its start is that of an undisturbed run. Raises
        WentWrongError.
        """
        after = len(self.lines)
        self.wait_for(lambda: self._digests(after) >= 2, "no step and digest came", STEP_WITHIN_S)
        observed = list(self.lines)
        self.reference.wait_for(lambda: len(self.reference.lines) >= len(observed), "the undisturbed run is late", 60)
        for number, (line, wanted) in enumerate(zip(observed, self.reference.lines, strict=False)):
            if line != wanted:
                raise WentWrongError(f"line {number} is {line.strip()!r}, and undisturbed it is {wanted.strip()!r}")

    def _digests(self, after: int) -> int:
        return sum(line.startswith("digest") for line in self.lines[after:])

    def longest_gap_s(self, since: float) -> float:
        """The longest time between two lines that ended after that moment."""
        times = [at for at in self.times if at >= since - 1.0]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


class Jobs:
    """All trainings, with their undisturbed runs. A context manager."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self._built = folder / "steps"
        self._compiler: subprocess.Popen[str] | None = None
        self._references: dict[str, Lines] = {}
        self._jobs: dict[str, Job] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        self.end_references()

    def begin_references(self, names: set[str]) -> None:
        """The undisturbed runs, all at once on the last GPU, and the compiler for what has to be built."""
        kinds = [KINDS[name] for name in KINDS if name in names]
        if not on_stub() and any(kind.program == "steps" for kind in kinds):
            words = ["nvcc", "-O2", "-o", str(self._built), str(TRAINING / "steps.cu")]
            self._compiler = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        for kind in kinds:
            if kind.program != "steps" or on_stub():
                self._begin_reference(kind)

    def _begin_reference(self, kind: Kind) -> None:
        environ = {**self.node.environ(), **kind.environ, **visible(len(self.node.gpus) - kind.gpus, kind.gpus)}
        del environ["HEGM_SOCKET"]
        self._references[kind.name] = Lines(command_of(kind, self._built, 0.0), environ)

    def prepare(self, name: str) -> None:
        """Have one on its way, so that it is there when it is wanted; not one that its undisturbed run would hinder."""
        kind = KINDS[name]
        job = self._jobs.get(name)
        if job is not None and not job.spent:
            return
        reference = self._reference(kind)
        if reference.alive and (kind.alone or (kind.after_reference and len(reference.lines) < DIGEST_EVERY)):
            return
        self._begin(kind)

    def _reference(self, kind: Kind) -> Lines:
        if kind.name not in self._references:
            if kind.program == "steps" and self._compiler is not None:
                _, errors = self._compiler.communicate(timeout=HANG_S)
                if self._compiler.returncode:
                    raise WentWrongError(f"nvcc: {errors[-600:]}")
            self._begin_reference(kind)
        return self._references[kind.name]

    def _begin(self, kind: Kind) -> Job:
        if kind.name in self._jobs:
            self._jobs.pop(kind.name).close()
        self._jobs[kind.name] = Job(self.node, kind, self._reference(kind), self._built)
        return self._jobs[kind.name]

    def ready(self, name: str) -> Job:
        """Return a training of that kind; a new one if there is none, or it ends soon."""
        kind = KINDS[name]
        reference = self._reference(kind)
        if kind.alone:
            reference.process.wait(120)
        elif kind.after_reference:
            reference.wait_for(lambda: len(reference.lines) >= DIGEST_EVERY, "the undisturbed run is late", 120)
        job = self._jobs.get(name)
        if job is None or job.spent:
            job = self._begin(kind)
        job.ready()
        return job

    def end(self, *names: str) -> None:
        """End these."""
        for name in names:
            if name in self._jobs:
                self._jobs.pop(name).close()

    def end_all(self, *, but: tuple[str, ...] = ()) -> None:
        """End all but these."""
        self.end(*[name for name in self._jobs if name not in but])

    def settle(self) -> None:
        """Until all that were begun train, and the undisturbed runs are over."""
        for job in self._jobs.values():
            job.ready()
        self.wait_for_references()

    def end_references(self) -> None:
        """End the undisturbed runs; a training that is compared after that has a new one begun."""
        for lines in self._references.values():
            lines.close()
        self._references.clear()

    def wait_for_references(self) -> None:
        """Until none of the undisturbed runs is on a GPU any more."""
        for lines in self._references.values():
            lines.process.wait(120)
