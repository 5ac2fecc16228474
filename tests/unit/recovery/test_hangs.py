"""When a training that makes no step counts as hung, when its end is no failure, and what cannot be protected."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from hegmd.recovery.policy import LEARNED_TIMES, LEAST_HANG_S, LEAST_START_S, HangWatch, RestartWatch, start_limit_s
from hegmd.recovery.protection import Protection
from hegmd.recovery.snapshots import Unprotected
from hegmd.recovery.starts import Starts
from tests.cells import in_one_test
from tests.patience import HANG_S
from tests.unit.recovery.test_protection import AnsweringRank, Rig, restarted_ranks, worker

__all__ = ["restarted_ranks"]  # a fixture


def test_the_limit_is_learned_from_the_longest_time_between_two_boundaries() -> None:
    watch = HangWatch(None)
    assert watch.see(1, 0.0) is None
    assert watch.limit_s == LEAST_HANG_S
    assert watch.see(2, 30.0) is None
    assert watch.limit_s == 150.0
    assert watch.see(2, 170.0) is None
    assert watch.see(2, 181.0) == 151.0


def test_a_false_hang_doubles_the_limit_of_the_next_attempt() -> None:
    """The daemon killed an evaluation three times and then gave the job up."""
    watch = HangWatch(None)
    watch.see(9, 0.0)
    assert watch.see(9, LEAST_HANG_S + 1.0) == LEAST_HANG_S + 1.0
    watch.forget()
    watch.see(9, 100.0)
    assert watch.see(9, 170.0) is None
    assert watch.see(9, 101.0 + 2 * LEAST_HANG_S) == 1.0 + 2 * LEAST_HANG_S


def test_a_process_before_its_first_batch_does_not_count_as_hung() -> None:
    watch = HangWatch(5.0)
    assert watch.see(0, 0.0) is None
    assert watch.see(0, 100.0) is None  # it has not reached its first batch
    assert watch.see(3, 101.0) is None
    watch.forget()
    assert watch.see(3, 200.0) is None
    assert watch.see(3, 206.0) == 6.0


def test_a_hang_is_detected_although_images_are_retried() -> None:
    """Each attempt waited a minute for the next step and then restarted the limit: the hang was never detected."""
    watch = HangWatch(100.0)
    watch.see(3, 0.0)
    hang_times_s: list[float] = []
    now = 0.0
    while not hang_times_s and now < 1000.0:
        now += 1.0
        if now % 90.0 < 60.0:
            watch.hold(now)
        else:
            hang_times_s = [hung_s for hung_s in [watch.see(3, now)] if hung_s is not None]
    assert hang_times_s == [101.0]
    assert now == 340.0


def test_the_time_of_an_operation_does_not_raise_the_limit() -> None:
    watch = HangWatch(None)
    watch.see(3, 0.0)
    watch.hold(1.0)
    watch.hold(500.0)
    watch.see(4, 501.0)
    assert watch.limit_s == LEAST_HANG_S


def test_a_process_stopped_during_its_snapshot_counts_as_hung() -> None:
    """The process stayed parked for ever, and the daemon detected no hang."""
    watch = HangWatch(5.0)
    watch.see(3, 0.0)
    assert watch.see(3, 6.0, is_parked=True) is None
    assert watch.see(3, 5.0 + LEAST_HANG_S + 1.0, is_parked=True) == 6.0 + LEAST_HANG_S


def test_a_limit_of_zero_disables_detection() -> None:
    watch = HangWatch(0.0)
    watch.see(1, 0.0)
    assert watch.see(1, 1e6) is None


@in_one_test(
    ("wished_s", "longest_s", "hung", "expected_s"),
    [
        (None, 3.0, 0, LEAST_START_S),
        (None, 1000.0, 0, LEARNED_TIMES * 1000.0),
        (6.0, 3.0, 0, LEAST_START_S),  # a limit for steps is not one for imports
        (7200.0, 3.0, 0, 7200.0),
        (None, 3.0, 2, 4 * LEAST_START_S),
        (0.0, 3.0, 0, None),
    ],
)
def test_a_start_has_its_own_limit(
    wished_s: float | None, longest_s: float, hung: int, expected_s: float | None
) -> None:
    assert start_limit_s(wished_s, longest_s, hung) == expected_s


def test_each_restart_by_torchrun_has_its_own_time() -> None:
    watch = RestartWatch()
    assert not watch.see(0, 0.0, 5.0)
    assert not watch.see(1, 100.0, 5.0)
    assert not watch.see(1, 105.0, 5.0)
    assert not watch.see(2, 106.0, 5.0)
    assert not watch.see(2, 1e6, None)
    assert watch.see(2, 112.0, 5.0)
    assert not watch.see(0, 113.0, 5.0)
    assert not watch.see(2, 114.0, 5.0)


@pytest.mark.parametrize("is_taken", [False, True])
async def test_ranks_before_their_first_batch_were_killed_though_an_operation_took_them(
    restarted_ranks: subprocess.Popen[bytes], *, is_taken: bool
) -> None:
    """An operation can begin while their stacks are read."""
    rank = AnsweringRank(restarted_ranks.pid, 1)
    AnsweringRank.all_asked, AnsweringRank.asked_ranks, rank.boundary = anyio.Event(), 0, 0
    rig = Rig(rank)
    rig.job.newest = cast("Any", SimpleNamespace(step=3))
    rig.job.record = rig.job.record.replace(launched=True)
    rig.supervisor.pid = restarted_ranks.pid
    rig.supervisor.offer = rig.supervisor.offer.replace(pid=restarted_ranks.pid)
    rig.node.is_kept_from_training = lambda _pid: is_taken and AnsweringRank.asked_ranks == 1
    starts = Starts(rig.job, least_start_s=0.0)
    with anyio.fail_after(HANG_S):
        while not AnsweringRank.asked_ranks:  # the first look begins its time
            await starts.check_restart_by_torchrun(is_possible=True)
    assert bool(rig.job.killed_for) == (not is_taken)


async def test_a_rank_that_never_came_to_a_batch_was_left_out_when_the_others_were_killed_for_waiting(
    process: subprocess.Popen[bytes], second_process: subprocess.Popen[bytes]
) -> None:
    """torchrun had started both again by itself. The one that hung was not even asked for its stacks."""
    waits, hangs = (AnsweringRank(one.pid, 2) for one in (process, second_process))
    AnsweringRank.all_asked, AnsweringRank.asked_ranks = anyio.Event(), 0
    hangs.boundary = 0
    rig = Rig(waits, hangs)
    rig.job.newest, rig.job.boundary = cast("Any", SimpleNamespace(step=3)), waits.boundary
    with anyio.fail_after(HANG_S):
        await Protection(rig.job)._end_hung([cast("Any", waits)], 61.0)
    assert rig.job.killed_pids == [process.pid, second_process.pid]


async def test_a_job_that_hangs_before_its_first_snapshot_is_not_killed_but_reported_once() -> None:
    """The daemon killed the job although it could not recover it."""
    rig = Rig(own_worker := worker("now"))
    messages: list[str] = []

    async def notify(_do: str, _operation: str, *, message: str, hint: str) -> None:
        messages.append(message)

    rig.supervisor.tell = notify
    protection = Protection(rig.job)
    rig.job.boundary = 5
    for _ in range(2):
        await protection._end_hung([own_worker], 61.0)
    assert rig.job.killed_for == ""
    assert messages == ["job j1 (train) has completed no step for 61 s, and has no snapshot: it is not changed"]
    assert rig.events == ["job.hung"]


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
async def test_a_clock_that_was_set_during_a_start_let_later_starts_hang_for_hours(set_by_s: float) -> None:
    """A start limit is learned from the longest start, which had taken an hour by the wall clock."""
    rig, utc = Rig(), {"now": 1e9}

    async def tell(_do: str, *_job: str, **_text: str) -> None: ...

    rig.supervisor.tell, rig.node.utc = tell, lambda: utc["now"]
    rig.supervisor.offer = rig.supervisor.offer.replace(pid=None, fell=-9)
    starts = Starts(rig.job)
    attempt = starts._begun_attempt()
    utc["now"] += set_by_s
    back = worker("now")
    back.about.boundary = 0
    await starts._note_recovered(attempt, [back])
    assert 0.0 <= (rig.job.record.attempts[-1].trained_s or 0.0) < HANG_S
    assert 0.0 <= rig.job.record.longest_start_s < HANG_S


async def test_a_job_that_was_written_into_an_image_was_started_again_beside_it() -> None:
    """Its GPU was not free, and the image could not be restored: the second one wrote to the same files."""
    rig, written, told = Rig(), iter((True, False)), list[tuple[str, str, str]]()

    async def tell(do: str, _job: str, *, message: str, hint: str) -> None:
        told.append((do, message, hint))

    async def order(*_words: object, **_values: object) -> None:
        raise AssertionError("it is started again")

    rig.supervisor.tell, rig.supervisor.order = tell, order
    rig.node.is_being_written = lambda _job: next(written)
    rig.node.end_of = lambda _job, _since_ticks: "written into the image /images/one by operation 7"
    rig.job.snapshots = [SimpleNamespace(generation=1, step=5)]
    rig.supervisor.offer = rig.supervisor.offer.replace(pid=None, fell=-9)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Starts(rig.job).recover)
        await anyio.wait_all_tasks_blocked()
        assert not told, "its operation may yet be rolled back"
        rig.node.changed.notify_all()
    ((do, message, hint),) = told
    assert (do, hint) == ("give-up", "run: hegmctl restore, with that image")
    assert "it was written into the image /images/one by operation 7" in message


async def test_the_ranks_of_a_script_that_spawns_them_were_told_to_be_jobs_of_their_own() -> None:
    async def counted(_do: str, **_values: object) -> None: ...

    rig = Rig(worker("now", pid=8), worker("now", pid=9))
    for one in rig.node.workers:
        one.connected, one.order = True, counted
    with pytest.raises(Unprotected) as refused:
        await Protection(rig.job)._processes()
    assert "torch.multiprocessing.spawn does not" in refused.value.hint
