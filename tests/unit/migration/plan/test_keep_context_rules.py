"""Plans of a suspend that keeps CUDA contexts: where it works, what stays, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.migration.machine.operation import FORWARD, RESUME, SUSPEND, JobProcess, Operation
from hegmd.migration.model import Candidate, NodeSnapshotForPlan, PlanRequest
from hegmd.migration.plan.keep_context_rules import against_image
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.protocol.messages import Communicators
from hegmd.protocol.operations import KEEP_CONTEXT
from tests.unit.migration.nvidia_nodes import (
    GIB,
    MIB,
    SUSPENSION,
    a_gpu,
    a_process,
    a_snapshot,
    an_agent,
    cuda_facts,
    the_plan,
    the_reasons,
)

KEEPING = SUSPENSION.replace(keep_context=True)


def plan_of(candidate: Candidate, **values: Any) -> Any:
    return the_plan(planned(a_snapshot(candidate, **values), KEEPING))


def reasons_of(candidate: Candidate, request: PlanRequest = KEEPING, **values: Any) -> list[str]:
    return [reason.message for reason in the_reasons(planned(a_snapshot(candidate, **values), request))]


def test_the_plan_shows_what_stays_and_where_it_can_resume() -> None:
    plan = plan_of(a_process(an_agent(cuda_facts(reserved_bytes=32 * GIB))))
    (worker,) = plan.workers
    assert (worker.method, worker.carrier, worker.to, worker.driver_bytes) == (KEEP_CONTEXT, "host", None, 0)
    assert worker.stays_bytes == GIB, "33 GiB by NVML, 32 GiB of them the allocator's"
    assert "1.0 GiB of process 4711 stays on gpu0" in plan.hazards[0]
    assert "it can resume on gpu0 only" in plan.hazards[0]
    assert not any("driver" in step or "checkpoint" in step for step in plan.steps)


def test_it_takes_less_time_than_with_the_drivers_checkpoint() -> None:
    job = a_process(an_agent())
    whole = the_plan(planned(a_snapshot(job), SUSPENSION))
    kept = plan_of(job)
    assert kept.estimate_s < whole.estimate_s
    assert kept.pool_needed_bytes == whole.pool_needed_bytes


def test_values_that_the_driver_does_not_report_are_unknown_and_not_zero() -> None:
    plan = plan_of(a_process(an_agent(), vram_bytes=None))
    assert plan.workers[0].stays_bytes is None
    assert "an unknown amount of process 4711 stays on gpu0" in plan.hazards[0]


@pytest.mark.parametrize(
    ("gpu", "carrier"),
    [
        ({"driver_version": "535.183.01"}, "host"),
        ({"driver_version": None}, "host"),
        ({"mig": True}, "worker"),
        ({"mps": True}, "worker"),
    ],
)
def test_it_works_where_the_driver_calls_do_not(gpu: dict[str, Any], carrier: str) -> None:
    gpus = (a_gpu("gpu0", **gpu), a_gpu("gpu1"))
    job = a_process(an_agent())
    assert reasons_of(job, SUSPENSION, gpus=gpus), "the driver can do it here, so this shows nothing"
    assert plan_of(job, gpus=gpus).workers[0].carrier == carrier


def test_a_refusal_of_the_driver_suggests_keep_context() -> None:
    gpus = (a_gpu("gpu0", mig=True), a_gpu("gpu1"))
    (reason,) = the_reasons(planned(a_snapshot(a_process(an_agent()), gpus=gpus), SUSPENSION))
    assert "hegmctl suspend --keep-context 4711" in reason.hint
    (without,) = [
        reason
        for reason in the_reasons(planned(a_snapshot(a_process(), gpus=gpus), SUSPENSION))
        if "MIG" in reason.message
    ]
    assert "--keep-context" not in without.hint, "a process without an agent cannot keep its context"


def test_communicators_stay_connected_and_ranks_stop_together() -> None:
    groups = Communicators(mechanism="none", groups=1, backends=("nccl",), uncovered=("a group of its own",))
    ranks = [
        a_process(
            an_agent(rank=rank, world_size=2, communicators=groups, size_bytes=GIB),
            pid=4711 + rank,
            job="j",
            gpus=(f"gpu{rank}",),
            vram_bytes=2 * GIB,
        )
        for rank in range(2)
    ]
    assert the_reasons(planned(a_snapshot(*ranks), SUSPENSION)), "the driver can move them, so this shows nothing"
    plan = the_plan(planned(a_snapshot(*ranks), KEEPING))
    assert [worker.communicators for worker in plan.workers] == ["", ""]
    assert plan.is_distributed
    assert not any("disconnect" in hazard for hazard in plan.hazards)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (a_process(), "process 4711 has no agent, which --keep-context needs"),
        (a_process(an_agent(cuda_facts(hazards=("graphs",)))), "captured CUDA graphs"),
        (a_process(an_agent(size_bytes=0)), "no storages that can be offloaded"),
    ],
)
def test_a_process_whose_storages_cannot_leave_is_refused(job: Candidate, message: str) -> None:
    assert any(message in reason for reason in reasons_of(job))


@pytest.mark.parametrize(
    ("carrier", "gpu", "message", "hint"),
    [
        ("driver", {}, "driver carries bytes by the driver's checkpoint only", "omit --carrier"),
        ("host", {"mig": True}, "host cannot copy under MIG or MPS", "use --carrier worker"),
        ("peer", {}, "peer copies only serve a migration", "omit --carrier"),
        ("mule", {}, "there is no carrier 'mule'", "there are peer, host, worker, driver"),
    ],
)
def test_a_carrier_that_cannot_is_refused_by_name(carrier: str, gpu: dict[str, Any], message: str, hint: str) -> None:
    snapshot = a_snapshot(a_process(an_agent()), gpus=(a_gpu("gpu0", **gpu), a_gpu("gpu1")))
    (reason,) = the_reasons(planned(snapshot, KEEPING.replace(carrier=carrier)))
    assert reason.message.startswith("process 4711 cannot keep its context: ")
    assert message in reason.message
    assert reason.hint == hint


def test_gpus_of_other_vendors_are_refused_by_name() -> None:
    gpus = (a_gpu("gpu0", vendor="amd"), a_gpu("gpu1"))
    assert reasons_of(a_process(an_agent()), gpus=gpus) == ["gpu0 is of vendor amd, from which no carrier can copy"]


# -- and back ----------------------------------------------------------------------------------------------------------


def suspended(**values: Any) -> Operation:
    plain: dict[str, Any] = {
        "name": "4711",
        "pid": 4711,
        "start_ticks": 7,
        "token": "t",
        "method": KEEP_CONTEXT,
        "carrier": "host",
        "chip": "hopper",
        "first_gpu": "gpu0",
        "origin_gpu": "gpu0",
        "previous_gpu": "gpu0",
        "target_gpu": None,
        "gpu": None,
        "size_bytes": 32 * GIB,
        "stays_bytes": 600 * MIB,
        "offloaded": True,
        "is_parked": True,
        "reservations": {},
    }
    worker = JobProcess(**{**plain, **values})
    return Operation(id="3", kind=SUSPEND, phase="suspended", direction=FORWARD, workers=(worker,))


def resumed(to: str | None, snapshot: NodeSnapshotForPlan) -> Any:
    return planned_resume(snapshot, PlanRequest(kind=RESUME, pids=(4711,), to=to), suspended())


def test_it_resumes_on_its_gpu_without_the_driver() -> None:
    snapshot = a_snapshot(a_process(an_agent()), gpus=(a_gpu("gpu0", driver_version="535.1", mig=None), a_gpu("gpu1")))
    for to in (None, "gpu0"):
        plan = the_plan(resumed(to, snapshot))
        assert (plan.workers[0].to, plan.workers[0].method) == ("gpu0", KEEP_CONTEXT)
        assert plan.reservation_bytes["gpu0"] < 33 * GIB


@pytest.mark.parametrize("gpu", [{"mig": True}, {"mps": True}])
def test_it_resumes_where_the_driver_could_not_restore(gpu: dict[str, Any]) -> None:
    snapshot = a_snapshot(a_process(an_agent()), gpus=(a_gpu("gpu0", **gpu), a_gpu("gpu1")))
    assert the_plan(resumed(None, snapshot)).workers[0].to == "gpu0"


def test_a_gpu_that_is_lost_or_gone_is_refused() -> None:
    for gpus, message in (
        ((a_gpu("gpu0", state="lost"), a_gpu("gpu1")), "gpu0 is lost, and process 4711 has its CUDA context there"),
        ((a_gpu("gpu1"),), "there is no GPU gpu0"),
    ):
        found = the_reasons(resumed(None, a_snapshot(a_process(an_agent()), gpus=gpus)))
        assert [reason.message for reason in found] == [message]


def test_another_gpu_is_refused_by_name() -> None:
    (reason,) = the_reasons(resumed("gpu1", a_snapshot(a_process(an_agent()))))
    assert reason.message == "process 4711 keeps its CUDA context on gpu0 and can resume there only, not on gpu1"
    assert reason.hint == "run: hegmctl resume 4711; then: hegmctl migrate 4711 --to gpu1"


def test_a_full_gpu_is_refused_with_numbers() -> None:
    full = a_snapshot(a_process(an_agent()), gpus=(a_gpu("gpu0", free_bytes=GIB), a_gpu("gpu1")))
    (reason,) = the_reasons(resumed(None, full))
    assert reason.message.startswith("gpu0 has 1.0 GiB free, but ")


def test_an_image_of_a_job_with_a_kept_context_is_refused() -> None:
    found = against_image(suspended())
    assert found is not None
    assert found[0] == "process 4711 keeps its CUDA context on its GPU, which an image cannot have"
    assert against_image(suspended(method="driver")) is None
