"""The contents of a plan, and every refusal with its next step.

Longer than 400 lines because plans of all kinds are made of the same node.
"""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.memory.sizes import whole_size
from hegmd.migration.machine.operation import CHECKPOINT, MIGRATE, RESTORE, RESUME, SUSPEND, Limits, Operation
from hegmd.migration.model import (
    AgentSurvey,
    Candidate,
    GpuMemory,
    MigrationPlan,
    NodeSnapshotForPlan,
    PlanRequest,
    PoolMemory,
    Unreachable,
)
from hegmd.migration.plan import throughput as pace
from hegmd.migration.plan.estimate import from_image, with_image
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.migration.plan.throughput import IN, OUT, Throughputs, image_s
from hegmd.protocol.messages import LeftAlone
from hegmd.protocol.operations import Reason
from tests.cells import in_one_test
from tests.unit.migration.operations import DrivenOperation, operation, worker

GIB = 2**30


def _gpu(name: str, **values: Any) -> GpuMemory:
    plain: dict[str, Any] = {"id": name, "vendor": "simulated", "chip": "sim", "free_bytes": 8 * GIB}
    return GpuMemory(**{**plain, **values})


def _agent(**values: Any) -> AgentSurvey:
    return AgentSurvey(**{"token": "t", "size_bytes": 2 * GIB, "boundary": 3, **values})


def _process(pid: int = 4711, **values: Any) -> Candidate:
    plain: dict[str, Any] = {
        "pid": pid,
        "start_ticks": 7,
        "uid": 1000,
        "name": "train.py",
        "gpus": ("gpu0",),
        "agent": _agent(),
    }
    return Candidate(**{**plain, **values})


def _snapshot(*candidates: Candidate, **values: Any) -> NodeSnapshotForPlan:
    plain: dict[str, Any] = {
        "gpus": (_gpu("gpu0"), _gpu("gpu1")),
        "candidates": candidates or (_process(),),
        "pool": PoolMemory(budget_bytes=16 * GIB, free_bytes=12 * GIB),
    }
    return NodeSnapshotForPlan(**{**plain, **values})


def _to(gpu: str | None = "gpu1", *pids: int, **values: Any) -> PlanRequest:
    return PlanRequest(**{"kind": MIGRATE, "pids": pids or (4711,), "to": gpu, **values})


def _suspend(*pids: int) -> PlanRequest:
    return PlanRequest(kind=SUSPEND, pids=pids or (4711,))


def _plan(found: MigrationPlan | tuple[Reason, ...]) -> MigrationPlan:
    assert isinstance(found, MigrationPlan), found
    return found


def test_a_dry_run_names_a_stopped_job() -> None:
    """A stopped job reaches no boundary, so the operation would fail at its limit."""
    snapshot = _snapshot()
    candidates = tuple(candidate.replace(stopped=True) for candidate in snapshot.candidates)
    plan = _plan(planned(snapshot.replace(candidates=candidates), _to()))
    (pid,) = [worker.pid for worker in plan.workers]
    assert f"process {pid} is stopped by a signal or a debugger" in plan.hazards[0]
    assert plan.hazards[0].endswith(f"kill -CONT {pid}")


def _only_reason(found: MigrationPlan | tuple[Reason, ...]) -> Reason:
    assert isinstance(found, tuple), found
    (reason,) = found
    assert reason.hint
    return reason


def test_a_plan_shows_the_needed_and_the_free_memory() -> None:
    plan = _plan(planned(_snapshot(), _to()))
    assert (plan.kind, plan.way, plan.workers[0].carrier) == (MIGRATE, "agent", "worker")
    assert plan.reservation_bytes == {"gpu1": 2 * GIB}
    assert plan.gpu_free_bytes == {"gpu1": 8 * GIB}
    assert (plan.size_bytes, plan.pool_needed_bytes, plan.pool_free_bytes) == (2 * GIB, whole_size(2 * GIB), 12 * GIB)
    assert plan.estimate_s == pytest.approx(2 * 2 * GIB / 2e9 + 0.05)
    assert plan.hazards == ()
    assert "verify a boundary" in plan.steps


def test_a_suspension_needs_no_gpu_memory_and_half_the_time() -> None:
    plan = _plan(planned(_snapshot(), _suspend()))
    assert plan.reservation_bytes == {}
    assert plan.estimate_s == pytest.approx(2 * GIB / 2e9 + 0.05)
    assert plan.workers[0].to is None


def test_a_plan_becomes_the_operation_that_the_machine_takes() -> None:
    snapshot = _snapshot()
    plan = _plan(planned(snapshot, _to()))
    chips = {gpu.id: gpu.chip for gpu in snapshot.gpus}
    op = plan.operation("op1", snapshot.candidates, chips, limits=Limits(), utc=5.0)
    moved = DrivenOperation(op).until("done").op.workers[0]
    assert (moved.pid, moved.start_ticks, moved.token, moved.chip, moved.gpu) == (4711, 7, "t", "sim", "gpu1")
    assert op.owner_uid == 1000


def test_a_job_moves_as_one_and_another_users_job_of_that_name_stays() -> None:
    job = [_process(pid, job="bert", gpus=(gpu,)) for pid, gpu in ((1, "gpu0"), (2, "gpu1"))]
    stranger = _process(3, job="bert", uid=1001)
    alone = _process(4)
    plan = _plan(planned(_snapshot(*job, stranger, alone), _to("gpu1,gpu1", 1)))
    assert [(found.pid, found.to, found.carrier) for found in plan.workers] == [
        (1, "gpu1", "worker"),
        (2, "gpu1", "none"),
    ]
    assert plan.size_bytes == 2 * GIB


@pytest.mark.parametrize("uid", [1000, 1001])
def test_a_job_of_another_user_that_claims_the_same_run_can_move_during_a_restart(uid: int) -> None:
    op = _plan(planned(_snapshot(), _to())).operation("op1", _snapshot().candidates, {}, limits=Limits(), utc=5.0)
    restarting = op.replace(workers=tuple([one.replace(pid=1, method="restart", run="bert") for one in op.workers]))
    found = planned(_snapshot(_process(job="bert", uid=uid), running=(restarting,)), _to())
    if uid == op.owner_uid:
        assert _only_reason(found).code == "busy"
    else:
        assert _plan(found).workers[0].to == "gpu1"


def test_single_processes_can_be_placed() -> None:
    job = [_process(pid, job="bert") for pid in (1, 2)]
    plan = _plan(planned(_snapshot(*job), _to(None, 1, placement={"2": "gpu1"})))
    assert [found.to for found in plan.workers] == ["gpu0", "gpu1"]


def test_ranks_stop_together_and_absent_ones_are_a_hazard() -> None:
    ranks = [_process(pid, job="ddp", agent=_agent(rank=pid, world_size=4)) for pid in (0, 1)]
    plan = _plan(planned(_snapshot(*ranks), _to("gpu1", 0)))
    assert plan.is_distributed
    assert plan.hazards == ("2 of the job's 4 ranks are on this node; the others wait for them",)


LEFT = LeftAlone(why="shared with another process", storages=3, size_bytes=GIB)


def test_skipped_files_are_named() -> None:
    plan = _plan(planned(_snapshot(_process(agent=_agent(left_alone=(LEFT,)))), _to()))
    assert plan.workers[0].left_alone_bytes == GIB
    assert "3 storages, 1.0 GiB: shared with another process" in plan.hazards[0]


def _op(phase: str = "reloading") -> Operation:
    return operation(worker(pid=4711), id="op7", phase=phase)


@in_one_test(
    ("snapshot", "request_", "code", "says", "hints"),
    [
        (_snapshot(_process(agent=None)), _to(), "refused", "4711 has no agent", "hegmctl run"),
        (
            _snapshot(_process(agent=_agent(size_bytes=None))),
            _to(),
            "refused",
            "has not reported its memory",
            "seconds",
        ),
        (_snapshot(), _to("gpu1", 9), "not-found", "process 9 is on no GPU", "hegmctl ps"),
        (_snapshot(beginning=(9,)), _to("gpu1", 9), "refused", "process 9 is starting up", "then retry"),
        (_snapshot(), _to("gpu7"), "not-found", "there is no GPU gpu7", "gpu0 and gpu1"),
        (_snapshot(), _to("gpo1"), "not-found", "there is no GPU gpo1", "did you mean gpu1? the GPUs here: gpu0"),
        (_snapshot(), _to("gpu0"), "refused", "4711 is on gpu0 already", "--to"),
        (_snapshot(running=(_op(),)), _to(), "busy", "operation op7 (migrate, reloading)", "hegmctl op op7"),
        (_snapshot(running=(_op("suspended"),)), _to(), "busy", "operation op7", "hegmctl resume"),
        (_snapshot(_process(gpus=("gpu0", "gpu1"))), _to(), "refused", "on gpu0 and gpu1", "NVIDIA"),
        (_snapshot(_process(gpus=())), _to(), "refused", "no known GPU", "hegmctl ps"),
        (_snapshot(gpus=(_gpu("gpu0"), _gpu("gpu1", state="lost"))), _to(), "refused", "gpu1 is lost", "gpus"),
        (_snapshot(gpus=(_gpu("gpu0", state="lost"), _gpu("gpu1"))), _to(), "refused", "gpu0 is lost", "doctor"),
        (_snapshot(gpus=(_gpu("gpu0"), _gpu("gpu1", chip="x"))), _to(), "refused", "another chip: x, not sim", "chip"),
        (_snapshot(gpus=(_gpu("gpu0"), _gpu("gpu1", mig=True))), _to(), "refused", "MIG", "without MIG"),
        (_snapshot(gpus=(_gpu("gpu0"), _gpu("gpu1", mps=True))), _to(), "refused", "MPS", "and MPS"),
        (_snapshot(gpus=(_gpu("gpu0"), _gpu("gpu1", free_bytes=None))), _to(), "refused", "does not know", "doctor"),
        (_snapshot(gpus=(_gpu("gpu0"), _gpu("gpu1", free_bytes=GIB))), _to(), "refused", "1.0 GiB free", "suspend or"),
        (
            _snapshot(gpus=(_gpu("gpu0", vendor="amd"), _gpu("gpu1", vendor="amd"))),
            _to(),
            "refused",
            "of vendor amd",
            "simulated",
        ),
        (
            _snapshot(pool=PoolMemory(budget_bytes=GIB, free_bytes=GIB)),
            _suspend(),
            "refused",
            "2.1 GiB of the pool are needed to move 2.0 GiB, but its budget is 1.0 GiB",
            "pool.budget_bytes",
        ),
        (
            _snapshot(pool=PoolMemory(budget_bytes=4 * GIB, free_bytes=GIB)),
            _suspend(),
            "busy",
            "1.0 GiB",
            "hegmctl ops",
        ),
        (_snapshot(), _to().replace(carrier="host"), "refused", "host cannot carry process 4711", "--carrier worker"),
        (
            _snapshot(_process(agent=_agent(size_bytes=GIB // 2, left_alone=(LEFT,)))),
            _suspend(),
            "refused",
            "1.0 GiB of 1.5 GiB of process 4711 would stay",
            "shared with another process",
        ),
    ],
)
def test_a_reason_has_a_message_and_the_next_step(
    snapshot: NodeSnapshotForPlan, request_: PlanRequest, code: str, says: str, hints: str
) -> None:
    reason = _only_reason(planned(snapshot, request_))
    assert reason.code == code
    assert says in reason.message
    assert hints in reason.hint


def test_a_plan_that_the_pool_would_refuse_for_its_table_is_refused() -> None:
    """The pool's pieces are larger than the bytes that go into them, and a plan that forgot that was turned back."""
    needed_bytes = whole_size(2 * GIB)
    for free_bytes, refused in ((2 * GIB, True), (needed_bytes - 1, True), (needed_bytes, False)):
        found = planned(_snapshot(pool=PoolMemory(budget_bytes=16 * GIB, free_bytes=free_bytes)), _suspend())
        assert isinstance(found, tuple) is refused, found
    job = [_process(pid, job="bert") for pid in (1, 2)]
    each_rounded = _snapshot(*job, pool=PoolMemory(budget_bytes=2 * needed_bytes, free_bytes=2 * needed_bytes))
    assert _plan(planned(each_rounded, _suspend(1))).pool_needed_bytes == 2 * needed_bytes


def test_a_process_in_hand_is_refused_for_that_alone() -> None:
    """A suspended process is on no GPU, and the planner listed that as a fault too."""
    suspended = _process(gpus=(), agent=None)
    reason = _only_reason(planned(_snapshot(suspended, running=(_op("suspended"),)), _suspend()))
    assert (reason.code, "hegmctl resume 4711" in reason.hint) == ("busy", True)


def test_a_rank_without_a_memory_report_is_not_left_behind() -> None:
    ready = _process(1, job="ddp", agent=_agent(rank=0, world_size=2))
    late = _process(2, job="ddp", gpus=(), agent=_agent(rank=1, world_size=2, size_bytes=None))
    reason = _only_reason(planned(_snapshot(ready, late), _to("gpu1", 1)))
    assert reason.message == "rank 1 (process 2) has not reported its memory yet"


def test_all_reasons_come_at_once_and_each_once() -> None:
    snapshot = _snapshot(_process(1, agent=None), _process(2), _process(3))
    found = planned(snapshot, _to("gpu7", 1, 2, 3))
    assert isinstance(found, tuple)
    assert [reason.message for reason in found] == ["process 1 has no agent", "there is no GPU gpu7"]


def test_memory_is_counted_for_all_processes_that_go_to_a_gpu() -> None:
    job = [_process(pid, job="bert") for pid in (1, 2)]
    gpus = (_gpu("gpu0"), _gpu("gpu1", free_bytes=3 * GIB))
    assert "4.0 GiB are needed" in _only_reason(planned(_snapshot(*job, gpus=gpus), _to("gpu1", 1))).message


def test_a_gpu_that_a_job_has_to_leave_is_not_a_target_for_it() -> None:
    """A drain of gpu0 onto a full gpu1 ended with the advice that there was room on gpu0."""
    gpus = (_gpu("gpu0"), _gpu("gpu1", free_bytes=GIB))
    assert "suspend or" in _only_reason(planned(_snapshot(gpus=gpus), _to("gpu1"))).hint
    third = (*gpus, _gpu("gpu2"))
    assert _only_reason(planned(_snapshot(gpus=third), _to("gpu1"))).hint.endswith("enough free memory: gpu2")


def _suspended() -> Operation:
    op = operation(worker(pid=4711, to=None, size_bytes=2 * GIB, chip="sim"), kind=SUSPEND)
    return DrivenOperation(op).until("suspended").op.replace(id="op7")


def _resume(gpu: str | None) -> PlanRequest:
    return PlanRequest(kind=RESUME, pids=(4711,), to=gpu)


def test_a_resume_uses_the_former_gpu_unless_another_is_named() -> None:
    op = _suspended()
    for requested_gpu, expected in ((None, "gpu0"), ("gpu1", "gpu1")):
        plan = _plan(planned_resume(_snapshot(_process(gpus=())), _resume(requested_gpu), op))
        assert plan.destinations == {"4711": expected}
        assert plan.reservation_bytes == {expected: op.workers[0].size_bytes}
        assert plan.pool_needed_bytes == 0


@in_one_test(
    ("first", "others", "expected"),
    [
        ({"condition": "failing"}, {}, "gpu1"),
        ({"condition": "gone"}, {}, "gpu1"),
        ({"state": "lost", "chip": None}, {}, "gpu1"),
        ({"condition": "failing"}, {"condition": "failing"}, "gpu0"),
        ({"condition": "failing"}, {"chip": "other"}, "gpu0"),
        ({"condition": "failing"}, {"mig": True}, "gpu0"),
        ({"condition": "failing", "vendor": "nvidia", "driver_version": "570.1"}, {"vendor": "nvidia"}, "gpu0"),
        ({}, {}, "gpu0"),
    ],
)
def test_a_job_was_resumed_on_its_failing_gpu_though_another_was_healthy(
    first: dict[str, Any], others: dict[str, Any], expected: str
) -> None:
    gpus = (_gpu("gpu0", **first), _gpu("gpu1", **others), _gpu("gpu2", free_bytes=GIB, **others))
    plan = _plan(planned_resume(_snapshot(_process(gpus=()), gpus=gpus), _resume(None), _suspended()))
    assert plan.destinations == {"4711": expected}
    assert any("the job resumes on gpu1" in hazard for hazard in plan.hazards) == (expected == "gpu1")


@in_one_test(("condition", "is_planned"), [("failing", True), ("gone", False)])
def test_a_job_stayed_suspended_if_only_its_failing_gpu_had_room_for_it(condition: str, is_planned: bool) -> None:
    """A swap that failed, and a script that had lent its GPU, could not resume it either."""
    gpus = (_gpu("gpu0", condition=condition), _gpu("gpu1", free_bytes=1))
    found = planned_resume(_snapshot(_process(gpus=()), gpus=gpus), _resume(None), _suspended())
    if is_planned:
        assert _plan(found).destinations == {"4711": "gpu0"}
        assert "gpu1 has 1 byte free" in _plan(found).hazards[0]
    else:
        assert "gpu1 has 1 byte free" in _only_reason(found).message


def test_a_job_with_a_process_on_the_cpu_was_not_resumed_from_a_failing_gpu() -> None:
    """The process on the CPU was refused a place with an empty name."""
    op = operation(
        *[worker(name, pid=pid, to=None, chip="sim") for name, pid in (("a", 4711), ("b", 4712))], kind=SUSPEND
    )
    op = DrivenOperation(op).until("suspended").op
    op = op.with_worker(op.workers[1].replace(first_gpu="cpu"))
    snapshot = _snapshot(_process(), _process(4712), gpus=(_gpu("gpu0", condition="failing"), _gpu("gpu1")))
    plan = _plan(planned_resume(snapshot, _resume(None), op))
    assert plan.destinations == {"4711": "gpu1", "4712": "cpu"}


@in_one_test(
    ("snapshot", "says"),
    [
        (_snapshot(_process(gpus=(), agent=None)), "not connected"),
        (_snapshot(_process(gpus=()), gpus=(_gpu("gpu1", state="lost"),)), "gpu1 is lost"),
        (_snapshot(_process(gpus=()), gpus=(_gpu("gpu1", chip="x"),)), "another chip"),
        (_snapshot(_process(gpus=()), gpus=(_gpu("gpu1", free_bytes=1),)), "1 byte free"),
        (_snapshot(_process(gpus=()), gpus=(_gpu("gpu0"),)), "there is no GPU gpu1"),
    ],
)
def test_an_impossible_resume_is_refused_with_the_reason(snapshot: NodeSnapshotForPlan, says: str) -> None:
    assert says in _only_reason(planned_resume(snapshot, _resume("gpu1"), _suspended())).message


def test_only_suspended_jobs_can_be_resumed() -> None:
    assert "only a suspended operation" in _only_reason(planned_resume(_snapshot(), _resume(None), _op())).message


def test_a_held_job_needs_no_memory_where_it_has_a_reservation() -> None:
    drive = DrivenOperation(operation(worker(pid=4711, chip="sim"))).until("checkpointing")
    held = drive.op.replace(phase="suspended", direction="hold")
    held = held.with_worker(held.workers[0].replace(target_gpu=None, kept_gpu="gpu0"))
    full = (_gpu("gpu0", free_bytes=0), _gpu("gpu1", free_bytes=0))
    plan = _plan(planned_resume(_snapshot(_process(), gpus=full), _resume(None), held))
    assert plan.destinations == {"4711": "gpu0"}


def test_the_time_for_an_image_was_not_in_the_estimate() -> None:
    """The estimate was 0.06 s, and the downtime 3 s."""
    snapshot = _snapshot()
    plan = _plan(planned(snapshot, PlanRequest(kind=CHECKPOINT, pids=(4711,))))
    made_s = image_s(snapshot.rates, OUT, 3 * GIB)
    ended = with_image(plan, snapshot.rates, size_bytes=3 * GIB, leave_running=False)
    assert (ended.image_s, ended.estimate_s, ended.ends) == (made_s, plan.estimate_s + made_s, True)
    left = with_image(plan, snapshot.rates, size_bytes=3 * GIB, leave_running=True)
    back_s = 2 * GIB / snapshot.rates.in_bytes_per_s
    left_s = image_s(snapshot.rates, pace.LEFT, 3 * GIB)
    assert left_s < made_s, "it does not stand while the image is read back"
    assert "write process and bytes" not in left.steps, "nor while its bytes are written"
    assert left.estimate_s >= plan.estimate_s + left_s + back_s
    assert not left.ends
    assert left.steps[-1].endswith("verify the image while the job trains")


def test_the_time_of_a_restore_includes_reading_and_resume() -> None:
    snapshot, op = _snapshot(_process(gpus=())), _suspended()
    plan = _plan(planned_resume(snapshot, _resume(None), op))
    restored = from_image(plan, snapshot.rates, size_bytes=3 * GIB)
    assert (restored.kind, restored.image_s) == (RESTORE, image_s(snapshot.rates, IN, 3 * GIB))
    assert restored.estimate_s == plan.estimate_s + image_s(snapshot.rates, IN, 3 * GIB)


def test_estimates_of_images_follow_this_nodes_measurements() -> None:
    paces = Throughputs()
    assert image_s(paces.rates(), OUT, 0) == paces.rates().image_out_s
    for _ in range(20):
        paces.note_image(OUT, 0, 3.0)
        paces.note_image(OUT, 8 * GIB, 7.0)
        paces.note_image(IN, 8 * GIB, 0.1)  # sooner than without a byte: the rate is unknown
    assert image_s(paces.rates(), OUT, 0) == pytest.approx(3.0, rel=0.01)
    assert image_s(paces.rates(), OUT, 8 * GIB) == pytest.approx(7.0, rel=0.01)
    assert image_s(paces.rates(), IN, 0) < 0.1


@pytest.mark.parametrize(
    ("unreachable", "code", "message", "hint"),
    [
        (
            Unreachable(pid=9, gpus=("gpu4",), vram_bytes=3 << 30, ended=True),
            "not-found",
            "process 9 has exited, but the driver still lists it on gpu4 with 3.0 GiB",
            "fuser",
        ),
        (
            Unreachable(pid=9, gpus=("gpu0", "gpu4"), ended=True),
            "not-found",
            "process 9 has exited, but the driver still lists it on gpu0 and gpu4",
            "fuser",
        ),
        (
            Unreachable(pid=9, gpus=("gpu4",), vram_bytes=0, why="/proc hides it"),
            "refused",
            "process 9 is on gpu4 with 0 bytes, but cannot be moved: /proc hides it",
            "root",
        ),
    ],
    ids=["ended", "ended-on-two", "hidden"],
)
def test_a_process_that_ps_lists_is_not_reported_as_on_no_gpu(
    unreachable: Unreachable, code: str, message: str, hint: str
) -> None:
    """Issue 14, row 12: "it is on no GPU; see hegmctl ps", which listed it on gpu4."""
    for request in (_to("gpu1", 9), PlanRequest(kind=SUSPEND, pids=(9,))):
        found = planned(_snapshot().replace(unreachable=(unreachable,)), request)
        assert isinstance(found, tuple)
        assert [(reason.code, reason.message) for reason in found] == [(code, message)]
        assert hint in found[0].hint
