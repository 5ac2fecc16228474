"""One command for a machine with two NVIDIA GPUs: what do NCCL's settings and the agent cost the steps of two ranks?

    PYTHONPATH=.:client python3 -m tests.gpu.nccl_cost --out FILE [--gib 1,16] [--steps N] [--repeat N] [--no-proof]

For each size, DDP trainings of `training/ranked.py` run one after another: with NVLink multicast, without it as
`hegmctl run` sets it, and so under `hegmctl run`. The figure is the median step of rank 0 in seconds, the first fifth
of the steps left out. Then `hegmctl doctor --nccl` moves its throwaway job, which proves this node's combination. FILE
has the results as JSON after each run. Without a GPU the ranks use gloo, and the figures say nothing.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from hegmctl.running import nccl_settings
from tests.gpu.moves_node import Node, WentWrongError
from tests.gpu.nccl_run import READY_WITHIN_S, REFERENCE_WITHIN_S, RankedJob, Results

MULTICAST, WITHOUT, AGENT = "with multicast", "without", "without, under hegmctl run"
JOB = "ddp-times@alone"


def step_s(folder: Path, options: argparse.Namespace, way: str, node: Node) -> float:
    """Train to the end in that way, and return the median step. Raises WentWrongError."""
    environ = {**os.environ, "PYTHONPATH": "", **(nccl_settings("keep") if way == MULTICAST else nccl_settings(None))}
    run: list[str] = []
    if way == AGENT:
        environ, run = node.environ(), [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--"]
    with closing(RankedJob(JOB, folder, options, environ, run, options.steps)) as job:
        job.wait_for(options.steps, REFERENCE_WITHIN_S)
        job.process.wait(READY_WITHIN_S)
    times = json.loads((folder / f"{JOB}.times").read_text())
    return statistics.median(times[len(times) // 5 :])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON with all results")
    parser.add_argument("--gib", default="1,16", metavar="SIZES", help="weights, gradients and moments of each rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=2, help="so many runs of each way, by turns")
    parser.add_argument("--nccl", metavar="FILE", help="a libnccl.so.2 that the trainings use instead of PyTorch's")
    parser.add_argument("--no-proof", action="store_true", help="leave out hegmctl doctor --nccl")
    options = parser.parse_args(argv)
    results = Results(options.out, time.monotonic())
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-nccl-")))
        (folder / "node").mkdir()
        node = held.enter_context(Node(folder / "node"))
        for size in options.gib.split(","):
            options.gib = float(size)
            medians: dict[str, list[float]] = {MULTICAST: [], WITHOUT: [], AGENT: []}
            for _ in range(options.repeat):
                for way, seen in medians.items():
                    seen.append(step_s(folder, options, way, node))
                    results.note(way, "run", gib=options.gib, step_s=round(seen[-1], 5))
            for way, seen in medians.items():
                ratio = statistics.median(seen) / statistics.median(medians[MULTICAST])
                results.note(
                    way, "median", gib=options.gib, step_s=round(statistics.median(seen), 5), ratio=round(ratio, 4)
                )
        if not options.no_proof:
            try:
                results.note("doctor", "proof", answer=node.hegmctl("doctor", "--nccl", "--python", sys.executable))
            except (WentWrongError, subprocess.TimeoutExpired) as error:
                results.note("doctor", "proof", wrong=str(error)[:1500], log=node.log_tail(40).splitlines())
    print(f"{len(results.steps)} results, {len(results.wrong)} wrong")
    return bool(results.wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
