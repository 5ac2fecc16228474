"""The cost of turns on a real daemon: two trainings share a simulated GPU that has room for one.

Part of the benchmark `sharing`. A step waits for most of its time, as a script does whose GPU computes, and says when
it was made. Time is lost where no step is made for longer than a usual one takes: while one trains, its pace is that of
a training that is alone, since only one has the GPU. Without PyTorch there is no training.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from hegmctl.connection import Connection, connect
from tests.bench.bench_downtime import environment_for
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon
from tests.looks import COMMAND_MS, pause

MIB = 1 << 20
TRAINING = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
weight = torch.zeros(64 << 18)
while True:
    for (batch,) in DataLoader(TensorDataset(torch.arange(64.0)), batch_size=1, shuffle=True):
        loss = (weight[:64] - batch).square().mean()
        time.sleep(0.05)
        print(float(loss).hex(), time.monotonic(), flush=True)
"""
# Each has 64 MiB.
GPU, NEEDS, WANTED_BYTES = "1x100MiB", "65MiB", 60 * MIB
SHARED_S, ROOMS = 600.0, 5
STARTS_WITHIN_S = 120.0
# Issue 17: a switch between two jobs of 1 GiB, room for 32 GiB, and what turns may cost.
SWITCH_BUDGET_MS, ROOM_BUDGET_MS, LOST_BUDGET_PERCENT = 250.0, 1100.0, 5.0

Step = tuple[float, int]


def run() -> list[Row]:
    """Return what turns of ten minutes lost, what a switch took, and how soon room was made."""
    if find_spec("torch") is None:
        print("no PyTorch here: the turns are left out", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="hegm-") as name:
        folder = Path(name)
        with ExitStack() as held:
            node = RunningDaemon(folder, "--simulate", GPU).configured('[sharing]\nslices = "on"\n')
            daemon = held.enter_context(node)
            hegmd = held.enter_context(connect(str(daemon.socket_path)))
            held.enter_context(_training(daemon, folder / "0"))
            _await_steps(folder / "0", 50)
            rooms_ms = [_room_ms(hegmd, folder / "0") for _ in range(ROOMS)]
            held.enter_context(_training(daemon, folder / "1"))
            _await_steps(folder / "1", 1)
            began = time.monotonic()
            pause(1e3 * SHARED_S)
            ended = time.monotonic()
        steps = steps_of([folder / "0", folder / "1"], began, ended)
    return [*turns(steps, began, ended), Row("make-room: request to free memory, p50", *_of(rooms_ms))]


def _of(rooms_ms: Sequence[float]) -> tuple[float, str, float]:
    return statistics.median(rooms_ms), "ms", ROOM_BUDGET_MS


def turns(steps: Sequence[Step], began: float, ended: float) -> list[Row]:
    """Return the figures of steps by two trainings, in the order of their times."""
    gaps = [(later[0] - earlier[0], earlier[1] != later[1]) for earlier, later in pairwise(steps)]
    step_s = statistics.mean([gap for gap, is_switch in gaps if not is_switch])
    switches_ms = [1e3 * gap for gap, is_switch in gaps if is_switch]
    lost_percent = 100.0 * (1.0 - step_s * len(steps) / (ended - began))
    what = f"{ended - began:.0f} s of two trainings by turns"
    return [
        Row(f"{what}: switches", len(switches_ms), ""),
        Row("last step of one to first step of the other, p50", statistics.median(switches_ms), "ms", SWITCH_BUDGET_MS),
        Row("the same, most", max(switches_ms), "ms"),
        Row(f"{what}: lost against one after the other", lost_percent, "%", LOST_BUDGET_PERCENT),
    ]


def steps_of(paths: Sequence[Path], began: float, ended: float) -> list[Step]:
    """Return when each training made a step between two instants, in order."""
    found = [(time_of(line), number) for number, path in enumerate(paths) for line in _lines(path)]
    return sorted(step for step in found if began <= step[0] <= ended)


def time_of(line: str) -> float:
    """Return when the step of that line was made."""
    return float(line.split()[1])


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def _training(daemon: RunningDaemon, path: Path) -> Iterator[None]:
    """Run one training in the queue from its start to its end."""
    words = ["run", "--no-daemon-start", "--gpu", "auto", "--bytes", NEEDS]
    command = [sys.executable, "-m", "hegmctl", *words, "--", sys.executable, "-c", TRAINING]
    with path.open("w") as losses:
        job = subprocess.Popen(command, env=environment_for(daemon), stdout=losses)
    try:
        yield
    finally:
        job.kill()
        job.wait()


def _await_steps(path: Path, count: int) -> None:
    """Wait until it has made so many steps more. Raises RuntimeError."""
    wanted, deadline = len(_lines(path)) + count, time.monotonic() + STARTS_WITHIN_S
    while len(_lines(path)) < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the training {path.name} does not train")
        pause(COMMAND_MS)


def _room_ms(hegmd: Connection, path: Path) -> float:
    """Return how long a request for room took, the wait for the end of a batch included."""
    began = time.monotonic()
    lease = hegmd.make_room(WANTED_BYTES, gpu="gpu0", priority="production", until_free=True).lease
    took_ms = 1e3 * (time.monotonic() - began)
    if lease is not None:
        hegmd.release(lease.id)
    _await_steps(path, 50)
    return took_ms
