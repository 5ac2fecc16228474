"""The ways of moving a process: each condition in turn closes what it has to close, with a reason that names it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hegmd.migration.model import AgentSurvey, Candidate, GpuMemory, NodeSnapshotForPlan, PlanRequest, Surroundings
from hegmd.migration.plan import driver_rules
from hegmd.migration.plan.migration_options import ways_of
from hegmd.migration.plan.planner import planned
from hegmd.protocol.snapshots import AgentInfo, GpuProcess, GpuUse, Way
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
)

CRIU = "/usr/sbin/criu"
AGENT = AgentInfo(name="hegm-agent", version="0.2", supervised=True)
BOTH: dict[str, Any] = {
    "gpus": ("gpu0", "gpu1"),
    "kinds": ("compute", "compute"),
    "driver_bytes_by_gpu": {"gpu0": GIB, "gpu1": GIB},
}


def the_process(candidate: Candidate, agent: AgentInfo | None = None, **values: Any) -> GpuProcess:
    """The process of that candidate as `hegmctl ps` shows it."""
    uses = zip(candidate.gpus, candidate.kinds or ("compute",) * len(candidate.gpus), strict=True)
    survey = agent or (AGENT if candidate.agent is not None else None)
    plain: dict[str, Any] = {
        "pid": candidate.pid,
        "start_ticks": candidate.start_ticks,
        "gpus": tuple([GpuUse(gpu=gpu, vram_bytes=GIB, kind=kind) for gpu, kind in uses]),
        "agent": survey,
    }
    return GpuProcess(**{**plain, **values})


def ways(snapshot: NodeSnapshotForPlan, process: GpuProcess | None = None, criu: str | None = CRIU) -> dict[str, Way]:
    process = process or the_process(snapshot.candidates[0])
    return {way.way: way for way in ways_of(snapshot, [process], criu)[process.pid]}


def possible(snapshot: NodeSnapshotForPlan, process: GpuProcess | None = None) -> list[str]:
    return [name for name, way in ways(snapshot, process).items() if way.possible]


def with_gpus(candidate: Candidate, *gpus: GpuMemory, **values: Any) -> NodeSnapshotForPlan:
    return a_snapshot(candidate, gpus=gpus, **values)


def supervised(agent: AgentSurvey | None = None, **values: Any) -> Candidate:
    return a_process(agent or an_agent(), supervisor=4710, **values)


def test_the_four_options_come_in_the_order_of_preference() -> None:
    assert list(ways(a_snapshot(a_process()))) == ["agent", "driver", "criu", "restart"]


def test_a_plain_job_on_two_equal_gpus_can_go_by_the_driver() -> None:
    found = ways(a_snapshot(a_process()))
    assert [name for name, way in found.items() if way.possible] == ["driver"]
    for word in ("580.159.04", "gpu1", "managed memory"):
        assert word in found["driver"].reason
    assert "hegmctl run" not in found["agent"].reason
    assert "no agent, but an image needs one" in found["criu"].reason


def test_an_agent_enables_the_options_that_need_one() -> None:
    found = ways(a_snapshot(supervised()))
    assert all(way.possible for way in found.values()), found
    assert "hegm-agent 0.2" in found["agent"].reason
    assert CRIU in found["criu"].reason


# ---- one judgement ---------------------------------------------------------------------------------------------------

Made = Callable[[], NodeSnapshotForPlan]

# Each refusal of the driver's rules, by what is otherwise on a node on which the job could be suspended.
REFUSALS: dict[str, Made] = {
    "NCCL by the agent's word": lambda: a_snapshot(a_process(an_agent(cuda_facts(hazards=("nccl-p2p",))))),
    "CUDA IPC": lambda: a_snapshot(a_process(an_agent(cuda_facts(hazards=("ipc-shared",))))),
    "mapped for peers": lambda: a_snapshot(a_process(an_agent(cuda_facts(hazards=("peer-mapped",))))),
    "managed memory": lambda: a_snapshot(a_process(an_agent(cuda_facts(hazards=("managed",))))),
    "NCCL seen from outside": lambda: a_snapshot(a_process(around=Surroundings(nccl_shared=True))),
    "NCCL of one on several GPUs": lambda: a_snapshot(
        a_process(an_agent(), around=Surroundings(nccl_shared=True), **BOTH), gpus=(a_gpu("gpu0"), a_gpu("gpu1"))
    ),
    "stopped": lambda: a_snapshot(a_process(around=Surroundings(stopped=True))),
    "memory unknown": lambda: a_snapshot(a_process(vram_bytes=None)),
    "a share unknown": lambda: a_snapshot(a_process(an_agent(), **{**BOTH, "driver_bytes_by_gpu": {"gpu0": GIB}})),
    "another user's": lambda: a_snapshot(a_process(), uid=1001),
    "version unknown": lambda: with_gpus(a_process(), a_gpu("gpu0", driver_version=None), a_gpu("gpu1")),
    "version no number": lambda: with_gpus(a_process(), a_gpu("gpu0", driver_version="x.y"), a_gpu("gpu1")),
    "driver too old": lambda: with_gpus(a_process(), a_gpu("gpu0", driver_version="550.90.07"), a_gpu("gpu1")),
    "driver is denied": lambda: with_gpus(a_process(), a_gpu("gpu0", driver_version="610.57.04"), a_gpu("gpu1")),
    "MIG": lambda: with_gpus(a_process(), a_gpu("gpu0", mig=True), a_gpu("gpu1")),
    "MPS": lambda: with_gpus(a_process(), a_gpu("gpu0", mps=True), a_gpu("gpu1")),
    "client of MPS": lambda: a_snapshot(a_process(kinds=("mps",))),
    "graphics": lambda: a_snapshot(a_process(kinds=("graphics",))),
    "no memory for it": lambda: a_snapshot(a_process(), available_bytes=GIB),
    "a group's limit": lambda: a_snapshot(a_process(around=Surroundings(cgroup_free_bytes=GIB))),
    # The planner's refusals that are not rules of the driver.
    "GPU lost": lambda: with_gpus(a_process(), a_gpu("gpu0", state="lost"), a_gpu("gpu1")),
    "several GPUs, no agent": lambda: a_snapshot(a_process(**BOTH)),
    "another rank's": lambda: a_snapshot(
        a_process(an_agent(), job="j"),
        a_process(an_agent(cuda_facts(hazards=("nccl-p2p",))), pid=4712, gpus=("gpu1",), job="j"),
    ),
    "a child's": lambda: a_snapshot(
        a_process(), a_process(pid=4712, parent=4711, around=Surroundings(nccl_shared=True))
    ),
}


@in_one_test("made", REFUSALS.values(), ids=[name.replace(" ", "-") for name in REFUSALS])
def test_ps_and_suspend_refuse_a_process_in_the_same_words(made: Made) -> None:
    """Issue 14, row 9: `ps --ways` called ranks with live NCCL communicators movable, and `suspend` refused them."""
    snapshot = made()
    messages = [reason.message for reason in the_reasons(planned(snapshot, SUSPENSION))]
    found = ways(snapshot)
    assert found["driver"].reason in messages
    for name in ("agent", "driver", "criu"):
        assert not found[name].possible, name
    if snapshot.candidates[0].agent is not None:
        assert any(message in found["agent"].reason for message in messages)
        assert found["criu"].reason in [
            reason.message for reason in the_reasons(planned(snapshot, SUSPENSION.replace(kind="checkpoint")))
        ]


def _hints_of(snapshot: NodeSnapshotForPlan) -> set[str]:
    """Return the hints of the driver's rules: each refusal has its own hint."""
    candidate = snapshot.candidates[0]
    own = [gpu for gpu in snapshot.gpus if gpu.id in candidate.gpus]
    reasons = [*driver_rules.against_memory(snapshot, candidate, driver_rules.rest_of(candidate))]
    for gpu in own:
        reasons += driver_rules.against_leaving(snapshot, candidate, gpu)
    return {hint.split(": kill")[0] for _, _, hint in reasons}


def test_every_hazard_and_every_hint_of_the_drivers_rules_is_in_the_table_above() -> None:
    walked = set().union(*(_hints_of(made()) for made in REFUSALS.values()))
    of_hazards = {hint for _, hint in driver_rules.HAZARDS.values()}
    assert of_hazards <= walked
    rules = (driver_rules.against_leaving, driver_rules.against_memory)
    refusals = [
        node for rule in rules for node in ast.walk(ast.parse(inspect.getsource(rule))) if type(node) is ast.Yield
    ]
    assert len(walked - of_hazards) == len(refusals), sorted(walked)


def test_a_process_that_can_be_suspended_counts_as_movable() -> None:
    around = Surroundings(nccl_shared=True, nccl_p2p_disabled=True)
    for candidate in (a_process(), a_process(an_agent()), a_process(around=around), a_process(an_agent(), **BOTH)):
        third = (a_gpu("gpu0"), a_gpu("gpu1"), a_gpu("gpu2"))
        snapshot = a_snapshot(candidate, gpus=third)
        the_plan(planned(snapshot, SUSPENSION))
        assert ways(snapshot)["driver"].possible


def test_an_agent_that_was_never_surveyed_closes_nothing() -> None:
    """An operation asks it; until then `ps` says what is known."""
    assert "agent" in possible(a_snapshot(supervised(an_agent(size_bytes=None))))


def test_a_restart_is_refused_for_the_agents_reasons() -> None:
    found = ways(a_snapshot(supervised(an_agent(refusals=("its gradients are sparse",)))))
    assert not found["restart"].possible
    assert "sparse" in found["restart"].reason
    (reason,) = the_reasons(
        planned(
            a_snapshot(supervised(an_agent(refusals=("its gradients are sparse",)))),
            PlanRequest(kind="migrate", pids=(4711,), to="gpu1", via="restart"),
        )
    )
    assert reason.message == found["restart"].reason


# ---- other GPUs, other vendors, and what is not a process ------------------------------------------------------------

TARGETS: dict[str, tuple[Made, str]] = {
    "driver that cannot move": (
        lambda: with_gpus(a_process(an_agent()), a_gpu("gpu0", driver_version="575.51"), a_gpu("gpu1")),
        "on its former GPU",
    ),
    "only GPU": (lambda: with_gpus(a_process(an_agent()), a_gpu("gpu0")), "no other GPU"),
    "other chip": (lambda: with_gpus(a_process(an_agent()), a_gpu("gpu0"), a_gpu("gpu1", chip="L4")), "no other GPU"),
    "chip unknown": (
        lambda: with_gpus(a_process(an_agent()), a_gpu("gpu0", chip=None), a_gpu("gpu1")),
        "chip of gpu0 is unknown",
    ),
    "lost": (lambda: with_gpus(a_process(an_agent()), a_gpu("gpu0"), a_gpu("gpu1", state="lost")), "no other GPU"),
    "cut up": (lambda: with_gpus(a_process(an_agent()), a_gpu("gpu0"), a_gpu("gpu1", mig=True)), "no other GPU"),
    "under MPS": (lambda: with_gpus(a_process(an_agent()), a_gpu("gpu0"), a_gpu("gpu1", mps=True)), "no other GPU"),
    "on all": (lambda: a_snapshot(a_process(an_agent(), **BOTH)), "gpu0 and gpu1"),
}


@in_one_test(("made", "words"), TARGETS.values(), ids=[name.replace(" ", "-") for name in TARGETS])
def test_without_another_gpu_a_process_can_be_suspended_and_not_moved(made: Made, words: str) -> None:
    snapshot = made()
    the_plan(planned(snapshot, SUSPENSION))
    found = ways(snapshot)
    for name in ("agent", "driver"):
        assert not found[name].possible
        assert words in found[name].reason


def test_an_exited_or_invisible_process_has_no_way_to_move() -> None:
    process = the_process(a_process(), start_ticks=None)
    snapshot = a_snapshot()
    assert possible(snapshot, process) == []
    assert "cannot verify" in ways(snapshot, process)["driver"].reason
    assert ways(snapshot, process.replace(note="it has ended"))["driver"].reason == "it has ended"


def test_a_job_on_the_cpu_can_be_started_again_on_a_gpu_and_nothing_else() -> None:
    candidate = supervised(gpus=(), kinds=(), on_cpu=True, vram_bytes=None)
    there = the_process(candidate, AGENT.replace(on_cpu=True))
    assert possible(a_snapshot(candidate), there) == ["restart"]
    assert possible(a_snapshot(candidate), the_process(candidate)) == []


def test_an_agent_on_amd_leaves_the_restart() -> None:
    snapshot = with_gpus(supervised(), a_gpu("gpu0", vendor="amd"), a_gpu("gpu1", vendor="amd"))
    assert possible(snapshot) == ["restart"]
    assert "restart" in ways(snapshot)["agent"].reason
    assert "only the NVIDIA driver" in ways(snapshot)["driver"].reason


def test_an_agent_on_simulated_gpus_needs_only_another_of_them() -> None:
    first, second = a_gpu("gpu0", vendor="simulated"), a_gpu("gpu1", vendor="simulated")
    assert "agent" in possible(with_gpus(a_process(an_agent()), first, second))
    assert "agent" not in possible(with_gpus(a_process(an_agent()), first))
    assert "no driver" in ways(with_gpus(a_process(an_agent()), first, second))["driver"].reason


@pytest.mark.parametrize(
    ("uid", "criu", "words"), [(0, None, "not installed"), (1000, CRIU, "needs root")], ids=["none", "user"]
)
def test_reasons_that_exclude_criu(uid: int, criu: str | None, words: str) -> None:
    found = ways(a_snapshot(a_process(an_agent()), uid=uid), criu=criu)
    assert found["driver"].possible, "a user's own daemon may move that user's processes"
    assert not found["criu"].possible
    assert words in found["criu"].reason


def test_reasons_are_one_line_without_a_full_stop() -> None:
    snapshots = [made() for made in REFUSALS.values()] + [made() for made, _ in TARGETS.values()]
    for found in [way for snapshot in snapshots for way in ways(snapshot).values()]:
        assert found.reason
        assert "\n" not in found.reason
        assert not found.reason.endswith(".")
        assert len(found.reason) <= 250


def test_a_restart_needs_a_supervisor() -> None:
    """It was called possible for every process with an agent, and refused when it was asked for."""
    candidate = a_process(an_agent())
    alone = ways(a_snapshot(candidate), the_process(candidate, AGENT.replace(supervised=False)))["restart"]
    assert not alone.possible
    assert "hegmctl run --allow-restart" in alone.reason


def test_a_prestarted_python_was_shown_nowhere() -> None:
    candidate = supervised()
    kept = the_process(candidate, AGENT.replace(kept=True))
    assert "prestarted" in ways(a_snapshot(candidate), kept)["restart"].reason
    assert "prestarted" not in ways(a_snapshot(candidate))["restart"].reason


@pytest.mark.thorough
def test_thousands_of_processes_are_judged_each_with_its_own_family_only() -> None:
    """Judging each among all the others took the daemon's loop for seconds on a node with 2,000 of them."""
    agent = an_agent()
    candidates = [a_process(agent, pid=pid) for pid in range(1000, 1400)]
    candidates[7] = candidates[7].replace(around=Surroundings(stopped=True))
    found = ways_of(a_snapshot(*candidates), [the_process(candidate) for candidate in candidates], CRIU)
    closed = [pid for pid, options in found.items() if not options[1].possible]
    assert closed == [1007]
