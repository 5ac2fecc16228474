"""The ways of `failures`: what each training does or suffers, and how one is run and looked at."""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from hegmctl.connection import connect
from hegmd.errors import HegmError
from hegmd.protocol.messages import FaultReply, SimulateFault
from hegmd.protocol.recovery import JobRecovery
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import BARE, BRISK

SCRIPT = Path(__file__).parents[1] / "e2e/moved/failing.py"
LAUNCHER = Path(__file__).with_name("forking_launcher.py")
POLL_INTERVAL_S = 0.1
# It fails so many steps after it was seen to be protected, at one step on all ranks, and ends so many steps later.
AHEAD, MORE, STEPS = 10, 15, 400
REAL, SIMULATED = "real", "simulated"
NCCL = "nccl"
# The log lines that are kept of a wrong case, and how many times its stacks are looked for.
TAIL_LINES, LOOKS = 40, 10
PHASES = ("load", "forward", "backward", "commit", "after")
ALL, LAST, FIRST = "all ranks", "the last rank", "rank 0"
HANG = "hang: "


class UnexpectedEnd(Exception):
    """A case did not end as it should."""


class Cut(Exception):
    """The time limit was reached before the case ended."""


@dataclass(frozen=True)
class Case:
    """One way to fail. `kind` is the script's own fault; `strike` comes from outside."""

    name: str
    kind: str = "none"
    phase: str = "after"
    who: str = LAST
    least_ranks: int = 1
    is_end: bool = False
    children: int = 0
    strike: Callable[[Run], None] | None = None
    #: On which GPUs alone it can be.
    only_on: str | None = None

    @property
    def shares_daemon(self) -> bool:
        """Whether other cases may have the same daemon: it is not killed, nor are its files or GPUs changed."""
        return self.strike in (None, kill_in_restore)

    def ranks(self, world: int) -> str:
        """The ranks that fail, each a digit."""
        return {ALL: "".join(map(str, range(world))), LAST: str(world - 1), FIRST: "0"}[self.who]


class Options(argparse.Namespace):
    """The options of the command line. No trial begins after `begins_until`; those that run are cut at `ends_at`.

    Both are set once the undisturbed runs have ended.
    """

    gpus: str
    device: str
    backend: str
    jobs: int
    times: int
    ranks: str
    only: str
    out: Path | None
    case_limit_s: float
    hang_limit: str
    fork_ranks: bool
    budget_s: float
    grace_s: float
    begins_until: float = math.inf
    ends_at: float = math.inf
    #: The socket of the Python process that forks ranks, if there is one.
    forks: Path | None = None
    #: The number of steps of a training without an earlier end.
    steps: int = STEPS

    def place(self, case: Case) -> str:
        """On which GPUs it is."""
        return case.only_on or self.gpus


class Run:
    """One training in a folder of its own, which has its name.

    `struck_at` is the time of the strike from outside, and `last_step` the step at which it ends.
    """

    def __init__(
        self, daemon: RunningDaemon, folder: Path, case: Case, world: int, options: Options, *, alone: bool = False
    ) -> None:
        self.daemon, self.folder, self.world, self.options = daemon, folder, world, options
        self.struck_at, self.last_step = 0.0, options.steps
        self._deadline = time.monotonic() + options.case_limit_s
        command = [sys.executable, str(SCRIPT)]
        is_real = options.place(case) == REAL
        if world > 1 and options.forks is not None and not is_real:
            command = [sys.executable, str(LAUNCHER), "run", str(options.forks), str(world), str(SCRIPT)]
        elif world > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            command = [sys.executable, *launcher, str(SCRIPT)]
        # On a machine with other work, such a limit kills trainings that do not hang.
        limit = ["--hang-limit", options.hang_limit] if case.name.startswith(HANG) else []
        gpus = ",".join(f"gpu{rank}" for rank in range(world)) if options.backend == NCCL else "gpu0"
        recover = ["--recover=0.3s", *limit, "--gpu", gpus, "--no-daemon-start"]
        run = [sys.executable, "-m", "hegmctl", "run", "--name", folder.name, *recover, "--"]
        roots = (str(SCRIPT.parents[3]), str(SCRIPT.parents[3] / "client"))
        light = () if is_real else (str(BRISK),)  # the import of PyTorch is most of a trial's work
        paths = os.pathsep.join(filter(None, (*roots, *light, os.environ.get("PYTHONPATH"))))
        fields = {"FAILS": f"{case.kind} {case.phase} {case.ranks(world)}", "CHILDREN": str(case.children)}
        quick = {"PACE_S": "0"} if alone else fields
        environ = {**os.environ, "HEGM_SOCKET": str(daemon.socket_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        environ |= {
            "STEPS": str(options.steps),
            "BACKEND": options.backend,
            **({"DEVICE": options.device} if is_real else BARE),
        }
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            words = command if alone else [*run, *command]
            self.process = subprocess.Popen(
                words, cwd=folder, env={**environ, **quick}, stdout=out, stderr=err, start_new_session=True
            )

    def lines(self) -> list[tuple[int, int, str]]:
        """Rank, step and loss of each step so far."""
        whole = [line.split() for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [(int(line[1]), int(line[2]), line[3]) for line in whole if len(line) == 4 and line[0] == "step"]

    def pids(self) -> list[int]:
        """Each start of a process."""
        with suppress(FileNotFoundError):
            return [int(line.split()[0]) for line in (self.folder / "starts").read_text().splitlines()]
        return []

    def recovery(self) -> JobRecovery | None:
        """Return what the daemon knows of the job, or None without a daemon."""
        with suppress(HegmError, OSError), connect(str(self.daemon.socket_path)) as hegmd:
            return next((job for job in hegmd.recovery().jobs if job.name == self.folder.name), None)
        return None

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Look again until it is so. Raises UnexpectedEnd."""
        pause = Event()
        while not is_so():
            if time.monotonic() > self.options.ends_at:
                raise Cut
            if time.monotonic() > self._deadline:
                raise UnexpectedEnd(f"{what} did not come to be within {self.options.case_limit_s:g} s")
            if what != "its end" and self.process.poll() is not None:
                raise UnexpectedEnd(f"it ended with {self.process.returncode} before {what}: {self.last_line()}")
            pause.wait(POLL_INTERVAL_S)

    def until_protected(self) -> None:
        """Until both slots of each rank have a snapshot."""

        def is_so() -> bool:
            found = self.recovery()
            return found is not None and sum(slot.step is not None for slot in found.slots) == 2 * self.world

        self.until(is_so, "two snapshots")

    def have_it_fail(self) -> None:
        """Say to the script at which step it fails, and at which it ends."""
        at = self.furthest() + AHEAD
        self._say("ends-at", at + MORE)
        self._say("fails-at", at)

    def strike(self, strike: Callable[[Run], None]) -> None:
        """Do that to it, and have it end soon after it was started again."""
        self.struck_at = time.time()
        strike(self)
        self.until(lambda: len(self.pids()) > self.world, "another start")
        self._say("ends-at", self.furthest() + MORE)

    def have_it_end(self) -> None:
        """Say to the script at which step it ends."""
        self._say("ends-at", self.furthest() + MORE)

    def furthest(self) -> int:
        """The last step of any rank."""
        return max((step for _, step, _ in self.lines()), default=0)

    def _say(self, name: str, step: int) -> None:
        if name == "ends-at":
            self.last_step = min(step, self.options.steps)
        file = self.folder / f"{name}.new"
        file.write_text(str(step))
        file.rename(self.folder / name)

    def next_step_s(self) -> float | None:
        """The time from its failure to the first step of all ranks after the last start."""
        failed = [float(file.read_text() or "nan") for file in self.folder.glob("failed-*")]
        with suppress(OSError, ValueError):
            firsts = dict(line.split() for line in (self.folder / "firsts").read_text().splitlines())
            took_s = max(map(float, firsts.values())) - (self.struck_at or min(failed))
            return round(took_s, 2) if took_s > 0 else None
        return None

    def story(self) -> str:
        """Return the stacks of its threads, and the last lines of its log and of its daemon's."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        pause = Event()
        for _ in range(LOOKS):  # a process that hangs may never print its stacks
            pause.wait(POLL_INTERVAL_S)
        found = self.recovery()
        stacks = [recovery.stacks for recovery in found.recoveries if recovery.stacks] if found is not None else []
        parts = ("stacks", *stacks, "errors", _tail(self.err.read_text(errors="replace")), "daemon")
        return "\n".join([*parts, _tail(self.daemon.log_text())])

    def last_line(self) -> str:
        """The last line of hegmctl, or of the command."""
        lines = self.err.read_text(errors="replace").strip().splitlines() or [""]
        return next((line for line in reversed(lines) if line.startswith("hegmctl: ")), lines[-1])

    def end(self) -> None:
        """Kill all processes that are left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])


def kill_with_daemon(run: Run) -> None:
    """Both within a moment, and the next daemon a little later."""
    run.daemon.stop(signal.SIGKILL)
    os.kill(run.pids()[-1], signal.SIGKILL)
    run.daemon.start()


def kill_daemon_in_recovery(run: Run) -> None:
    os.kill(run.pids()[-1], signal.SIGKILL)
    run.until(lambda: len(run.pids()) > run.world, "a second start")
    run.daemon.stop(signal.SIGKILL)
    run.daemon.start()


def kill_in_restore(run: Run) -> None:
    """The second start is killed as soon as its script begins."""
    os.kill(run.pids()[-1], signal.SIGKILL)
    run.until(lambda: len(run.pids()) > run.world, "a second start")
    os.kill(run.pids()[-1], signal.SIGKILL)


def damage_newest(run: Run) -> None:
    """A bit of the newest snapshot of a rank is flipped."""
    run.daemon.stop(signal.SIGKILL)
    found = sorted(pool_of(run.daemon).glob("hegm-pool-*-0.*"), key=lambda path: path.stat().st_mtime)
    data = bytearray(found[-1].read_bytes())
    end = data.rindex(b"HEGMSLOT")
    place = max(index for index in range(0, end, 4096) if data[index : index + 4096].strip(b"\0"))
    data[place] ^= 1
    os.kill(run.pids()[0], signal.SIGKILL)
    found[-1].write_bytes(data)
    run.daemon.start()


def pool_of(daemon: RunningDaemon) -> Path:
    """Return the folder with the files of its pool."""
    identity = (daemon.folder / "state" / "identity").read_text()[:16]
    return Path(f"/dev/shm/hegmd-{os.geteuid()}-{identity}")


def lose_gpu(run: Run) -> None:
    """Its GPU falls off the bus, which ends nothing by itself."""
    with connect(str(run.daemon.socket_path)) as hegmd:
        hegmd.call(SimulateFault(target="gpu0", fault="lost"), FaultReply)
        hegmd.gpus()


CASES: Sequence[Case] = (
    *(Case(f"exception: {phase}", "exception", phase) for phase in PHASES),
    *(Case(f"SIGKILL: {phase}", "sigkill", phase) for phase in PHASES),
    Case("SIGKILL of rank 0", "sigkill", "forward", FIRST, 2),
    Case("SIGKILL of all ranks", "sigkill", "forward", ALL, 2),
    Case("SIGKILL, workers in the loader", "sigkill", "forward", children=1),
    Case("segfault", "segfault", "backward"),
    Case("MemoryError", "memory", "forward"),
    Case("CUDA: out of memory", "device-oom", "forward", only_on=REAL),
    Case("CUDA: device-side assert", "device-assert", "backward", only_on=REAL),
    Case("KeyboardInterrupt", "interrupt", "forward", ALL, is_end=True),
    Case("SystemExit", "exit", "forward", ALL, is_end=True),
    *(Case(f"{HANG}{kind}", kind, "forward") for kind in ("sleep", "lock", "socket", "c-call", "stop")),
    Case(f"{HANG}in a collective", "sleep", "backward", least_ranks=2),
    Case(f"{HANG}in a kernel", "kernel", "forward", only_on=REAL),
    Case("SIGKILL in the restore", strike=kill_in_restore),
    Case("daemon and process killed", strike=kill_with_daemon),
    Case("daemon killed in the recovery", strike=kill_daemon_in_recovery),
    Case("newest snapshot damaged", strike=damage_newest),
    Case("GPU lost", strike=lose_gpu, only_on=SIMULATED),
)
