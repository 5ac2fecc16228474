"""Steps in a row, each planned on the node as the ones before it leave it."""

from __future__ import annotations

from typing import Any

from hegmd.memory.sizes import whole_size
from hegmd.migration.machine.operation import JobProcess, Operation
from hegmd.migration.model import AgentSurvey, Candidate, GpuMemory, MigrationPlan, NodeSnapshotForPlan, PoolMemory
from hegmd.migration.plan.forecast import after, expected
from hegmd.migration.plan.sequence_plan import at_once, departure, occupants, planned_drain, planned_swap
from hegmd.protocol.messages import CudaFacts
from hegmd.protocol.operations import PlannedProcess, Reason
from tests.unit.migration.operations import DrivenOperation, operation, worker

GIB = 1 << 30


def _gpu(name: str, free_gib: int | None, **values: Any) -> GpuMemory:
    free_bytes = None if free_gib is None else free_gib * GIB
    return GpuMemory(**{"id": name, "vendor": "simulated", "chip": "sim", "free_bytes": free_bytes, **values})


def _process(pid: int, *gpus: str, size_gib: int = 2, **values: Any) -> Candidate:
    agent = AgentSurvey(token=str(pid), size_bytes=size_gib * GIB, boundary=3)
    return Candidate(**{"pid": pid, "start_ticks": 7, "uid": 1000, "gpus": gpus, "agent": agent, **values})


def _snapshot(*candidates: Candidate, gpus: tuple[GpuMemory, ...], **values: Any) -> NodeSnapshotForPlan:
    pool = PoolMemory(budget_bytes=16 * GIB, free_bytes=16 * GIB)
    return NodeSnapshotForPlan(**{"gpus": gpus, "candidates": candidates, "pool": pool, **values})


def _steps(found: object) -> list[tuple[str, int, str | None]]:
    assert isinstance(found, tuple)
    assert all(isinstance(step, MigrationPlan) for step in found), found
    return [(step.kind, step.workers[0].pid, step.workers[0].to) for step in found]


def _messages(found: object) -> list[str]:
    assert isinstance(found, tuple)
    assert all(isinstance(reason, Reason) for reason in found), found
    return [reason.message for reason in found]


def test_if_one_fits_next_to_the_other_the_first_goes_first() -> None:
    gpus = (_gpu("gpu0", 2), _gpu("gpu1", 2))
    found = planned_swap(_snapshot(_process(1, "gpu0"), _process(2, "gpu1"), gpus=gpus), 1, 2)
    assert _steps(found) == [("migrate", 1, "gpu1"), ("migrate", 2, "gpu0")]


def test_if_only_the_second_fits_next_to_the_first_it_goes_first() -> None:
    gpus = (_gpu("gpu0", 1), _gpu("gpu1", 1))
    snapshot = _snapshot(_process(1, "gpu0"), _process(2, "gpu1", size_gib=1), gpus=gpus)
    assert _steps(planned_swap(snapshot, 1, 2)) == [("migrate", 2, "gpu0"), ("migrate", 1, "gpu1")]


BY_BOTH = [("suspend", 1, None), ("suspend", 2, None), ("resume", 1, "gpu1"), ("resume", 2, "gpu0")]
BY_ONE = [("suspend", 1, None), ("migrate", 2, "gpu0"), ("resume", 1, "gpu1")]


def test_if_no_gpu_fits_both_they_leave_for_the_pool_and_return_together() -> None:
    gpus = (_gpu("gpu0", 0), _gpu("gpu1", 0))
    found = planned_swap(_snapshot(_process(1, "gpu0"), _process(2, "gpu1"), gpus=gpus), 1, 2)
    assert _steps(found) == BY_BOTH
    parts = at_once([step for step in found if isinstance(step, MigrationPlan)])
    assert [[(step.kind, step.workers[0].pid) for step in part] for part in parts] == [
        [("suspend", 1), ("suspend", 2)],
        [("resume", 1), ("resume", 2)],
    ]


def test_bytes_moved_by_peer_do_not_wait_in_the_pool() -> None:
    """Each job is then parked for its own move alone, by NVLink for a tenth of the time of a copy to the pool."""
    gpus = [_gpu(name, 0, vendor="nvidia", driver_version="580.1") for name in ("gpu0", "gpu1")]
    linked = tuple(gpu.replace(nvlinks=("gpu0", "gpu1"), free_bytes=4 * GIB) for gpu in gpus)
    cuda = CudaFacts(gpus=(), allocator="native", expandable=False, largest_bytes=GIB)
    jobs = []
    for pid in (1, 2):
        agent = AgentSurvey(token=str(pid), size_bytes=6 * GIB, boundary=3, cuda=cuda)
        jobs.append(_process(pid, f"gpu{pid - 1}", agent=agent, kinds=("compute",), vram_bytes=7 * GIB))
    pool = PoolMemory(budget_bytes=64 * GIB, free_bytes=64 * GIB)
    snapshot = _snapshot(*jobs, gpus=linked, pool=pool)
    assert _steps(planned_swap(snapshot, 1, 2)) == BY_ONE
    apart = tuple(gpu.replace(nvlinks=()) for gpu in linked)
    assert _steps(planned_swap(snapshot.replace(gpus=apart), 1, 2)) == BY_BOTH


def test_if_the_pool_fits_one_that_one_waits_there_alone() -> None:
    gpus = (_gpu("gpu0", 0), _gpu("gpu1", 0))
    snapshot = _snapshot(_process(1, "gpu0", size_gib=2), _process(2, "gpu1"), gpus=gpus)
    small = PoolMemory(budget_bytes=16 * GIB, free_bytes=3 * GIB)
    assert "are needed to move 2.0 GiB" in _messages(planned_swap(snapshot.replace(pool=small), 1, 2))[0]


def test_memory_is_needed_for_the_storages_the_agent_and_the_driver() -> None:
    """Issue 14, row 20: no test missed a sum of these that was a difference."""
    moves = PlannedProcess(pid=1, name="", gpu="gpu0", to="gpu1", size_bytes=100, carrier="host")
    moves = moves.replace(overlap_bytes=30, agent_overhead_bytes=7, driver_bytes=2)
    assert moves.reservation_bytes == 79
    assert moves.replace(overlap_bytes=101).reservation_bytes == 9
    assert moves.replace(carrier="driver").reservation_bytes == 9


def test_the_drivers_own_share_of_a_gpu_is_free_when_a_process_has_left_it() -> None:
    """It was left out, so a swap on GPUs that are full was refused."""
    leaves = PlannedProcess(pid=1, name="", gpu="gpu0", to=None, size_bytes=4, driver_bytes=3, carrier="host")
    plan = MigrationPlan(
        kind="suspend",
        way="agent",
        workers=(leaves, leaves.replace(pid=2, gpu="gpu1", carrier="driver", size_bytes=5, driver_bytes=6)),
        size_bytes=4,
        reservation_bytes={},
        gpu_free_bytes={},
        pool_needed_bytes=0,
        pool_free_bytes=0,
        estimate_s=0.0,
        is_distributed=False,
        steps=(),
    )
    left = after(_snapshot(gpus=(_gpu("gpu0", 0), _gpu("gpu1", 0))), plan)
    assert [gpu.free_bytes for gpu in left.gpus] == [7, 6]
    assert left.pool.free_bytes == 16 * GIB - whole_size(4), "what the driver carries is not in the pool"


def test_a_swap_without_enough_memory_is_refused_before_it_begins() -> None:
    gpus = (_gpu("gpu0", 0), _gpu("gpu1", 0))
    snapshot = _snapshot(_process(1, "gpu0", size_gib=1), _process(2, "gpu1"), gpus=gpus)
    assert _messages(planned_swap(snapshot, 1, 2)) == ["gpu0 has 1.0 GiB free, but 2.0 GiB are needed"]


def test_two_processes_of_one_job_change_places_in_one_operation() -> None:
    gpus = (_gpu("gpu0", 8), _gpu("gpu1", 8), _gpu("gpu2", 8))
    job = [_process(pid, f"gpu{pid}", job="run") for pid in (0, 1, 2)]
    (plan,) = planned_swap(_snapshot(*job, gpus=gpus), 0, 1)
    assert isinstance(plan, MigrationPlan)
    assert [(found.pid, found.to) for found in plan.workers] == [(0, "gpu1"), (1, "gpu0"), (2, "gpu2")]


def test_a_job_on_several_gpus_cannot_be_swapped() -> None:
    gpus = (_gpu("gpu0", 8), _gpu("gpu1", 8), _gpu("gpu2", 8))
    job = [_process(pid, f"gpu{pid}", job="run") for pid in (0, 1)]
    found = planned_swap(_snapshot(*job, _process(2, "gpu2"), gpus=gpus), 2, 0)
    assert _messages(found) == ["the job of process 0 is on gpu0 and gpu1"]


def test_jobs_of_as_many_ranks_on_gpus_of_their_own_change_places() -> None:
    """In the order of the ranks, whichever has the smaller pid; past the pool where there is no memory for both."""

    def rank(number: int, pid: int, gpu: str, job: str) -> Candidate:
        plain = _process(pid, gpu, job=job)
        assert plain.agent is not None
        return plain.replace(agent=plain.agent.replace(rank=number, world_size=2))

    gpus = tuple(_gpu(f"gpu{number}", 1) for number in range(4))
    here = (rank(0, 12, "gpu0", "a"), rank(1, 11, "gpu1", "a"))
    there = (rank(0, 21, "gpu2", "b"), rank(1, 22, "gpu3", "b"))
    found = planned_swap(_snapshot(*here, *there, gpus=gpus), 11, 21)
    steps = [step for step in found if isinstance(step, MigrationPlan)]
    assert [(step.kind, step.place) for step in steps] == [
        ("suspend", None),
        ("suspend", None),
        ("resume", "gpu2,gpu3"),
        ("resume", "gpu0,gpu1"),
    ]
    assert [worker.pid for worker in steps[2].workers] == [12, 11]
    roomy = tuple(_gpu(f"gpu{number}", 8) for number in range(4))
    moves = planned_swap(_snapshot(*here, *there, gpus=roomy), 11, 21)
    assert [step.place for step in moves if isinstance(step, MigrationPlan)] == ["gpu2,gpu3", "gpu0,gpu1"]


def test_a_drain_moves_the_jobs_on_the_gpu_to_the_gpu_with_most_free_memory() -> None:
    gpus = (_gpu("gpu0", 8), _gpu("gpu1", 3), _gpu("gpu2", 5), _gpu("gpu3", 9, state="lost"))
    unfit = (_gpu("gpu4", 9, condition="failing"), _gpu("gpu5", 9, condition="gone"))
    job = [_process(1, "gpu0", job="run"), _process(2, "gpu1", job="run")]
    found = departure(_snapshot(*job, gpus=gpus + unfit), 1, "gpu0", ())
    assert isinstance(found, MigrationPlan)
    assert [(moved.pid, moved.to, moved.carrier) for moved in found.workers] == [
        (1, "gpu2", "worker"),
        (2, "gpu1", "none"),
    ]


def test_every_unsuitable_target_is_listed_with_the_reason() -> None:
    gpus = (_gpu("gpu0", 8), _gpu("gpu1", 1), _gpu("gpu2", None))
    found = departure(_snapshot(_process(1, "gpu0"), gpus=gpus), 1, "gpu0", ("gpu1", "gpu2"))
    assert _messages(found) == [
        "gpu1 has 1.0 GiB free, but 2.0 GiB are needed",
        "hegmd does not know how much memory is free on gpu2",
    ]
    gone = (_gpu("gpu0", 8), _gpu("gpu1", 8, condition="gone", why="XID 79"))
    found = departure(_snapshot(_process(1, "gpu0"), gpus=gone), 1, "gpu0", ("gpu1",))
    assert _messages(found) == ["gpu1 is gone: XID 79"]
    alone = departure(_snapshot(_process(1, "gpu0"), gpus=gpus[:1]), 1, "gpu0", ())
    assert _messages(alone) == ["there is no other healthy GPU than gpu0"]


def test_a_job_is_listed_once_and_a_drain_plans_each_after_the_others() -> None:
    gpus = (_gpu("gpu0", 0), _gpu("gpu1", 5))
    job = [_process(pid, "gpu0", job="run") for pid in (1, 2)]
    snapshot = _snapshot(*job, _process(3, "gpu0"), gpus=gpus)
    assert list(occupants(snapshot, "gpu0")) == [1, 3]
    plans, stays = planned_drain(snapshot, "gpu0", ())
    assert [[moved.pid for moved in plan.workers] for plan in plans] == [[1, 2]]
    assert [_messages(reasons) for reasons in stays] == [["gpu1 has 1.0 GiB free, but 2.0 GiB are needed"]]


def _under_way(phase: str) -> Operation:
    size_bytes = 2 * GIB
    mine = worker(pid=9, size_bytes=size_bytes, reservations={"gpu0": size_bytes})
    return DrivenOperation(operation(mine)).until(phase).op


def test_promised_memory_is_not_available_to_others() -> None:
    gpus = (_gpu("gpu0", 8), _gpu("gpu1", 8))
    snapshot = _snapshot(gpus=gpus, running=(_under_way("reserving"),))
    node_snapshot = expected(snapshot)
    assert [gpu.free_bytes for gpu in node_snapshot.gpus] == [8 * GIB, 6 * GIB]
    assert node_snapshot.pool.free_bytes == 16 * GIB - whole_size(2 * GIB)
    taken = expected(snapshot.replace(running=(_under_way("quiescing"),)))
    assert taken.replace(running=()) == snapshot.replace(running=()), "what was taken counts in what is free already"


def test_bytes_moved_by_peer_are_promised_gpu_memory_and_no_pool_memory() -> None:
    """The planner refused a second move for pool memory that it did not need, and planned with promised memory."""
    gpus = (_gpu("gpu0", 8), _gpu("gpu1", 8))
    mine = worker(
        pid=9, method="driver", carrier="peer", size_bytes=2 * GIB, driver_bytes=GIB, reservations={"gpu0": 3 * GIB}
    )
    snapshot = expected(_snapshot(gpus=gpus, running=(DrivenOperation(operation(mine)).until("reserving").op,)))
    assert [gpu.free_bytes for gpu in snapshot.gpus] == [8 * GIB, 3 * GIB]
    assert snapshot.pool.free_bytes == 16 * GIB
    by_driver = mine.replace(carrier="driver", size_bytes=0, driver_bytes=3 * GIB)
    snapshot = expected(_snapshot(gpus=gpus, running=(DrivenOperation(operation(by_driver)).until("reserving").op,)))
    assert [gpu.free_bytes for gpu in snapshot.gpus] == [8 * GIB, 5 * GIB]
    assert snapshot.pool.free_bytes == 16 * GIB


def test_memory_for_a_job_that_kept_its_context_is_not_there_for_others_before_its_agent_has_allocated_it() -> None:
    """Two trainings that took turns on one GPU were resumed at the same time."""
    back = worker(
        to="gpu0", pid=9, method="keep-context", size_bytes=2 * GIB, offloaded=True, reservations={"gpu0": 2 * GIB}
    )
    real, simulated = (_snapshot(gpus=(_gpu("gpu0", 8, vendor=vendor),)) for vendor in ("nvidia", "simulated"))

    def seen_gib(snapshot: NodeSnapshotForPlan, one: JobProcess) -> float:
        gpu = expected(snapshot.replace(running=(operation(one, kind="resume"),))).gpus[0]
        return (gpu.free_bytes or 0) / GIB

    assert [seen_gib(real, back), seen_gib(real, back.replace(offloaded=False))] == [6, 8]
    assert seen_gib(real, back.replace(target_gpu=None)) == 8, "it stays suspended"
    assert seen_gib(simulated, back) == 8, "a simulated GPU counts a reservation at once"


def test_after_a_suspension_the_gpu_memory_is_free_and_the_pool_is_not() -> None:
    snapshot = _snapshot(_process(1, "gpu0"), _process(2, "gpu1"), gpus=(_gpu("gpu0", 0), _gpu("gpu1", 0)))
    snapshots = [snapshot]
    for step in planned_swap(snapshot, 1, 2):
        assert isinstance(step, MigrationPlan)
        snapshots.append(after(snapshots[-1], step))
    empty, whole = snapshots[1], snapshots[-1]
    assert [gpu.free_bytes for gpu in empty.gpus] == [2 * GIB, 0]
    assert (empty.candidates[0].gpus, empty.pool.free_bytes) == ((), 16 * GIB - whole_size(2 * GIB))
    assert [candidate.gpus for candidate in whole.candidates] == [("gpu1",), ("gpu0",)]
    assert (whole.gpus, whole.pool) == (snapshot.gpus, snapshot.pool)


def test_a_swap_of_a_process_with_itself_is_refused_as_such() -> None:
    gpus = (_gpu("gpu0", 2), _gpu("gpu1", 2))
    found = planned_swap(_snapshot(_process(1, "gpu0"), gpus=gpus), 1, 1)
    assert _messages(found) == ["process 1 cannot change places with itself"]


def test_processes_that_cannot_change_places_are_refused_with_every_reason() -> None:
    gpus = (_gpu("gpu0", 2), _gpu("gpu1", 2))
    snapshot = _snapshot(_process(1, "gpu0"), _process(2, "gpu0", "gpu1"), gpus=gpus)
    assert _messages(planned_swap(snapshot, 1, 2)) == ["process 2 is on gpu0 and gpu1"]
    assert _messages(planned_swap(snapshot, 8, 9)) == ["process 8 is on no GPU", "process 9 is on no GPU"]
