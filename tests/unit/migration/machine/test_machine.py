"""The machine, event by event: the stages, the rollback from each, and what is refused or ignored."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.errors import Refused
from hegmd.migration.machine import events
from hegmd.migration.machine.machine import TERMINAL, handle
from hegmd.migration.machine.operation import SUSPEND
from tests.cells import in_one_test
from tests.unit.migration.operations import DrivenOperation, ending, operation, tags, worker

FORWARD = "reserving quiescing measuring offloading checkpointing restoring reloading releasing verifying tidying done"
TURNING = FORWARD.split()[:5]
PAST_RETURN = FORWARD.split()[5:-1]


def _suspending() -> DrivenOperation:
    return DrivenOperation(operation(worker(to=None), kind=SUSPEND))


def test_a_migration_passes_its_stages_in_order() -> None:
    drive = DrivenOperation(operation()).until("done")
    assert drive.phases == FORWARD.split()
    moved = drive.op.workers[0]
    assert (moved.gpu, moved.reservations, moved.pool_bytes, moved.verified) == ("gpu1", {"gpu1": 10}, 0, True)
    assert not drive.op.pending
    assert drive.op.deadline is None


def test_no_worker_gets_an_order_before_gpu_memory_and_pool_are_reserved() -> None:
    drive = DrivenOperation(operation())
    assert tags(drive.feed(events.Begin())) == ["reserve", "reserve-pool"]
    assert drive.end() == ()
    assert tags(drive.end()) == ["park"]


def test_pool_memory_is_freed_only_after_the_next_boundary() -> None:
    drive = DrivenOperation(operation()).until("verifying")
    assert tags(drive.wanted) == ["verify"]
    assert tags(drive.end()) == ["release-reservation", "release-pool"]


def test_memory_for_growth_is_taken_before_the_offload() -> None:
    drive = DrivenOperation(operation()).until("measuring")
    wanted: Any = drive.end(size_bytes=25)
    assert [(effect.tag, effect.size_bytes) for effect in wanted] == [("reserve", 25), ("reserve-pool", 25)]
    assert drive.op.phase == "reserving"


def test_a_job_that_outgrew_its_reservation_continues_unharmed() -> None:
    drive = DrivenOperation(operation()).until("measuring")
    drive.end(size_bytes=25)
    drive.fail("refused")
    assert drive.until("rolled-back").op.workers[0].was_offloaded is False
    assert drive.op.failure is not None
    assert drive.op.failure.message == "reserve failed"


def test_a_process_that_exists_already_only_waits() -> None:
    drive = DrivenOperation(operation(worker("a"), worker("b", to="gpu0")))
    drive.until("done")
    done_to = {(effect.worker, effect.tag) for _, _, _, wanted in drive.taken for effect in wanted}
    assert {tag for name, tag in done_to if name == "b"} == {"park", "release"}


def test_a_suspension_ends_without_reservations_and_with_all_bytes() -> None:
    drive = _suspending().until("suspended")
    held = drive.op.workers[0]
    assert (held.gpu, held.offloaded, held.is_parked, held.reservations, held.pool_bytes) == (None, True, True, {}, 10)
    assert drive.op.deadline is None


def test_a_resume_reserves_memory_first_and_succeeds() -> None:
    drive = _suspending().until("suspended")
    assert tags(drive.feed(events.ResumeRequested(to={"a": "gpu1"}))) == ["reserve"]
    assert drive.until("done").op.workers[0].gpu == "gpu1"
    assert drive.op.kind == "resume"


def test_a_resume_without_memory_suspends_the_job_again_and_reports_the_reason() -> None:
    drive = _suspending().until("suspended")
    drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    drive.fail("refused")
    assert drive.op.phase == "suspended"
    assert drive.op.failure is not None
    drive.feed(events.ResumeRequested(to={"a": "gpu0"}))
    assert drive.until("done").op.failure is None


def test_a_resume_names_a_gpu_for_every_process() -> None:
    drive = DrivenOperation(operation(worker("a", to=None), worker("b", to=None), kind=SUSPEND)).until("suspended")
    with pytest.raises(Refused, match="no target GPU is given for b"):
        handle(drive.op, events.ResumeRequested(to={"a": "gpu1"}), 0.0)


@in_one_test("phase", TURNING)
def test_cancelling_before_the_job_has_left_rolls_back(phase: str) -> None:
    drive = DrivenOperation(operation()).until(phase)
    drive.feed(events.CancelRequested(by="ada"))
    drive.on(lambda: drive.op.phase in TERMINAL)
    back = drive.op.workers[0]
    assert drive.op.phase == "rolled-back"
    assert (back.gpu, back.is_parked, back.offloaded, back.reservations, back.pool_bytes) == (
        "gpu0",
        False,
        False,
        {"gpu0": 10},
        0,
    )
    assert drive.op.failure is not None
    assert drive.op.failure.code == "cancelled"
    assert back.verified == back.was_offloaded


@in_one_test("phase", PAST_RETURN)
def test_cancelling_after_the_job_has_left_its_gpu_is_refused_and_the_move_continues(phase: str) -> None:
    drive = DrivenOperation(operation()).until(phase)
    with pytest.raises(Refused) as refused:
        drive.feed(events.CancelRequested(by="ada"))
    assert refused.value.hint
    assert drive.until("done").op.failure is None


@in_one_test("phase", FORWARD.split()[:7])
def test_a_failure_before_the_restore_rolls_back(phase: str) -> None:
    drive = DrivenOperation(operation()).until(phase)
    failed = drive.wanted[0]
    drive.fail()
    at = "gpu0" if phase != "reloading" else "gpu1"
    out = 10 if phase in {"checkpointing", "reloading"} else 0
    while drive.op.phase not in TERMINAL:
        effect = drive.wanted[0]
        if effect.tag == "inspect":
            drive.end(out_bytes=out, gpu=None if phase == "restoring" else at, parked=True)
        else:
            drive.end()
    assert drive.op.phase == "rolled-back"
    assert drive.op.workers[0].gpu == "gpu0"
    assert drive.op.failure is not None
    assert drive.op.failure.message == f"{failed.tag} failed"


def test_a_failed_rollback_holds_the_job_until_it_is_resumed() -> None:
    drive = DrivenOperation(operation()).until("checkpointing")
    drive.feed(events.CancelRequested())
    drive.until("reloading")
    drive.fail()
    drive.end(out_bytes=10, reservations={"gpu0": 10, "gpu1": 10}, pool_bytes=10)
    drive.until("suspended")
    held = drive.op.workers[0]
    assert drive.op.direction == "hold"
    assert (held.is_parked, held.offloaded, held.pool_bytes, dict(held.reservations)) == (True, True, 10, {"gpu0": 10})
    drive.feed(events.ResumeRequested(to={"a": "gpu0"}))
    assert drive.until("done").op.workers[0].offloaded is False


def test_no_boundary_within_the_limit_withdraws_without_a_trace() -> None:
    drive = DrivenOperation(operation()).until("quiescing")
    drive.now = 20.0
    assert tags(drive.feed(events.DeadlinePassed())) == ["withdraw"]
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "park"]
    assert drive.until("rolled-back").op.failure is not None
    assert drive.op.failure is not None
    assert drive.op.failure.code == "timeout"
    assert drive.op.failure.message == "no batch boundary within 20 s", "in other words than the agent's"
    assert not drive.op.workers[0].was_offloaded


def test_the_hint_of_a_refusal_is_a_valid_command() -> None:
    """`hegmctl cancel` of a suspended job hinted at «hegmctl resume», a second resume at «hegmctl op», of nothing."""
    drive = _suspending().until("offloading")
    with pytest.raises(Refused) as busy:
        handle(drive.op, events.ResumeRequested(to={"a": "gpu0"}), 0.0)
    assert busy.value.hint == f"watch it with: hegmctl op {drive.op.id}"
    drive.until("suspended")
    with pytest.raises(Refused) as resting:
        handle(drive.op, events.CancelRequested(by="ada"), 0.0)
    assert resting.value.hint == f"resume it with: hegmctl resume {drive.op.workers[0].pid}"


def test_an_early_alarm_changes_nothing() -> None:
    drive = DrivenOperation(operation()).until("quiescing")
    assert drive.op.deadline == 20.0
    assert handle(drive.op, events.DeadlinePassed(), 19.9)[0] is drive.op


def test_the_operation_waits_for_a_late_boundary_after_the_move() -> None:
    drive = DrivenOperation(operation()).until("verifying")
    drive.wanted.clear()
    drive.now = 40.0
    assert tags(drive.feed(events.DeadlinePassed())) == ["inspect"]
    drive.end(parked=False, gpu="gpu1", boundary=5)
    assert drive.op.phase == "verifying"
    assert tags(drive.wanted) == ["verify"]
    assert drive.op.workers[0].pool_bytes == 10


def test_ranks_stop_one_past_the_highest_count() -> None:
    drive = DrivenOperation(operation(worker("a"), worker("b"), is_distributed=True)).until("counting")
    drive.end(boundary=7)
    parks: Any = drive.end(boundary=9)
    assert [(effect.tag, effect.at) for effect in parks] == [("park", 10), ("park", 10)]


def test_a_rank_that_has_passed_the_boundary_moves_it_for_all() -> None:
    drive = DrivenOperation(operation(worker("a"), worker("b"), is_distributed=True)).until("counting")
    drive.end(boundary=7)
    drive.end(boundary=7)
    assert drive.end(boundary=8) == ()
    overrun = drive.wanted.pop(0)
    again: Any = drive.feed(events.PassedBoundary(effect=overrun.number, worker="b", boundary=9))
    assert [(effect.worker, effect.at) for effect in again] == [("a", 10), ("b", 10)]
    drive.end(boundary=10)
    assert drive.op.phase == "quiescing"
    drive.end(boundary=10)
    assert drive.op.phase == "measuring"


def test_ranks_that_never_meet_are_released() -> None:
    drive = DrivenOperation(operation(worker("a"), worker("b"), is_distributed=True)).until("quiescing")
    for _ in range(20):
        if drive.op.direction == "forward":
            drive.end(boundary=2)
    assert drive.op.direction == "back"
    assert "did not park at one boundary" in str(drive.op.failure)


def test_no_rank_continues_before_all_have_their_bytes() -> None:
    drive = DrivenOperation(operation(worker("a"), worker("b"), is_distributed=True)).until("reloading")
    assert drive.end() == ()
    assert tags(drive.end()) == ["release", "release"]


@in_one_test("phase", FORWARD.split()[:-1])
def test_a_worker_that_ends_takes_nothing_with_it(phase: str) -> None:
    drive = DrivenOperation(operation()).until(phase)
    drive.feed(events.WorkerExited(worker="a", why="killed by signal 9"))
    drive.wanted = [effect for effect in drive.wanted if drive.op.pending_numbered(effect.number)]
    drive.on(lambda: drive.op.phase in TERMINAL)
    gone = drive.op.workers[0]
    assert (dict(gone.reservations), gone.pool_bytes) == ({}, 0)
    its_state_was_out = phase in {"offloading", "checkpointing", "restoring", "reloading", "releasing"}
    assert drive.op.phase == ("lost" if its_state_was_out else "rolled-back" if phase != "tidying" else drive.op.phase)
    assert drive.op.failure is not None
    assert "killed by signal 9" in drive.op.failure.message
    assert drive.op.failure.code == "not-found", "issue 14, row 11: it ended; refused means that nothing changed"


def test_the_other_processes_of_a_job_are_rolled_back_when_one_exits() -> None:
    drive = DrivenOperation(operation(worker("a"), worker("b"))).until("offloading")
    drive.feed(events.WorkerExited(worker="b"))
    drive.wanted = [effect for effect in drive.wanted if effect.worker == "a"]
    drive.on(lambda: drive.op.phase in TERMINAL)
    assert drive.op.workers[0].gpu == "gpu0"
    assert drive.op.workers[0].verified


def test_another_agent_under_the_same_pid_is_another_program() -> None:
    drive = DrivenOperation(operation()).until("quiescing")
    drive.feed(events.AgentBack(worker="a", token="another"))
    assert drive.op.workers[0].has_exited


@in_one_test("phase", FORWARD.split()[:-1])
def test_a_restarted_daemon_inspects_and_continues(phase: str) -> None:
    drive = DrivenOperation(operation()).until(phase)
    drive.wanted.clear()
    was = drive.op.workers[0]
    assert tags(drive.feed(events.Recovered())) == ["inspect"]
    drive.end(
        parked=was.is_parked,
        out_bytes=10 if was.offloaded else 0,
        gpu=was.gpu,
        reservations=was.reservations,
        pool_bytes=was.pool_bytes,
        boundary=was.boundary or 4,
    )
    assert drive.until("done").op.failure is None


def test_an_agent_that_continued_without_a_daemon_does_not_get_old_bytes() -> None:
    drive = DrivenOperation(operation()).until("checkpointing")
    drive.wanted.clear()
    drive.feed(events.Recovered())
    drive.end(parked=False, out_bytes=0, gpu="gpu0", reservations={"gpu0": 10}, pool_bytes=10, boundary=9)
    drive.on(lambda: drive.op.phase in TERMINAL)
    done = [effect.tag for _, _, _, wanted in drive.taken[-4:] for effect in wanted]
    assert drive.op.phase == "rolled-back"
    assert "reload" not in done


def test_a_rank_with_offloaded_bytes_gets_no_order_for_another_boundary() -> None:
    """One rank resumed automatically while the job was suspended; resuming the second rank stops no process."""
    drive = DrivenOperation(
        operation(worker("a", to=None), worker("b", to=None), kind=SUSPEND, is_distributed=True)
    ).until("suspended")
    alone = drive.op.workers[1].replace(
        is_parked=False, park_requested=False, offloaded=False, gpu="gpu0", target_gpu="gpu0", reservations={"gpu0": 10}
    )
    drive.op = drive.op.with_worker(alone)
    drive.feed(events.ResumeRequested(to={"a": "gpu0", "b": "gpu1"}))
    assert drive.until("done").op.workers[1].gpu == "gpu0", "it could not be stopped to be moved"
    resumed = [effect for _, _, _, wanted in drive.taken[-9:] for effect in wanted]
    assert "park" not in tags(resumed)


def test_a_process_that_continued_without_a_gpu_gets_a_reservation_before_the_gpu() -> None:
    """On a GPU that is only simulated, an agent can bring its bytes back though all room was given away."""
    drive = _suspending().until("suspended")
    drive.feed(events.AgentBack(worker="a", token="token-a"))
    drive.end(parked=False, out_bytes=0, gpu=None, reservations={}, pool_bytes=10, boundary=9)
    assert [(effect.tag, getattr(effect, "gpu", None)) for effect in drive.wanted] == [("reserve", "gpu0")]
    assert drive.until("rolled-back").op.workers[0].gpu == "gpu0"


def test_a_rank_that_waits_for_a_suspended_one_does_not_keep_the_operation_from_being_resumed() -> None:
    """The rank reaches no boundary, so the wait for one never ended."""
    drive = DrivenOperation(
        operation(worker("a", to=None), worker("b", to=None), kind=SUSPEND, is_distributed=True)
    ).until("suspended")
    alone = drive.op.workers[1].replace(
        is_parked=False, park_requested=False, offloaded=False, gpu="gpu0", target_gpu="gpu0", reservations={"gpu0": 10}
    )
    drive.op = drive.op.with_worker(alone)
    drive.feed(events.ResumeRequested(to={"a": "gpu0", "b": "gpu0"}))
    drive.fail("refused")
    assert drive.op.phase == "suspended"


def test_a_reservation_whose_release_was_not_reported_is_taken_again_before_use() -> None:
    """An ending that got lost left room for held that had been given away."""
    drive = _suspending().until("leaving")
    drive.wanted.clear()
    drive.now = 1000.0
    drive.feed(events.DeadlinePassed())
    assert drive.op.workers[0].reservations == {"gpu0": 0}
    drive.until("suspended")
    assert drive.op.workers[0].reservations == {}


def test_a_running_process_is_not_stopped_for_a_rollback() -> None:
    """A failed resume offloaded a process that had resumed automatically."""
    drive = _suspending().until("suspended")
    drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    drive.end()
    drive.fail()
    drive.end(parked=False, out_bytes=0, gpu="gpu1", reservations={"gpu1": 10}, pool_bytes=10, boundary=9)
    drive.on(lambda: drive.op.phase in TERMINAL)
    assert (drive.op.workers[0].gpu, drive.op.workers[0].was_offloaded) == ("gpu1", True)


def test_memory_given_to_a_worker_that_ends_meanwhile_is_released() -> None:
    """A retry waited for ever for the dead worker."""
    drive = DrivenOperation(operation()).until("quiescing")
    drive.feed(events.WorkerExited(worker="a"))
    drive.wanted = [effect for effect in drive.wanted if effect.tag.startswith("release-")]
    drive.fail()
    drive.now = 100.0
    drive.wanted.clear()
    assert set(tags(drive.feed(events.DeadlinePassed()))) == {"release-reservation", "release-pool"}
    assert drive.until("rolled-back").op.workers[0].reservations == {}


def test_the_reservation_of_a_late_process_is_kept() -> None:
    """A restore that ended after its rollback had become impossible left the process without its reservation."""
    drive = DrivenOperation(operation(worker("a"), worker("b"))).until("restoring")
    drive.feed(events.WorkerExited(worker="b"))
    restore = drive.wanted[0]
    held = drive.op.replace(direction="hold")
    drive.op = held.with_worker(held.workers[0].replace(target_gpu=None, kept_gpu="gpu0"))
    drive.feed(ending(restore))
    given = [(effect.worker, getattr(effect, "gpu", None)) for effect in drive.taken[-1][3]]
    assert ("a", "gpu1") not in given


def test_a_repeated_result_event_is_ignored() -> None:
    drive = DrivenOperation(operation())
    drive.feed(events.Begin())
    taken = ending(drive.wanted[0])
    drive.feed(taken)
    assert handle(drive.op, taken, 0.0) == (drive.op, ())


def test_an_ending_for_another_worker_or_effect_means_nothing() -> None:
    drive = DrivenOperation(operation())
    drive.feed(events.Begin())
    number = drive.wanted[0].number
    for event in (
        events.Reserved(effect=number, worker="b"),
        events.Offloaded(effect=number, worker="a", size_bytes=1),
    ):
        assert handle(drive.op, event, 0.0)[0] is drive.op
