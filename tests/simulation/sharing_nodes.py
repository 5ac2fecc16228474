"""Nodes and traces at random for the sharing policy, each from its seed alone."""

from __future__ import annotations

import math
from random import Random

from hegmd.sharing.model import (
    HELD,
    JOB_STATES,
    LEAVING,
    PENDING,
    QUEUED,
    RUNNING,
    SUSPENDED,
    USER_SUSPENDED,
    Gpu,
    Job,
    Lease,
    Rules,
    Snapshot,
)
from tools.sharing.node import GIB, JobSpec, LeaseSpec, Node, Policy

NOW = 1000.0
PRIORITIES = (20, 20, 50, 50, 50, 80)
SIZES_GIB = (2, 5, 10, 20, 40, 60)


def snapshot_of(seed: int) -> Snapshot:
    """Return a node in any state, likely or not, whose memory adds up."""
    random = Random(seed)
    gpus = [f"gpu{index}" for index in range(random.randint(1, 4))]
    total_bytes = 80 * GIB
    free = {gpu: total_bytes - random.choice((0, 0, 0, 3, 30)) * GIB for gpu in gpus}
    leases: list[Lease] = []
    for number in range(random.randint(0, 3)):
        size_bytes, gpu = random.choice(SIZES_GIB) * GIB, random.choice(gpus)
        if random.random() < 0.5 and size_bytes <= free[gpu]:
            used_bytes = random.choice((0, size_bytes // 2, size_bytes))
            free[gpu] -= used_bytes
            leases.append(Lease(f"l{number}", f"l{number}", HELD, 80, 1, 0.0, size_bytes, gpu, used_bytes))
        else:
            wished = random.choice((gpu, None))
            leases.append(_pending(random, f"l{number}", size_bytes, wished))
    jobs = [_job(random, f"j{number}", gpus, free) for number in range(random.randint(2, 16))]
    return Snapshot(
        gpus=tuple(
            Gpu(gpu, total_bytes, None if random.random() < 0.05 else free[gpu], "H200", random.random() > 0.05)
            for gpu in gpus
        ),
        jobs=tuple(jobs),
        leases=tuple(leases),
        rules=Rules(
            slices=random.random() < 0.8, headroom_bytes=random.choice((0, 0, GIB)), turns_per_gpu=random.choice((1, 4))
        ),
        pool_free_bytes=random.choice((None, None, 30 * GIB, 120 * GIB)),
    )


def _pending(random: Random, lease_id: str, size_bytes: int, gpu: str | None) -> Lease:
    return Lease(
        *(
            lease_id,
            lease_id,
            PENDING,
            random.choice((50, 80, 90)),
            random.choice((1, 2)),
            _past(random),
            size_bytes,
            gpu,
        ),
        preempts_others=random.random() < 0.7,
        retry_at_s=_retry(random),
    )


def _job(random: Random, job_id: str, gpus: list[str], free: dict[str, int]) -> Job:
    count = random.choice((1, 1, 1, min(2, len(gpus))))
    needs = tuple(random.choice(SIZES_GIB) * GIB for _ in range(count))
    places = random.sample(gpus, count)
    held = {gpu: random.choice((need, need, need // 2)) for gpu, need in zip(places, needs, strict=True)}
    state = random.choice((*JOB_STATES, *[RUNNING] * 10))
    if state not in (QUEUED, SUSPENDED, USER_SUSPENDED):
        if any(free[gpu] < need for gpu, need in zip(places, needs, strict=True)):
            state = random.choice((QUEUED, SUSPENDED))
        else:
            for gpu in places:
                free[gpu] -= held[gpu]
    if state in (QUEUED, SUSPENDED, USER_SUSPENDED):
        held = {}
    return Job(
        *(job_id, job_id, state, random.choice(PRIORITIES), random.choice((1, 1, 2)), _past(random)),
        gpus=() if state == QUEUED else tuple(places),
        needs_bytes=None if state in (QUEUED, LEAVING) and count == 1 and random.random() < 0.2 else needs,
        held_bytes=held,
        allowed_gpus=tuple(places) if random.random() < 0.2 else None,
        chip=random.choice(("H200", "H200", "H200", "H100")) if state == SUSPENDED else None,
        is_preemptible=random.random() < 0.8,
        preempts_others=random.random() < 0.7,
        turn_s=random.choice((0.0, 0.0, 10.0, 40.0)),
        switch_s=random.choice((0.2, 1.0, 4.0)),
        hindrance="the agent of process 4711 is not connected" if random.random() < 0.1 else "",
        retry_at_s=_retry(random),
    )


def _past(random: Random) -> float:
    return NOW - random.choice((0.1, 1.0, 10.0, 25.0, 35.0, 100.0)) * random.uniform(0.9, 1.1)


def _retry(random: Random) -> float | None:
    return random.choice((None, None, None, None, NOW - 1, NOW + 5))


def life(seed: int, policy: Policy) -> Node:
    """Return a node on which 25 jobs arrive, with leases, other operations, refusals and changes of priority."""
    random = Random(seed)
    gpus = {f"gpu{index}": 80 * GIB for index in range(random.randint(1, 3))}
    node = Node(gpus, policy, Rules(), pool_bytes=random.choice((None, 200 * GIB, 120 * GIB)))
    specs: list[JobSpec | LeaseSpec] = []
    for number in range(25):
        count = random.choice((1, 1, 1, 1, len(gpus)))
        specs.append(
            JobSpec(
                id=f"j{number}",
                arrival_s=random.uniform(0, 600),
                work_s=random.expovariate(1 / 60),
                needs_bytes=tuple(random.choice(SIZES_GIB) * GIB for _ in range(count)),
                priority=random.choice(PRIORITIES),
                uid=random.choice((1, 2)),
                is_preemptible=random.random() < 0.8,
                preempts_others=random.random() < 0.8,
                is_need_known=count > 1 or random.random() < 0.8,
            )
        )
    specs += [
        LeaseSpec(
            id=f"l{number}",
            arrival_s=random.uniform(0, 800),
            hold_s=random.choice((0.5, 5, 100)),
            size_bytes=random.choice(SIZES_GIB) * GIB,
            gpu=random.choice((None, "gpu0")),
        )
        for number in range(6)
    ]
    node.add(specs)
    for _ in range(30):
        _disturb(node, random, f"j{random.randrange(25)}", random.uniform(0, 900))
    return node


def _disturb(node: Node, random: Random, job_id: str, at_s: float) -> None:
    """Have something happen to a job at that instant that the policy did not decide."""
    what = random.randrange(4)
    for_s = random.choice((1.0, 30.0))

    def present() -> bool:
        return job_id in node.jobs and not math.isinf(node.jobs[job_id].left_s) and node.jobs[job_id].ended_s is None

    def change(**changes: object) -> None:
        if present():
            node.change(job_id, **changes)

    if what == 0:
        node.at(at_s, lambda: change(hindrance="the agent of process 4711 is not connected"))
        node.at(at_s + for_s, lambda: change(hindrance=""))
    elif what == 1:
        node.at(at_s, lambda: change(retry_at_s=at_s + for_s))
    elif what == 2:
        node.at(at_s, lambda: change(priority=random.choice(PRIORITIES)))
    else:
        node.at(at_s, lambda: node.occupy(job_id, for_s) if present() else None)
