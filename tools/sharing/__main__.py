"""`python -m tools.sharing`: run the daemon's policy on a trace, beside FIFO and no sharing, and print what it gains.

`--record` writes docs/measurements/sharing_simulation.json, from which the picture in docs/sharing.md is drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from hegmd.sharing.model import Rules
from hegmd.sharing.policy import decide
from tools.pictures.records import MEASUREMENTS, ROOT
from tools.sharing.node import Node, Policy
from tools.sharing.other_policies import fifo, no_sharing
from tools.sharing.traces import GPUS, HOURS, JOBS, LEASES, POOL_BYTES, PRIORITIES, trace

POLICIES: dict[str, Policy] = {"sharing": decide, "FIFO": fifo, "no sharing": no_sharing}
RECORD = MEASUREMENTS / "sharing_simulation.json"
Row = dict[str, str | float]


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def simulated(policy: Policy, seed: int, jobs: int = JOBS, rules: Rules | None = None) -> Node:
    """Return the node after the trace has ended and every job with it."""
    node = Node(dict(GPUS), policy, rules or Rules(), pool_bytes=POOL_BYTES)
    node.add(trace(seed, jobs, LEASES * jobs // JOBS, HOURS * jobs / JOBS))
    node.run()
    unfinished = [job.spec.id for job in node.jobs.values() if job.ended_s is None]
    if unfinished:
        raise RuntimeError(f"{len(unfinished)} jobs never ended, such as {unfinished[0]}")
    return node


def figures(name: str, node: Node) -> Row:
    """Return what the policy achieved. Waiting is from the arrival of a job to its first batch."""
    jobs = list(node.jobs.values())
    last_arrival_s = max(job.spec.arrival_s for job in jobs)
    row: Row = {
        "policy": name,
        # As a share of the time in which jobs arrive: the end of a trace has only its last jobs.
        "utilisation_percent": round(100 * node.computed_at(last_arrival_s) / last_arrival_s / len(node.gpus), 1),
        "ended_h": round(node.now / 3600, 1),
        "mean_turnaround_min": round(
            statistics.mean((job.ended_s or 0.0) - job.spec.arrival_s for job in jobs) / 60, 1
        ),
    }
    for label, priority, _ in PRIORITIES:
        waits = [(job.first_step_s or 0.0) - job.spec.arrival_s for job in jobs if job.spec.priority == priority]
        row |= {
            f"{label}_wait_p50_s": round(percentile(waits, 50)),
            f"{label}_wait_p95_s": round(percentile(waits, 95)),
        }
    rooms = [(lease.granted_s or 0.0) - lease.spec.arrival_s for lease in node.leases.values()]
    row |= {"room_wait_p50_s": round(percentile(rooms, 50), 1), "room_wait_p95_s": round(percentile(rooms, 95), 1)}
    row["switches"] = sum(job.switches for job in jobs)
    switching_s = sum(job.switching_s * job.view.gpu_count for job in jobs)
    row["loss_percent"] = round(100 * switching_s / (switching_s + node.computed_s), 2)
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the figures as a table, a policy in each column."""
    lines: list[str] = []
    for key in rows[0]:
        cells = [f"{row[key]:>12,}" if isinstance(row[key], int | float) else f"{row[key]:>12}" for row in rows]
        lines.append(f"{key.replace('_', ' '):28}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.sharing", description="Simulate sharing on a trace.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--record", action="store_true", help="write docs/measurements/sharing_simulation.json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, policy in POLICIES.items():
        began_s = time.monotonic()
        node = simulated(policy, arguments.seed, arguments.jobs)
        took_s = time.monotonic() - began_s
        print(f"{name}: {node.decisions} decisions in {took_s:.0f} s", file=sys.stderr)
        rows.append(figures(name, node))
    print(table(rows))
    if arguments.record:
        write_record(rows, arguments.seed, arguments.jobs)


def write_record(rows: Sequence[Row], seed: int, jobs: int) -> None:
    """Write what the picture is drawn from."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    record = {
        "title": f"Simulation: {jobs:,} jobs and {LEASES * jobs // JOBS} requests for room on 8 GPUs of 80 GiB",
        "machine": "a model in simulated time: any machine gives the same figures",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "revision": revision,
        "command": f"make simulate-sharing (seed {seed})",
        "conditions": "slices on; switches as long as measured on H200; the trace is made up",
        "rows": list(rows),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
