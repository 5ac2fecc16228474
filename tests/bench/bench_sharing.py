"""How long one decision of the sharing policy takes with 1,000 jobs, and what turns cost.

A decision: the median of 50, on several nodes, in processor time; it neither waits nor uses another thread. Turns: on a
model of an H200 in simulated time, and on a real daemon with a simulated GPU, which takes ten minutes.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from random import Random

from hegmd.sharing.model import QUEUED, RUNNING, SUSPENDED, Gpu, Job, Snapshot
from hegmd.sharing.policy import decide
from tests.bench import bench_turns
from tests.bench.report import Row
from tools.sharing.node import JobSpec, Node

GIB = 1 << 30
JOBS, GPUS, DECISIONS = 1000, 16, 50
BUDGET_MS, LOST_PERCENT = 10.0, bench_turns.LOST_BUDGET_PERCENT
NOW = 1000.0


def crowd(priorities: int) -> Snapshot:
    """Return 16 full GPUs with some hundred jobs on them, and the rest of 1,000 jobs waiting."""
    random = Random(1)
    free = {f"gpu{index}": 80 * GIB for index in range(GPUS)}
    jobs: list[Job] = []
    for number in range(JOBS):
        size_bytes, gpu = random.choice((1, 2, 4, 8, 16, 40)) * GIB, random.choice(list(free))
        state = RUNNING if free[gpu] >= size_bytes else random.choice((QUEUED, SUSPENDED))
        held = {gpu: size_bytes} if state == RUNNING else {}
        free[gpu] -= sum(held.values())
        jobs.append(
            Job(
                *(f"j{number}", f"job{number}", state, random.randrange(priorities) * 100 // priorities),
                *(1000 + number % 20, NOW - random.uniform(3, 300)),
                gpus=() if state == QUEUED else (gpu,),
                needs_bytes=(size_bytes,),
                held_bytes=held,
                preempts_others=True,
            )
        )
    gpus = tuple(Gpu(gpu, 80 * GIB, free_bytes, "H200") for gpu, free_bytes in free.items())
    return Snapshot(gpus=gpus, jobs=tuple(jobs))


def decision_ms(snapshot: Snapshot) -> float:
    """Return how long a decision takes, the median of some."""
    times: list[float] = []
    for _ in range(DECISIONS):
        began_s = time.process_time()
        decide(snapshot, NOW)
        times.append((time.process_time() - began_s) * 1e3)
    return statistics.median(times)


def run() -> list[Row]:
    """Return the figures beside the budget."""
    crowded = crowd(3)
    settled = crowded._replace(
        jobs=tuple(replace(job, since_s=NOW - 5) if job.state == RUNNING else job for job in crowded.jobs)
    )
    own = crowded._replace(jobs=tuple(replace(job, preempts_others=False) for job in crowded.jobs))
    return [
        Row("one decision, 1,000 jobs of 3 priorities, all turns ended at once", decision_ms(crowded), "ms", BUDGET_MS),
        Row("one decision, the same while turns last", decision_ms(settled), "ms", BUDGET_MS),
        Row(
            "one decision, the same with jobs of 20 users that suspend only their own",
            decision_ms(own),
            "ms",
            BUDGET_MS,
        ),
        Row("one decision, 1,000 jobs of 100 priorities", decision_ms(crowd(100)), "ms", BUDGET_MS),
        Row("model of an H200, ten minutes of two 32 GiB jobs: lost", modelled_loss_percent(), "%", LOST_PERCENT),
        *bench_turns.run(),
    ]


def modelled_loss_percent() -> float:
    """Return the part of ten minutes in which two jobs that take turns on one GPU do not compute."""
    node = Node({"gpu0": 40 * GIB}, decide)
    node.add(JobSpec(f"j{number}", 0, math.inf, (32 * GIB,), startup_s=0.0) for number in range(2))
    node.run(600)
    return 100.0 * (1.0 - node.computed_s / node.now)
