"""The trainings that go into images and come back, each with its undisturbed run to compare with.

Owns their processes, whoever is their parent: one that has come back from an image is a child of CRIU's attendant. All
are started at once and wait, with their imports behind them and nothing on a GPU, until it is their turn.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hegmd.node.processes.process_set import end_all, population_of
from hegmd.node.processes.process_tree import read_tree
from tests.gpu.moves_jobs import TRAINING, on_stub
from tests.gpu.moves_node import Account, Node, WentWrongError, until

STEPS = 2500 if on_stub() else 4000
PACE_S = 0.03
# The end of a run is not used: what is begun has to have time to be seen through.
LAST_STEPS = 500
READY_WITHIN_S = 120.0
ENDS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Kind:
    """A kind of training: what it holds, and whether its loader has processes of its own."""

    size_gib: int
    workers: bool = False


class Training:
    """One process, and the files that it writes. `gpu` as CUDA is to see it; with `agent` under `hegmctl run`."""

    def __init__(self, node: Node, kind: Kind, folder: Path, *, gpu: int, agent: bool) -> None:
        self.folder, self.kind = folder, kind
        folder.mkdir(parents=True)
        environ = {**node.environ(), "CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        run = [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--"]
        if not agent:
            run = []
            del environ["HEGM_SOCKET"]
        script = ["-m", "tests.gpu.training.pretended_imaged"] if on_stub() else [str(TRAINING / "imaged.py")]
        words = [str(folder), str(kind.size_gib << 10), str(STEPS), str(PACE_S if agent else 0.0)]
        words += ["workers"] if kind.workers else []
        with (folder / "said").open("a") as log:
            self.process = subprocess.Popen(
                [*run, sys.executable, *script, *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # as a scheduler starts it; CRIU wants whole sessions
            )
        self.pid = self.process.pid

    def go(self) -> None:
        """Let it take its memory and train."""
        (self.folder / "go").touch()

    @property
    def lines(self) -> list[str]:
        """Return its output, whole lines only."""
        with suppress(FileNotFoundError):
            return [line for line in (self.folder / "lines").read_text().splitlines(keepends=True) if line[-1] == "\n"]
        return []

    def alive(self) -> bool:
        """Whether the process, or the one that came back with its number, is there."""
        if self.process.poll() is None:
            return True
        return self.pid in population_of([self.pid]).start_ticks

    def wait_for_lines(self, count: int, within_s: float) -> None:
        """Raises WentWrongError when it ends before that."""

        def there() -> bool:
            if len(self.lines) < count and not self.alive() and len(self.lines) < count:
                raise WentWrongError(f"process {self.pid} ended after {len(self.lines)} lines: {self.output()}")
            return len(self.lines) >= count

        until(there, f"{count} lines of process {self.pid}", within_s)

    def output(self) -> str:
        return (self.folder / "said").read_text()[-1500:]

    def end(self) -> None:
        """End it with all its descendants. Twice is fine."""
        if self.alive():
            with suppress(ProcessLookupError, FileNotFoundError):
                end_all(population_of(read_tree(self.pid).pids))
        self.process.wait(ENDS_WITHIN_S)

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.folder)


class Job(Training):
    """A training that goes into images, beside its undisturbed run."""

    def __init__(self, node: Node, kind: Kind, folder: Path, reference: Training) -> None:
        super().__init__(node, kind, folder, gpu=0, agent=True)
        self.node, self.reference = node, reference

    @property
    def spent(self) -> bool:
        """Whether it is over, or so near its end that nothing is to be begun with it."""
        return not self.alive() or len(self.lines) > STEPS - LAST_STEPS

    def ready(self) -> None:
        """Let it train, and wait until it does and its agent attends."""
        self.go()
        self.wait_for_lines(10, READY_WITHIN_S)
        self.node.wait_for_agent(self.pid)

    @property
    def gpu(self) -> int:
        """The GPU that it is on, by NVML."""
        return self.node.gpu_of(self.pid)

    def is_whole(self, gpu: int) -> None:
        """Check that it trains on that GPU alone, and all its output matches an undisturbed run."""
        before = len(self.lines)

        def goes_on() -> bool:
            if not self.alive():
                raise WentWrongError(f"process {self.pid} has ended: {self.output()}")
            return sum(line.startswith("digest") for line in self.lines[before:]) >= 1

        until(goes_on, f"a step and a digest of process {self.pid}", READY_WITHIN_S)
        observed = self.lines
        self.reference.wait_for_lines(len(observed), READY_WITHIN_S)
        for number, (printed, wanted) in enumerate(zip(observed, self.reference.lines, strict=False)):
            if printed != wanted:
                raise WentWrongError(f"line {number} is {printed.strip()!r}, and undisturbed it is {wanted.strip()!r}")
        if self.gpu != gpu:
            raise WentWrongError(f"process {self.pid} is on GPU {self.gpu}, and was to be on {gpu} alone")

    def has_ended(self, account: Account) -> None:
        """Check that no process has its pid, and no process has any of its GPU memory."""
        self.process.wait(ENDS_WITHIN_S)
        if self.alive():
            raise WentWrongError(f"process {self.pid} is in an image, and lives")
        if account.places(self.pid):
            raise WentWrongError(f"process {self.pid} is in an image, and has {account.places(self.pid)} MiB")

    def pause_since(self, asked_utc: float) -> tuple[float, float]:
        """When the longest pause ended that was over after that moment, and how long it was."""
        until(lambda: self._pauses(asked_utc), f"that process {self.pid} stood and went on", READY_WITHIN_S)
        return max(self._pauses(asked_utc), key=lambda pause: pause[1])

    def _pauses(self, asked_utc: float) -> list[tuple[float, float]]:
        with suppress(FileNotFoundError):
            lines = (self.folder / "pauses").read_text().splitlines(keepends=True)
            printed = [line.split() for line in lines if line[-1] == "\n"]
            return [(float(ended), float(took)) for ended, took in printed if float(ended) >= asked_utc]
        return []


class Jobs:
    """All trainings by their kind, with their undisturbed runs. A context manager has to end it with `close`."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._references: dict[Kind, Training] = {}
        self._jobs: dict[tuple[Kind, str], Job] = {}
        self._count = 0

    def _new_folder(self) -> Path:
        self._count += 1
        return self._folder / f"job{self._count}"

    def begin(self, kind: Kind, use: str = "") -> Job:
        """Start one if there is none; a training of another use does not count."""
        if (kind, use) in self._jobs:
            return self._jobs[kind, use]
        reference = self._references.get(kind)
        if reference is None:
            last = len(self._node.gpus) - 1
            reference = Training(self._node, kind, self._new_folder(), gpu=last, agent=False)
            reference.go()
            self._references[kind] = reference
        job = self._jobs[kind, use] = Job(self._node, kind, self._new_folder(), reference)
        return job

    def settle(self) -> None:
        """Wait until the undisturbed runs are over: they would share the GPUs with what is measured."""
        for reference in self._references.values():
            reference.process.wait(READY_WITHIN_S)
            reference.wait_for_lines(STEPS, 1)

    def ready(self, kind: Kind, use: str = "") -> Job:
        """Return a training that runs; a new one if there is none, or it ends soon."""
        job = self._jobs.get((kind, use))
        if job is not None and job.spent:
            self.end(kind, use)
            job = None
        if job is None:
            job = self.begin(kind, use)
        job.ready()
        return job

    def end(self, kind: Kind, use: str = "") -> None:
        """End that one, if there is one."""
        job = self._jobs.pop((kind, use), None)
        if job is not None:
            job.close()

    def end_all(self) -> None:
        """End all but the undisturbed runs."""
        for kind, use in list(self._jobs):
            self.end(kind, use)

    def close(self) -> None:
        for training in (*self._jobs.values(), *self._references.values()):
            training.close()
