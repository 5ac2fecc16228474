"""Ranks with communicators in the machine: the order of their steps, and what follows where one of them fails."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.errors import Refused
from hegmd.migration.machine import events
from hegmd.migration.machine.communicators import cannot_meet
from hegmd.migration.machine.effects import Effect, Release
from hegmd.migration.machine.operation import FORWARD, HOLD, SUSPEND, ImageRequest, Operation
from tests.unit.migration.operations import DrivenOperation, ending, operation, tags, worker


def ranks(to: tuple[str | None, str | None] = ("gpu1", "gpu0"), **values: Any) -> Operation:
    """Two, of which a is on gpu0 and b on gpu1."""
    plain = {"communicators": "suspend"}
    second = {"gpu": "gpu1", "origin_gpu": "gpu1", "first_gpu": "gpu1", "reservations": {"gpu1": 10}}
    workers = worker("a", to[0], rank=0, **plain), worker("b", to[1], rank=1, **plain, **second)
    return operation(*workers, is_distributed=True, created_utc=1.0, **values)


def _of(drive: DrivenOperation, tag: str) -> list[Effect]:
    return [effect for effect in drive.wanted if effect.tag == tag]


def test_all_ranks_disconnect_and_are_locked_before_the_first_is_checkpointed_and_reconnect_before_any_runs() -> None:
    """Bytes leave while the ranks disconnect, and return while they reconnect."""
    drive = DrivenOperation(ranks()).until("done")
    effect_groups = [[effect.tag for effect in wanted] for _, _, _, wanted in drive.taken if len(wanted) > 1]
    assert effect_groups == [
        ["reserve", "reserve-pool"] * 2,
        ["survey"] * 2,
        ["park"] * 2,
        ["survey"] * 2,
        ["disconnect", "offload"] * 2,
        ["lock"] * 2,
        ["checkpoint"] * 2,
        ["restore"] * 2,
        ["reconnect", "reload"] * 2,
        ["release"] * 2,
        ["verify"] * 2,
        ["release-reservation", "release-pool"] * 2,
    ]
    assert [rank.gpu for rank in drive.op.workers] == ["gpu1", "gpu0"]


def test_a_rank_that_cannot_disconnect_is_inspected_when_its_bytes_have_left() -> None:
    drive = DrivenOperation(ranks()).until("disconnecting")
    drive.fail()  # the disconnect of rank a
    assert drive.op.phase == "settling"
    assert not _of(drive, "inspect")
    drive.end()  # its offload
    assert [effect.worker for effect in _of(drive, "inspect")] == ["a"]


@pytest.mark.parametrize("phase", ["counting", "quiescing"])
def test_a_stopped_rank_was_not_named_when_the_limit_passed(phase: str) -> None:
    """SIGSTOP had stopped one of eight ranks, and the message said only that `counting` did not finish."""
    drive = DrivenOperation(ranks()).until(phase)
    drive.end()  # rank a answers
    drive.now = drive.op.deadline or 0.0
    drive.feed(events.DeadlinePassed())
    assert drive.op.failure is not None
    assert drive.op.failure.message.endswith(f": process {drive.op.workers[1].pid} did not answer")
    assert f"hegmctl inspect {drive.op.workers[1].pid}" in drive.op.failure.hint


def test_a_job_without_communicators_has_none_of_these_steps() -> None:
    bare = [one.replace(communicators="") for one in ranks().workers]
    phases = DrivenOperation(operation(*bare, is_distributed=True)).until("done").phases
    assert not {"disconnecting", "locking", "unlocking", "reconnecting"}.intersection(phases)


def test_a_rank_that_stays_is_disconnected_and_locked_too_and_unlocked_where_it_is() -> None:
    drive = DrivenOperation(ranks(("gpu0", "gpu2"))).until("done")
    effects_seen = [(effect.tag, effect.worker) for _, _, _, wanted in drive.taken for effect in wanted]
    assert {("disconnect", "a"), ("lock", "a"), ("unlock", "a"), ("reconnect", "a")} <= set(effects_seen)
    assert not {("checkpoint", "a"), ("offload", "a"), ("unlock", "b")}.intersection(effects_seen)


def test_a_helper_lost_in_the_restore_of_all_ranks_does_not_hold_the_job() -> None:
    """The failure of the second rank's restore counted as that of the rollback, which had not begun."""
    drive = DrivenOperation(ranks()).until("restoring")
    drive.fail()
    drive.fail()
    drive.until("rolled-back")
    assert [rank.gpu for rank in drive.op.workers] == ["gpu0", "gpu1"]


def test_a_rollback_whose_restore_fails_is_held() -> None:
    drive = DrivenOperation(ranks()).until("restoring")
    drive.fail()
    drive.until("restoring")
    drive.fail()
    drive.until("suspended")
    assert drive.op.direction == HOLD


def test_a_lock_that_fails_is_undone_on_all_ranks_in_the_reverse_order() -> None:
    drive = DrivenOperation(ranks(kind=SUSPEND, to=(None, None))).until("locking")
    drive.end()
    drive.fail("refused")
    drive.until("rolled-back")
    phases = [phase for phase in drive.phases if phase.startswith(("un", "re"))]
    assert phases[-3:] == ["unlocking", "reloading", "releasing"]
    assert all(rank.is_connected and not rank.is_locked and not rank.is_parked for rank in drive.op.workers)


def test_a_rank_that_has_grown_is_locked_again_before_any_is_checkpointed() -> None:
    drive = DrivenOperation(ranks()).until("locking")
    grown = drive.wanted.pop(0)
    drive.feed(events.GrewBeyondPlan(effect=grown.number, worker=grown.worker, driver_bytes=5))
    assert not drive.op.workers[0].is_locked
    drive.until("checkpointing")
    assert all(rank.is_locked for rank in drive.op.workers)
    assert drive.op.workers[0].driver_bytes == 5


def _failing_to_reconnect(drive: DrivenOperation) -> None:
    """Both ranks fail to reconnect in this round, and are inspected after their bytes have returned."""
    drive.on(lambda: bool(_of(drive, "reconnect")))
    for reconnect in _of(drive, "reconnect"):
        drive.wanted.remove(reconnect)
        ends: dict[str, Any] = {"effect": reconnect.number, "worker": reconnect.worker}
        drive.feed(events.Failed(**ends, fault="broken", message="reconnect failed", hint="wait"))
    while looked := [*_of(drive, "reload"), *_of(drive, "inspect")]:
        effect = looked[0]
        drive.wanted.remove(effect)
        rank = drive.op.worker(effect.worker)
        assert rank is not None
        found = {"gpu": rank.gpu, "pool_bytes": 10} if effect.tag == "inspect" else {}
        drive.feed(ending(effect, **found))


def test_ranks_that_cannot_connect_try_once_more_in_a_new_generation_and_are_then_held_with_their_bytes() -> None:
    drive = DrivenOperation(ranks()).until("reloading")
    first = drive.op.generation
    _failing_to_reconnect(drive)
    assert drive.op.direction == FORWARD
    assert {getattr(effect, "generation", None) for effect in _of(drive, "reconnect")} == {first + 1}
    _failing_to_reconnect(drive)
    assert (drive.op.phase, drive.op.direction) == ("suspended", HOLD)
    assert all(rank.is_parked and rank.pool_bytes for rank in drive.op.workers)
    assert drive.op.failure is not None
    assert "hegmctl resume; if that fails as well, wait; " in drive.op.failure.hint  # as the agent reports
    assert f"hegmctl cancel {drive.op.id} --drop ends them" in drive.op.failure.hint
    assert cannot_meet(drive.op)
    drive.feed(events.ResumeRequested(to={"a": "gpu1", "b": "gpu0"}))
    assert {getattr(effect, "generation", None) for effect in _of(drive, "reconnect")} == {first + 3}
    assert not cannot_meet(drive.op)
    drive.until("done")


def _reconnecting() -> DrivenOperation:
    """Both ranks have their bytes, and neither has connected."""
    drive = DrivenOperation(ranks()).until("reloading")
    for reload in _of(drive, "reload"):
        drive.wanted.remove(reload)
        drive.feed(ending(reload))
    assert drive.op.phase == "reconnecting"
    return drive


def test_an_answer_of_an_earlier_generation_is_ignored() -> None:
    drive = _reconnecting()
    late = drive.wanted.pop(1)
    drive.fail()
    drive.feed(ending(late))
    rank = drive.op.worker(late.worker)
    assert rank is not None
    assert rank.is_unlinked


def test_ranks_whose_peer_has_ended_continue_without_a_reconnect() -> None:
    drive = _reconnecting()
    drive.feed(events.WorkerExited(worker="b"))
    drive.wanted = [effect for effect in drive.wanted if effect.worker == "a"]
    drive.end()
    effects_seen = [effect.tag for effect in drive.wanted]
    assert "release" in effects_seen
    assert "reconnect" not in effects_seen


def test_ranks_of_a_suspended_job_stay_suspended_when_one_of_them_ends_and_give_its_groups_up_at_the_resume() -> None:
    """The bytes returned into memory that other processes had taken, and the daemon refused the release for ever."""
    drive = DrivenOperation(ranks((None, None), kind=SUSPEND)).until("suspended")
    drive.feed(events.WorkerExited(worker="b", why="it was killed"))
    assert tags(drive.wanted) == ["release-pool"], "of the rank that has ended"
    drive.until("suspended").feed(events.ResumeRequested(to={"a": "gpu0"}))
    drive.on(lambda: drive.op.phase == "releasing")
    assert [effect.abort for effect in _of(drive, "release") if isinstance(effect, Release)] == [True]
    assert drive.until("lost").op.workers[0].gpu == "gpu0"
    together = DrivenOperation(ranks()).until("releasing")
    assert [effect.abort for effect in _of(together, "release") if isinstance(effect, Release)] == [False, False]


def test_ranks_whose_communicators_nccl_has_suspended_go_into_no_image() -> None:
    drive = DrivenOperation(ranks(kind=SUSPEND, to=(None, None))).until("suspended")
    with pytest.raises(Refused, match="which CRIU cannot dump"):
        drive.feed(events.ImageRequested(handoff=ImageRequest(path="/images/one", uid=0, gid=0)))


def test_ranks_whose_communicators_were_aborted_go_into_an_image() -> None:
    suspended = ranks(kind=SUSPEND, to=(None, None))
    workers = tuple([one.replace(communicators="replace") for one in suspended.workers])
    drive = DrivenOperation(suspended.replace(workers=workers)).until("suspended")
    drive.feed(events.ImageRequested(handoff=ImageRequest(path="/images/one", uid=0, gid=0)))
    assert drive.until("done").op.is_image_complete


def test_ranks_that_exchange_gpus_reserve_them_when_all_have_left_and_give_up_their_own_first() -> None:
    drive = DrivenOperation(ranks(reserves_late=True)).until("checkpointing")
    assert not any(effect.tag == "reserve" for _, _, _, wanted in drive.taken for effect in wanted)
    drive.end()
    assert not _of(drive, "reserve")
    assert tags(drive.end()) == ["release-reservation", "release-reservation"]
    assert tags(drive.end()) == ["reserve"]
    drive.until("done")
    assert [rank.reservations for rank in drive.op.workers] == [{"gpu1": 10}, {"gpu0": 10}]
