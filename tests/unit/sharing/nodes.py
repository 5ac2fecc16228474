"""Small nodes for the tests of the sharing policy: GPUs of 80 GiB, and jobs in one line each."""

from __future__ import annotations

from hegmd.sharing.model import HELD, PENDING, QUEUED, RUNNING, SUSPENDED, Action, Gpu, Job, Lease, Rules, Snapshot
from hegmd.sharing.policy import decide

GIB = 1 << 30
USER = 1000
OTHER_USER = 1001
NOW = 1000.0


def gpu(gpu_id: str = "gpu0", free_gib: int | None = 80, *, total_gib: int = 80, is_healthy: bool = True) -> Gpu:
    free_bytes = None if free_gib is None else free_gib * GIB
    return Gpu(gpu_id, total_gib * GIB, free_bytes, chip="H200", is_healthy=is_healthy)


def running(job_id: str, size_gib: int = 40, gpu_id: str = "gpu0", *, since_s: float = 0.0, priority: int = 50) -> Job:
    return Job(
        *(job_id, job_id, RUNNING, priority, USER, since_s),
        gpus=(gpu_id,),
        needs_bytes=(size_gib * GIB,),
        held_bytes={gpu_id: size_gib * GIB},
        chip="H200",
    )


def queued(job_id: str, size_gib: int | None = 40, *, since_s: float = 500.0, priority: int = 50) -> Job:
    needs_bytes = None if size_gib is None else (size_gib * GIB,)
    return Job(job_id, job_id, QUEUED, priority, USER, since_s, needs_bytes=needs_bytes)


def suspended(
    job_id: str, size_gib: int = 40, gpu_id: str = "gpu0", *, since_s: float = 500.0, priority: int = 50
) -> Job:
    return Job(
        *(job_id, job_id, SUSPENDED, priority, USER, since_s),
        gpus=(gpu_id,),
        needs_bytes=(size_gib * GIB,),
        chip="H200",
    )


def pending(size_gib: int, gpu_id: str | None = "gpu0", *, priority: int = 80, lease_id: str = "l1") -> Lease:
    return Lease(lease_id, lease_id, PENDING, priority, USER, NOW, size_gib * GIB, gpu_id)


def held(size_gib: int, *, used_gib: int = 0, lease_id: str = "l1") -> Lease:
    return Lease(lease_id, lease_id, HELD, 80, USER, NOW, size_gib * GIB, "gpu0", used_gib * GIB)


def decided(
    *parts: Gpu | Job | Lease, rules: Rules | None = None, pool_gib: int | None = None, now: float = NOW
) -> tuple[Action, ...]:
    return decide(node(*parts, rules=rules, pool_gib=pool_gib), now).actions


def node(*parts: Gpu | Job | Lease, rules: Rules | None = None, pool_gib: int | None = None) -> Snapshot:
    return Snapshot(
        gpus=tuple(part for part in parts if isinstance(part, Gpu)),
        jobs=tuple(part for part in parts if isinstance(part, Job)),
        leases=tuple(part for part in parts if isinstance(part, Lease)),
        rules=rules or Rules(),
        pool_free_bytes=None if pool_gib is None else pool_gib * GIB,
    )


def kinds(actions: tuple[Action, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(action.kind, action.subject, action.gpus) for action in actions]
