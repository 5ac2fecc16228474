"""The machine after a restart, after a failed restore, and when some ranks cannot roll back."""

from __future__ import annotations

from hegmd.agent.channel import MAX_PAUSE_S
from hegmd.migration.machine import events
from hegmd.migration.machine.operation import BACK, FORWARD, SUSPEND
from tests.unit.migration.operations import DrivenOperation, operation, tags, worker


def test_an_operation_that_had_not_begun_does_not_begin_with_the_next_daemon() -> None:
    """Issue 4: what was refused, since its record could not be synced, was carried out by the next daemon."""
    drive = DrivenOperation(operation())
    assert drive.feed(events.Recovered()) == ()
    assert drive.op.phase == "rolled-back"
    assert drive.op.failure is not None
    assert "began" in drive.op.failure.message
    assert drive.op.workers[0].was_offloaded is False


def test_after_a_reboot_the_deadline_is_one_of_the_new_clock() -> None:
    """Issue 4: the clock starts over, and a deadline of the old one was days away."""
    drive = DrivenOperation(operation(), now=1e6).until("offloading")
    drive.feed(events.AgentLost(worker="a"))
    assert drive.op.phase == "settling"
    drive.now = 3.0
    drive.feed(events.Recovered())
    assert drive.op.phase == "settling"
    assert drive.op.deadline == 3.0 + drive.op.limits.settle_s


def test_a_job_whose_agents_paused_for_as_long_as_they_may_was_rolled_back() -> None:
    """An agent that finds no daemon tries again after 5 s, and the next daemon waited for 5 s."""
    drive = DrivenOperation(operation()).until("quiescing")
    drive.feed(events.Recovered())
    drive.feed(events.AgentLost(worker="a"))
    drive.now += 2 * MAX_PAUSE_S
    drive.feed(events.DeadlinePassed())
    assert (drive.op.phase, drive.op.direction) == ("settling", FORWARD)
    drive.now += 2 * MAX_PAUSE_S
    drive.feed(events.DeadlinePassed())
    assert drive.op.direction == BACK, "the wait has an end"


def test_the_free_memory_is_counted_again_when_a_restore_has_failed() -> None:
    """Issue 4: the daemon counted memory as reserved that another process had taken, and the first resume failed."""
    drive = DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended")
    drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    drive.on(lambda: drive.op.phase == "restoring")
    drive.fail()
    drive.on(lambda: tags(drive.wanted) == ["inspect"])
    drive.end(gpu=None, out_bytes=10, reservations={}, pool_bytes=10)
    assert drive.until("suspended").op.workers[0].reservations == {}
    wanted = drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    assert tags(wanted) == ["reserve"]


def test_a_reloaded_rank_stays_parked_while_another_rank_is_suspended() -> None:
    """Issue 4: a resume without room for all let the one rank go that had been brought back before."""
    home = worker(origin_gpu="gpu0", target_gpu="gpu0", is_parked=True, park_requested=True, was_offloaded=True)
    away = worker(
        "b",
        None,
        origin_gpu=None,
        gpu=None,
        offloaded=True,
        is_parked=True,
        park_requested=True,
        was_offloaded=True,
        reservations={},
    )
    held = operation(home, away, kind=SUSPEND, is_distributed=True, phase="suspended", direction="hold")
    drive = DrivenOperation(held)
    drive.feed(events.ResumeRequested(to={"a": "gpu0", "b": "gpu1"}))
    assert tags(drive.wanted) == ["reserve"]
    drive.fail("refused")
    assert drive.op.phase == "suspended"
    assert drive.wanted == []
    assert drive.op.workers[0].is_parked


def test_a_worker_that_was_parked_again_after_the_move_is_at_its_new_boundary() -> None:
    drive = DrivenOperation(operation()).until("verifying")
    drive.wanted.clear()
    drive.now = 40.0
    drive.feed(events.DeadlinePassed())
    drive.end(parked=True, gpu="gpu1", boundary=9)
    assert drive.op.workers[0].boundary == 9
