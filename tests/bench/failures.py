"""`python -m tests.bench.failures`: ways in which a training fails, each so many times, and what became of it.

Each is a training under `hegmctl run --recover` on simulated GPUs: one process, or ranks of torchrun over gloo. The end
of a case is `exact` (it made all steps, and every loss, of repeated steps too, is that of an undisturbed run), `ended`
(by a failure from which no recovery is wanted), or WRONG with what was seen. The exit status is 1 if one is WRONG.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from hegmctl.connection import connect
from hegmd.errors import HegmError
from hegmd.protocol.messages import FaultReply, SimulateFault
from hegmd.protocol.recovery import JobRecovery
from tests.e2e.daemon import RunningDaemon

SCRIPT = Path(__file__).parents[1] / "e2e/moved/failing.py"
LIMIT_S, POLL_INTERVAL_S = 1800.0, 0.1
# It fails so many steps after it was seen to be protected, and at one step on all ranks.
AHEAD, STEPS = 8, 150
PHASES = ("load", "forward", "backward", "commit", "after")
ALL, LAST, FIRST = "all ranks", "the last rank", "rank 0"
HANG = "hang: "


class GoneWrong(Exception):
    """A case did not end as it should."""


@dataclass(frozen=True)
class Case:
    """One way to fail. `kind` is what the script does by itself; `strike` is done to it from outside."""

    name: str
    kind: str = "none"
    phase: str = "after"
    who: str = LAST
    least_ranks: int = 1
    is_end: bool = False
    children: int = 0
    strike: Callable[[Run], None] | None = None

    def ranks(self, world: int) -> str:
        """The ranks that fail, each a digit."""
        return {ALL: "".join(map(str, range(world))), LAST: str(world - 1), FIRST: "0"}[self.who]


class Run:
    """One training in a folder of its own."""

    def __init__(self, daemon: RunningDaemon, folder: Path, case: Case, world: int, *, alone: bool = False) -> None:
        self.daemon, self.folder, self.world = daemon, folder, world
        folder.mkdir()
        command = [sys.executable, str(SCRIPT)]
        if world > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            command = [sys.executable, *launcher, str(SCRIPT)]
        # On a machine with other work, such a limit kills trainings that do not hang.
        limit = ["--hang-limit", "6s"] if case.name.startswith(HANG) else []
        recover = ["--recover=0.3s", *limit, "--gpu", "gpu0", "--no-daemon-start"]
        run = [sys.executable, "-m", "hegmctl", "run", *recover, "--"]
        paths = os.pathsep.join((str(SCRIPT.parents[3]), str(SCRIPT.parents[3] / "client")))
        told = {"FAILS": f"{case.kind} {case.phase} {case.ranks(world)}", "CHILDREN": str(case.children)}
        quick = {"PACE_S": "0"} if alone else told
        environ = {**os.environ, "HEGM_SOCKET": str(daemon.socket_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        environ["STEPS"] = str(STEPS)
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
        """What the daemon knows of it, while there is a daemon."""
        with suppress(HegmError, OSError), connect(str(self.daemon.socket_path)) as hegmd:
            return next(iter(hegmd.recovery().jobs[-1:]), None)
        return None

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Look again until it is so. Raises GoneWrong."""
        deadline, pause = time.monotonic() + LIMIT_S, Event()
        while not is_so():
            if time.monotonic() > deadline:
                raise GoneWrong(f"{what} did not come to be within {LIMIT_S:g} s")
            if what != "its end" and self.process.poll() is not None:
                raise GoneWrong(f"it ended with {self.process.returncode} before {what}: {self.said()}")
            pause.wait(POLL_INTERVAL_S)

    def until_protected(self) -> None:
        """Until both slots of each rank have a snapshot."""

        def is_so() -> bool:
            found = self.recovery()
            return found is not None and sum(slot.step is not None for slot in found.slots) == 2 * self.world

        self.until(is_so, "two snapshots")

    def have_it_fail(self) -> None:
        """Say to the script at which step it fails."""
        file = self.folder / "fails-at.new"
        file.write_text(str(max(step for _, step, _ in self.lines()) + AHEAD))
        file.rename(self.folder / "fails-at")

    def said(self) -> str:
        """The last line of hegmctl, or of the command."""
        lines = self.err.read_text(errors="replace").strip().splitlines() or [""]
        return next((line for line in reversed(lines) if line.startswith("hegmctl: ")), lines[-1])

    def end(self) -> None:
        """Kill what is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_newest(run: Run) -> None:
    os.kill(run.pids()[-1], signal.SIGKILL)


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
    found = sorted(_memory_of(run.daemon).glob("hegm-pool-*-0.*"), key=lambda path: path.stat().st_mtime)
    data = bytearray(found[-1].read_bytes())
    end = data.rindex(b"HEGMSLOT")
    place = max(index for index in range(0, end, 4096) if data[index : index + 4096].strip(b"\0"))
    data[place] ^= 1
    os.kill(run.pids()[0], signal.SIGKILL)
    found[-1].write_bytes(data)
    run.daemon.start()


def _memory_of(daemon: RunningDaemon) -> Path:
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
    Case("KeyboardInterrupt", "interrupt", "forward", ALL, is_end=True),
    Case("SystemExit", "exit", "forward", ALL, is_end=True),
    *(Case(f"{HANG}{kind}", kind, "forward") for kind in ("sleep", "lock", "socket", "c-call", "stop")),
    Case(f"{HANG}in a collective", "sleep", "backward", least_ranks=2),
    Case("SIGKILL in the restore", strike=kill_in_restore),
    Case("daemon and process killed", strike=kill_with_daemon),
    Case("daemon killed in the recovery", strike=kill_daemon_in_recovery),
    Case("newest snapshot damaged", strike=damage_newest),
    Case("GPU lost", strike=lose_gpu),
)


def result_of(run: Run, case: Case, expected: set[tuple[int, int, str]]) -> str:
    """What became of it. Raises GoneWrong."""
    try:
        run.until_protected()
        if case.strike is None:
            run.have_it_fail()
        else:
            case.strike(run)
        run.until(lambda: run.process.poll() is not None, "its end")
        status, told = run.process.returncode, set(run.lines())
    finally:
        run.end()
    if not told <= expected:
        raise GoneWrong(f"{len(told - expected)} losses differ")
    if case.is_end and len(run.pids()) == run.world:
        return f"ended with status {status}"
    if status or told != expected:
        raise GoneWrong(f"status {status}, {len(told)} of {len(expected)} steps: {run.said()}")
    if len(run.pids()) == run.world:
        raise GoneWrong("it did not fail")
    return "exact"


def undisturbed(world: int) -> set[tuple[int, int, str]]:
    """The steps of a run that nothing disturbs."""
    with node() as (daemon, folder):
        alone = Run(daemon, folder / "alone", Case("alone"), world, alone=True)
        alone.until(lambda: alone.process.poll() is not None, "its end")
        return set(alone.lines())


@contextmanager
def node() -> Iterator[tuple[RunningDaemon, Path]]:
    """A daemon with two simulated GPUs, in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="hegm-failures-") as name, RunningDaemon(Path(name)) as daemon:
        yield daemon, Path(name)


def main() -> int:
    """Run the cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    for world in map(int, asked.ranks.split(",")):
        expected = undisturbed(world)
        cases = [case for case in CASES if world >= case.least_ranks and asked.only in case.name]
        for case in cases:
            found: dict[str, int] = {}
            began = time.monotonic()
            for _ in range(asked.times):
                with node() as (daemon, folder):
                    try:
                        result = result_of(Run(daemon, folder / "run", case, world), case, expected)
                    except GoneWrong as error:
                        result = f"WRONG: {error}"
                    found[result] = found.get(result, 0) + 1
            mean_s = (time.monotonic() - began) / max(1, asked.times)
            said = "; ".join(f"{times} x {result}" for result, times in found.items())
            print(f"{world} {'rank ' if world == 1 else 'ranks'}  {case.name:<32}{mean_s:6.1f} s  {said}", flush=True)
            rows.append({"ranks": world, "case": case.name, "seconds": round(mean_s, 1), "results": found})
            if asked.out is not None:
                asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("WRONG" in str(row["results"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
