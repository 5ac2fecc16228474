"""Plans of jobs whose ranks have communicators: how they are disconnected, what is refused, and who goes where.

Longer than 400 lines because all these rules are tested with the same ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.migration.machine.operation import Limits, Operation
from hegmd.migration.model import (
    Candidate,
    MigrationPlan,
    NodeSnapshotForPlan,
    PlanRequest,
    PoolMemory,
    Surroundings,
    Unreachable,
)
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.migration.plan.sequence_plan import planned_drain
from hegmd.protocol.messages import Combination, Communicators, Proof
from tests.cells import in_one_test
from tests.unit.migration.nvidia_nodes import (
    GIB,
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


def groups(**values: Any) -> Communicators:
    plain: dict[str, Any] = {"mechanism": "suspend", "groups": 1, "backends": ("nccl",), "library": "2.29.7"}
    return Communicators(**{**plain, **values})


def a_rank(number: int, communicators: Communicators | None = None, **values: Any) -> Candidate:
    """Return one of two ranks, with 33 GiB on the GPU of its number; its CUDA facts permit peer-to-peer."""
    uuid = f"GPU-gpu{number}"
    agent = an_agent(
        cuda_facts(hazards=("nccl-p2p",), gpus=(uuid,)),
        rank=number,
        world_size=values.pop("world_size", 2),
        communicators=communicators or groups(),
    )
    return a_process(agent, **{"pid": 4711 + number, "gpus": (f"gpu{number}",), "job": "run", **values})


GLOO = [groups(backends=("gloo",), mechanism="replace")] * 2
ROOMY: dict[str, Any] = {"pool": PoolMemory(budget_bytes=128 * GIB, free_bytes=128 * GIB)}


def a_job(*communicators: Communicators, **values: Any) -> NodeSnapshotForPlan:
    ranks = [a_rank(number, communicators[number] if number < len(communicators) else None) for number in range(2)]
    return a_snapshot(*ranks, **{**ROOMY, **values})


@pytest.mark.parametrize("mechanism", ["suspend", "replace"])
def test_ranks_are_suspended_by_the_method_that_their_agents_name(mechanism: str) -> None:
    plan = the_plan(planned(a_job(*[groups(mechanism=mechanism)] * 2), SUSPENSION))
    assert [worker.communicators for worker in plan.workers] == [mechanism] * 2
    assert plan.is_distributed
    assert not plan.reserves_late
    op = plan.operation("1", a_job().candidates, {}, limits=Limits(), utc=0.0)
    assert [worker.communicators for worker in op.workers] == [mechanism] * 2
    assert "2 ranks disconnect 1 group each (nccl, NCCL 2.29.7)" in " ".join(plan.hazards)
    assert "NCCL_NVLS_ENABLE=0" in " ".join(plan.hazards)


OTHER = a_process(an_agent(), pid=99, gpus=("gpu1",), job="other")
EXCHANGE = to("gpu1,gpu0")
BACK = PlanRequest(kind="resume", pids=(4711,))


def beside(other: Candidate, *communicators: Communicators, **values: Any) -> NodeSnapshotForPlan:
    return a_job(*communicators, **values).replace(candidates=(*a_job(*communicators).candidates, other))


def suspended(snapshot: NodeSnapshotForPlan) -> Operation:
    op = the_plan(planned(snapshot, SUSPENSION)).operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)
    return DrivenOperation(op).until("suspended").op


def restored(snapshot: NodeSnapshotForPlan) -> NodeSnapshotForPlan:
    """Return the node after the driver has restored its ranks."""
    surveys = [None if one.agent is None else one.agent.replace(driver_restored=True) for one in snapshot.candidates]
    pairs = zip(snapshot.candidates, surveys, strict=True)
    return snapshot.replace(candidates=tuple([one.replace(agent=agent) for one, agent in pairs]))


def begun(plan: MigrationPlan, snapshot: NodeSnapshotForPlan) -> Operation:
    return plan.operation("2", snapshot.candidates, {}, limits=Limits(), utc=0.0)


def test_ranks_were_lost_on_gpus_that_they_shared_with_another_process() -> None:
    """The GPU interrupts no kernel of a process that the driver has restored, and NCCL's kernels wait for ranks."""
    (reason,) = the_reasons(planned(beside(OTHER), EXCHANGE))
    assert reason.message.startswith("process 4711 uses NCCL and needs gpu1 for itself")
    assert "process 99 would be there too" in reason.message
    assert reason.hint.startswith("end, suspend or move process 99 first")
    the_plan(planned(a_job(), EXCHANGE))
    the_plan(planned(beside(OTHER, *GLOO), EXCHANGE))
    foreign = Unreachable(pid=98, gpus=("gpu0",))
    (reason,) = the_reasons(planned(a_job(unreachable=(foreign,)), EXCHANGE))
    assert "process 98 would be there too" in reason.message
    the_plan(planned(a_job(unreachable=(foreign.replace(ended=True),)), EXCHANGE))


def test_ranks_that_were_suspended_beside_another_process_resume_when_they_are_alone() -> None:
    plan = the_plan(planned(beside(OTHER), SUSPENSION))
    assert "process 99 is on its GPUs too: a job with NCCL can only be resumed" in " ".join(plan.hazards)
    assert "on its GPUs too" not in " ".join(the_plan(planned(beside(OTHER, *GLOO), SUSPENSION)).hazards)
    op = suspended(a_job())
    (reason,) = the_reasons(planned_resume(beside(OTHER), BACK, op))
    assert "process 4712 uses NCCL and needs gpu1 for itself" in reason.message
    the_plan(planned_resume(a_job(), BACK, op))
    idle = op.replace(id="2", workers=(op.workers[0].replace(pid=99),))
    the_plan(planned_resume(beside(OTHER, running=(idle,)), BACK, op))


def test_an_image_of_ranks_is_not_made_beside_another_process() -> None:
    """A job that is left running is restored where it is. An image of its neighbour brings no process to the GPU."""
    image = SUSPENSION.replace(kind="checkpoint")
    (reason,) = the_reasons(planned(beside(OTHER), image))
    assert "process 4712 uses NCCL and needs gpu1 for itself" in reason.message
    assert "or migrate this job" in reason.hint
    the_plan(planned(restored(beside(OTHER)), image.replace(pids=(99,))))


def test_no_process_comes_to_the_gpu_of_ranks_that_the_driver_has_restored() -> None:
    comes = a_process(an_agent(), pid=99, gpus=("gpu2",), job="other")
    four = tuple(a_gpu(f"gpu{number}") for number in range(4))

    def node(*, is_restored: bool, kind: Communicators) -> NodeSnapshotForPlan:
        ranks = a_snapshot(*[a_rank(number, kind) for number in range(2)], **ROOMY, gpus=four)
        ranks = restored(ranks) if is_restored else ranks
        return ranks.replace(candidates=(*ranks.candidates, comes))

    request = to("gpu1", pids=(99,))
    (reason,) = the_reasons(planned(node(is_restored=True, kind=groups()), request))
    assert reason.message.startswith("process 4712 uses NCCL and needs gpu1 for itself")
    assert "process 99 would be there too" in reason.message
    the_plan(planned(node(is_restored=True, kind=groups()), request.replace(to="gpu3")))
    the_plan(planned(node(is_restored=False, kind=groups()), request))
    the_plan(planned(node(is_restored=True, kind=GLOO[0]), request))


def test_a_process_that_kept_its_context_does_not_resume_beside_ranks_that_the_driver_has_restored() -> None:
    """They may be restored beside it while it is suspended, as it computes nothing then."""
    node = beside(OTHER)
    kept = the_plan(planned(node, SUSPENSION.replace(pids=(99,), keep_context=True)))
    idle = DrivenOperation(begun(kept, node)).until("suspended").op
    there = node.replace(running=(idle,))
    the_plan(planned(there, EXCHANGE))
    the_plan(planned_resume(there, BACK.replace(pids=(99,)), idle))
    (reason,) = the_reasons(planned_resume(restored(there), BACK.replace(pids=(99,)), idle))
    assert "process 4712 uses NCCL and needs gpu1 for itself" in reason.message
    assert reason.hint.startswith("end, suspend or move process 4712 first")


def test_a_process_that_is_on_its_way_to_a_gpu_was_not_seen_there() -> None:
    """Its operation had begun, and the driver did not list it on the GPU yet."""
    three = tuple(a_gpu(f"gpu{number}") for number in range(3))
    comes = OTHER.replace(gpus=("gpu2",))
    node = beside(comes, gpus=three).replace(gpus=three)
    op = begun(the_plan(planned(node, to("gpu1", pids=(99,)))), node)
    (reason,) = the_reasons(planned(node.replace(running=(op,)), EXCHANGE))
    assert "needs gpu1 for itself" in reason.message
    assert "process 99 would be there too" in reason.message
    assert reason.hint.startswith("wait until the operation on process 99 has ended")
    op = begun(the_plan(planned(node, EXCHANGE)), node)
    comes_and_leaves = the_reasons(planned(node.replace(running=(op,)), to("gpu1", pids=(99,))))
    assert [reason.message.split(" after")[0] for reason in comes_and_leaves] == [
        f"process {pid} uses NCCL and needs gpu1 for itself" for pid in (4712, 4711)
    ]
    the_plan(planned(node.replace(running=(op.replace(kind="quiesce"),)), to("gpu1", pids=(99,))))
    gloo = beside(comes, *GLOO).replace(gpus=three)
    op = begun(the_plan(planned(gloo, EXCHANGE)), gloo)
    the_plan(planned(gloo.replace(running=(op,)), to("gpu1", pids=(99,))))


def test_a_drain_moved_another_job_to_the_gpu_of_ranks_that_it_had_moved_there() -> None:
    """A plan of several steps did not know that the driver restores ranks in the first one."""
    gpus = tuple(a_gpu(f"gpu{number}", nvlinks=()) for number in range(3))
    rank = a_rank(0, gpus=("gpu0",))
    far = a_rank(1, gpus=("gpu2",))
    other = a_process(an_agent(), pid=99, gpus=("gpu0",), job="other")
    plans, stays = planned_drain(a_snapshot(rank, far, other, **ROOMY, gpus=gpus), "gpu0", ("gpu1",))
    assert [plan.workers[0].pid for plan in plans] == [4711]
    assert "process 4711 uses NCCL and needs gpu1 for itself" in stays[0][0].message


def test_ranks_without_an_agent_are_not_moved_beside_another_process() -> None:
    """The driver can move them if NCCL_P2P_DISABLE=1 is set: then their communicators stay as they are."""
    around = Surroundings(nccl_shared=True, nccl_p2p_disabled=True)
    rank = a_process(None, around=around)
    (reason,) = the_reasons(planned(a_snapshot(rank, OTHER, **ROOMY), to("gpu1")))
    assert reason.message.startswith("process 4711 uses NCCL and needs gpu1 for itself")
    the_plan(planned(a_snapshot(rank, **ROOMY), to("gpu1")))


def test_ranks_with_nccl_on_one_gpu_can_only_keep_their_contexts() -> None:
    """NCCL connects such ranks if they name different hosts. Each resume of them by the driver ended them."""
    one = [a_rank(number, gpus=("gpu0",)) for number in range(2)]
    (reason,) = the_reasons(planned(a_snapshot(*one, **ROOMY), SUSPENSION))
    assert reason.message.startswith("processes 4711 and 4712 use NCCL and are on gpu0: after a restore by the driver")
    assert reason.hint == "move them to a GPU each first: hegmctl migrate --to; or use --keep-context"
    (reason,) = the_reasons(planned(a_snapshot(*one, **ROOMY), SUSPENSION.replace(kind="checkpoint")))
    assert reason.hint == "move them to a GPU each first: hegmctl migrate --to"
    kept = a_snapshot(*one, **ROOMY)
    plan = the_plan(planned(kept, SUSPENSION.replace(keep_context=True)))
    op = plan.operation("1", kept.candidates, {}, limits=Limits(), utc=0.0)
    the_plan(planned_resume(kept, BACK, DrivenOperation(op).until("suspended").op))


def test_the_estimate_has_the_seconds_for_communicators_and_ranks_on_gpus_of_their_own_go_at_once() -> None:
    alone_s = the_plan(planned(a_snapshot(a_process(an_agent()), **ROOMY), SUSPENSION)).estimate_s
    assert the_plan(planned(a_job(), SUSPENSION)).estimate_s == pytest.approx(alone_s + 0.42)
    together = [a_rank(number, GLOO[number], gpus=("gpu0",)) for number in range(2)]
    one_gpu_s = the_plan(planned(a_snapshot(*together, **ROOMY), SUSPENSION)).estimate_s
    assert one_gpu_s == pytest.approx(2 * alone_s)


def test_ranks_whose_groups_have_no_peers_are_planned_as_any_processes() -> None:
    bare = [a_rank(number, groups(mechanism="none", groups=0)) for number in range(2)]
    plan = the_plan(planned(a_snapshot(*bare, **ROOMY), SUSPENSION))
    assert not any(worker.communicators for worker in plan.workers)
    assert "disconnect" not in " ".join(plan.hazards)


@in_one_test(
    ("counts", "communicators", "together"),
    [
        (((4450, 4460), (2530, 2540)), [None, None], False),
        (((4450, 4460), (2530, 2540)), [groups(mechanism="none", groups=0)] * 2, False),
        (((4450, 4460), (2530, 4440)), [None, None], True),
        (((4450, 4460), None), [None, None], True),
        (((4450, 4460), (4440, 4440)), [groups(mechanism="none", groups=0)] * 2, True),
        (((4450, 4460), (2530, 2540)), GLOO, True),
        (((4450, 4460), (2530, 2540)), [groups(mechanism="none", groups=0, uncovered=("cupy",))] * 2, True),
    ],
)
def test_ranks_that_train_alone_do_not_wait_for_one_boundary(
    counts: tuple[tuple[int, int] | None, ...], communicators: list[Communicators | None], together: bool
) -> None:
    """Two ranks without a process group drifted apart by 2,000 batches; a move waited 54 s for the slower one."""
    ranks: list[Candidate] = []
    for number, count in enumerate(counts):
        rank = a_rank(number, communicators[number])
        assert rank.agent is not None
        ranks.append(rank.replace(agent=rank.agent.replace(counts=count, communicators=communicators[number])))
    found = planned(a_snapshot(*ranks, **ROOMY), SUSPENSION.replace(kind="quiesce"))
    assert isinstance(found, MigrationPlan), found
    assert found.is_distributed == together


@in_one_test(
    ("snapshot", "message", "hint"),
    [
        (a_job(groups(uncovered=("group 1 uses symmetric memory",))), "group 1 uses symmetric memory", "--via restart"),
        (a_job(groups(mechanism="none", uncovered=("cupy",))), "cannot disconnect: cupy", "--via restart"),
        (a_job(groups(nvls=True), groups(nvls=True)), "NVLS", "NCCL_NVLS_ENABLE=0"),
        (a_snapshot(a_rank(0, world_size=4), a_rank(1, world_size=4)), "2 of the job's 4 ranks", "other nodes"),
        (a_snapshot(a_rank(0), a_process(pid=4712, job="run", gpus=("gpu1",))), "4712 has no agent", "hegmctl run"),
    ],
    ids=["uncovered", "only uncovered", "NVLS", "other nodes", "no agent"],
)
def test_groups_that_cannot_be_disconnected_are_refused_once_with_the_next_step(
    snapshot: NodeSnapshotForPlan, message: str, hint: str
) -> None:
    reasons = the_reasons(planned(snapshot, SUSPENSION))
    found = [reason for reason in reasons if message in reason.message]
    assert len(found) == 1, reasons
    assert hint in found[0].hint


def test_a_reason_for_all_ranks_is_stated_once() -> None:
    """Issue 16, bad input: a driver that is not used, and a rank without an agent, which counted as missing as well."""
    denied = tuple([gpu.replace(driver_version="610.57.04") for gpu in FOUR])
    (reason,) = the_reasons(planned(a_job(gpus=denied), to("gpu2,gpu3")))
    assert "driver 610.57.04 is not used for moves" in reason.message
    bare = a_snapshot(a_rank(0), a_rank(1).replace(agent=None), gpus=FOUR, **ROOMY)
    (missing,) = the_reasons(planned(bare, to("gpu2,gpu3")))
    assert missing.message == "process 4712 has no agent, and belongs to ranks with communicators (4711)"


def test_ranks_of_a_script_that_spawns_them_were_told_that_the_other_ranks_have_ended() -> None:
    agent = an_agent(cuda_facts(), communicators=groups(), rank=None, world_size=None)
    spawned = [a_rank(number).replace(agent=agent) for number in range(2)]
    (reason,) = the_reasons(planned(a_snapshot(*spawned, **ROOMY), SUSPENSION))
    assert "the ranks of the job have no RANK and WORLD_SIZE in their environment" in reason.message
    assert "torch.multiprocessing.spawn does not" in reason.hint


def test_an_agent_that_does_not_report_how_it_disconnects_is_refused() -> None:
    (reason,) = the_reasons(planned(a_snapshot(a_process(an_agent(cuda_facts(hazards=("nccl-p2p",))))), SUSPENSION))
    assert "live NCCL communicators" in reason.message


def test_communicators_that_go_into_an_image_are_replaced_even_if_the_library_can_suspend_them() -> None:
    plan = planned(a_job(), SUSPENSION.replace(kind="checkpoint"))
    assert isinstance(plan, MigrationPlan)
    assert [worker.communicators for worker in plan.workers] == ["replace", "replace"]


FOUR = tuple(a_gpu(f"gpu{number}", nvlinks=tuple(f"gpu{other}" for other in range(4))) for number in range(4))


@in_one_test(
    ("requested", "places"),
    [
        ("gpu2,gpu3", ["gpu2", "gpu3"]),
        ("gpu3,gpu2", ["gpu3", "gpu2"]),
        ("gpu1,gpu0", ["gpu1", "gpu0"]),
        ("gpu0=gpu2", ["gpu2", "gpu1"]),
        ("gpu0=gpu1,gpu1=gpu0", ["gpu1", "gpu0"]),
    ],
)
def test_several_gpus_are_taken_in_rank_order_or_in_the_place_of_others(requested: str, places: list[str]) -> None:
    snapshot = a_job(gpus=FOUR)
    plan = the_plan(planned(snapshot, to(requested, pids=(4712,))))
    assert [worker.to for worker in sorted(plan.workers, key=lambda worker: worker.pid)] == places


def test_one_gpu_for_ranks_on_several_is_refused_and_the_hint_names_one_for_each() -> None:
    """Issue 19: `migrate JOB --to 1` put both ranks on one GPU silently."""
    (reason,) = the_reasons(planned(a_job(*GLOO, gpus=FOUR), to("gpu2")))
    assert reason.message == "the job has 2 ranks, on gpu0 and gpu1, and --to names one GPU"
    assert "--to gpu2,gpu3;" in reason.hint
    assert "--to gpu2,gpu2" in reason.hint
    snapshot = a_job(*GLOO, gpus=FOUR)
    op = the_plan(planned(snapshot, SUSPENSION)).operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)
    resume = PlanRequest(kind="resume", pids=(4711,), to="gpu2")
    (again,) = the_reasons(planned_resume(snapshot, resume, DrivenOperation(op).until("suspended").op))
    assert again.message == reason.message


def test_the_hint_for_ranks_with_nccl_named_gpus_on_which_they_are_refused() -> None:
    (reason,) = the_reasons(planned(a_job(gpus=FOUR), to("gpu2")))
    assert reason.hint == "name a GPU for each in rank order: --to gpu2,gpu3"
    three = [a_rank(number, gpus=(f"gpu{min(number, 1)}",), world_size=3) for number in range(3)]
    (few,) = the_reasons(planned(a_snapshot(*three, **ROOMY), to("gpu1")))
    assert few.hint == "NCCL needs a GPU for each rank, and this node has 2; see hegmctl gpus"


def test_one_gpu_is_enough_for_ranks_that_share_one() -> None:
    together = [a_rank(number, GLOO[number], gpus=("gpu0",)) for number in range(2)]
    plan = the_plan(planned(a_snapshot(*together, gpus=FOUR, **ROOMY), to("gpu2")))
    assert [worker.to for worker in plan.workers] == ["gpu2", "gpu2"]


def test_ranks_can_be_put_on_one_gpu_by_name_with_gloo_but_not_with_nccl() -> None:
    plan = the_plan(planned(a_job(*GLOO, gpus=FOUR), to("gpu2,gpu2")))
    assert [worker.to for worker in plan.workers] == ["gpu2", "gpu2"]
    (reason,) = the_reasons(planned(a_job(gpus=FOUR), to("gpu2,gpu2")))
    assert reason.message == "NCCL cannot connect ranks on one GPU, and 4711 and 4712 would be on gpu2"


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("gpu0,gpu1,gpu2", "2 ranks, and 3 GPUs"),
        ("gpu3=gpu2", "does not say which GPU replaces which of"),
        ("gpu0=", "does not say which GPU replaces which of"),
        (",,", "has an empty name in it"),
        ("gpu1,", "has an empty name in it"),
    ],
)
def test_words_that_fit_no_job_of_two_ranks_are_refused(requested: str, message: str) -> None:
    """The next step was `--to ,,`, or a `hegmctl migrate` with a GPU that the node may not have, also for a resume."""
    (reason,) = the_reasons(planned(a_job(gpus=FOUR), to(requested)))
    assert message in reason.message
    assert "--to gpu0" in reason.hint
    assert "migrate" not in reason.hint


def test_ranks_are_resumed_on_exchanged_gpus() -> None:
    snapshot = a_job()
    plan = the_plan(planned_resume(snapshot, BACK.replace(to="gpu1,gpu0"), suspended(snapshot)))
    assert plan.destinations == {"4711": "gpu1", "4712": "gpu0"}


def test_ranks_go_from_gpu_to_gpu_if_both_fit_and_otherwise_when_all_have_left() -> None:
    """A rank of 33 GiB leaves 100 of the 140 GiB free; then 20 are free, too few for either rank."""
    request = to("gpu1,gpu0")
    plan = the_plan(planned(a_job(), request))
    assert not plan.reserves_late
    assert [worker.carrier for worker in plan.workers] == ["peer", "peer"]
    tight = a_job(gpus=(a_gpu("gpu0", free_bytes=20 * GIB), a_gpu("gpu1", free_bytes=20 * GIB)))
    late = the_plan(planned(tight, request))
    assert late.reserves_late
    assert [worker.carrier for worker in late.workers] == ["host", "host"]
    assert late.operation("1", tight.candidates, {}, limits=Limits(), utc=0.0).reserves_late
    assert "reserved when all ranks have left" in " ".join(late.hazards)
    full = a_job(
        gpus=(a_gpu("gpu0", free_bytes=20 * GIB), a_gpu("gpu1", free_bytes=20 * GIB), a_gpu("gpu2", free_bytes=GIB))
    )
    assert the_reasons(planned(full, to("gpu1,gpu2"))), "nobody leaves gpu2"


TRIED = Combination(
    driver="580.159.04", library="2.29.7", framework_version="2.13.0", chip="0x10de:0x2335", links="nvlink"
)


def tried(verdict: str, **values: Any) -> tuple[Proof, ...]:
    return (Proof(combination=TRIED.replace(**values), verdict=verdict, detail="suspend ended as lost"),)


def linked(**values: Any) -> NodeSnapshotForPlan:
    """Two ranks on two GPUs with NVLink, and the chip and version of what was tried."""
    gpus = [
        a_gpu(f"gpu{number}", chip=TRIED.chip, nvlinks=(f"gpu{1 - number}",), driver_version=TRIED.driver)
        for number in range(2)
    ]
    job = a_job(gpus=tuple(gpus), **values)
    versions = [
        candidate.replace(agent=candidate.agent.replace(framework_version="2.13.0"))
        for candidate in job.candidates
        if candidate.agent is not None
    ]
    return job.replace(candidates=tuple(versions))


def test_a_plan_shows_whether_the_combination_was_proven_by_a_throwaway_job() -> None:
    """Issue 16, outcome 4: no real job is the first to try a combination."""
    known = " ".join(the_plan(planned(linked(proofs=tried("proven")), SUSPENSION)).hazards)
    assert "proven by hegmctl doctor --nccl: driver 580.159.04, NCCL 2.29.7, PyTorch 2.13.0" in known
    assert "links nvlink" in known
    unknown = " ".join(the_plan(planned(linked(), SUSPENSION)).hazards)
    assert "not proven yet" in unknown
    assert "run: hegmctl doctor --nccl" in unknown


@in_one_test("field", ["driver", "library", "framework_version", "chip", "links"])
def test_a_proof_holds_for_the_combination_that_was_tried_only(field: str) -> None:
    for verdict in ("proven", "failed"):
        plan = the_plan(planned(linked(proofs=tried(verdict, **{field: "another"})), SUSPENSION))
        assert "not proven yet" in " ".join(plan.hazards)


def test_a_combination_with_which_the_throwaway_job_failed_is_refused_by_name() -> None:
    (reason,) = the_reasons(planned(linked(proofs=tried("failed")), SUSPENSION))
    assert "NCCL 2.29.7, PyTorch 2.13.0" in reason.message
    assert "suspend ended as lost" in reason.message
    assert "hegmctl doctor --nccl" in reason.hint


def test_the_job_that_tries_a_failed_combination_once_more_is_not_refused() -> None:
    job = linked(proofs=tried("failed"))
    the_plan(planned(job.replace(proving=(job.candidates[0].pid,)), SUSPENSION))


def test_ranks_without_nccl_need_no_proof() -> None:
    communicators = [groups(backends=("gloo",), library=None, mechanism="replace")] * 2
    assert "proven" not in " ".join(the_plan(planned(a_job(*communicators), SUSPENSION)).hazards)
