"""The sharing policy, case by case: which job gets a GPU, which is suspended, and which stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hegmd.sharing.model import ARRIVING, BUSY, LEAVING, RUNNING, USER_SUSPENDED, Gpu, Job, Rules
from hegmd.sharing.policy import decide, explain
from hegmd.sharing.requests import is_moving
from hegmd.sharing.view import View
from tests.cells import in_one_test
from tests.unit.sharing.nodes import (
    GIB,
    NOW,
    OTHER_USER,
    decided,
    gpu,
    held,
    kinds,
    node,
    pending,
    queued,
    running,
    suspended,
)


def test_an_idle_node_has_nothing_to_do() -> None:
    assert decided(gpu(), gpu("gpu1"), running("j1")) == ()


def test_a_queued_job_starts_where_most_memory_is_free() -> None:
    actions = decided(gpu("gpu0", 50), gpu("gpu1", 70), queued("j1", 40))
    assert kinds(actions) == [("start", "j1", ("gpu1",))]
    assert actions[0].size_bytes == (40 * GIB,)


def test_a_queued_job_avoids_a_gpu_with_jobs_of_its_priority_or_higher() -> None:
    assert kinds(decided(gpu("gpu0", 70), gpu("gpu1", 60), running("j1", 10), queued("j2", 40))) == [
        ("start", "j2", ("gpu1",))
    ]


def test_a_pinned_job_waits_for_its_gpu() -> None:
    job = replace(queued("j1", 60), allowed_gpus=("gpu0",))
    assert decided(gpu("gpu0", 20), gpu("gpu1", 80), job) == ()


@pytest.mark.parametrize("unusable", [gpu("gpu0", None), gpu("gpu0", is_healthy=False), gpu("gpu0", 30, total_gib=30)])
def test_nothing_starts_on_an_unhealthy_or_unknown_or_small_gpu(unusable: Gpu) -> None:
    assert decided(unusable, queued("j1", 40)) == ()


def test_a_job_of_unknown_need_takes_a_gpu_without_others_and_keeps_it() -> None:
    assert decided(gpu("gpu0", 60), running("j1", 20, since_s=NOW), queued("j2", None)) == ()
    assert kinds(decided(gpu("gpu0"), queued("j2", None))) == [("start", "j2", ("gpu0",))]
    begun = replace(running("j2", 1), needs_bytes=None)
    assert decided(gpu("gpu0", 79), begun, queued("j3", 10), rules=Rules(slices=False)) == ()


def test_memory_that_a_running_job_has_not_taken_yet_is_not_given_away() -> None:
    begun = replace(running("j1", 60), held_bytes={"gpu0": 5 * GIB})
    assert decided(gpu("gpu0", 75), begun, queued("j2", 40), rules=Rules(slices=False)) == ()


def test_only_one_of_two_jobs_gets_memory_that_is_enough_for_one() -> None:
    assert kinds(decided(gpu(), queued("j1", 60), queued("j2", 60, priority=80))) == [("start", "j2", ("gpu0",))]


def test_a_higher_priority_suspends_the_fewest_bytes_of_the_lowest_priority() -> None:
    jobs = [running("j1", 30, priority=20), running("j2", 20, priority=20), running("j3", 20, priority=50)]
    actions = decided(gpu("gpu0", 10), *jobs, queued("j4", 30, priority=80))
    assert kinds(actions) == [("suspend", "j2", ("gpu0",))]
    assert (actions[0].beneficiary, actions[0].ends_turn) == ("j4", False)
    assert "j4" in actions[0].reason


def test_no_second_job_is_suspended_while_one_leaves() -> None:
    jobs = [replace(running("j1", 40, priority=20), state=LEAVING), running("j2", 40, priority=20)]
    assert decided(gpu("gpu0", 0), *jobs, queued("j3", 40, priority=80)) == ()


def test_requested_memory_of_a_job_is_not_free_before_it_has_left() -> None:
    leaving = replace(running("j1", 1), state=LEAVING, needs_bytes=(40 * GIB,))
    assert decided(gpu("gpu0", 79), leaving, queued("j2", 60)) == ()
    assert kinds(decided(gpu("gpu0", 79), leaving, queued("j2", 30))) == [("start", "j2", ("gpu0",))]


def test_memory_freed_for_one_job_is_not_given_to_another() -> None:
    leaving = replace(running("j1", 60, priority=20), state=LEAVING)
    assert decided(gpu("gpu0", 20), leaving, queued("j3", 80, priority=80), queued("j4", 10)) == ()


def test_a_job_migrates_if_another_gpu_has_memory() -> None:
    actions = decided(gpu("gpu0", 0), gpu("gpu1", 40), running("j1", 40), running("j2", 40), pending(40))
    assert kinds(actions) == [("migrate", "j1", ("gpu1",))] or kinds(actions) == [("migrate", "j2", ("gpu1",))]


def test_a_lease_is_granted_when_its_memory_is_free() -> None:
    assert kinds(decided(gpu("gpu0", 60), pending(40))) == [("grant", "l1", ("gpu0",))]


def test_a_held_lease_keeps_its_unused_memory() -> None:
    assert decided(gpu("gpu0", 50), held(60, used_gib=30), queued("j1", 30)) == ()
    assert kinds(decided(gpu("gpu0", 50), held(60, used_gib=30), queued("j1", 20))) == [("start", "j1", ("gpu0",))]


def test_a_suspended_job_resumes_on_any_gpu_before_a_job_of_lower_priority_starts() -> None:
    actions = decided(gpu("gpu0", 0), gpu("gpu1", 40), suspended("j1", 40), queued("j2", 40, priority=20))
    assert kinds(actions) == [("resume", "j1", ("gpu1",))]


def test_a_job_stays_suspended_for_a_moment_before_it_resumes() -> None:
    snapshot = node(gpu(), suspended("j1", since_s=NOW - 0.5))
    decision = decide(snapshot, NOW)
    assert (decision.actions, decision.again_at_s) == ((), NOW + 1.5)
    assert kinds(decide(snapshot, NOW + 1.5).actions) == [("resume", "j1", ("gpu0",))]


def test_a_job_that_could_not_resume_says_why() -> None:
    job = replace(suspended("j1"), retry_at_s=NOW + 5, failure="process 99 is on gpu0")
    (waiting,) = decide(node(gpu(), job), NOW).waiting
    assert waiting.waits == "until it is tried again: process 99 is on gpu0"


@in_one_test(
    "change",
    [
        {"is_preemptible": False},
        {"hindrance": "the agent of process 4711 is not connected"},
        {"retry_at_s": NOW + 5},
        {"state": BUSY},
        {"state": ARRIVING},
        {"uid": OTHER_USER},
        {"priority": 80},
    ],
)
def test_some_jobs_are_never_suspended_for_another(change: dict[str, Any]) -> None:
    job = replace(running("j1", 80, priority=20, since_s=NOW), **change)
    assert decided(gpu("gpu0", 0), job, pending(40)) == ()


def test_a_resumed_job_runs_at_least_twice_as_long_as_its_switch() -> None:
    resumed = replace(running("j1", 80, priority=20, since_s=NOW - 1), turn_s=9.0, switch_s=2.0)
    assert decide(node(gpu("gpu0", 0), resumed, pending(40)), NOW).again_at_s == NOW + 3
    assert kinds(decided(gpu("gpu0", 0), resumed, pending(40), now=NOW + 3)) == [("suspend", "j1", ("gpu0",))]


def test_a_lease_with_the_right_suspends_jobs_of_other_users() -> None:
    job = replace(running("j1", 80, priority=20), uid=OTHER_USER)
    assert kinds(decided(gpu("gpu0", 0), job, pending(40)._replace(preempts_others=True))) == [
        ("suspend", "j1", ("gpu0",))
    ]


def test_a_job_that_a_user_suspended_is_left_alone() -> None:
    assert decided(gpu(), replace(suspended("j1"), state=USER_SUSPENDED)) == ()


# -- turns -------------------------------------------------------------------------------------------------------------


def test_jobs_of_equal_priority_change_places_when_a_turn_ends() -> None:
    snapshot = node(gpu("gpu0", 20), running("j1", 60, since_s=NOW - 10), suspended("j2", 60))
    decision = decide(snapshot, NOW)
    assert (decision.actions, decision.again_at_s) == ((), NOW + 20)
    (action,) = decide(snapshot, NOW + 20).actions
    assert (action.kind, action.subject, action.ends_turn) == ("suspend", "j1", True)


def test_a_turn_is_twenty_times_as_long_as_its_switch() -> None:
    costly = replace(running("j1", 60, since_s=NOW - 30), switch_s=4.0)
    assert decide(node(gpu("gpu0", 20), costly, suspended("j2", 60)), NOW).again_at_s == NOW + 50


def test_an_interrupted_job_continues_its_turn_before_others() -> None:
    interrupted = replace(suspended("j2", 60, since_s=NOW - 5), turn_s=10.0)
    assert kinds(decided(gpu(), suspended("j1", 60), interrupted)) == [("resume", "j2", ("gpu0",))]


def test_a_job_cannot_take_a_gpu_that_an_earlier_job_waits_for() -> None:
    jobs = [running("j1", 60, since_s=NOW - 10), suspended("j2", 70, since_s=1), suspended("j3", 15, since_s=2)]
    assert decided(gpu("gpu0", 20), *jobs) == ()
    fits_beside = suspended("j4", 10, since_s=2)
    assert kinds(decided(gpu("gpu0", 20), *jobs[:2], fits_beside)) == [("resume", "j4", ("gpu0",))]


def test_without_slices_jobs_of_equal_priority_wait_for_the_end() -> None:
    jobs = [running("j1", 60), suspended("j2", 60)]
    assert decided(gpu("gpu0", 20), *jobs, rules=Rules(slices=False)) == ()


def test_a_new_job_takes_turns_only_if_the_pool_fits_the_next_exchange() -> None:
    jobs = [running("j1", 60), queued("j2", 60)]
    assert decided(gpu("gpu0", 20), *jobs, pool_gib=119) == ()
    (waiting,) = explain(node(gpu("gpu0", 20), *jobs, pool_gib=119), NOW)
    assert "pool memory for the jobs" in waiting.waits
    assert kinds(decided(gpu("gpu0", 20), *jobs, pool_gib=120)) == [("suspend", "j1", ("gpu0",))]
    assert kinds(decided(gpu("gpu0", 20), jobs[0], suspended("j2", 60), pool_gib=60)) == [("suspend", "j1", ("gpu0",))]


def test_a_job_that_cannot_be_suspended_takes_no_turns() -> None:
    stubborn = replace(suspended("j2", 60), is_preemptible=False)
    assert decided(gpu("gpu0", 20), running("j1", 60), stubborn) == ()


# -- several GPUs ------------------------------------------------------------------------------------------------------


def _on_two_gpus(job: Job) -> Job:
    sizes = (60 * GIB, 50 * GIB)
    held_bytes = {"gpu0": 60 * GIB, "gpu1": 50 * GIB} if job.state == RUNNING else {}
    return replace(job, gpus=("gpu0", "gpu1"), needs_bytes=sizes, held_bytes=held_bytes)


def test_a_job_on_two_gpus_waits_until_both_have_memory() -> None:
    job = _on_two_gpus(suspended("j1"))
    assert decided(gpu("gpu0", 60), gpu("gpu1", 40), job) == ()
    assert kinds(decided(gpu("gpu0", 60), gpu("gpu1", 50), job)) == [("resume", "j1", ("gpu0", "gpu1"))]
    assert kinds(decided(gpu("gpu0", 50), gpu("gpu1", 60), job)) == [("resume", "j1", ("gpu1", "gpu0"))]


def test_a_job_of_unknown_need_waits_until_as_many_gpus_as_it_wants_have_no_other_jobs() -> None:
    pair = replace(queued("pair", None), wanted_gpus=2)
    assert kinds(decided(gpu("gpu0"), gpu("gpu1"), pair)) == [("start", "pair", ("gpu0", "gpu1"))]
    busy = node(gpu("gpu0"), gpu("gpu1", 40), running("other", 40, "gpu1"), pair, rules=Rules(slices=False))
    assert decide(busy, NOW).actions == ()
    assert decide(busy, NOW).waiting[0].waits.startswith("whole GPUs on gpu0, gpu1")


def test_suspending_a_job_frees_all_its_gpus() -> None:
    victim = _on_two_gpus(running("j1", priority=20))
    actions = decided(gpu("gpu0", 20), gpu("gpu1", 30), victim, queued("j2", 70), queued("j3", 60))
    assert kinds(actions) == [("suspend", "j1", ("gpu0", "gpu1"))]
    assert actions[0].size_bytes == (60 * GIB, 50 * GIB)


# -- explanations ------------------------------------------------------------------------------------------------------


def test_every_waiting_job_shows_what_happens_next() -> None:
    jobs = [
        running("j1", 60, since_s=NOW - 10),
        suspended("j2", 60),
        queued("j3", 200),
        replace(suspended("j4"), hindrance="the agent of process 4711 is not connected"),
    ]
    by_subject = {waiting.subject: waiting for waiting in explain(node(gpu("gpu0", 20), *jobs, pending(10)), NOW)}
    assert by_subject["l1"].next == "its memory is kept on gpu0, which had 10 GiB free for it"
    assert (by_subject["j2"].waits, by_subject["j2"].next) == (
        "until the turn of j1 ends in 20 s",
        "it resumes on gpu0",
    )
    assert by_subject["j3"].waits == "200.0 GiB on a GPU: gpu0 has at most 80.0 GiB for jobs"
    assert by_subject["j4"].waits == "until this has changed: the agent of process 4711 is not connected"


def test_the_reason_for_an_impossible_size_names_who_uses_the_rest() -> None:
    """`hegmctl queue` showed "139 GiB on 1 GPU; the largest on this node has 140 GiB"."""
    small = gpu("gpu0", 78)._replace(kept_bytes=GIB)
    waits = explain(node(small, queued("j1", 79)), NOW)[0].waits
    assert waits == (
        "79.0 GiB on a GPU: gpu0 has at most 78.0 GiB for jobs of its 80.0 GiB: "
        "the driver and hegmd keep 1.0 GiB and other programs use 1.0 GiB"
    )
    shared = small._replace(contexts_bytes=GIB)
    assert explain(node(shared, queued("j1", 79)), NOW)[0].waits.endswith(
        "the driver and hegmd keep 1.0 GiB and suspended jobs keep contexts of 1.0 GiB"
    ), "kept contexts counted as other programs"
    barely = replace(queued("j1"), needs_bytes=(78 * GIB + 4096,))
    assert explain(node(small, barely), NOW)[0].waits.startswith("78.0 GiB and 4,096 bytes on a GPU: gpu0 has at most")
    other_chip = replace(queued("j1", 10), chip="H100")
    assert explain(node(small, other_chip), NOW)[0].waits == "a healthy GPU of type H100: this node has none"
    on_two = replace(queued("j1"), needs_bytes=(GIB, GIB))
    assert explain(node(small, on_two), NOW)[0].waits == "2 healthy GPUs: this node has 1"


def test_a_turn_needs_pool_memory_for_tensors_but_not_for_contexts() -> None:
    """A pool of 80 GiB was too small for turns of jobs that need 40 GiB of it."""
    first, second = running("j1", 41), queued("j2", 40)
    assert decided(gpu("gpu0", 39), first, second, pool_gib=80, now=10_000.0) == ()
    (action,) = decided(gpu("gpu0", 39), replace(first, pool_bytes=40 * GIB), second, pool_gib=80, now=10_000.0)
    assert action.subject == "j1"


def test_a_job_that_waits_for_leased_memory_is_shown_the_lease() -> None:
    """The explanation named only the free memory, so that its figures did not add up to the GPU's memory."""
    (waiting,) = explain(node(gpu("gpu0", 70), suspended("j1", 40), held(60, used_gib=10)), NOW)
    assert waiting.waits == "40 GiB on gpu0: 20 GiB is free, 60 GiB is kept for lease l1"


def test_a_waiting_job_shows_who_has_the_gpu_and_how_it_gets_it() -> None:
    """On a node with Slurm the job saw a lease without its Slurm job, and none of the jobs that have the memory."""
    lease = held(30)._replace(ends_with="Slurm job 42")
    important, small = running("j2", 15, priority=90), running("j3", 5, priority=20)
    (waiting,) = explain(node(gpu("gpu0", 50), queued("j1", 70), lease, important, small), NOW)
    assert waiting.waits == (
        "70 GiB on gpu0: 20 GiB is free, 30 GiB is kept for lease l1 of Slurm job 42, j2 with 15 GiB has priority 90, "
        "other programs use 10 GiB"
    )
    assert waiting.next == "it starts on gpu0"
    (waiting,) = explain(node(gpu("gpu0", 50), queued("j1", 45), lease, important), NOW)
    assert waiting.next == "it starts on gpu0 once Slurm job 42 ends; sooner: hegmctl release l1"
    (waiting,) = explain(node(gpu("gpu0", 40), queued("j1", 45), running("j4", 40, priority=90)), NOW)
    assert waiting.next == "it starts on gpu0 once j4 ends"
    (waiting,) = explain(node(gpu("gpu0", 20), suspended("j1", 45), running("j4", 28, priority=90)), NOW)
    assert waiting.next == "it resumes on gpu0 once they end: hegmctl ps --gpu gpu0 lists them"
    first, waiting = explain(node(gpu("gpu0"), pending(60), queued("j1", 45)), NOW)
    assert first.subject == "l1"
    assert waiting.waits == "45 GiB on gpu0: 20 GiB is free, lease l1 gets 60 GiB"
    assert waiting.next == "it starts on gpu0 once lease l1 has ended"


def _two_chips(*free_gib: int) -> list[Gpu]:
    """Return four GPUs of one chip, and larger ones of another chip with `free_gib` free."""
    small = [gpu(f"gpu{number}", 24, total_gib=24)._replace(chip="L4") for number in range(4)]
    return [*small, *(gpu(f"gpu{number}", free_gib) for number, free_gib in enumerate(free_gib, 4))]


def test_a_job_starts_on_several_gpus_of_the_chip_that_can_hold_it() -> None:
    """The daemon considered only the most common chip, whatever its memory: the job waited for ever."""
    pair = replace(queued("j1"), needs_bytes=(60 * GIB, 60 * GIB))
    (action,) = decided(*_two_chips(80, 80), pair)
    assert action.gpus == ("gpu4", "gpu5")
    low = [running(f"j{number}", 80, f"gpu{number}", priority=20) for number in (4, 5)]
    assert {action.subject for action in decided(*_two_chips(0, 0), *low, pair)} == {"j4", "j5"}
    (waiting,) = explain(node(*_two_chips(80, 80)[:5], pair), NOW)
    assert waiting.waits == "2 healthy GPUs of type H200: this node has 1"


def test_a_job_starts_on_several_gpus_of_one_chip_only() -> None:
    pair = replace(queued("j1", None), wanted_gpus=2)
    (action,) = decided(*_two_chips(80, 0), pair)
    assert action.gpus == ("gpu0", "gpu1")
    sized = replace(queued("j1"), needs_bytes=(20 * GIB, 20 * GIB))
    assert decided(*_two_chips(80, 0)[3:], sized) == (), "two GPUs of different chips do not match"


def test_a_job_frees_no_memory_that_its_own_lease_keeps_after_it_has_left() -> None:
    """It left for nothing. A small lease still shields no large job, nor any number of jobs."""
    free, lease, request = gpu("gpu0", 20), held(30, used_gib=30), pending(40, lease_id="l2")
    first, second = (replace(running(f"j{number}", 30, priority=20), within=("l1",)) for number in (1, 2))
    assert kinds(decided(free, first, lease, request)) == []
    assert kinds(decided(free, first, second, lease, request)) == [("suspend", "j2", ("gpu0",))]
    large = replace(running("j1", 50, priority=20), within=("l1",))
    assert kinds(decided(free, large, held(10, used_gib=10), request)) == [("suspend", "j1", ("gpu0",))]


def test_a_job_within_a_lease_may_use_the_leases_memory() -> None:
    """It waited for its own lease to end."""
    waiting = replace(queued("j1", 60), within=("l1",))
    assert kinds(decided(gpu("gpu0", 80), waiting, held(70))) == [("start", "j1", ("gpu0",))]
    assert kinds(decided(gpu("gpu0", 80), queued("j2", 60), held(70))) == []
    both = decided(gpu("gpu0", 80), waiting, queued("j2", 20, since_s=600.0), held(70))
    assert kinds(both) == [("start", "j1", ("gpu0",))], "10 GiB are left beside the lease"


def test_a_lease_waits_while_hegmd_itself_copies_on_the_gpu() -> None:
    """The daemon refused make-room if it looked before the GPU helper's context was gone, which no job had left."""
    lease, copying = pending(79), gpu("gpu0", 78)._replace(copying_bytes=2 * GIB)
    for parts, is_expected in (((copying, lease), True), ((copying._replace(copying_bytes=0), lease), False)):
        snapshot = node(*parts)
        assert is_moving(View(NOW, snapshot), decide(snapshot, NOW), lease.id) is is_expected
    assert explain(node(copying, lease), NOW)[0].waits.endswith(": hegmd uses 2.0 GiB until its copies end")
