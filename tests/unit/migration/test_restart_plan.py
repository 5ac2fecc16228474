"""When a plan is a restart, its notes, and every refusal. Longer than 400 lines because one rig serves them all."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.memory.sizes import NEXT_TO_NOTHING_BYTES, whole_size
from hegmd.migration.machine.operation import BY_STATE, MIGRATE, RESTART, RESUME, SUSPEND, Limits, Respawn
from hegmd.migration.model import (
    AgentSurvey,
    Candidate,
    GpuMemory,
    MigrationPlan,
    NodeSnapshotForPlan,
    PlanRequest,
    PoolMemory,
)
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.protocol.messages import Communicators, CudaDevice, CudaFacts
from hegmd.protocol.operations import Reason
from tests.unit.migration.operations import operation, worker

GIB = 1 << 30


def node(agent: dict[str, Any] | None = None, **candidate: Any) -> NodeSnapshotForPlan:
    """A job on gpu0 with a supervisor; gpu1 is like it, gpu2 another chip of the vendor, gpu3 another vendor's."""
    survey = AgentSurvey(
        **{"token": "t", "size_bytes": 10, "boundary": 5, "state_bytes": 4096, "refusals": (), **(agent or {})}
    )
    plain = {"pid": 7, "start_ticks": 1, "uid": 0, "job": "run", "gpus": ("gpu0",), "supervisor": 6, "python": True}
    job = Candidate(**{**plain, "agent": survey, "vram_bytes": 10, **candidate})
    kinds = (("gpu0", "simulated", "A"), ("gpu1", "simulated", "A"), ("gpu2", "simulated", "B"), ("gpu3", "amd", "C"))
    gpus = tuple([GpuMemory(id=name, vendor=vendor, chip=chip, free_bytes=GIB) for name, vendor, chip in kinds])
    return NodeSnapshotForPlan(gpus=gpus, candidates=(job,), pool=PoolMemory(budget_bytes=GIB, free_bytes=GIB))


def ask(to: str | None = "gpu1", **more: Any) -> PlanRequest:
    return PlanRequest(**{"kind": MIGRATE, "pids": (7,), "to": to, **more})


def plan_of(found: MigrationPlan | tuple[Reason, ...]) -> MigrationPlan:
    assert isinstance(found, MigrationPlan), found
    return found


def reasons_text(found: MigrationPlan | tuple[Reason, ...]) -> str:
    assert not isinstance(found, MigrationPlan)
    return "\n".join(f"{reason.message}; {reason.hint}" for reason in found)


@pytest.mark.parametrize(("phase", "next_"), [("suspended", "--resume op1"), ("restoring", "hegmctl op op1")])
def test_a_process_whose_state_is_held_is_not_reported_as_on_no_gpu(phase: str, next_: str) -> None:
    left = worker(pid=9, method=RESTART, carrier=BY_STATE, state_saved=True, offloaded=True, gpu=None)
    held = operation(left, phase=phase)
    refused = reasons_text(planned(node().replace(running=(held,)), PlanRequest(kind=SUSPEND, pids=(9,))))
    assert f"process 9 has exited, and operation op1 ({phase}) keeps its state" in refused
    assert next_ in refused


def on_two(*numbers: int | None, rank: int | None = None, uuids: str = "01", **values: Any) -> NodeSnapshotForPlan:
    """A process on gpu0 and gpu1, with 300 bytes on one and 100 on the other, of which 200 are its state."""
    facts = [
        CudaDevice(uuid=f"GPU-{gpu}", size_bytes=50, number=number) for gpu, number in zip(uuids, numbers, strict=False)
    ]
    cuda = CudaFacts(gpus=("GPU-0", "GPU-1"), allocator="native", expandable=False, devices=tuple(facts))
    agent = {"cuda": cuda, "state_bytes": 200, "rank": rank, "world_size": None if rank is None else 1}
    gpus = tuple([f"gpu{number}" for number in uuids])
    held = {"gpu0": 300, "gpu1": 100}
    found = node(agent, gpus=gpus, vram_bytes=400, driver_bytes_by_gpu=held, **values)
    return found.replace(gpus=tuple([gpu.replace(uuid=f"GPU-{gpu.id[3:]}", vendor=of(gpu)) for gpu in found.gpus]))


def of(gpu: GpuMemory) -> str:
    return gpu.vendor if gpu.vendor == "amd" else "nvidia"


@pytest.mark.parametrize(
    ("to", "place", "needed"),
    [
        (None, "gpu0,gpu1", {}),
        ("gpu0,gpu1", "gpu0,gpu1", {}),
        ("gpu1,gpu0", "gpu1,gpu0", {"gpu1": 200, "gpu0": 0}),
        ("gpu0=gpu2", "gpu2,gpu1", {"gpu2": 300, "gpu1": 0}),
        ("gpu1=gpu2", "gpu0,gpu2", {"gpu0": 0, "gpu2": 100}),
        ("gpu0=gpu1,gpu1=gpu0", "gpu1,gpu0", {"gpu1": 200, "gpu0": 0}),
    ],
)
def test_a_process_on_several_gpus_is_restarted_with_memory_reserved_for_each_device(
    to: str | None, place: str, needed: dict[str, int]
) -> None:
    plan = plan_of(planned(on_two(0, 1), ask(to, via=RESTART)))
    (found,) = plan.workers
    assert (found.gpu, found.to, found.method, found.carrier) == ("gpu0,gpu1", place, RESTART, BY_STATE)
    assert (found.driver_bytes_by_gpu, found.storage_bytes_by_gpu) == ((150, 50), (150, 50))
    assert (found.driver_bytes, found.size_bytes) == (200, 200)
    assert plan.reservation_bytes == needed


def test_the_gpus_of_a_restarted_process_are_in_the_order_of_its_devices() -> None:
    plan = plan_of(planned(on_two(0, 1, uuids="10"), ask("gpu1=gpu2", via=RESTART)))
    assert (plan.workers[0].gpu, plan.workers[0].to) == ("gpu1,gpu0", "gpu2,gpu0")
    assert plan.reservation_bytes == {"gpu2": 100, "gpu0": 0}


def test_a_restart_on_other_gpus_needs_memory_on_each() -> None:
    full = on_two(0, 1)
    full = full.replace(gpus=tuple([gpu.replace(free_bytes=99 if gpu.id == "gpu2" else GIB) for gpu in full.gpus]))
    assert "gpu2" in reasons_text(planned(full, ask("gpu1=gpu2", via=RESTART)))


@pytest.mark.parametrize(
    ("found", "to", "why"),
    [
        (on_two(0, 1), "gpu1", "is on 2 GPUs, and would be restarted on gpu1: its script uses 2 devices; name a GPU"),
        (on_two(0, 1), "cpu", "would be restarted on cpu: its script uses 2 devices"),
        (on_two(0, 1), "gpu2,gpu2", "two GPUs of process 7 cannot both move to gpu2"),
        (on_two(0, 1), "gpu0,gpu9", "gpu9"),
        (on_two(0, 1), "gpu0,gpu3", "on gpu0,gpu3, which are GPUs of different vendors"),
        (
            on_two(0, 2),
            "gpu1,gpu0",
            "process 7 uses cuda:2, and a new process would see 2 GPUs only, from cuda:0 to cuda:1",
        ),
        (on_two(0, None), "gpu1,gpu0", "does not report which of its devices is on which GPU"),
        (on_two(0), "gpu1,gpu0", "does not report which of its devices is on which GPU"),
        (on_two(0, 1, rank=0), "gpu1,gpu0", "process 7 is rank 0 of its job, on 2 GPUs"),
    ],
)
def test_a_restart_of_a_process_on_several_gpus_is_refused_where_a_device_would_be_another(
    found: NodeSnapshotForPlan, to: str, why: str
) -> None:
    assert why in reasons_text(planned(found, ask(to, via=RESTART)))


def test_a_restart_started_a_process_where_its_only_device_does_not_exist() -> None:
    """It used the second GPU that it saw; the new process saw one GPU."""
    refused = reasons_text(planned(on_two(1, uuids="1"), ask("gpu0", via=RESTART)))
    assert "process 7 uses cuda:1, and a new process would see one GPU only, as cuda:0" in refused
    assert "omit --via restart, or start it with only its GPUs: hegmctl run --gpu" in refused
    assert plan_of(planned(on_two(0, uuids="1"), ask("gpu0", via=RESTART))).workers


def test_a_better_method_is_preferred() -> None:
    plan = plan_of(planned(node(), ask("gpu1", allow_restart=True)))
    assert plan.workers[0].method != RESTART


def test_an_allowed_restart_reaches_another_chip_or_vendor() -> None:
    for to in ("gpu2", "gpu3"):
        plan = plan_of(planned(node(), ask(to, allow_restart=True)))
        assert (plan.workers[0].method, plan.workers[0].carrier) == (RESTART, BY_STATE)
        assert "another chip" in plan.hazards[0]
        assert "a new process continues" in plan.hazards[1]
        assert "only script variables given to hegm.keep" in plan.hazards[2]


def test_variables_that_start_over_are_named_in_the_plan() -> None:
    """The plan said of every script that its variables start over, which did not show whether that matters."""
    variable = "log (TextIOWrapper) in main() at train.py:31"
    named = plan_of(planned(node({"begin_anew": (variable,)}), ask("gpu2", allow_restart=True)))
    assert named.hazards[2] == f"process 7: starts from the beginning: {variable}; call hegm.keep to keep it"
    none = plan_of(planned(node({"begin_anew": ()}), ask("gpu2", allow_restart=True)))
    assert not any("starts from the beginning" in hazard for hazard in none.hazards)


def test_a_training_started_by_a_shell_is_not_restarted() -> None:
    """Its supervisor waited for the shell, which took the exit status of a restart for the end of the training."""
    refused = reasons_text(planned(node(apart=True), ask("gpu2", via=RESTART)))
    assert "would take its exit for the end of the job" in refused
    assert "exec python3 train.py" in refused


def test_the_ranks_of_a_script_that_spawns_them_were_told_to_exec_a_script_in_a_shell() -> None:
    candidate = node(apart=True).candidates[0]
    agent = candidate.agent
    assert agent is not None
    connected = agent.replace(communicators=Communicators(mechanism="replace", groups=1, backends=("gloo",)))
    spawned = node(apart=True).replace(candidates=(candidate.replace(agent=connected),))
    refused = reasons_text(planned(spawned, ask("gpu2", via=RESTART)))
    assert "would take its exit for the end of the job" in refused
    assert "torch.multiprocessing.spawn does not" in refused


def test_unsearched_values_are_in_the_plan() -> None:
    """The search for variables stopped at its limits silently, and the variables it missed were lost."""
    unseen = "not searched: the 4,000 objects of __main__.players"
    plan = plan_of(planned(node({"begin_anew": (unseen,)}), ask("gpu2", allow_restart=True)))
    assert plan.hazards[2] == f"process 7: {unseen}; call hegm.keep to keep changes there"


def test_a_job_that_an_operation_has_was_offered_a_restart_that_it_refuses() -> None:
    moved = plan_of(planned(node(), ask("gpu1")))
    other = moved.operation("4", node().candidates, {}, limits=Limits(), utc=0.0)
    refused = reasons_text(planned(node().replace(running=(other,)), ask("gpu2")))
    assert "operation 4 (migrate, planned) already includes process 7" in refused
    assert "--via restart" not in refused


def test_a_disallowed_restart_is_offered_in_the_hint() -> None:
    """The refusal alone left people with nothing to do, though their job could have been restarted there."""
    assert "hegmctl migrate 7 --via restart --to GPU --dry-run" in reasons_text(planned(node(), ask("gpu2")))
    assert "--via restart" not in reasons_text(planned(node(supervisor=None), ask("gpu2")))


def test_a_restart_may_stay_where_it_is_and_the_operation_has_all_that_it_is_to_change() -> None:
    respawn = Respawn(set={"A": "1"}, unset=("B",), python="/other/python")
    snapshot = node()
    plan = plan_of(planned(snapshot, ask(None, via=RESTART, respawn=respawn)))
    assert (plan.workers[0].gpu, plan.workers[0].to) == ("gpu0", "gpu0")
    assert plan.pool_needed_bytes > 4096
    assert plan.reservation_bytes == {}
    op = plan.operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)
    assert op.respawn == respawn
    assert (op.workers[0].run, op.workers[0].must_exit) == ("run", True)


def test_facts_unknown_after_attaching_block_a_restart_and_no_move() -> None:
    """Issue 19, outcome 7."""
    snapshot = node({"unknown": ("its first random state", "its command")})
    refused = reasons_text(planned(snapshot, ask("gpu2", via=RESTART)))
    assert "attached while it ran, so a restart does not know its first random state and its command" in refused
    assert plan_of(planned(snapshot, ask("gpu1"))).workers[0].method != RESTART


def test_all_reasons_against_a_restart_are_reported() -> None:
    via = ask("gpu2", via=RESTART)
    assert "process 7 has no supervisor that would restart it" in reasons_text(planned(node(supervisor=None), via))
    refused = node({"refusals": ("optimizer 2 has a function in it", "the stream has no place")})
    assert "optimizer 2 has a function in it" in reasons_text(planned(refused, via))
    assert "the stream has no place" in reasons_text(planned(refused, via))
    assert "is unknown" in reasons_text(planned(node({"state_bytes": None}), via))
    other = ask("gpu2", via=RESTART, respawn=Respawn(python="/p"))
    assert "does not begin with a Python" in reasons_text(planned(node(python=False), other))
    large = node({"state_bytes": 2 * GIB})
    assert "of the pool are needed" in reasons_text(planned(large, via))


def test_a_program_other_than_python_was_noticed_only_at_the_start() -> None:
    """The plan accepted `--python /bin/true`, and the job had exited before the error appeared."""
    other = ask("gpu2", via=RESTART, respawn=Respawn(python="/bin/true"))
    refused = reasons_text(planned(node(no_python="asked for its version, it says nothing"), other))
    assert "/bin/true is no Python: asked for its version, it says nothing" in refused
    for kind in ("pypy 3.10.14", "cpython 3.8.20", "cpython 2.7.18"):
        assert f"/bin/true is {kind}, which cannot load a saved state" in reasons_text(
            planned(node(other_python=kind), other)
        )
    plan = plan_of(planned(node(other_python="cpython 3.14.0"), other))
    assert any("the Python /bin/true (cpython 3.14.0)" in hazard for hazard in plan.hazards)
    assert any("the Python /bin/true:" in hazard for hazard in plan_of(planned(node(), other)).hazards)


def test_variables_that_would_have_cost_it_its_state_or_its_place_were_changed() -> None:
    """With `--to gpu1 --env HEGM_GPU=gpu0` the job ran on gpu0; with another HEGM_SOCKET the daemon lost it."""
    for changed in ({"set": {"HEGM_SOCKET": "/nowhere"}}, {"unset": ("HEGM_RUN",)}):
        other = ask("gpu2", via=RESTART, respawn=Respawn(**changed))
        assert "cannot be changed: hegmd identifies the job by it" in reasons_text(planned(node(), other))
    other = ask("gpu2", via=RESTART, respawn=Respawn(set={"HEGM_GPU": "gpu0"}, unset=("CUDA_VISIBLE_DEVICES",)))
    refused = reasons_text(planned(node(), other))
    assert "CUDA_VISIBLE_DEVICES and HEGM_GPU cannot be changed: hegmd sets it to the target of --to" in refused
    harmless = Respawn(set={"HEGM_EXIT_CODE": "7", "PYTHONPATH": "/x"})
    plan_of(planned(node(), ask("gpu2", via=RESTART, respawn=harmless)))


def test_a_python_that_never_loads_the_agent_does_not_start_the_script_over() -> None:
    """Such as a script that starts Python with -I: no agent restored the state, and the training began again."""
    other = ask("gpu2", via=RESTART, respawn=Respawn(python="/opt/python"))
    refused = reasons_text(planned(node(other_python="cpython 3.12.4 alone"), other))
    assert "/opt/python is cpython 3.12.4, which is started with -E or -I, or drops PYTHONPATH" in refused


def on_cpu(agent: dict[str, Any] | None = None, **candidate: Any) -> NodeSnapshotForPlan:
    return node({"size_bytes": 0, **(agent or {})}, **{"gpus": (), "on_cpu": True, "vram_bytes": None, **candidate})


def test_a_job_on_the_cpu_was_nowhere_and_could_not_be_restarted_on_a_gpu() -> None:
    plan = plan_of(planned(on_cpu(), ask("gpu3", via=RESTART)))
    member = plan.workers[0]
    assert (member.gpu, member.to, member.method) == ("cpu", "gpu3", RESTART)
    assert plan.reservation_bytes == {"gpu3": 4096 + NEXT_TO_NOTHING_BYTES}
    assert "is unknown before it runs there" in plan.hazards[0]
    simulated = plan_of(planned(on_cpu({"size_bytes": 9000}), ask("gpu1", via=RESTART)))
    assert simulated.reservation_bytes == {"gpu1": 9000}
    op = plan.operation("1", on_cpu().candidates, {}, limits=Limits(), utc=0.0)
    assert (op.workers[0].gpu, op.workers[0].first_gpu, op.workers[0].reservations) == ("cpu", "cpu", {})


def test_a_job_on_the_cpu_can_only_be_restarted_and_the_refusal_names_that() -> None:
    refused = reasons_text(planned(on_cpu(), ask("gpu1")))
    assert "process 7 trains on the CPU" in refused
    assert "hegmctl migrate 7 --via restart --to GPU --dry-run" in refused
    assert plan_of(planned(on_cpu(), ask("gpu1", allow_restart=True))).workers[0].method == RESTART
    assert "trains on the CPU" in reasons_text(planned(on_cpu(), PlanRequest(kind=SUSPEND, pids=(7,))))


def test_only_a_restart_leads_to_the_cpu_and_it_needs_no_gpu_memory() -> None:
    assert "--via restart --to cpu" in reasons_text(planned(node(), ask("cpu")))
    plan = plan_of(planned(node(), ask("cpu", via=RESTART)))
    assert (plan.workers[0].gpu, plan.workers[0].to, plan.reservation_bytes) == ("gpu0", "cpu", {})
    again = plan_of(planned(on_cpu(), ask(None, via=RESTART)))
    assert (again.workers[0].gpu, again.workers[0].to) == ("cpu", "cpu")


def test_host_memory_for_a_move_to_the_cpu_is_checked_first() -> None:
    """The state is there twice for a while, and a node that has not that much would end some process or other."""
    needed_bytes = whole_size(4096) + 4096
    tight = node().replace(available_bytes=needed_bytes - 1)
    assert "are needed for process 7 to continue on the CPU" in reasons_text(planned(tight, ask("cpu", via=RESTART)))
    plan_of(planned(tight.replace(available_bytes=needed_bytes), ask("cpu", via=RESTART)))


def test_a_held_state_can_continue_on_the_cpu_and_nothing_else_can() -> None:
    snapshot = node()
    op = plan_of(planned(snapshot, ask("gpu1", via=RESTART))).operation(
        "1", snapshot.candidates, {}, limits=Limits(), utc=0.0
    )
    left = op.workers[0].replace(gpu=None, previous_gpu="gpu0", state_saved=True, offloaded=True)
    resume = PlanRequest(kind=RESUME, pids=(7,), to="cpu")
    plan = plan_of(planned_resume(snapshot, resume, op.replace(phase="suspended", workers=(left,))))
    assert (plan.workers[0].to, plan.reservation_bytes) == ("cpu", {})
    # The dry run promised a restart, although no supervisor could start it.
    assert "if that is still running; otherwise run: hegmctl run --allow-restart --resume 1" in plan.hazards[-1]
    driven = left.replace(method="driver", state_saved=False)
    assert "cannot continue on the CPU" in reasons_text(
        planned_resume(snapshot, resume, op.replace(phase="suspended", workers=(driven,)))
    )


def ranked(
    *ranks: int | None, world: int = 2, gpus: tuple[str, ...] = ("gpu0",), **candidate: Any
) -> NodeSnapshotForPlan:
    """A job of such ranks, on those GPUs one after the other."""
    one = node(**candidate)
    job = one.candidates[0]
    members: list[Candidate] = []
    for index, rank in enumerate(ranks):
        survey = job.agent and job.agent.replace(rank=rank, world_size=None if rank is None else world)
        gpu = gpus[index % len(gpus)]
        members.append(job.replace(pid=7 + index, gpus=(gpu,), agent=survey))
    return one.replace(candidates=tuple(members))


def test_ranks_are_restarted_as_one() -> None:
    plan = plan_of(planned(ranked(0, 1), ask("gpu2", via=RESTART)))
    assert (plan.is_distributed, [worker.to for worker in plan.workers]) == (True, ["gpu2", "gpu2"])
    op = plan.operation("1", ranked(0, 1).candidates, {}, limits=Limits(), utc=0.0)
    assert op.restarts_together
    assert [worker.rank for worker in op.workers] == [0, 1]


def test_a_job_whose_ranks_are_not_all_here_or_not_known_is_not_restarted() -> None:
    """Each would be started with the launcher, and find no state of its own."""
    via = ask("gpu2", via=RESTART)
    assert "of 2 ranks, 0 are here" in reasons_text(planned(ranked(0), via))
    assert "of 3 ranks, 0 and 2 are here" in reasons_text(planned(ranked(0, 2, world=3), via))
    assert "have no RANK and WORLD_SIZE in their environment" in reasons_text(planned(ranked(None, None), via))
    assert "have no RANK and WORLD_SIZE in their environment" in reasons_text(planned(ranked(0, 0), via))
    assert "15 at most" in reasons_text(planned(ranked(*range(16), world=16), via))


def test_ranks_keep_apart_and_together_as_they_were() -> None:
    """They find their GPUs by the order in which a variable names them."""
    apart = ranked(0, 1, gpus=("gpu0", "gpu1"))
    assert "the job has 2 ranks, on gpu0 and gpu1, and --to names one GPU" in reasons_text(
        planned(apart, ask("gpu2", via=RESTART))
    )
    crossed = ask(None, via=RESTART, placement={"7": "gpu2", "8": "gpu3"})
    assert "GPUs of amd and simulated" in reasons_text(planned(apart, crossed))
    exchanged = plan_of(planned(apart, ask("gpu1,gpu0", via=RESTART)))
    assert [worker.to for worker in exchanged.workers] == ["gpu1", "gpu0"]
    one_moves = plan_of(planned(apart, ask("gpu1=gpu2", via=RESTART)))
    assert [worker.to for worker in one_moves.workers] == ["gpu0", "gpu2"]


def of_nvidia(snapshot: NodeSnapshotForPlan) -> NodeSnapshotForPlan:
    return snapshot.replace(gpus=tuple([gpu.replace(vendor="nvidia") for gpu in snapshot.gpus]))


def test_ranks_share_gpus_after_a_restart_where_they_fit_and_their_numbers_lead_there() -> None:
    """Issue 16, outcome 6. A GPU is named once in the variable, so ranks can only take the GPUs in turn."""
    four = of_nvidia(ranked(0, 1, 2, 3, world=4, gpus=("gpu0", "gpu1", "gpu2", "gpu3")))
    plan = plan_of(planned(four, ask("gpu2,gpu3,gpu2,gpu3", via=RESTART)))
    assert [worker.to for worker in plan.workers] == ["gpu2", "gpu3", "gpu2", "gpu3"]
    assert "4 ranks share 2 GPUs, so the script has to take its GPU by LOCAL_RANK modulo" in plan.hazards[0]
    refused = reasons_text(planned(four, ask("gpu2,gpu2,gpu3,gpu3", via=RESTART)))
    assert "hegmd cannot place the ranks on gpu2,gpu2,gpu3,gpu3: each finds its GPU by its number" in refused
    assert "name the GPUs in turn, such as --to gpu2,gpu3,gpu2,gpu3" in refused
    halves = of_nvidia(ranked(0, 1, 2, 3, world=4, gpus=("gpu0", "gpu0", "gpu1", "gpu1")))
    plan = plan_of(planned(halves, ask("gpu0=gpu2,gpu1=gpu3", via=RESTART)))
    assert [worker.to for worker in plan.workers] == ["gpu2", "gpu2", "gpu3", "gpu3"]
    simulated = ranked(0, 1, 2, world=3, gpus=("gpu0", "gpu1", "gpu2"))
    plan = plan_of(planned(simulated, ask("gpu2,gpu2,gpu1", via=RESTART)))
    assert [worker.to for worker in plan.workers] == ["gpu2", "gpu2", "gpu1"]


@pytest.mark.parametrize(("first", "is_refused"), [(0, False), (1, True)])
def test_ranks_are_not_restarted_without_a_device_that_they_use(first: int, *, is_refused: bool) -> None:
    """Ranks on cuda:1 and cuda:2 of four GPUs were restarted with two. Only a recovery refused that."""
    found = of_nvidia(ranked(0, 1, gpus=("gpu0", "gpu1")))
    candidates = []
    for number, member in enumerate(found.candidates, first):
        device = CudaDevice(uuid=f"GPU-{member.gpus[0]}", size_bytes=1, number=number)
        cuda = CudaFacts(gpus=(device.uuid,), allocator="native", expandable=False, devices=(device,))
        candidates.append(member.replace(agent=member.agent and member.agent.replace(cuda=cuda)))
    gpus = tuple([gpu.replace(uuid=f"GPU-{gpu.id}") for gpu in found.gpus])
    plan = planned(found.replace(candidates=tuple(candidates), gpus=gpus), ask("gpu1,gpu0", via=RESTART))
    if is_refused:
        assert "a rank uses cuda:2, and a new process would see 2 GPUs only" in reasons_text(plan)
    else:
        assert plan_of(plan).workers


def test_ranks_that_do_not_fit_on_a_gpu_together_are_not_restarted_there() -> None:
    apart = ranked(0, 1, gpus=("gpu0", "gpu1"), vram_bytes=GIB * 3 // 4)
    refused = reasons_text(planned(apart, ask("gpu2,gpu2", via=RESTART)))
    assert "gpu2 has 1.0 GiB free, but 1.5 GiB are needed" in refused, refused


def test_ranks_with_nccl_were_restarted_on_one_gpu_where_they_cannot_connect() -> None:
    groups = Communicators(mechanism="replace", groups=1, backends=("nccl",))
    apart = of_nvidia(ranked(0, 1, gpus=("gpu0", "gpu1"), agent={"communicators": groups}))
    refused = reasons_text(planned(apart, ask("gpu2,gpu2", via=RESTART)))
    assert "NCCL cannot connect ranks on one GPU, and 7 and 8 would be on gpu2" in refused, refused


def test_a_single_rank_of_a_launcher_is_started_with_it() -> None:
    """Its state was given to the launcher, which closed it before it started the rank."""
    one = plan_of(planned(ranked(0, world=1, launched=True), ask("gpu2", via=RESTART)))
    op = one.operation("1", ranked(0, world=1, launched=True).candidates, {}, limits=Limits(), utc=0.0)
    assert op.restarts_together
    alone = plan_of(planned(ranked(0, world=1), ask("gpu2", via=RESTART)))
    assert not alone.is_distributed
