"""Nodes with NVIDIA's GPUs for plans: plain ones, of which a test says what is otherwise."""

from __future__ import annotations

from typing import Any

from hegmd.migration.machine.operation import MIGRATE, SUSPEND
from hegmd.migration.model import (
    AgentSurvey,
    Candidate,
    GpuMemory,
    MigrationPlan,
    NodeSnapshotForPlan,
    PlanRequest,
    PoolMemory,
)
from hegmd.protocol.messages import CudaFacts
from hegmd.protocol.operations import Reason

GIB, MIB = 2**30, 2**20


def a_gpu(name: str, **values: Any) -> GpuMemory:
    other = "gpu1" if name == "gpu0" else "gpu0"
    plain: dict[str, Any] = {
        "id": name,
        "uuid": f"GPU-{name}",
        "vendor": "nvidia",
        "chip": "hopper",
        "free_bytes": 100 * GIB,
        "driver_version": "580.159.04",
        "nvlinks": (other,),
    }
    return GpuMemory(**{**plain, **values})


def cuda_facts(**values: Any) -> CudaFacts:
    plain: dict[str, Any] = {"gpus": ("GPU-gpu0",), "allocator": "native", "expandable": False, "largest_bytes": GIB}
    return CudaFacts(**{**plain, **values})


def an_agent(cuda: CudaFacts | None = None, **values: Any) -> AgentSurvey:
    return AgentSurvey(**{"token": "t", "size_bytes": 32 * GIB, "boundary": 3, "cuda": cuda or cuda_facts(), **values})


def a_process(agent: AgentSurvey | None = None, **values: Any) -> Candidate:
    plain: dict[str, Any] = {
        "pid": 4711,
        "start_ticks": 7,
        "uid": 1000,
        "name": "train.py",
        "gpus": ("gpu0",),
        "kinds": ("compute",),
        "vram_bytes": 33 * GIB,
        "agent": agent,
    }
    return Candidate(**{**plain, **values})


def a_snapshot(*candidates: Candidate, **values: Any) -> NodeSnapshotForPlan:
    plain: dict[str, Any] = {
        "gpus": (a_gpu("gpu0"), a_gpu("gpu1")),
        "candidates": candidates,
        "pool": PoolMemory(budget_bytes=64 * GIB, free_bytes=64 * GIB),
        "available_bytes": 500 * GIB,
    }
    return NodeSnapshotForPlan(**{**plain, **values})


def to(gpu: str = "gpu1", **values: Any) -> PlanRequest:
    return PlanRequest(**{"kind": MIGRATE, "pids": (4711,), "to": gpu, **values})


SUSPENSION = PlanRequest(kind=SUSPEND, pids=(4711,))


def the_plan(found: MigrationPlan | tuple[Reason, ...]) -> MigrationPlan:
    assert isinstance(found, MigrationPlan), found
    return found


def the_reasons(found: MigrationPlan | tuple[Reason, ...]) -> tuple[Reason, ...]:
    assert isinstance(found, tuple), found
    assert all(reason.hint for reason in found)
    return found
