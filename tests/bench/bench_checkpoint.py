"""How long a training with 1 GiB on a simulated GPU takes into an image and back, by command, with real CRIU.

The job's time to stand under `--leave-running` is the daemon's own figure, as `hegmctl ops` shows it; the others are
from the command's start to its end, so that the image was read back and the next batch was seen. Onto a disk and onto a
file system in memory. HEGM_BENCH_IMAGE_DIR names another disk. Without PyTorch, CRIU or root there is nothing to tell.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hegmd.node.processes.process_set import end_all, population_of
from hegmd.node.processes.process_tree import pids_below
from tests.bench.bench_downtime import environment_for, operation, shown_on_gpu
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import daemon_by
from tests.e2e.real_criu import find_criu

SCRIPT = Path(__file__).parent / "scripts" / "holding.py"
ROUNDS = 3
GB = 1e9


def run() -> list[Row]:
    if find_spec("torch") is None:
        print("no PyTorch here: images of trainings are left out", file=sys.stderr)
        return []
    disk = Path(os.environ.get("HEGM_BENCH_IMAGE_DIR", "/var/tmp"))
    criu = find_criu()
    if isinstance(criu, str):
        print(f"images of trainings are left out: {criu}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="hegm-") as folder, daemon_by(criu, Path(folder)) as daemon:
        return [
            row for name, place in (("disk", disk), ("tmpfs", Path("/dev/shm"))) for row in _rows(daemon, name, place)
        ]


def _rows(daemon: RunningDaemon, name: str, place: Path) -> list[Row]:
    folder = Path(tempfile.mkdtemp(dir=place, prefix="hegm-bench-"))
    parked_s: list[float] = []
    left_s: list[float] = []
    ended_s: list[float] = []
    back_s: list[float] = []
    try:
        with _job(daemon) as job:
            size_bytes = 0.0
            for at in range(ROUNDS):
                image = str(folder / f"left-{at}")
                took_s, left = timed(daemon, "checkpoint", "--leave-running", str(job.pid), image)
                left_s.append(took_s)
                parked_s.append(left["downtime_s"])
                size_bytes = left["size_bytes"]
                shutil.rmtree(image)
                image = str(folder / f"ended-{at}")
                ended_s.append(timed(daemon, "checkpoint", str(job.pid), image)[0])
                job.wait()  # its number is to be free
                back_s.append(timed(daemon, "restore", image)[0])
                shutil.rmtree(image)
    finally:
        shutil.rmtree(folder)
    return [
        Row(f"{name}: bytes on the GPU", size_bytes / GB, "GB"),
        Row(f"{name}: checkpoint, the job ended, p50", statistics.median(ended_s), "s"),
        Row(f"{name}: checkpoint --leave-running, p50", statistics.median(left_s), "s"),
        Row(f"{name}: of that, the job stands, p50", statistics.median(parked_s), "s"),
        Row(f"{name}: restore, p50", statistics.median(back_s), "s"),
    ]


def timed(daemon: RunningDaemon, *words: str) -> tuple[float, dict[str, float]]:
    """How long the command took, and the operation as it ended."""
    began = time.perf_counter()
    ended = operation(daemon, *words)
    return time.perf_counter() - began, ended


@contextlib.contextmanager
def _job(daemon: RunningDaemon) -> Iterator[subprocess.Popen[bytes]]:
    """The script under `hegmctl run`, in a session of its own, which it has again when it comes back."""
    words = [sys.executable, "-m", "hegmctl", "run", "--gpu", "gpu0", "--", sys.executable, str(SCRIPT)]
    job = subprocess.Popen(words, env=environment_for(daemon), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        shown_on_gpu(daemon, job)
        yield job
    finally:
        end_all(population_of(pids_below(job.pid)))
        job.wait()
