"""Measurements besides the moves: reservations, the cost of a step, the helper alone, and HeGM 0.3.3 on its own path.

HeGM's wheel is unpacked and used as its installation would be: `hegm-launcher` starts the training, `hegm-ctrl
checkpoint` returns when the launcher has its lock file, `hegm-ctrl resume` lets it start the script again. There is no
CRIU in between, and its files are in memory, so this is the least that its way can take. The same training is moved by
hegmd, by peer and by the driver alone; of all three it is the time from asking to the end of the next step.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil

from hegmd.protocol.messages import Migrate
from tests.gpu.bench_held import Adamw, Held, ProgramSettings
from tests.gpu.bench_record import Record
from tests.gpu.bench_ways import MoveCounts
from tests.gpu.moves_node import ROOT, SHARED_MEMORY, Node, WentWrongError, until

STEPS = 2000
ROUNDS = 5
PAIRS = 2
# About what each takes, so that none is begun that would not end.
ALONE = {"arm": 40.0, "idle": 60.0, "helper": 110.0, "adamw": 70.0, "hegm": 120.0}
SIZE_GIB = 8.0
WARM_STEPS = 20
COMMAND_S = 300.0
HEGM_TIMES = 3
LAUNCHER = "import sys; from hegm.launcher import main_cli; sys.exit(main_cli())"
CONTROL = "import sys; from hegm.ctrl import main_cli; sys.exit(main_cli())"


# ---- of hegmd alone -------------------------------------------------------------------------------------------------


def run_arm(ways: MoveCounts, repeat: int) -> None:
    """Measure from the request for a move until all is reserved and the helper is ready: without a helper at first, and
    again.
    """
    node = ways.node
    with contextlib.closing(Held(node, 1)) as job:
        job.begin()
        took: dict[str, list[float]] = {"no helper": [], "a helper": []}
        for _ in range(repeat):
            helper = node.helper_pid()
            if helper is not None:
                os.kill(helper, 9)
                until(lambda: node.helper_pid() is None, "that the helper is gone")
            for several in took.values():
                several.append(ways.migrate(job, "peer", noted=False).split["arm"])
        for name, values in took.items():
            middle, least, most = statistics.median(values), min(values), max(values)
            spread = f"{least:.3f} to {most:.3f}, {len(values)} times"
            ways.record.say(f"reserving with {name} there: {middle:.3f} s ({spread})")


def run_idle(node: Node, record: Record, repeat: int) -> None:
    """Measure a step with the agent in the process and without, in turn on the same GPU; all GPUs at once."""
    rounds = max(ROUNDS, repeat)
    with contextlib.ExitStack() as held:
        pairs: list[tuple[Held, Held]] = []
        for number in range(PAIRS * len(node.gpus)):
            gpu = number % len(node.gpus)
            pair = Held(node, 1, gpu=gpu, agent=False, rounds=True), Held(node, 1, gpu=gpu, rounds=True)
            for job in pair:
                held.callback(job.close)
            pairs.append(pair)
        for pair in pairs:
            for job in pair:
                job.begin()
        found: list[tuple[float, float]] = []
        for first in range(0, len(pairs), len(node.gpus)):
            with ThreadPoolExecutor(len(node.gpus)) as pool:
                for several in pool.map(partial(_in_turn, rounds=rounds), pairs[first : first + len(node.gpus)]):
                    found += several
    without, with_it = (statistics.median(values) * 1e6 for values in zip(*found, strict=True))
    ratios = sorted(there / alone - 1 for alone, there in found)
    spread = f"{ratios[0]:+.2%} to {ratios[-1]:+.2%}; {len(found)} pairs of {STEPS} steps"
    record.say(
        f"a step: {without:.1f} µs without the agent, {with_it:.1f} µs with it; pair by pair"
        f" {statistics.median(ratios):+.2%} ({spread})"
    )


def _in_turn(pair: tuple[Held, Held], rounds: int) -> list[tuple[float, float]]:
    """Without the agent and with it, the one first and then the other."""
    found: list[tuple[float, float]] = []
    for number in range(rounds):
        took = {job: job.step_s(STEPS) for job in (pair if number % 2 else pair[::-1])}
        found.append((took[pair[0]], took[pair[1]]))
    return found


def run_helper(node: Node, record: Record, *, quick: bool) -> None:
    """The helper without a daemon, by its own program. Raises WentWrongError for one of its steps that failed."""
    words = ["--mib", "8192", "start", "peer", "host"] if quick else []
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.helper_run", *words],
        env=node.environ(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    for line in ran.stdout.splitlines():
        record.say(line, keep="GB/s" in line or "ready after" in line or "contexts on" in line)
    if ran.returncode:
        raise WentWrongError(f"helper_run ended with {ran.returncode}")


# ---- beside others --------------------------------------------------------------------------------------------------


def run_adamw(node: Node, record: Record, size_gib: float, repeat: int) -> None:
    """hegmd by peer and the driver alone, on the training that HeGM is given."""
    with contextlib.closing(Adamw(node, size_gib, _by_hegmd(), {})) as job:
        pid = job.wait_for_steps(WARM_STEPS)
        until(lambda: _attends(node, pid), "that its agent attends")
        held_mib = sum(node.gpus.account().places(pid).values())
        # In this order: what the driver brought back cannot be shown.
        moves = {carrier: [_moved(node, job, carrier) for _ in range(repeat)] for carrier in ("peer", "driver")}
    for carrier, values in moves.items():
        what = f"AdamW training of {held_mib:.0f} MiB, asked until its next step"
        record.say(f"{what}: hegmd by {carrier} {spread(values)}")


def run_hegm(node: Node, record: Record, wheel: Path, size_gib: float, ends: float) -> None:
    """HeGM on its own path, as often as there is time for, up to HEGM_TIMES."""
    left_s = ends - time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hegm-wheel-") as site:
        unpack(wheel, Path(site))
        locked, whole = restarted(node, size_gib, Path(site), left_s)
    name = wheel.name.partition("-py")[0]
    record.say(f"AdamW training of {size_gib:g} GiB by {name}: asked until its lock file {spread(locked)}")
    record.say(f"AdamW training of {size_gib:g} GiB by {name}: asked until its next step {spread(whole)}")


def unpack(wheel: Path, site: Path) -> None:
    """Have it in that folder, as an installation would."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)


def _by_hegmd() -> list[str]:
    return [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--"]


def _attends(node: Node, pid: int) -> bool:
    with node.connect() as connection:
        return any(there.pid == pid and there.agent for there in connection.processes().processes)


def _moved(node: Node, job: Adamw, carrier: str) -> float:
    (source,) = node.gpus.account().places(job.pid)
    asked_at = time.monotonic()
    reply = node.ask(Migrate(pids=(job.pid,), to=f"gpu{1 - source}", carrier=carrier))
    if reply.operation is None or reply.operation.phase != "done":
        raise WentWrongError(f"migrate: {reply.operation}")
    return job.next_step_s(asked_at)


def restarted(node: ProgramSettings, size_gib: float, site: Path, left_s: float) -> tuple[list[float], list[float]]:
    """Until the lock file, and until the next step, as often as the time is good for."""
    locked: list[float] = []
    whole: list[float] = []
    began = time.monotonic()
    # In memory, which is the fastest there is for it.
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="hegm-wheel-") as checkpoints:
        more = {
            "PYTHONPATH": f"{site}{os.pathsep}{node.environ()['PYTHONPATH']}",
            "HEGM_CHECKPOINT_DIR": checkpoints,
            "HEGM_DISABLE_EPOCH_RANGE_PATCH": "1",  # with it, torch 2.11 does not start
        }
        launcher = [sys.executable, "-c", LAUNCHER]
        with contextlib.closing(Adamw(node, size_gib, launcher, more)) as job, _with_children(job.pid):
            pid = job.wait_for_steps(WARM_STEPS)
            for _ in range(HEGM_TIMES):
                asked_at = time.monotonic()
                _control(node, more, "checkpoint", "--pid", str(pid))
                locked.append(time.monotonic() - asked_at)
                _control(node, more, "resume", "--all")
                whole.append(job.next_step_s(asked_at, of_another_than=pid))
                pid = job.wait_for_steps(len(job.lines) + WARM_STEPS)
                if time.monotonic() - began + 1.5 * whole[-1] > left_s:
                    break
    return locked, whole


@contextlib.contextmanager
def _with_children(pid: int) -> Generator[None]:
    """End the children of that process too: the launcher would leave its training on the GPU."""
    try:
        yield
    finally:
        for child in psutil.Process(pid).children():
            child.kill()


def _control(node: ProgramSettings, more: dict[str, str], *words: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CONTROL, *words],
        env={**node.environ(), **more},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    if ran.returncode or not any(good in ran.stdout for good in ("checkpoint-ready", "lock-removed")):
        raise WentWrongError(f"hegm-ctrl {words[0]}: {ran.stdout}{ran.stderr[-500:]}")


def spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.2f} s"
    return f"{middle} ({min(values):.2f} to {max(values):.2f}, {len(values)} times)"
