"""`python -m tests.bench.many_recoveries`: a training that is killed again and again, 50 times unless told.

Each time it is killed a moment after its next snapshot, and it ends by itself after the last recovery. Every loss is
compared with that of an undisturbed run. After each recovery a line of JSON has the memory, descriptors and threads of
the daemon and of `hegmctl run`, what the pool holds for the job, and the files of the pool. The exit status is 1 if a
loss differs, or if one of these grew in the second half.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.bench.failing_ways import SIMULATED, Case, Options, Run, pool_of
from tests.bench.failures import folder_of, node
from tests.bench.gauges import Memory

TIMES, STEPS = 50, 100_000
# Growth that is not reported: Python's allocator takes this much memory at once.
ALLOWED_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """After one recovery."""

    number: int
    next_step_s: float
    daemon_bytes: int
    daemon_fds: int
    daemon_threads: int
    supervisor_bytes: int
    supervisor_fds: int
    held_bytes: int
    pool_files: int


class Repeated:
    """A job that is killed again and again."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def kill_once(self, number: int) -> Sample:
        """Kill it after its next snapshot, and wait until it has come further than before."""
        run = self._run
        before = self._newest()
        run.until(lambda: self._newest() > before, "another snapshot")
        step, starts = run.furthest(), len(run.pids())
        struck_at = time.monotonic()
        os.kill(run.pids()[-1], signal.SIGKILL)
        run.until(lambda: len(run.pids()) > starts and run.furthest() > step, "a step after a recovery")
        took_s = time.monotonic() - struck_at
        daemon, supervisor = (psutil.Process(pid) for pid in (run.daemon.process.pid, run.process.pid))
        found = run.recovery()
        return Sample(
            number=number,
            next_step_s=round(took_s, 1),
            daemon_bytes=Memory.of(daemon.pid).anonymous_bytes,
            daemon_fds=daemon.num_fds(),
            daemon_threads=daemon.num_threads(),
            supervisor_bytes=Memory.of(supervisor.pid).anonymous_bytes,
            supervisor_fds=supervisor.num_fds(),
            held_bytes=0 if found is None else found.held_bytes,
            pool_files=len(list(pool_of(run.daemon).iterdir())),
        )

    def _newest(self) -> int:
        """Return the number of the job's newest snapshot; 0 before the first."""
        found = self._run.recovery()
        return 0 if found is None else max((slot.generation or 0 for slot in found.slots), default=0)


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return the figures whose minimum is larger in the second half; a minimum, because a snapshot may be under way.

    The first quarter does not count: the daemon opens files then that it keeps.
    """
    samples = samples[len(samples) // 4 :]
    half = len(samples) // 2
    found: list[str] = []
    for name in ("daemon_bytes", "daemon_fds", "daemon_threads", "supervisor_bytes", "supervisor_fds", "held_bytes"):
        first, second = (min(getattr(one, name) for one in part) for part in (samples[:half], samples[half:]))
        if second - first > (ALLOWED_BYTES if name.endswith("_bytes") else 0):
            found.append(f"{name}: {first} to {second}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.many_recoveries", description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a file for the samples, one JSON a line")
    arguments = parser.parse_args(argv)
    options = Options(gpus=SIMULATED, hang_limit="off", case_limit_s=1e9, steps=STEPS)
    with node(SIMULATED) as daemon, folder_of("job") as folder, folder_of("alone") as other:
        run = Run(daemon, folder, Case("killed again and again"), 1, options)
        try:
            run.until_protected()
            samples: list[Sample] = []
            for number in range(1, arguments.times + 1):
                samples.append(Repeated(run).kill_once(number))
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(samples[-1])) + "\n")
            run.have_it_end()
            run.until(lambda: run.process.poll() is not None, "its end")
            lines = run.lines()
        finally:
            run.end()
        options.steps = run.last_step
        alone = Run(daemon, other, Case("alone"), 1, options, alone=True)
        try:
            alone.until(lambda: alone.process.poll() is not None, "its end")
            expected = set(alone.lines())
        finally:
            alone.end()
    problems = grown(samples)
    if run.process.returncode or set(lines) != expected:
        problems.append(f"status {run.process.returncode}; {len(set(lines) ^ expected)} steps differ")
    took = sorted(sample.next_step_s for sample in samples)
    print(
        f"{len(samples)} recoveries, {len(lines)} steps made, {len(expected)} different ones, all equal: {not problems}"
    )
    print(f"SIGKILL to the next step: median {took[len(took) // 2]} s, longest {took[-1]} s")
    print("\n".join([json.dumps(asdict(samples[0])), json.dumps(asdict(samples[-1])), *problems]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
