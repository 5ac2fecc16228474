"""Traces for the simulator: 1,000 jobs and 100 requests for room on eight GPUs of 80 GiB, from a seed."""

from __future__ import annotations

import math
from random import Random

from tools.sharing.node import GIB, JobSpec, LeaseSpec

GPUS = {f"gpu{index}": 80 * GIB for index in range(8)}
POOL_BYTES = 1024 * GIB
JOBS, LEASES = 1000, 100
HOURS = 12
# name, number, share of all jobs
PRIORITIES = (("production", 80, 0.1), ("normal", 50, 0.5), ("best-effort", 20, 0.4))
_SIZES_GIB, _SIZE_WEIGHTS = (4, 8, 16, 24, 40, 64), (20, 20, 20, 15, 15, 10)
_LOADS = (0.4, 0.6, 0.8, 1.0)
_MEDIAN_WORK_S, _SPREAD = 360.0, 1.0


def trace(seed: int, jobs: int = JOBS, leases: int = LEASES, hours: float = HOURS) -> list[JobSpec | LeaseSpec]:
    """Return what arrives: more by day than by night, short jobs and long ones, one of twenty on two GPUs."""
    random = Random(seed)
    arrivals = sorted(_arrival_s(random, hours) for _ in range(jobs))
    specs: list[JobSpec | LeaseSpec] = [_job(random, f"j{number}", at_s) for number, at_s in enumerate(arrivals)]
    specs += [
        LeaseSpec(
            id=f"l{number}",
            arrival_s=_arrival_s(random, hours),
            hold_s=random.uniform(60, 600),
            size_bytes=random.choice((16, 32, 48)) * GIB,
        )
        for number in range(leases)
    ]
    return specs


def _arrival_s(random: Random, hours: float) -> float:
    """Return an instant; in the middle of the trace three times as much arrives as at its ends."""
    while True:
        at = random.random()
        if random.random() < (1 + 2 * math.sin(math.pi * at)) / 3:
            return at * hours * 3600


def _job(random: Random, job_id: str, at_s: float) -> JobSpec:
    count = 2 if random.random() < 0.05 else 1
    size_bytes = random.choices(_SIZES_GIB, _SIZE_WEIGHTS)[0] * GIB
    (priority,) = random.choices([row[1] for row in PRIORITIES], [row[2] for row in PRIORITIES])
    return JobSpec(
        id=job_id,
        arrival_s=at_s,
        work_s=random.lognormvariate(math.log(_MEDIAN_WORK_S), _SPREAD),
        needs_bytes=(size_bytes,) * count,
        priority=priority,
        load=random.choice(_LOADS),
        batch_s=random.uniform(0.1, 0.8),
        is_preemptible=priority < 80,
    )
