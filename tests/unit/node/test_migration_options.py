"""The ways of moving a process: each condition in turn closes what it has to close, with a reason that names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hegmd.node.migration_options import Candidate, GpuTraits, Ground, NodeMeans, ground_of, ways_of
from hegmd.protocol.snapshots import Gpu, Way

ROOT = NodeMeans(uid=0, criu_path="/usr/sbin/criu")
H200 = GpuTraits(id="gpu0", vendor="nvidia", chip="H200", driver_version="580.159.04")
OTHER_H200 = replace(H200, id="gpu1")
THIRD_H200 = replace(H200, id="gpu2")
L4 = replace(H200, id="gpu1", chip="L4")
NODE = Ground(gpus=(H200, OTHER_H200), means=ROOT)
JOB = Candidate(visible=True, uid=1000, agent=None, uses=(("gpu0", "compute"),))
WITH_AGENT = replace(JOB, agent="hegm-agent 0.2", supervised=True)


def way(name: str, candidate: Candidate, ground: Ground) -> Way:
    (found,) = [way for way in ways_of(candidate, ground) if way.way == name]
    return found


def with_gpus(*gpus: GpuTraits) -> Ground:
    return replace(NODE, gpus=gpus)


def test_the_four_ways_come_in_the_order_of_preference() -> None:
    assert [way.way for way in ways_of(JOB, NODE)] == ["agent", "driver", "criu", "restart"]


def test_a_job_on_the_cpu_can_be_started_again_on_a_gpu_and_nothing_else() -> None:
    there = replace(WITH_AGENT, uses=(), on_cpu=True)
    assert [found.way for found in ways_of(there, NODE) if found.possible] == ["restart"]
    assert not any(found.possible for found in ways_of(replace(there, on_cpu=False), NODE))


def test_a_plain_job_on_two_equal_gpus_can_go_by_driver_and_criu() -> None:
    possible = {way.way: way.possible for way in ways_of(JOB, NODE)}
    assert possible == {"agent": False, "driver": True, "criu": True, "restart": False}
    reason = way("driver", JOB, NODE).reason
    assert "580.159.04" in reason
    assert "gpu1" in reason
    assert "NCCL" in reason


DRIVER_REFUSALS = {
    "driver without the calls": (JOB, with_gpus(replace(H200, driver_version="550.90.07"), OTHER_H200), "570 or newer"),
    "driver that cannot move": (JOB, with_gpus(replace(H200, driver_version="575.51"), OTHER_H200), "580 or newer"),
    "driver version unknown": (JOB, with_gpus(replace(H200, driver_version=None), OTHER_H200), "not known"),
    "driver version that is no number": (JOB, with_gpus(replace(H200, driver_version="x.y"), OTHER_H200), "not known"),
    "only GPU": (JOB, with_gpus(H200), "no other GPU"),
    "other chip": (JOB, with_gpus(H200, L4), "no other GPU"),
    "chip unknown": (JOB, with_gpus(replace(H200, chip=None), OTHER_H200), "chip of gpu0 is not known"),
    "other GPU lost": (JOB, with_gpus(H200, replace(OTHER_H200, state="lost")), "no other GPU"),
    "other GPU cut up": (JOB, with_gpus(H200, replace(OTHER_H200, mig=True)), "no other GPU"),
    "other GPU under MPS": (JOB, with_gpus(H200, replace(OTHER_H200, mps=True)), "no other GPU"),
    "own GPU lost": (JOB, with_gpus(replace(H200, state="lost"), OTHER_H200), "gpu0 is lost"),
    "own GPU not listed": (JOB, with_gpus(OTHER_H200), "vendor unknown"),
    "MIG": (JOB, with_gpus(replace(H200, mig=True), OTHER_H200), "MIG"),
    "MPS on the GPU": (JOB, with_gpus(replace(H200, mps=True), OTHER_H200), "MPS"),
    "MPS client": (replace(JOB, uses=(("gpu0", "mps"),)), NODE, "MPS"),
    "graphics": (replace(JOB, uses=(("gpu0", "graphics"),)), NODE, "CUDA state only"),
    "AMD": (JOB, with_gpus(replace(H200, vendor="amd"), replace(OTHER_H200, vendor="amd")), "NVIDIA"),
    "simulated": (JOB, with_gpus(replace(H200, vendor="simulated"), OTHER_H200), "simulated"),
    "on every GPU there is": (replace(JOB, uses=(("gpu0", "compute"), ("gpu1", "compute"))), NODE, "gpu0 and gpu1"),
    "pid not seen": (replace(JOB, visible=False, uid=None), NODE, "trust"),
    "another user's": (JOB, replace(NODE, means=replace(ROOT, uid=1001)), "run hegmd as root"),
}


@pytest.mark.parametrize(
    ("candidate", "ground", "words"), DRIVER_REFUSALS.values(), ids=[name.replace(" ", "-") for name in DRIVER_REFUSALS]
)
def test_what_closes_the_drivers_way(candidate: Candidate, ground: Ground, words: str) -> None:
    found = way("driver", candidate, ground)
    assert not found.possible
    assert words in found.reason


def test_a_users_own_daemon_may_move_that_users_processes() -> None:
    assert way("driver", JOB, replace(NODE, means=replace(ROOT, uid=1000))).possible


def test_a_job_on_two_gpus_of_three_can_go() -> None:
    both = replace(JOB, uses=(("gpu0", "compute"), ("gpu1", "compute")))
    found = way("driver", both, with_gpus(H200, OTHER_H200, THIRD_H200))
    assert found.possible
    assert "gpu2" in found.reason


def test_criu_is_open_where_only_the_onto_part_of_the_driver_is_missing() -> None:
    alone = with_gpus(replace(H200, driver_version="575.51"))
    assert not way("driver", JOB, alone).possible
    assert way("criu", JOB, alone).possible


@pytest.mark.parametrize(
    ("candidate", "means", "words"),
    [
        (JOB, replace(ROOT, criu_path=None), "not installed"),
        (JOB, replace(ROOT, uid=1000), "needs root"),
        (replace(JOB, visible=False, uid=None), ROOT, "trust"),
        (replace(JOB, uses=(("gpu0", "mps"),)), ROOT, "MPS"),
    ],
)
def test_what_closes_criu(candidate: Candidate, means: NodeMeans, words: str) -> None:
    found = way("criu", candidate, replace(NODE, means=means))
    assert not found.possible
    assert words in found.reason


def test_an_agent_opens_what_needs_one() -> None:
    assert all(way.possible for way in ways_of(WITH_AGENT, NODE))
    assert "hegm-agent 0.2" in way("agent", WITH_AGENT, NODE).reason


def test_an_agent_takes_the_drivers_place_before_criu() -> None:
    mps = replace(WITH_AGENT, uses=(("gpu0", "mps"),))
    assert way("criu", mps, NODE).possible
    assert not way("agent", mps, NODE).possible


def test_an_agent_on_amd_leaves_the_restart() -> None:
    node = with_gpus(replace(H200, vendor="amd"), replace(OTHER_H200, vendor="amd"))
    assert not way("agent", WITH_AGENT, node).possible
    assert "restart" in way("agent", WITH_AGENT, node).reason
    assert way("restart", WITH_AGENT, node).possible


def test_an_agent_on_simulated_gpus_needs_only_another_of_them() -> None:
    first, second = replace(H200, vendor="simulated"), replace(OTHER_H200, vendor="simulated")
    assert way("agent", WITH_AGENT, with_gpus(first, second)).possible
    assert not way("agent", WITH_AGENT, with_gpus(first)).possible


def test_reasons_are_one_line_without_a_full_stop() -> None:
    grounds = [ground for _, ground, _ in DRIVER_REFUSALS.values()]
    candidates = [candidate for candidate, _, _ in DRIVER_REFUSALS.values()] + [WITH_AGENT]
    for ground in [NODE, *grounds]:
        for candidate in candidates:
            for found in ways_of(candidate, ground):
                assert found.reason
                assert "\n" not in found.reason
                assert not found.reason.endswith(".")
                assert len(found.reason) <= 200


def test_the_ground_is_the_same_when_only_figures_change() -> None:
    gpu = Gpu(id="gpu0", index=0, uuid="GPU-1", vendor="nvidia", chip="H200", memory_used_bytes=1)
    assert ground_of([gpu], ROOT) == ground_of([gpu.replace(memory_used_bytes=2)], ROOT)
    assert ground_of([gpu], ROOT) != ground_of([gpu.replace(mig=True)], ROOT)


def test_a_restart_takes_somebody_who_starts_it_again() -> None:
    """It was called possible for every process with an agent, and refused when it was asked for."""
    alone = way("restart", replace(WITH_AGENT, supervised=False), NODE)
    assert not alone.possible
    assert "hegmctl run --allow-restart" in alone.reason


def test_a_python_that_is_kept_ready_was_shown_nowhere() -> None:
    assert "kept ready" in way("restart", replace(WITH_AGENT, kept=True), NODE).reason
    assert "kept ready" not in way("restart", WITH_AGENT, NODE).reason
