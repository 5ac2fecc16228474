"""Plans on NVIDIA GPUs: carrier, duration, and every refusal with its next step."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.memory.sizes import CONTEXT_BYTES, LAST_BYTES, MAX_CONTEXT_BYTES, RESTORE_MARGIN_BYTES, SEGMENT_BYTES
from hegmd.migration.machine.operation import RESUME, Limits
from hegmd.migration.model import Candidate, GpuMemory, PlanRequest, Surroundings
from hegmd.migration.plan.driver_rules import contexts_of
from hegmd.migration.plan.forecast import after, expected
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.protocol.messages import CudaDevice, LeftAlone
from tests.cells import in_one_test
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
    to,
)
from tests.unit.migration.operations import DrivenOperation


def test_an_agents_storages_move_from_gpu_to_gpu_and_the_plan_estimates_the_time() -> None:
    plan = the_plan(planned(a_snapshot(a_process(an_agent(), vram_bytes=32 * GIB + 500 * MIB)), to()))
    (worker,) = plan.workers
    assert (plan.way, worker.carrier, worker.method) == ("agent", "peer", "driver")
    assert worker.driver_bytes == 500 * MIB + RESTORE_MARGIN_BYTES
    assert plan.reservation_bytes == {"gpu1": 2 * 32 * GIB + worker.driver_bytes + CONTEXT_BYTES}
    assert plan.pool_needed_bytes == 0
    assert 0.7 < plan.estimate_s < 1.0, "measured: 0.74 s"
    assert "offload by peer" in plan.steps


def test_a_suspended_process_can_return_to_the_memory_that_it_leaves() -> None:
    """Alone on its GPU it left by host, and to copy its bytes back more was needed than the GPU has."""
    process = a_process(an_agent(), driver_bytes_by_gpu={"gpu0": 33 * GIB})
    for free_bytes, carrier in (
        (CONTEXT_BYTES + RESTORE_MARGIN_BYTES - 1, "worker"),
        (CONTEXT_BYTES + RESTORE_MARGIN_BYTES, "host"),
    ):
        gpus = (a_gpu("gpu0", free_bytes=free_bytes), a_gpu("gpu1"))
        plan = the_plan(planned(a_snapshot(process, gpus=gpus), SUSPENSION))
        assert plan.workers[0].carrier == carrier
        assert any("its return to gpu0 needs" in hazard for hazard in plan.hazards) == (carrier == "worker")


def test_the_memory_of_a_context_is_measured_on_each_gpu() -> None:
    """With contexts of 600 to 900 MiB the copies back failed with out of memory, again and again for minutes."""
    gpus = (a_gpu("gpu0"), a_gpu("gpu1"), a_gpu("gpu2", chip="other"))

    def learnt(*sizes_mib: int, reserved_bytes: int = 32 * GIB) -> dict[str, int]:
        facts = cuda_facts(reserved_bytes=reserved_bytes, stacks_bytes=GIB)
        held = [{"gpu0": 33 * GIB + size_mib * MIB} for size_mib in sizes_mib]
        return contexts_of(gpus, [a_process(an_agent(facts), driver_bytes_by_gpu=one) for one in held])

    assert learnt(600) == {"gpu0": 600 * MIB, "gpu1": 600 * MIB}, "the other GPU is of the same chip"
    assert learnt(900, 700)["gpu0"] == 700 * MIB, "one of them has memory of its own too"
    assert learnt(300)["gpu0"] == CONTEXT_BYTES, "never less than expected"
    assert learnt(5000)["gpu0"] == MAX_CONTEXT_BYTES, "that is no context"
    assert learnt() == learnt(-1500) == learnt(600, reserved_bytes=0) == {}, "not measured"


@pytest.mark.parametrize("context_mib", [300, 600, 900])
def test_a_job_leaves_by_host_only_if_a_measured_context_fits_next_to_it_at_its_return(context_mib: int) -> None:
    context_bytes = context_mib * MIB
    process = a_process(an_agent(), driver_bytes_by_gpu={"gpu0": 33 * GIB})
    for free_bytes, carrier in (
        (context_bytes + RESTORE_MARGIN_BYTES - 1, "worker"),
        (context_bytes + RESTORE_MARGIN_BYTES, "host"),
    ):
        gpus = (a_gpu("gpu0", free_bytes=free_bytes, context_bytes=context_bytes), a_gpu("gpu1"))
        plan = the_plan(planned(a_snapshot(process, gpus=gpus), SUSPENSION))
        assert plan.workers[0].carrier == carrier


def test_a_suspension_goes_to_the_pool_and_a_process_without_an_agent_by_the_driver() -> None:
    suspended = the_plan(planned(a_snapshot(a_process(an_agent())), SUSPENSION))
    assert (suspended.workers[0].carrier, suspended.pool_needed_bytes > 32 * GIB) == ("host", True)
    bare = the_plan(planned(a_snapshot(a_process()), to()))
    assert (bare.way, bare.workers[0].carrier, len(bare.hazards)) == ("driver", "driver", 1)
    assert "cannot see whether it uses managed memory" in bare.hazards[0]
    assert bare.reservation_bytes == {"gpu1": 33 * GIB + RESTORE_MARGIN_BYTES}
    assert 14 < bare.estimate_s < 24, "measured: 18 s for 37 GiB, and 24.6 s for 32"


def test_cached_memory_is_not_carried_and_is_reserved_on_the_target() -> None:
    """The reserve was missing. Another process took all free memory, and the job found none at its next step."""
    agent = an_agent(cuda_facts(reserved_bytes=60 * GIB, padding_bytes=5))
    (worker,) = the_plan(planned(a_snapshot(a_process(agent, vram_bytes=61 * GIB)), to())).workers
    assert worker.driver_bytes == GIB + RESTORE_MARGIN_BYTES
    assert worker.agent_overhead_bytes == 28 * GIB + SEGMENT_BYTES
    assert worker.reservation_bytes == 61 * GIB + RESTORE_MARGIN_BYTES + SEGMENT_BYTES, "all that it had"
    left = LeftAlone(why="shared", storages=1, size_bytes=2 * GIB)
    agent = an_agent(cuda_facts(reserved_bytes=60 * GIB), left_alone=(left,))
    (worker,) = the_plan(planned(a_snapshot(a_process(agent, vram_bytes=61 * GIB)), to())).workers
    assert worker.driver_bytes == 3 * GIB + RESTORE_MARGIN_BYTES
    assert worker.reservation_bytes == 61 * GIB + RESTORE_MARGIN_BYTES + SEGMENT_BYTES


def test_a_target_without_memory_for_the_cache_is_refused() -> None:
    process = a_process(an_agent(cuda_facts(reserved_bytes=60 * GIB)), vram_bytes=61 * GIB)
    gpus = (a_gpu("gpu0"), a_gpu("gpu1", free_bytes=60 * GIB))
    (reason,) = the_reasons(planned(a_snapshot(process, gpus=gpus), to()))
    assert "gpu1 has" in reason.message


def test_a_process_that_has_cached_its_whole_gpu_can_move_to_an_empty_one() -> None:
    """No GPU has more than all: what there could never be beside the helper's context is not asked for."""
    total_bytes = 140 * GIB
    process = a_process(an_agent(cuda_facts(reserved_bytes=139 * GIB)), vram_bytes=total_bytes - 64 * MIB)
    gpus = (a_gpu("gpu0", free_bytes=64 * MIB), a_gpu("gpu1", free_bytes=total_bytes))
    whole = tuple([gpu.replace(total_bytes=total_bytes) for gpu in gpus])
    (worker,) = the_plan(planned(a_snapshot(process, gpus=whole), to())).workers
    assert worker.carrier == "worker", "on its own GPU nobody has room to copy"
    assert worker.reservation_bytes == total_bytes - CONTEXT_BYTES - LAST_BYTES


def test_memory_for_the_stacks_that_an_agent_frees_is_reserved_with_its_storages() -> None:
    """Held with the rest, a neighbour that took all it could had it before the agent, and the job had to wait."""
    agent = an_agent(cuda_facts(stacks_bytes=GIB // 4, padding_bytes=5))
    for carrier in ("peer", "worker"):
        (worker,) = the_plan(planned(a_snapshot(a_process(agent)), to(carrier=carrier))).workers
        assert (worker.driver_bytes, worker.agent_overhead_bytes) == (3 * GIB // 4 + RESTORE_MARGIN_BYTES, GIB // 4 + 5)
        assert worker.reservation_bytes == 33 * GIB + RESTORE_MARGIN_BYTES + 5
    (by_driver,) = the_plan(planned(a_snapshot(a_process(agent)), to(carrier="driver"))).workers
    assert by_driver.agent_overhead_bytes == 0


def test_with_little_memory_the_storages_go_in_rounds_and_with_less_through_the_pool() -> None:
    tight = (a_gpu("gpu0"), a_gpu("gpu1", free_bytes=40 * GIB))
    rounds = the_plan(planned(a_snapshot(a_process(an_agent()), gpus=tight), to()))
    assert rounds.workers[0].carrier == "peer"
    assert 27 * GIB < rounds.workers[0].overlap_bytes < 30 * GIB
    roomier = (a_gpu("gpu0"), a_gpu("gpu1", free_bytes=60 * GIB))
    plan = the_plan(planned(a_snapshot(a_process(an_agent()), gpus=roomier), to()))
    worker = plan.workers[0]
    assert 60 * GIB - 3 * GIB < plan.reservation_bytes["gpu1"] <= 60 * GIB - 2 * GIB, "rounds are as few as can be"
    assert worker.overlap_bytes < 12 * GIB
    tighter = (a_gpu("gpu0"), a_gpu("gpu1", free_bytes=35 * GIB))
    plan = the_plan(planned(a_snapshot(a_process(an_agent()), gpus=tighter), to()))
    assert (plan.workers[0].carrier, plan.workers[0].overlap_bytes) == ("host", 0)
    assert "needed there temporarily" in " ".join(plan.hazards)
    huge = an_agent(cuda_facts(largest_bytes=32 * GIB))
    plan = the_plan(planned(a_snapshot(a_process(huge), gpus=tight), to()))
    assert plan.workers[0].carrier == "host", "one storage cannot go in rounds"


def test_a_plan_reports_bytes_that_the_process_copies_itself() -> None:
    """Issue 14, row 1: it was found out by error 800, when the job was already in pieces."""
    plain = the_plan(planned(a_snapshot(a_process(an_agent())), to()))
    assert plain.workers[0].own_bytes == 0
    plan = the_plan(planned(a_snapshot(a_process(an_agent(cuda_facts(own_bytes=2 * GIB)))), to()))
    assert (plan.workers[0].carrier, plan.workers[0].own_bytes) == ("peer", 2 * GIB)
    assert any("2.0 GiB of process 4711 go by worker and not by peer" in hazard for hazard in plan.hazards)
    assert plan.estimate_s > plain.estimate_s + 0.3


@in_one_test(
    ("candidate", "snapshot", "carrier", "why"),
    [
        (a_process(an_agent(cuda_facts(expandable=True))), {}, "worker", "expandable segments"),
        (a_process(an_agent(cuda_facts(own_bytes=20 * GIB))), {}, "worker", "memory with tensors that stay"),
        (a_process(an_agent(cuda_facts(allocator="cudaMallocAsync"))), {}, "worker", "cudaMallocAsync"),
        (a_process(an_agent(cuda_facts(hazards=("graphs",)))), {}, "driver", "CUDA graphs"),
        (a_process(an_agent(), around=Surroundings(same_ipc=False)), {}, "worker", "IPC namespace"),
        (a_process(an_agent()), {"outlived": False}, "worker", "hegmd were killed"),
        (a_process(an_agent()), {"gpus": (a_gpu("gpu0", nvlinks=()), a_gpu("gpu1"))}, "host", "NVLink"),
        (a_process(an_agent()), {"gpus": (a_gpu("gpu0", free_bytes=0), a_gpu("gpu1"))}, "worker", "copying needs"),
        (a_process(an_agent(size_bytes=0)), {}, "driver", "reports no storages that can be offloaded"),
    ],
)
def test_a_slower_carrier_is_chosen_only_with_a_reason(
    candidate: Candidate, snapshot: dict[str, Any], carrier: str, why: str
) -> None:
    plan = the_plan(planned(a_snapshot(candidate, **snapshot), to()))
    assert plan.workers[0].carrier == carrier
    assert why in " ".join(plan.hazards)


def test_the_requested_carrier_is_used_or_refused() -> None:
    snapshot = a_snapshot(a_process(an_agent()))
    assert the_plan(planned(snapshot, to(carrier="host"))).workers[0].carrier == "host"
    by_driver = the_plan(planned(snapshot, to(carrier="driver"))).workers[0]
    assert (by_driver.size_bytes, by_driver.reservation_bytes) == (33 * GIB, 33 * GIB + RESTORE_MARGIN_BYTES)
    (reason,) = the_reasons(planned(a_snapshot(a_process()), to(carrier="peer")))
    assert "no agent" in reason.message
    (reason,) = the_reasons(planned(snapshot, to(carrier="pigeon")))
    assert "pigeon" in reason.message


@in_one_test(
    ("candidate", "snapshot", "message", "hint"),
    [
        (a_process(), {"gpus": (a_gpu("gpu0", driver_version="565.1"), a_gpu("gpu1"))}, "no checkpoint calls", "570"),
        (a_process(), {"gpus": (a_gpu("gpu0", driver_version="575.1"), a_gpu("gpu1"))}, "only restore", "580"),
        (a_process(), {"gpus": (a_gpu("gpu0", driver_version="610.57.04"), a_gpu("gpu1"))}, "can crash", "another"),
        (a_process(), {"gpus": (a_gpu("gpu0", driver_version=None), a_gpu("gpu1"))}, "not known", "doctor"),
        (a_process(), {"gpus": (a_gpu("gpu0"), a_gpu("gpu1", chip="blackwell"))}, "another chip", "same chip"),
        (a_process(), {"gpus": (a_gpu("gpu0", mig=True), a_gpu("gpu1"))}, "MIG", "without MIG"),
        (a_process(kinds=("mps",)), {}, "MPS", "and MPS"),
        (a_process(kinds=("graphics",)), {}, "graphics contexts", "hegmctl ps"),
        (a_process(), {"uid": 1001}, "uid 1001", "root"),
        (a_process(vram_bytes=None), {}, "does not report how much", "namespace"),
        (a_process(around=Surroundings(stopped=True)), {}, "stopped (SIGSTOP)", "kill -CONT 4711"),
        (a_process(around=Surroundings(nccl_shared=True)), {}, "NCCL", "NCCL_P2P_DISABLE=1"),
        (a_process(an_agent(cuda_facts(hazards=("nccl-p2p",)))), {}, "NCCL", "NCCL_P2P_DISABLE=1"),
        (a_process(an_agent(cuda_facts(hazards=("ipc-shared",)))), {}, "CUDA IPC", "close"),
        (a_process(an_agent(cuda_facts(hazards=("managed",)))), {}, "managed memory", "cudaMallocManaged"),
        (a_process(around=Surroundings(cgroup_free_bytes=8 * GIB)), {}, "the kernel would kill it", "memory.max"),
        (a_process(), {"available_bytes": 16 * GIB}, "memory available", "free memory"),
        (a_process(gpus=("gpu0", "gpu1")), {}, "on gpu0 and gpu1, but without an agent", "hegmctl run"),
    ],
)
def test_a_request_that_would_fail_or_lose_the_job_is_refused_before_anything_is_done(
    candidate: Candidate, snapshot: dict[str, Any], message: str, hint: str
) -> None:
    reasons = the_reasons(planned(a_snapshot(candidate, **snapshot), to()))
    assert any(message in reason.message and hint in reason.hint for reason in reasons), reasons


def test_ranks_without_peer_to_peer_are_moved_and_the_agents_report_has_precedence() -> None:
    around = Surroundings(nccl_shared=True, nccl_p2p_disabled=True)
    assert the_plan(planned(a_snapshot(a_process(around=around)), to()))
    reported = a_process(an_agent(), around=Surroundings(nccl_shared=True))
    assert the_plan(planned(a_snapshot(reported), to())), "its agent says that no communicator is alive"


def test_an_older_driver_suspends_and_resumes_where_it_was() -> None:
    gpus = (a_gpu("gpu0", driver_version="575.1"), a_gpu("gpu1", driver_version="575.1"))
    snapshot = a_snapshot(a_process(), gpus=gpus)
    plan = the_plan(planned(snapshot, SUSPENSION))
    op = plan.operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)
    suspended = DrivenOperation(op).until("suspended").op
    assert the_plan(planned_resume(snapshot, PlanRequest(kind=RESUME, pids=(4711,)), suspended)).estimate_s > 4
    (reason,) = the_reasons(planned_resume(snapshot, PlanRequest(kind=RESUME, pids=(4711,), to="gpu1"), suspended))
    assert "575.1" in reason.message


def test_processes_that_have_started_one_another_move_together() -> None:
    parent, child, grandchild = a_process(), a_process(pid=4712, parent=4711), a_process(pid=4713, parent=4712)
    stranger = a_process(pid=9)
    plan = the_plan(planned(a_snapshot(parent, child, grandchild, stranger), to(pids=(4713,))))
    assert [worker.pid for worker in plan.workers] == [4711, 4712, 4713]


def _on_two(*devices: CudaDevice, **values: Any) -> Candidate:
    """Return a process on both GPUs, with 20 GiB on one and 14 on the other. The agent reports 30 in all."""
    agent = an_agent(cuda_facts(gpus=("GPU-gpu0", "GPU-gpu1"), devices=devices), size_bytes=30 * GIB + MIB)
    shares = {"gpu0": 21 * GIB, "gpu1": 14 * GIB}
    plain = {"gpus": ("gpu0", "gpu1"), "vram_bytes": 35 * GIB, "driver_bytes_by_gpu": shares}
    return a_process(agent, kinds=("compute", "compute"), **{**plain, **values})


def _four(free_bytes: int = 100 * GIB) -> tuple[GpuMemory, ...]:
    return tuple([a_gpu(f"gpu{number}", free_bytes=free_bytes) for number in range(4)])


# As the agent reports them: in the order of its devices, not in that of the GPUs.
DEVICES = (
    CudaDevice(uuid="GPU-gpu1", size_bytes=12 * GIB, padding_bytes=3, reserved_bytes=13 * GIB),
    CudaDevice(uuid="GPU-gpu0", size_bytes=18 * GIB, padding_bytes=5, reserved_bytes=20 * GIB),
)


def test_a_process_on_several_gpus_is_copied_by_the_worker_with_memory_on_each_gpu() -> None:
    plan = the_plan(planned(a_snapshot(_on_two(*DEVICES), gpus=_four()), to("gpu2,gpu3", carrier="worker")))
    (worker,) = plan.workers
    assert worker.carrier == "worker"
    assert worker.driver_bytes_by_gpu == (GIB + RESTORE_MARGIN_BYTES, GIB + RESTORE_MARGIN_BYTES)
    assert worker.storage_bytes_by_gpu == (20 * GIB + SEGMENT_BYTES, 13 * GIB + SEGMENT_BYTES), (
        "what was cached as well"
    )
    assert worker.agent_overhead_bytes == 3 * GIB + 2 * SEGMENT_BYTES
    assert plan.reservation_bytes == {
        "gpu2": 21 * GIB + RESTORE_MARGIN_BYTES + SEGMENT_BYTES,
        "gpu3": 14 * GIB + RESTORE_MARGIN_BYTES + SEGMENT_BYTES,
    }
    assert plan.pool_needed_bytes > 30 * GIB
    one = the_plan(planned(a_snapshot(_on_two(*DEVICES), gpus=_four()), to("gpu1=gpu2", carrier="worker")))
    assert one.reservation_bytes == {"gpu0": 0, "gpu2": 14 * GIB + RESTORE_MARGIN_BYTES + SEGMENT_BYTES}


def _linked(free_bytes: int = 100 * GIB) -> tuple[GpuMemory, ...]:
    names = [f"gpu{number}" for number in range(4)]
    return tuple([a_gpu(name, free_bytes=free_bytes, nvlinks=tuple({*names} - {name})) for name in names])


def test_a_process_on_several_gpus_goes_by_peer_with_memory_for_each_part_twice() -> None:
    plan = the_plan(planned(a_snapshot(_on_two(*DEVICES), gpus=_linked()), to("gpu2,gpu3")))
    (worker,) = plan.workers
    assert (worker.carrier, worker.overlap_bytes, plan.pool_needed_bytes) == ("peer", 0, 0)
    first, second = worker.storage_bytes_by_gpu
    assert plan.reservation_bytes == {
        "gpu2": GIB + RESTORE_MARGIN_BYTES + 2 * first + CONTEXT_BYTES,
        "gpu3": GIB + RESTORE_MARGIN_BYTES + 2 * second + CONTEXT_BYTES,
    }
    assert not [hazard for hazard in plan.hazards if "go by" in hazard]


def test_a_process_on_several_gpus_without_memory_for_copies_goes_by_host() -> None:
    """One GPU without that memory is enough to refuse: its bytes cannot go to another GPU."""
    gpus = (*_linked()[:3], _linked(30 * GIB)[3])
    plan = the_plan(planned(a_snapshot(_on_two(*DEVICES), gpus=gpus), to("gpu2,gpu3")))
    assert plan.workers[0].carrier == "peer"
    gpus = (*_linked()[:3], _linked(20 * GIB)[3])
    plan = the_plan(planned(a_snapshot(_on_two(*DEVICES), gpus=gpus), to("gpu2,gpu3")))
    assert plan.workers[0].carrier == "host"
    assert "gpu3 has" in " ".join(plan.hazards)
    assert plan.reservation_bytes["gpu3"] == 14 * GIB + RESTORE_MARGIN_BYTES + SEGMENT_BYTES + CONTEXT_BYTES
    assert plan.pool_needed_bytes > 30 * GIB


@pytest.mark.parametrize(("free_gib", "carrier"), [(28, "peer"), (27, "host"), (8, "host")])
def test_gpus_that_one_process_exchanges_need_no_more_memory_than_its_copies(free_gib: int, carrier: str) -> None:
    """The process frees its memory on either GPU before its bytes return."""
    snapshot = a_snapshot(_on_two(*DEVICES), gpus=_linked(free_gib * GIB))
    plan = the_plan(planned(snapshot, to("gpu1,gpu0")))
    assert plan.workers[0].carrier == carrier


def test_the_memory_for_copies_by_peer_on_several_gpus_is_left_out_of_the_next_plan() -> None:
    snapshot = a_snapshot(_on_two(*DEVICES), gpus=_linked())
    plan = the_plan(planned(snapshot, to("gpu2,gpu3")))
    op = plan.operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)
    free = {gpu.id: gpu.free_bytes or 0 for gpu in expected(snapshot.replace(running=(op,))).gpus}
    first, second = plan.workers[0].storage_bytes_by_gpu
    assert free["gpu2"] == 99 * GIB - RESTORE_MARGIN_BYTES - 2 * first
    assert free["gpu3"] == 99 * GIB - RESTORE_MARGIN_BYTES - 2 * second


@pytest.mark.parametrize("devices", [(), DEVICES[:1], (*DEVICES[:1], CudaDevice(uuid="GPU-else", size_bytes=GIB))])
def test_the_driver_carries_a_process_whose_parts_on_its_gpus_are_unknown(devices: tuple[CudaDevice, ...]) -> None:
    """Room for a storage on the wrong GPU would be none."""
    plan = the_plan(planned(a_snapshot(_on_two(*devices), gpus=_four()), to("gpu2,gpu3")))
    (worker,) = plan.workers
    assert (worker.carrier, worker.storage_bytes_by_gpu) == ("driver", ())
    assert plan.reservation_bytes == {"gpu2": 21 * GIB + RESTORE_MARGIN_BYTES, "gpu3": 14 * GIB + RESTORE_MARGIN_BYTES}
    assert "what it holds on each" in " ".join(plan.hazards)


def test_the_next_plan_leaves_memory_for_a_process_on_several_gpus() -> None:
    snapshot = a_snapshot(_on_two(*DEVICES), gpus=_four(40 * GIB))
    plan = the_plan(planned(snapshot, to("gpu2,gpu3", carrier="worker")))
    op = plan.operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)
    free = {gpu.id: gpu.free_bytes for gpu in expected(snapshot.replace(running=(op,))).gpus}
    assert free["gpu2"] == 19 * GIB - RESTORE_MARGIN_BYTES - SEGMENT_BYTES
    assert free["gpu3"] == 26 * GIB - RESTORE_MARGIN_BYTES - SEGMENT_BYTES
    then = {gpu.id: gpu.free_bytes for gpu in after(snapshot, plan).gpus}
    assert then["gpu2"] == free["gpu2"]
    assert then["gpu0"] == 40 * GIB + 21 * GIB + RESTORE_MARGIN_BYTES + SEGMENT_BYTES


def test_without_memory_for_a_copy_context_the_worker_copies_itself() -> None:
    """Such a move was refused for half a gigabyte that it did not need."""
    for free_gib, carrier in ((33.6, "worker"), (34.2, "host")):
        gpus = (a_gpu("gpu0"), a_gpu("gpu1", free_bytes=int(free_gib * GIB)))
        plan = the_plan(planned(a_snapshot(a_process(an_agent()), gpus=gpus), to()))
        assert plan.workers[0].carrier == carrier
        assert ("of these for copying" in " ".join(plan.hazards)) is (carrier == "worker")


def test_the_second_process_on_a_gpu_gets_the_memory_that_the_first_leaves() -> None:
    """The planner promised all free memory to each job, and then refused both."""
    ranks = [a_process(an_agent(), pid=pid, job="1") for pid in (4711, 4712)]
    plan = the_plan(planned(a_snapshot(*ranks), to()))
    assert [worker.carrier for worker in plan.workers] == ["peer", "host"]
