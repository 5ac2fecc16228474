"""One command that has ranks fail in every way, and says whether they continued exactly and how long that took.

    PYTHONPATH=.:client python3 -m tests.gpu.block_run [--backend nccl] [--ranks 1,2,3] [--times N] [CASE...]

Without a GPU it takes gloo. Each case is one job of `hegmctl run --ranks` with N faults, one after the other, under a
hegmd of its own. A case is right if every loss of every rank, those of repeated steps too, is that of the undisturbed
job, and all faults were recovered from. The times are from the fault to the next step of all ranks; of a hang, from the
last step. With --out FILE, that has all results as JSON, also of a run that is cut.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.daemon import RunningDaemon

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "e2e" / "moved" / "block_ranks.py"
LIMIT_S = 900.0
_RECOVERED = re.compile(r"recovered from step (\d+) in ([0-9.]+) s")


class Case(NamedTuple):
    """The fault, with how many steps and how long a pause after each, so that a spare process is ready again."""

    fault: str
    steps: int = 10
    pace_s: float = 0.0
    soft_limit_s: float = 30.0
    least_ranks: int = 1


QUICK, SLOW = (10, 0.0), (25, 0.2)
CASES = {
    "exception in the forward pass": Case("rank=LAST,kind=exception", *QUICK),
    "exception in the backward pass": Case("rank=LAST,kind=exception,phase=backward", *QUICK),
    "exception before the step": Case("rank=LAST,kind=exception,phase=commit", *QUICK),
    "exception within the step": Case("rank=LAST,kind=exception,phase=torn", *QUICK),
    "exception within the step of all": Case("rank=all,kind=exception,phase=torn", *QUICK),
    "out of memory": Case("rank=LAST,kind=oom", *QUICK),
    "hang in sleep, limit 1 s": Case("rank=LAST,kind=hang", *QUICK, 1.0),
    "hang in a lock, limit 1 s": Case("rank=LAST,kind=lock", *QUICK, 1.0),
    "hang in a socket, limit 1 s": Case("rank=LAST,kind=socket", *QUICK, 1.0),
    "SIGKILL in the forward pass": Case("rank=LAST,kind=sigkill", *SLOW),
    "SIGKILL in the backward pass": Case("rank=LAST,kind=sigkill,phase=backward", *SLOW),
    "SIGKILL within the step": Case("rank=LAST,kind=sigkill,phase=torn", *SLOW),
    "SIGKILL of rank 0": Case("rank=0,kind=sigkill", *SLOW, 30.0, 2),
    "SIGKILL of all": Case("rank=all,kind=sigkill", *SLOW, 30.0, 2),
    "SIGSTOP, limits 1 s": Case("rank=LAST,kind=sigstop", *SLOW, 1.0),
    "C call that holds the interpreter, limits 1 s": Case("rank=LAST,kind=gil", *SLOW, 1.0),
}


def main() -> int:
    arguments = _arguments()
    results: list[dict[str, Any]] = []
    about = {
        "command": " ".join(["python3 -m tests.gpu.block_run", *sys.argv[1:]]),
        "revision": _output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "conditions": f"{platform.machine()}, {os.cpu_count()} processor cores, {arguments.note}".rstrip(", "),
    }
    for ranks in map(int, arguments.ranks.split(",")):
        expected: dict[int, set[str]] = {}
        for name, case in CASES.items():
            if (arguments.case and name not in arguments.case) or ranks < case.least_ranks:
                continue
            steps = case.steps * (arguments.times + 1)
            if steps not in expected:
                expected[steps] = set(_run(arguments, ranks, Case("", case.steps), steps, "")[0])
            result = _tried(arguments, ranks, name, case, expected[steps])
            results.append(result)
            print(f"{ranks} ranks, {name}: {result['verdict']}; median {result['median_s']} s of {result['faults']}")
            if arguments.out is not None:
                arguments.out.write_text(json.dumps({**about, "rows": results}, indent=1) + "\n")
    return 0 if all(result["verdict"] == "exact" for result in results) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", default="1,2,3", help="numbers of ranks")
    parser.add_argument("--times", type=int, default=20, help="faults in each case")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="", help="conditions that the record is to name")
    parser.add_argument("case", nargs="*", help="names of cases; all without")
    return parser.parse_args()


def _tried(arguments: argparse.Namespace, ranks: int, name: str, case: Case, expected: set[str]) -> dict[str, Any]:
    """One job with all faults of a case, each in a generation of its own."""
    fault = case.fault.replace("LAST", str(ranks - 1))
    faults = ";".join(
        f"{fault},step={number * case.steps},generation={number}" for number in range(1, arguments.times + 1)
    )
    output, errors, status = _run(arguments, ranks, case, case.steps * (arguments.times + 1), faults)
    took = [float(found) for _, found in _RECOVERED.findall(errors)]
    verdict = "exact"
    if status != 0:
        verdict = f"ended with {status}: {errors.strip().splitlines()[-1] if errors.strip() else ''}"
    elif set(output) != expected:
        verdict = f"{len(set(output) ^ expected)} losses differ"
    elif len(took) < arguments.times:
        verdict = f"{arguments.times - len(took)} faults were not recovered from"
    return {
        "ranks": ranks,
        "fault": name,
        "verdict": verdict,
        "median_s": round(statistics.median(took), 3) if took else None,
        "max_s": max(took, default=None),
        "faults": len(took),
    }


def _run(arguments: argparse.Namespace, ranks: int, case: Case, steps: int, faults: str) -> tuple[list[str], str, int]:
    words = [str(steps), str(case.soft_limit_s), arguments.backend, str(arguments.width), str(case.pace_s)]
    with tempfile.TemporaryDirectory() as folder, RunningDaemon(Path(folder)) as daemon:
        hegmctl = [sys.executable, "-m", "hegmctl", "--socket", str(daemon.socket_path), "run", "--ranks", str(ranks)]
        done = subprocess.run(
            [*hegmctl, "--", sys.executable, str(SCRIPT), *words],
            env={**os.environ, "HEGM_FAULT": faults},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    return done.stdout.splitlines(), done.stderr, done.returncode


def _output(*words: str) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
