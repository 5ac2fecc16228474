"""What is planned on NVIDIA's GPUs: which carrier, how long it takes, every reason against with the next step."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.migration.candidates import (
    AgentSurvey,
    Candidate,
    GpuRoom,
    Plan,
    PoolRoom,
    Rates,
    Request,
    Snapshot,
    Surroundings,
)
from hegmd.migration.carriage import estimate_s
from hegmd.migration.operation import MIGRATE, RESUME, SUSPEND, Limits
from hegmd.migration.paces import IN, OUT, Paces
from hegmd.migration.plan import planned, planned_resume
from hegmd.pieces import CONTEXT_BYTES, RESTORE_MARGIN_BYTES
from hegmd.protocol.messages import CudaFacts, LeftAlone
from hegmd.protocol.operations import Reason
from tests.unit.migration.operations import Drive

GIB, MIB = 2**30, 2**20


def _gpu(name: str, **values: Any) -> GpuRoom:
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
    return GpuRoom(**{**plain, **values})


def _cuda(**values: Any) -> CudaFacts:
    plain: dict[str, Any] = {"gpus": ("GPU-gpu0",), "allocator": "native", "expandable": False, "largest_bytes": GIB}
    return CudaFacts(**{**plain, **values})


def _agent(cuda: CudaFacts | None = None, **values: Any) -> AgentSurvey:
    return AgentSurvey(**{"token": "t", "size_bytes": 32 * GIB, "boundary": 3, "cuda": cuda or _cuda(), **values})


def _process(agent: AgentSurvey | None = None, **values: Any) -> Candidate:
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


def _snapshot(*candidates: Candidate, **values: Any) -> Snapshot:
    plain: dict[str, Any] = {
        "gpus": (_gpu("gpu0"), _gpu("gpu1")),
        "candidates": candidates,
        "pool": PoolRoom(budget_bytes=64 * GIB, free_bytes=64 * GIB),
        "available_bytes": 500 * GIB,
    }
    return Snapshot(**{**plain, **values})


def _to(gpu: str = "gpu1", **values: Any) -> Request:
    return Request(**{"kind": MIGRATE, "pids": (4711,), "to": gpu, **values})


SUSPENSION = Request(kind=SUSPEND, pids=(4711,))


def _plan(found: Plan | tuple[Reason, ...]) -> Plan:
    assert isinstance(found, Plan), found
    return found


def _reasons(found: Plan | tuple[Reason, ...]) -> tuple[Reason, ...]:
    assert isinstance(found, tuple), found
    assert all(reason.hint for reason in found)
    return found


def test_an_agents_storages_go_from_gpu_to_gpu_and_the_plan_says_how_long_that_takes() -> None:
    plan = _plan(planned(_snapshot(_process(_agent(), vram_bytes=32 * GIB + 500 * MIB)), _to()))
    (worker,) = plan.workers
    assert (plan.way, worker.carrier, worker.method) == ("agent", "peer", "driver")
    assert worker.rest_bytes == 500 * MIB + RESTORE_MARGIN_BYTES
    assert plan.room_needed_bytes == {"gpu1": 2 * 32 * GIB + worker.rest_bytes + CONTEXT_BYTES}
    assert plan.pool_needed_bytes == 0
    assert 0.7 < plan.estimate_s < 1.0, "measured: 0.74 s"
    assert "take the bytes out by peer" in plan.steps


def test_a_suspension_goes_to_the_pool_and_a_process_without_an_agent_by_the_driver() -> None:
    suspended = _plan(planned(_snapshot(_process(_agent())), SUSPENSION))
    assert (suspended.workers[0].carrier, suspended.pool_needed_bytes > 32 * GIB) == ("host", True)
    bare = _plan(planned(_snapshot(_process()), _to()))
    assert (bare.way, bare.workers[0].carrier, len(bare.hazards)) == ("driver", "driver", 1)
    assert "cannot be seen from outside" in bare.hazards[0]
    assert bare.room_needed_bytes == {"gpu1": 33 * GIB + RESTORE_MARGIN_BYTES}
    assert 14 < bare.estimate_s < 24, "measured: 18 s for 37 GiB, and 24.6 s for 32"


def test_what_the_allocator_only_keeps_for_later_takes_no_room_on_the_target() -> None:
    agent = _agent(_cuda(reserved_bytes=60 * GIB))
    plan = _plan(planned(_snapshot(_process(agent, vram_bytes=61 * GIB)), _to()))
    assert plan.workers[0].rest_bytes == GIB + RESTORE_MARGIN_BYTES
    left = LeftAlone(why="shared", storages=1, size_bytes=2 * GIB)
    agent = _agent(_cuda(reserved_bytes=60 * GIB), left_alone=(left,))
    plan = _plan(planned(_snapshot(_process(agent, vram_bytes=61 * GIB)), _to()))
    assert plan.workers[0].rest_bytes == 3 * GIB + RESTORE_MARGIN_BYTES


def test_room_for_the_stacks_that_an_agent_gives_back_is_held_with_its_storages() -> None:
    """Held with the rest, a neighbour that took all it could had it before the agent, and the job had to wait."""
    agent = _agent(_cuda(stacks_bytes=GIB // 4, padding_bytes=5))
    (worker,) = _plan(planned(_snapshot(_process(agent)), _to())).workers
    assert (worker.rest_bytes, worker.beside_bytes) == (3 * GIB // 4 + RESTORE_MARGIN_BYTES, GIB // 4 + 5)
    assert worker.room_bytes == 33 * GIB + RESTORE_MARGIN_BYTES + 5
    (by_worker,) = _plan(planned(_snapshot(_process(agent)), _to(carrier="worker"))).workers
    assert (by_worker.rest_bytes, by_worker.beside_bytes) == (GIB + RESTORE_MARGIN_BYTES, 5)
    (by_driver,) = _plan(planned(_snapshot(_process(agent)), _to(carrier="driver"))).workers
    assert by_driver.beside_bytes == 0


def test_with_little_room_the_storages_go_in_rounds_and_with_less_through_the_pool() -> None:
    tight = (_gpu("gpu0"), _gpu("gpu1", free_bytes=40 * GIB))
    rounds = _plan(planned(_snapshot(_process(_agent()), gpus=tight), _to()))
    assert rounds.workers[0].carrier == "peer"
    assert 27 * GIB < rounds.workers[0].overlap_bytes < 30 * GIB
    roomier = (_gpu("gpu0"), _gpu("gpu1", free_bytes=60 * GIB))
    plan = _plan(planned(_snapshot(_process(_agent()), gpus=roomier), _to()))
    worker = plan.workers[0]
    assert 60 * GIB - 3 * GIB < plan.room_needed_bytes["gpu1"] <= 60 * GIB - 2 * GIB, "rounds are as few as can be"
    assert worker.overlap_bytes < 12 * GIB
    tighter = (_gpu("gpu0"), _gpu("gpu1", free_bytes=35 * GIB))
    plan = _plan(planned(_snapshot(_process(_agent()), gpus=tighter), _to()))
    assert (plan.workers[0].carrier, plan.workers[0].overlap_bytes) == ("host", 0)
    assert "for a moment" in " ".join(plan.hazards)
    huge = _agent(_cuda(largest_bytes=32 * GIB))
    plan = _plan(planned(_snapshot(_process(huge), gpus=tight), _to()))
    assert plan.workers[0].carrier == "host", "one storage cannot go in rounds"


@pytest.mark.parametrize(
    ("candidate", "snapshot", "carrier", "why"),
    [
        (_process(_agent(_cuda(expandable=True))), {}, "worker", "expandable segments"),
        (_process(_agent(_cuda(allocator="cudaMallocAsync"))), {}, "worker", "cudaMallocAsync"),
        (_process(_agent(_cuda(hazards=("graphs",)))), {}, "driver", "CUDA graphs"),
        (_process(_agent(), around=Surroundings(same_ipc=False)), {}, "worker", "IPC namespace"),
        (_process(_agent()), {"outlived": False}, "worker", "hegmd were killed"),
        (_process(_agent()), {"gpus": (_gpu("gpu0", nvlinks=()), _gpu("gpu1"))}, "host", "NVLink"),
        (_process(_agent()), {"gpus": (_gpu("gpu0", free_bytes=0), _gpu("gpu1"))}, "worker", "copying needs"),
        (_process(_agent(size_bytes=0)), {}, "driver", "vouches for no storages"),
    ],
)
def test_a_slower_carrier_is_taken_for_a_reason(
    candidate: Candidate, snapshot: dict[str, Any], carrier: str, why: str
) -> None:
    plan = _plan(planned(_snapshot(candidate, **snapshot), _to()))
    assert plan.workers[0].carrier == carrier
    assert why in " ".join(plan.hazards)


def test_the_carrier_that_is_asked_for_is_taken_or_refused() -> None:
    snapshot = _snapshot(_process(_agent()))
    assert _plan(planned(snapshot, _to(carrier="host"))).workers[0].carrier == "host"
    by_driver = _plan(planned(snapshot, _to(carrier="driver"))).workers[0]
    assert (by_driver.size_bytes, by_driver.room_bytes) == (33 * GIB, 33 * GIB + RESTORE_MARGIN_BYTES)
    (reason,) = _reasons(planned(_snapshot(_process()), _to(carrier="peer")))
    assert "no agent" in reason.message
    (reason,) = _reasons(planned(snapshot, _to(carrier="pigeon")))
    assert "pigeon" in reason.message


@pytest.mark.parametrize(
    ("candidate", "snapshot", "message", "hint"),
    [
        (_process(), {"gpus": (_gpu("gpu0", driver_version="565.1"), _gpu("gpu1"))}, "no checkpoint calls", "570"),
        (_process(), {"gpus": (_gpu("gpu0", driver_version="575.1"), _gpu("gpu1"))}, "only bring", "580"),
        (_process(), {"gpus": (_gpu("gpu0", driver_version=None), _gpu("gpu1"))}, "not known", "doctor"),
        (_process(), {"gpus": (_gpu("gpu0"), _gpu("gpu1", chip="blackwell"))}, "another chip", "equal chip"),
        (_process(), {"gpus": (_gpu("gpu0", mig=True), _gpu("gpu1"))}, "MIG", "whole"),
        (_process(kinds=("mps",)), {}, "MPS", "whole"),
        (_process(kinds=("graphics",)), {}, "draws", "hegmctl ps"),
        (_process(), {"uid": 1001}, "uid 1001", "root"),
        (_process(vram_bytes=None), {}, "does not say how much", "namespace"),
        (_process(around=Surroundings(stopped=True)), {}, "stopped by a signal", "kill -CONT 4711"),
        (_process(around=Surroundings(nccl_shared=True)), {}, "NCCL", "NCCL_P2P_DISABLE=1"),
        (_process(_agent(_cuda(hazards=("nccl-p2p",)))), {}, "NCCL", "NCCL_P2P_DISABLE=1"),
        (_process(_agent(_cuda(hazards=("ipc-shared",)))), {}, "CUDA IPC", "close"),
        (_process(_agent(_cuda(hazards=("managed",)))), {}, "managed memory", "cudaMallocManaged"),
        (_process(around=Surroundings(memory_room_bytes=8 * GIB)), {}, "the kernel would kill it", "memory.max"),
        (_process(), {"available_bytes": 16 * GIB}, "memory available", "free memory"),
        (_process(gpus=("gpu0", "gpu1")), {}, "on gpu0 and gpu1, and without an agent", "hegmctl run"),
    ],
)
def test_what_would_lose_the_job_or_fail_is_refused_before_anything_is_done(
    candidate: Candidate, snapshot: dict[str, Any], message: str, hint: str
) -> None:
    reasons = _reasons(planned(_snapshot(candidate, **snapshot), _to()))
    assert any(message in reason.message and hint in reason.hint for reason in reasons), reasons


def test_ranks_that_keep_off_peer_to_peer_are_moved_and_an_agents_word_goes_before_what_is_seen() -> None:
    around = Surroundings(nccl_shared=True, nccl_p2p_disabled=True)
    assert _plan(planned(_snapshot(_process(around=around)), _to()))
    told = _process(_agent(), around=Surroundings(nccl_shared=True))
    assert _plan(planned(_snapshot(told), _to())), "its agent says that no communicator is alive"


def test_an_older_driver_suspends_and_resumes_where_it_was() -> None:
    gpus = (_gpu("gpu0", driver_version="575.1"), _gpu("gpu1", driver_version="575.1"))
    snapshot = _snapshot(_process(), gpus=gpus)
    plan = _plan(planned(snapshot, SUSPENSION))
    op = plan.operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)
    suspended = Drive(op).until("suspended").op
    assert _plan(planned_resume(snapshot, Request(kind=RESUME, pids=(4711,)), suspended)).estimate_s > 4
    (reason,) = _reasons(planned_resume(snapshot, Request(kind=RESUME, pids=(4711,), to="gpu1"), suspended))
    assert "575.1" in reason.message


def test_processes_that_have_started_one_another_move_together() -> None:
    parent, child, grandchild = _process(), _process(pid=4712, parent=4711), _process(pid=4713, parent=4712)
    stranger = _process(pid=9)
    plan = _plan(planned(_snapshot(parent, child, grandchild, stranger), _to(pids=(4713,))))
    assert [worker.pid for worker in plan.workers] == [4711, 4712, 4713]


def test_a_job_that_is_resumed_stands_while_the_helper_is_made_ready_too() -> None:
    """Its estimate was half of what was measured: contexts and the like take their time while the job stands."""
    snapshot = _snapshot(_process(_agent()))
    suspension = _plan(planned(snapshot, SUSPENSION))
    op = Drive(suspension.operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0)).until("suspended").op
    op = op.with_worker(op.workers[0].replace(size_bytes=32 * GIB, rest_bytes=GIB))
    request = Request(kind=RESUME, pids=(4711,))
    paces = Paces()
    estimates: list[float] = []
    for _ in range(2):
        estimates.append(_plan(planned_resume(snapshot.replace(rates=paces.rates()), request, op)).estimate_s)
        for _ in range(8):
            paces.note_arming("host", 1.0)
            paces.note_arming("worker", 100.0)
    assert estimates[0] == pytest.approx(1.475, rel=0.1), "as measured"
    assert estimates[1] - estimates[0] == pytest.approx(0.7, rel=0.05)


def test_where_there_is_no_room_for_a_context_to_copy_by_the_worker_copies_by_itself() -> None:
    """Such a move was refused for half a gigabyte that it did not need."""
    for free_gib, carrier in ((33.6, "worker"), (34.2, "host")):
        gpus = (_gpu("gpu0"), _gpu("gpu1", free_bytes=int(free_gib * GIB)))
        plan = _plan(planned(_snapshot(_process(_agent()), gpus=gpus), _to()))
        assert plan.workers[0].carrier == carrier
        assert ("of these for copying" in " ".join(plan.hazards)) is (carrier == "worker")


def test_of_several_that_go_to_one_gpu_the_second_takes_what_the_first_leaves() -> None:
    """Each was given all that is free there, and then both were refused together."""
    ranks = [_process(_agent(), pid=pid, job="1") for pid in (4711, 4712)]
    plan = _plan(planned(_snapshot(*ranks), _to()))
    assert [worker.carrier for worker in plan.workers] == ["peer", "host"]


# What stands in docs/benchmarks.md: GiB, what, carrier, seconds; twice where both directions were measured.
GIB_AND_CARRIER = [
    *((1, MIGRATE, "peer", took_s) for took_s in (0.649, 0.691)),
    *((8, MIGRATE, "peer", took_s) for took_s in (0.711, 0.723)),
    *((32, MIGRATE, "peer", took_s) for took_s in (0.905, 0.822)),
    *((100, MIGRATE, "peer", took_s) for took_s in (2.403, 1.624)),
    *((8, MIGRATE, "host", took_s) for took_s in (1.147, 1.134)),
    *((32, MIGRATE, "host", took_s) for took_s in (2.350, 2.266)),
    (8, MIGRATE, "worker", 3.277),
    (32, MIGRATE, "driver", 24.620),
    *((size_gib, SUSPEND, "host", took_s) for size_gib, took_s in ((1, 0.601), (8, 0.766), (32, 1.250), (100, 2.854))),
    (8, SUSPEND, "worker", 1.428),
    (32, SUSPEND, "driver", 17.233),
    *((size_gib, RESUME, "host", took_s) for size_gib, took_s in ((1, 0.679), (8, 0.874), (32, 1.475), (100, 3.245))),
    (8, RESUME, "worker", 1.539),
    (32, RESUME, "driver", 5.965),
]
# What is left to the driver: the stacks are its to carry where the agent does not show its storages.
REST_BYTES = {"peer": 756 * MIB, "host": 756 * MIB, "worker": 1020 * MIB, "driver": 33 * GIB}


@pytest.mark.parametrize(("size_gib", "kind", "carrier", "took_s"), GIB_AND_CARRIER)
def test_what_is_estimated_is_what_was_measured(size_gib: int, kind: str, carrier: str, took_s: float) -> None:
    """The worker's was a third of that, and 100 GiB in rounds of 1 GiB had the rounds for nothing."""
    size_bytes = size_gib * GIB
    overlap_bytes = size_bytes - GIB if size_gib == 100 and carrier == "peer" else 0
    seen = estimate_s(kind, carrier, size_bytes, REST_BYTES[carrier], Rates(), overlap_bytes)
    assert seen == pytest.approx(took_s, rel=0.3)


RATES = {
    "peer": ("peer_out_bytes_per_s", "peer_in_bytes_per_s", "make_bytes_per_s"),
    "host": ("host_out_bytes_per_s", "host_in_bytes_per_s", "make_bytes_per_s"),
    "worker": ("cuda_out_bytes_per_s", "cuda_in_bytes_per_s", "make_bytes_per_s"),
    "driver": ("driver_out_bytes_per_s", "driver_in_bytes_per_s"),
}
FIXED = ("driver_out_s", "driver_in_s")


@pytest.mark.parametrize("carrier", RATES)
def test_an_estimate_follows_the_rates_of_its_own_carrier_and_of_no_other(carrier: str) -> None:
    rates = Rates()

    def seen(changed: Rates) -> float:
        return estimate_s(MIGRATE, carrier, 32 * GIB, 40 * GIB, changed, 4 * GIB)

    for name in (*RATES[carrier], *FIXED):
        assert seen(rates.replace(**{name: getattr(rates, name) / 2 + 100.0})) != pytest.approx(seen(rates), rel=1e-6)
    others = {name for several in RATES.values() for name in several} - set(RATES[carrier]) - set(RATES["driver"])
    assert seen(rates.replace(**dict.fromkeys(others, 1.0))) == seen(rates)


@pytest.mark.parametrize("carrier", ["peer", "host", "worker"])
def test_what_a_carrier_took_is_what_it_is_estimated_to_take_next(carrier: str) -> None:
    """Half of what was paid for making and for rounds went into the rate of the copies, and was counted twice then."""
    paces = Paces()
    for _ in range(40):
        paces.note(carrier, OUT, 32 * GIB, 3.0)
        paces.note(carrier, IN, 32 * GIB, 5.0, rounds=9)
        paces.note("driver", OUT, 760 * MIB, 0.5)
        paces.note("driver", IN, 760 * MIB, 0.25)
    overlap_bytes = 32 * GIB - 6 * GIB  # makes rounds of 4 GiB, of which there are eight
    seen = estimate_s(MIGRATE, carrier, 32 * GIB, 760 * MIB, paces.rates(), overlap_bytes)
    assert seen == pytest.approx(3.0 + 5.0 - 0.005 + 0.75, rel=0.001)


def test_what_a_move_took_goes_into_the_next_estimate() -> None:
    paces = Paces()
    snapshot = _snapshot(_process(_agent()))
    before = _plan(planned(snapshot.replace(rates=paces.rates()), _to())).estimate_s
    for _ in range(8):
        paces.note("peer", OUT, 32 * GIB, 2.0)
        paces.note("driver", IN, GIB // 2, 1.0)
        paces.note("peer", IN, 1, 100.0)
    rates = paces.rates()
    assert rates.peer_out_bytes_per_s == pytest.approx(32 * GIB / 1.98, rel=0.1)
    assert rates.driver_in_s == pytest.approx(1.0, rel=0.01)
    assert _plan(planned(snapshot.replace(rates=rates), _to())).estimate_s > before + 2
