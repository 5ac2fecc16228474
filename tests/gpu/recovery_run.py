"""One command for a machine with an NVIDIA GPU: what do snapshots cost, and how soon does a killed training continue?

    python3 -m tests.gpu.recovery_run --out recovery.json [--sizes 1,32] [--tasks pause,kill,torchrun] [--kills N]
                                      [--interval TEXT] [--room-gib 0,8] [--look-s N] [--budget-s N] [--rehearse]

It needs one GPU, PyTorch and hegmd's own dependencies (`pip install .`), and no network. With the default sizes it
takes about seven minutes, host memory for two states of the largest size, and video memory for three. `--rehearse`
does the same on simulated GPUs with small trainings: that shows that the program runs, and its figures say nothing.

* `pause`: an AdamW training whose state (weights, gradients and moments) has so many GiB runs under
  `hegmctl run --recover`, once with room for a shadow copy and once without (`HEGM_SNAPSHOT_SHADOW=off`). Told are the
  pause of each snapshot by the agent's word, the longest gap between two steps, and what part of the time all gaps took
  in which a step took more than twice the median. With the shadow copy the interval is the one chosen by default, or
  `--interval`, which gives more snapshots to judge by. With `--room-gib` another process leaves just so much of the
  GPU's memory for a shadow copy, once for each number, in place of these two.
* `kill`: a training of 810 million parameters (12.9 GB state) is killed with SIGKILL. Told is the time until the first
  line of a new process, with `--ready always` and without.
* `torchrun`: the same with torchrun, which starts a script again that saves itself with torch.save.

Each loss of each process is compared, bit for bit, with that of an undisturbed run. Undisturbed runs are stopped with
SIGSTOP while something is measured. OUT has all figures as JSON and is written again after each of them. Exit status 1
if a loss differs or if something went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hegmd.protocol.recovery import RECOVERED
from tests.gpu.moves_jobs import TRAINING
from tests.gpu.moves_node import WentWrongError, until
from tests.gpu.recovery_jobs import Losses, ProtectedJob, compared, gaps_of, step_times
from tests.gpu.restart_node import RestartNode

TASKS = ("pause", "kill", "torchrun")
# Weights and moments: adamw.py has gradients besides.
KILLED_GIB, REHEARSED_GIB = 9.1, 0.02
SHARE_WITHOUT_GRADIENTS = 0.75
POOL_BYTES = 100 << 30
WITHIN_S = 120.0
# How long the test watches a training with snapshots, and before the first.
LOOK_S, MAX_LOOK_S, BASE_S = 20.0, 60.0, 6.0
SNAPSHOTS = 4
LEAVE_ROOM = Path(__file__).with_name("leave_room.py")
# With no shadow copy the default interval would be more than a minute.
SHORT_INTERVAL_S = "2s"
SAVE_EVERY_S = 5.0
POLL_S = 0.05
_OFF = {"HEGM_SNAPSHOT_SHADOW": "off"}


class Bench:
    """All tasks, on one GPU. `figures` is what OUT has."""

    def __init__(self, node: RestartNode, options: argparse.Namespace) -> None:
        self.node, self._options = node, options
        self._notes = node.folder / "agent.notes"
        self._ends = time.monotonic() + options.budget_s
        self.figures: dict[str, Any] = {"went_wrong": [], "pause": [], "kill": [], "torchrun": [], "exact": []}
        #: Compared at the end: the training, its steps, and the undisturbed run.
        self._to_compare: list[tuple[str, list[str], Losses]] = []
        self._held = contextlib.ExitStack()

    def run(self) -> None:
        with self._held:
            for name in self._options.tasks:
                self._guarded(name, {"pause": self._pause, "kill": self._kill, "torchrun": self._torchrun}[name])
            self._guarded("compare", self._compare)

    def _guarded(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the other tasks are to be measured all the same
            traceback.print_exc()
            print(self.node.log_tail(30), flush=True)
            self._keep("went_wrong", {"task": name, "why": f"{type(error).__name__}: {error}"[:2000]})

    def _keep(self, kind: str, figure: dict[str, Any]) -> None:
        self.figures[kind].append(figure)
        print(kind, json.dumps(figure), flush=True)
        self._options.out.write_text(json.dumps(self.figures, indent=1) + "\n")

    def _require_time(self) -> None:
        if time.monotonic() > self._ends:
            raise WentWrongError(f"{self._options.budget_s:g} s are over")

    def _alone(self, words: Sequence[str], base_s: float = 0.0) -> Losses:
        """An undisturbed run, which has stopped once it is known how fast it is."""
        environ = {**self.node.environ(), **self.node.begun_on("gpu0")[1]}
        del environ["HEGM_SOCKET"]
        alone = Losses(words, environ)
        self._held.callback(alone.close)
        alone.wait_for(lambda: len(alone.steps()) >= 5, "an undisturbed run does not train", WITHIN_S)
        if base_s:
            since = time.monotonic()
            until(lambda: time.monotonic() - since > base_s, "the time", 2 * base_s)
        alone.stop()
        return alone

    @contextlib.contextmanager
    def _job(
        self, alone: Losses, what: str, words: Sequence[str], *options: str, **more: str
    ) -> Iterator[ProtectedJob]:
        job = ProtectedJob(self.node, words, *options, **more)
        try:
            yield job
        finally:
            self._to_compare.append((what, job.steps(), alone))
            job.close()
            self._await_end_of_slots()

    def _await_end_of_slots(self) -> None:
        """Give back what the daemon keeps of a job whose supervisor was killed."""

        def is_over() -> bool:
            with self.node.connect() as connection:
                jobs = connection.recovery().jobs
                for job in jobs:
                    if job.state == "kept":
                        connection.drop_recovery(job.id)
            return not jobs

        until(is_over, "that the slots are given back", WITHIN_S)

    # -- pauses --------------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        for size_gib in self._options.sizes:
            words = [str(TRAINING / "adamw.py"), str(size_gib * SHARE_WITHOUT_GRADIENTS), "made-there"]
            alone = self._alone(words, BASE_S)
            base = gaps_of(step_times(alone, 0.0))[10:]
            step_s = {"mean": statistics.mean(base), "median": statistics.median(base)}
            modes: list[tuple[str, str, dict[str, str], float | None]] = [
                ("shadow", self._options.recover, {}, None),
                ("paused", f"--recover={SHORT_INTERVAL_S}", _OFF, None),
            ]
            if self._options.rooms_gib:
                recover = f"--recover={self._options.interval or SHORT_INTERVAL_S}"
                modes = [(f"room for {gib:g} GiB", recover, {}, gib) for gib in self._options.rooms_gib]
            for mode, option, more, room_gib in modes:
                self._require_time()
                with (
                    self._job(alone, f"pause {size_gib} {mode}", words, option, **more) as job,
                    self._room(job, room_gib),
                ):
                    figure = self._watched(job, self._options.look_s)
                self._keep("pause", {"size_gib": size_gib, "mode": mode, "alone_step_s": step_s, **figure})

    @contextlib.contextmanager
    def _room(self, job: ProtectedJob, room_gib: float | None) -> Iterator[None]:
        """Have another process leave so much memory for a shadow, once the job has what it needs."""
        if room_gib is None or self._options.rehearse:
            yield
            return
        words = [sys.executable, str(LEAVE_ROOM), "0", str(int(room_gib * (1 << 30)))]
        environ = {**self.node.environ(), **self.node.begun_on("gpu0")[1]}
        with subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as filler:
            try:
                job.read_steps(5)
                assert filler.stdin is not None
                assert filler.stdout is not None
                print("fill", file=filler.stdin, flush=True)
                print(f"room for {room_gib} GiB: {filler.stdout.readline().strip()}", flush=True)
                yield
            finally:
                filler.kill()

    def _watched(self, job: ProtectedJob, look_s: float) -> dict[str, Any]:
        """Measure what snapshots cost a training. The first two allocate their memory, and count separately."""
        costs: dict[int, dict[str, Any]] = {}
        watched_from, is_cold, pause = 0.0, True, threading.Event()
        began = time.monotonic()
        while time.monotonic() - began < MAX_LOOK_S + (WITHIN_S if is_cold else 0.0):
            recovery = job.recovery()
            if recovery is not None and recovery.snapshots and recovery.snapshots not in costs:
                records = [slot for slot in recovery.slots if slot.step is not None]
                size_bytes = max((slot.size_bytes or 0 for slot in records), default=0)
                costs[recovery.snapshots] = {
                    "cost_s": recovery.cost_s,
                    "interval_s": recovery.interval_s,
                    "size_bytes": size_bytes,
                }
                if recovery.snapshots == 2:
                    is_cold, watched_from = False, time.monotonic()
                    began = watched_from
            if recovery is not None and recovery.state == "unprotected":
                raise WentWrongError(f"it is not protected: {recovery.why}")
            is_enough = sum(number > 2 for number in costs) >= SNAPSHOTS
            if watched_from and is_enough and time.monotonic() - watched_from > look_s:
                break
            if not job.alive:
                raise WentWrongError(f"it has ended: {job.error_text()}")
            pause.wait(POLL_S)  # the daemon does not report a snapshot
        if not watched_from:
            watched_from = began
        gaps = gaps_of(step_times(job, watched_from))
        median = statistics.median(gaps)
        excess_s = sum(gap - median for gap in gaps if gap > 2 * median)
        warm = [one["cost_s"] for number, one in costs.items() if number > 2 and one["cost_s"] is not None]
        return {
            "snapshots": list(costs.values()),
            "pause_s": statistics.median(warm) if warm else None,
            "max_pause_s": max(warm, default=None),
            "longest_gap_s": max(gaps),
            "step_s": {"mean": statistics.mean(gaps), "median": median},
            "watched_s": sum(gaps),
            "excess_share": excess_s / sum(gaps),
            "notes": _last_of(self._notes),
        }

    # -- kills ---------------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        words = [str(TRAINING / "adamw.py"), str(self._options.killed_gib), "made-there"]
        alone = self._alone(words)
        for ready in ("always", None):
            options = ["--recover=3s", *(["--ready", ready] if ready else [])]
            with self._job(alone, f"kill, ready {ready}", words, *options) as job:
                for number in range(self._options.kills):
                    self._require_time()
                    self._keep("kill", {"ready": ready or "off", **self._kill_once(job, number, is_kept=bool(ready))})

    def _kill_once(self, job: ProtectedJob, number: int, *, is_kept: bool) -> dict[str, Any]:
        def is_protected() -> bool:
            recovery = job.recovery()
            whole = [] if recovery is None else [slot for slot in recovery.slots if slot.step is not None]
            return recovery is not None and recovery.state == "protected" and len(whole) == 2

        until(is_protected, "that it is protected", WITHIN_S)
        if is_kept:
            until(partial(self._has_next, job), "that a next process is kept ready", WITHIN_S)
        job.read_steps(2)
        pid, recovery = job.worker(), len(job.lines)
        killed_at, killed_utc = time.monotonic(), time.time()
        os.kill(pid, signal.SIGKILL)

        def firsts() -> list[int]:
            lines = list(job.lines)
            return [
                at
                for at in range(recovery, len(lines))
                if lines[at].startswith("step ") and lines[at].split()[1] != f"{pid}"
            ]

        job.wait_for(lambda: len(firsts()) > 1, "it does not train again", WITHIN_S)
        until(
            lambda: len(_recoveries(job)) > number and _recoveries(job)[-1].result == RECOVERED, "a recovery", WITHIN_S
        )
        last = _recoveries(job)[-1]
        marks = {
            line.split()[1]: float(line.split()[2]) - killed_utc
            for line in list(job.lines)[recovery:]
            if line.startswith("mark ")
        }
        return {
            "next_step_s": job.times[firsts()[0]] - killed_at,
            "started_s": last.started_s,
            "restored_s": last.restored_s,
            "trained_s": last.trained_s,
            "marks_s": marks,
            "steps_lost": None if last.step is None or last.from_step is None else last.step - last.from_step,
        }

    def _has_next(self, job: ProtectedJob) -> bool:
        """Whether the process that is kept ready has imported all, by the word of its agent."""
        notes = self._notes.read_text(errors="replace") if self._notes.exists() else ""
        return any(re.search(rf"hegm agent {pid} [\d.]+: ready: ", notes) for pid in job.children()[1:])

    # -- torchrun ------------------------------------------------------------------------------------------------------

    def _torchrun(self) -> None:
        folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-saved-")))
        script, size = str(TRAINING / "saved.py"), str(self._options.killed_gib)
        alone = self._alone([script, size, str(folder / "none"), "1e9"])
        environ = {**self.node.environ(), **self.node.begun_on("gpu0")[1], "PYTHONUNBUFFERED": "1"}
        del environ["HEGM_SOCKET"]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "9"]
        job = Losses([*launcher, script, size, str(folder / "saved.pt"), str(SAVE_EVERY_S)], environ)
        with contextlib.closing(job):
            for _ in range(self._options.kills):
                self._require_time()
                self._keep("torchrun", self._kill_under_torchrun(job))
            self._to_compare.append(("torchrun", job.steps(), alone))
            os.kill(int(job.steps()[-1].split()[1]), signal.SIGTERM)

    def _kill_under_torchrun(self, job: Losses) -> dict[str, Any]:
        count = len(job.lines)

        def new(word: str) -> list[int]:
            lines = list(job.lines)
            return [at for at in range(count, len(lines)) if lines[at].startswith(word)]

        job.wait_for(lambda: len(new("saved ")) > 0, "it does not save itself", WITHIN_S)
        saved = job.lines[new("saved ")[0]].split()
        count = len(job.lines)
        job.wait_for(lambda: len(new("step ")) > 2, "it does not train", WITHIN_S)
        pid, count = int(saved[1]), len(job.lines)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        job.wait_for(
            lambda: any(job.lines[at].split()[1] != f"{pid}" for at in new("step ")), "no new process trains", WITHIN_S
        )
        first = next(at for at in new("step ") if job.lines[at].split()[1] != f"{pid}")
        return {"next_step_s": job.times[first] - killed_at, "save_s": float(saved[3]), "every_s": SAVE_EVERY_S}

    # -- exactness -----------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Have all undisturbed runs come as far as the trainings that were disturbed."""
        for _what, _steps, alone in self._to_compare:
            alone.go_on()
        for what, steps, alone in self._to_compare:
            wanted = len({tuple(line.split()[2:]) for line in steps})
            left_s = max(10.0, self._ends + 60 - time.monotonic())
            with contextlib.suppress(WentWrongError):  # as far as it has come
                alone.wait_for(partial(_has_steps, alone, wanted + 3), "it is late", left_s)
            self._keep("exact", {"what": what, **compared(steps, alone.steps())})


def _has_steps(alone: Losses, count: int) -> bool:
    return len(alone.steps()) >= count


def _recoveries(job: ProtectedJob) -> Sequence[Any]:
    recovery = job.recovery()
    return () if recovery is None else recovery.recoveries


def _last_of(path: Path) -> list[str]:
    """The last notes of the agents of how a snapshot was taken."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if "snapshot" in line or " copied in " in line][-40:]


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="1,32", help="GiB of state, gradients included")
    parser.add_argument("--tasks", default=",".join(TASKS), help=", ".join(TASKS))
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--interval", help="between snapshots with a shadow copy")
    parser.add_argument("--room-gib", help="how much memory is free for a shadow copy, such as 0,8", default="")
    parser.add_argument("--look-s", type=float, default=LOOK_S, help="how long a training with snapshots is watched")
    parser.add_argument("--budget-s", type=float, default=330.0, help="begin no measurement after so long")
    parser.add_argument("--rehearse", action="store_true", help="on simulated GPUs, with small trainings")
    options = parser.parse_args(argv)
    options.tasks = options.tasks.split(",")
    if set(options.tasks) - set(TASKS):
        parser.error(f"--tasks takes some of {', '.join(TASKS)}")
    options.sizes = [REHEARSED_GIB] if options.rehearse else [float(text) for text in options.sizes.split(",")]
    options.killed_gib = REHEARSED_GIB if options.rehearse else KILLED_GIB
    options.recover = "--recover" if options.interval is None else f"--recover={options.interval}"
    options.rooms_gib = [float(text) for text in options.room_gib.split(",") if text]
    options.look_s = 1.0 if options.rehearse else options.look_s
    return options


def main(argv: Sequence[str]) -> int:
    options = _parsed(argv)
    with tempfile.TemporaryDirectory(prefix="hegm-recovery-") as name:
        folder = Path(name)
        more = {"HEGM_AGENT_DEBUG": str(folder / "agent.notes")}
        with RestartNode(folder, rehearsed=options.rehearse, pool_bytes=POOL_BYTES, more=more) as node:
            if not node.gpus():
                print("there is no GPU here; --rehearse does it on simulated ones", flush=True)
                return 1
            bench = Bench(node, options)
            bench.run()
    print(json.dumps(bench.figures, indent=1))
    return int(bool(bench.figures["went_wrong"]) or not all(figure["exact"] for figure in bench.figures["exact"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
