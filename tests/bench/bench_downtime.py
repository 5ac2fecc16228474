"""The downtime of the training of `make demo` when it is moved from one simulated GPU to the other and back.

The downtime is the daemon's own figure, as `hegmctl ops` shows it; the bytes are those that left the process. The
duration of an undisturbed batch is from the script's own record. Without PyTorch the benchmark is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from hegmctl.connection import connect
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "contrib" / "demo" / "train.py"
MORE_STEPS_THAN_IT_LIVES = "1000000"
MOVES = 15
SHOWS_UP_WITHIN_S = 60.0
# A quarter of a second: a viewer of the demonstration's losses does not notice such a pause.
BUDGET_MS = 250.0
MIB = 1 << 20


def run() -> list[Row]:
    if find_spec("torch") is None:
        print("no PyTorch here: the demonstration is left out", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="hegm-") as folder, RunningDaemon(Path(folder)) as daemon:
        path = Path(folder) / "losses"
        with _job(daemon, path) as pid:
            moves = [operation(daemon, "migrate", str(pid), "--to", f"gpu{1 - at % 2}") for at in range(MOVES)]
        times = [float(line.split()[2]) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    batch_ms = 1e3 * statistics.median(later - earlier for earlier, later in pairwise(times))
    downtimes_ms = [1e3 * move["downtime_s"] for move in moves]
    return [
        Row("the demonstration's training: bytes moved", moves[-1]["size_bytes"] / MIB, "MiB"),
        Row("one batch of it", batch_ms, "ms"),
        Row("migrate: downtime, p50", statistics.median(downtimes_ms), "ms", BUDGET_MS),
        Row("migrate: downtime, most", max(downtimes_ms), "ms"),
    ]


@contextlib.contextmanager
def _job(daemon: RunningDaemon, path: Path) -> Iterator[int]:
    """The script under `hegmctl run` on gpu0, from when the daemon shows it there; its pid."""
    words = ["run", "--gpu", "gpu0", "--", sys.executable, str(SCRIPT), MORE_STEPS_THAN_IT_LIVES]
    with path.open("w") as losses:
        job = subprocess.Popen([sys.executable, "-m", "hegmctl", *words], env=environment_for(daemon), stdout=losses)
    try:
        shown_on_gpu(daemon, job)
        yield job.pid
    finally:
        job.kill()
        job.wait()


def shown_on_gpu(daemon: RunningDaemon, job: subprocess.Popen[bytes]) -> None:
    """Wait until the daemon shows it on its GPU. Raises RuntimeError."""
    deadline = time.monotonic() + SHOWS_UP_WITHIN_S
    with connect(str(daemon.socket_path)) as hegmd:
        while not any(process.pid == job.pid and process.gpus for process in hegmd.processes().processes):
            if time.monotonic() > deadline or job.poll() is not None:
                raise RuntimeError(f"the training does not show up on its GPU: {daemon.log_text()}")


def operation(daemon: RunningDaemon, *words: str) -> dict[str, Any]:
    """How it ended, which has to be well."""
    command = [sys.executable, "-m", "hegmctl", *words, "--json"]
    done = subprocess.run(command, env=environment_for(daemon), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"hegmctl {' '.join(words)}: {done.stdout}{done.stderr}")
    daemon.read_notices()
    ended: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["operation"]
    return ended


def environment_for(daemon: RunningDaemon) -> dict[str, str]:
    """A plain environment with the daemon in it."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HEGM_")}
    paths = f"{ROOT}{os.pathsep}{ROOT / 'client'}"
    return plain | {"HEGM_SOCKET": str(daemon.socket_path), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
