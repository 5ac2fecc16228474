"""The sharing policy keeps its promises on thousands of random nodes, and in whole lives of a simulated one.

The second part of the file shows that each promise can be broken: a policy that overlooks something is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from hegmd.sharing.model import RUNNING, SUSPENDED, Decision, Job, Rules, Snapshot
from hegmd.sharing.policy import decide
from tests.simulation.sharing_nodes import NOW, life, snapshot_of
from tests.simulation.sharing_promises import broken
from tests.wide import quick_first
from tools.sharing.__main__ import POLICIES, figures, simulated
from tools.sharing.node import GIB, JobSpec, LeaseSpec, Node, Overcommitted, Policy

NODES = 3000
LIVES = 40


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", quick_first([range(at, at + 500) for at in range(0, NODES, 500)], 1), ids=str)
def test_every_promise_is_kept_on_any_node(seeds: range) -> None:
    for seed in seeds:
        snapshot = snapshot_of(seed)
        assert broken(snapshot, NOW, decide(snapshot, NOW)) == [], f"seed {seed}"


@pytest.mark.thorough
def test_a_decision_does_not_depend_on_the_order_of_a_snapshot() -> None:
    for seed in range(300):
        snapshot, random = snapshot_of(seed), Random(seed)
        gpus, jobs = list(snapshot.gpus), list(snapshot.jobs)
        random.shuffle(gpus)
        random.shuffle(jobs)
        assert decide(snapshot._replace(gpus=tuple(gpus), jobs=tuple(jobs)), NOW) == decide(snapshot, NOW)


def lived(seed: int, policy: Policy = decide) -> tuple[Node, list[str]]:
    """Live one life to its end, and return what was broken in it."""
    node = life(seed, policy)
    found: list[str] = []
    node.on_decision = lambda snapshot, now, decision: found.extend(broken(snapshot, now, decision))
    try:
        node.run()
    except Overcommitted as error:
        found.append(str(error))
    found += [f"{job.spec.id} never ends: {job.view}" for job in node.jobs.values() if job.ended_s is None]
    return node, found


@pytest.mark.parametrize("seeds", quick_first([range(8), range(8, LIVES)], 1), ids=str)
def test_every_job_ends_and_every_promise_is_kept_in_any_life(seeds: range) -> None:
    for seed in seeds:
        _, found = lived(seed)
        assert found == [], f"seed {seed}"


@pytest.mark.thorough
@pytest.mark.parametrize(("job_count", "gpu_count"), quick_first([(5, 3), (2, 1), (2, 3), (5, 1), (9, 1), (9, 3)], 1))
def test_each_of_n_equals_has_its_turn_within_n_minus_1_quanta(gpu_count: int, job_count: int) -> None:
    """Jobs of all sizes that never end, in all mixes: none waits longer than the others' turns and switches."""
    for seed in range(4):
        random = Random(seed)
        node = Node({f"gpu{index}": 80 * GIB for index in range(gpu_count)}, decide, Rules(turns_per_gpu=job_count))
        node.add(
            JobSpec(f"j{number}", number, math.inf, (random.choice((20, 45, 60, 75)) * GIB,), startup_s=1.0)
            for number in range(job_count)
        )
        waits = TurnStatistics()
        node.on_decision = waits.look
        node.run(3600)
        quantum_s = max(30.0, *(20 * job.view.switch_s for job in node.jobs.values()))
        most_switches_s = 10.0
        assert len(node.jobs) == len(waits.ran)
        assert waits.longest_s <= (job_count - 1) * (quantum_s + most_switches_s), f"seed {seed}"
        assert waits.shortest_turn_s >= 30.0 - 1e-6


class TurnStatistics:
    """How long jobs waited for their turns, and how long their turns were."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.shortest_turn_s = math.inf
        self.ran: set[str] = set()

    def look(self, snapshot: Snapshot, now: float, decision: Decision) -> None:
        jobs = {job.id: job for job in snapshot.jobs}
        for job in jobs.values():
            if job.state == RUNNING:
                self.ran.add(job.id)
            else:
                self.longest_s = max(self.longest_s, now - job.since_s)
        for action in decision.actions:
            if action.kind == "suspend":
                self.shortest_turn_s = min(self.shortest_turn_s, now - jobs[action.subject].since_s)


def test_two_jobs_that_take_turns_lose_at_most_5_percent() -> None:
    node = Node({"gpu0": 80 * GIB}, decide)
    node.add(JobSpec(f"j{number}", 0, math.inf, (60 * GIB,), startup_s=0.0) for number in range(2))
    node.run(600)
    assert node.computed_s / node.now >= 0.95
    assert min(job.switches for job in node.jobs.values()) >= 5


@pytest.mark.thorough
def test_repeated_leases_neither_starve_nor_lose_a_job() -> None:
    """Requests flap once a second for ten minutes. The job still trains for a third of that time."""
    node = Node({"gpu0": 80 * GIB}, decide)
    node.add([JobSpec("j1", 0, math.inf, (60 * GIB,))])
    node.add(LeaseSpec(f"l{second}", 20.0 + second, 0.2, 40 * GIB) for second in range(0, 600, 1))
    node.run(700)
    assert node.computed_s - 80 > 600 / 3
    assert all(lease.ended_s is not None for lease in node.leases.values())


def test_a_full_pool_stops_neither_turns_nor_jobs() -> None:
    node = Node({"gpu0": 80 * GIB}, decide, pool_bytes=120 * GIB)
    node.add(JobSpec(f"j{number}", number, 200.0, (60 * GIB,)) for number in range(8))
    node.run()
    assert all(job.ended_s is not None for job in node.jobs.values())


@pytest.mark.thorough
def test_the_simulator_runs_each_policy_to_the_end_of_a_trace() -> None:
    rows = {name: figures(name, simulated(policy, 1, 60)) for name, policy in POLICIES.items()}
    assert rows["sharing"].keys() == rows["FIFO"].keys()
    assert rows["no sharing"]["switches"] == rows["FIFO"]["switches"] == 0
    assert float(rows["sharing"]["mean_turnaround_min"]) <= float(rows["no sharing"]["mean_turnaround_min"])


# -- each promise can be broken ----------------------------------------------------------------------------------------

Blinder = Callable[[Job], Job]


def blind(change: Blinder) -> Policy:
    """The policy, which sees every job as `change` shows it."""

    def policy(snapshot: Snapshot, now: float) -> Decision:
        return decide(snapshot._replace(jobs=tuple(map(change, snapshot.jobs))), now)

    return policy


def without_leases(snapshot: Snapshot, now: float) -> Decision:
    return decide(snapshot._replace(leases=tuple(lease for lease in snapshot.leases if lease.state != "held")), now)


def without_rules(snapshot: Snapshot, now: float) -> Decision:
    return decide(
        snapshot._replace(rules=Rules(min_quantum_s=0.0, quantum_per_switch=0.0, settle_s=0.0, run_per_switch=0.0)), now
    )


def without_pool(snapshot: Snapshot, now: float) -> Decision:
    return decide(snapshot._replace(pool_free_bytes=None), now)


def idle(snapshot: Snapshot, now: float) -> Decision:
    return decide(snapshot, now)._replace(actions=())


def late(snapshot: Snapshot, now: float) -> Decision:
    return decide(snapshot, now)._replace(again_at_s=None)


MUTANTS: dict[str, Policy] = {
    "overlooks that a job cannot be acted on": blind(lambda job: replace(job, hindrance="")),
    "overlooks a refusal": blind(lambda job: replace(job, retry_at_s=None)),
    "overlooks that a job may not be preempted": blind(lambda job: replace(job, is_preemptible=True)),
    "overlooks whose job it is": blind(lambda job: replace(job, uid=1)),
    "overlooks promised memory": blind(
        lambda job: replace(job, needs_bytes=tuple(job.held_bytes.values())) if job.state == RUNNING else job
    ),
    "overlooks where a job is pinned": blind(lambda job: replace(job, allowed_gpus=None)),
    "overlooks the chip": blind(lambda job: replace(job, chip=None)),
    "turns priorities round": blind(lambda job: replace(job, priority=100 - job.priority)),
    "takes every job for suspended by itself": blind(
        lambda job: replace(job, state=SUSPENDED) if job.state == "user-suspended" else job
    ),
    "overlooks leases": without_leases,
    "overlooks quantum and hysteresis": without_rules,
    "overlooks the pool": without_pool,
    "does nothing": idle,
    "never decides again": late,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_policy_that_overlooks_something_is_found(name: str) -> None:
    policy = MUTANTS[name]
    assert any(broken(snapshot := snapshot_of(seed), NOW, policy(snapshot, NOW)) for seed in range(500))
