"""An operation that only holds its job at a boundary: it ends in time, or becomes the next requested operation."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.errors import Refused
from hegmd.migration.machine import events
from hegmd.migration.machine.operation import CHECKPOINT, QUIESCE, SUSPEND, ImageRequest, Operation
from tests.unit.migration.operations import DrivenOperation, operation, tags, worker

WISH = ImageRequest(path="/images/one", uid=1000, gid=1000)


def quiesce(*names: str, **values: Any) -> Operation:
    workers = [worker(name, to="gpu0", **values) for name in names or ("a",)]
    return operation(*workers, kind=QUIESCE, is_distributed=len(workers) > 1)


def held(*names: str) -> DrivenOperation:
    return DrivenOperation(quiesce(*names)).until("holding")


def suspended() -> DrivenOperation:
    return DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended")


def effect_tags(drive: DrivenOperation) -> list[str]:
    return [effect.tag for *_, wanted in drive.taken for effect in wanted]


def test_a_job_is_quiesced_and_resumed_without_being_moved() -> None:
    drive = DrivenOperation(quiesce()).until("done")
    assert drive.phases == ["quiescing", "holding", "releasing", "verifying", "done"]
    assert effect_tags(drive) == ["park", "hold", "release", "verify"]
    assert drive.op.failure is None


def test_ranks_park_at_one_boundary_and_share_one_hold() -> None:
    drive = held("a", "b")
    assert {member.boundary for member in drive.op.workers} == {drive.op.at}
    drive.until("done")
    assert effect_tags(drive).count("hold") == 1
    assert effect_tags(drive).count("release") == 2


def test_a_quiesced_job_can_be_resumed_before_its_time() -> None:
    drive = held()
    (release,) = drive.feed(events.ResumeRequested(to={}))
    assert release.tag == "release"
    assert drive.op.pending == tuple([pending for pending in drive.op.pending if pending.effect == "release"])


def test_cancelling_a_hold_resumes_the_job() -> None:
    drive = held()
    assert tags(drive.feed(events.CancelRequested(by="somebody"))) == ["release"]
    drive.wanted = [effect for effect in drive.wanted if effect.tag == "release"]
    drive.until("rolled-back")


def test_a_hold_that_ends_late_changes_nothing() -> None:
    drive = held()
    hold = drive.wanted[0]
    drive.feed(events.ResumeRequested(to={}))
    before = drive.op
    drive.feed(events.Held(effect=hold.number, worker="a"))
    assert drive.op is before


def test_a_job_that_continued_without_a_daemon_is_not_parked_again() -> None:
    """The agent waits for a daemon for a limited time; the client of the hold has to learn that the hold ended."""
    drive = held()
    drive.wanted.clear()
    (inspect,) = drive.feed(events.Recovered())
    assert inspect.tag == "inspect"
    drive.end(parked=False, boundary=9)
    assert drive.op.phase == "rolled-back"
    assert drive.op.failure is not None
    assert "resumed on its own" in drive.op.failure.message
    assert "park" not in tags(drive.wanted)


def test_a_hold_continues_under_the_next_daemon() -> None:
    drive = held()
    drive.wanted.clear()
    drive.feed(events.Recovered())
    assert tags(drive.end()) == ["hold"]
    assert drive.op.phase == "holding"


def test_a_hold_was_broken_because_agents_took_longer_than_5_s_to_reconnect() -> None:
    drive = held()
    drive.wanted.clear()
    drive.feed(events.Recovered())
    drive.fail("disconnected")
    drive.now = drive.op.deadline or 0.0
    drive.feed(events.DeadlinePassed())
    assert drive.op.direction == "forward"
    drive.fail("disconnected")
    drive.feed(events.AgentBack(worker="a", token="token-a"))
    drive.end()
    assert drive.op.phase == "holding"


def test_a_job_that_has_not_parked_yet_is_not_waited_for_beyond_its_limit() -> None:
    drive = DrivenOperation(quiesce()).until("quiescing")
    drive.feed(events.AgentLost(worker="a"))
    drive.now = drive.op.deadline or 0.0
    drive.feed(events.DeadlinePassed())
    assert drive.op.direction == "back"


def test_when_a_rank_ends_the_others_are_released() -> None:
    drive = held("a", "b")
    wanted = drive.feed(events.WorkerExited(worker="a", why="it was killed"))
    assert [(effect.tag, effect.worker) for effect in wanted] == [("release", "b")]


# ---- and then something else -----------------------------------------------------------------------------------------


def test_a_held_job_is_suspended_without_resuming_in_between() -> None:
    drive = held()
    into = operation(worker(to=None), kind=SUSPEND, id="op2")
    drive.feed(events.Repurposed(into=into))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "hold"]
    drive.until("suspended")
    assert drive.op.id == "op1"
    assert not {"park", "release"} & set(effect_tags(drive)[2:])


def test_held_ranks_are_suspended_at_their_current_boundary() -> None:
    drive = held("a", "b")
    at = drive.op.at
    into = operation(worker("a", to=None), worker("b", to=None), kind=SUSPEND, is_distributed=True)
    drive.feed(events.Repurposed(into=into))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "hold"]
    drive.until("suspended")
    assert {member.boundary for member in drive.op.workers} == {at}


def test_a_hold_is_not_taken_up_for_other_processes_than_it_holds() -> None:
    drive = held("a")
    with pytest.raises(Refused, match="holds other processes"):
        drive.feed(events.Repurposed(into=operation(worker("a", to=None), worker("b", to=None), kind=SUSPEND)))
    assert drive.op.phase == "holding"


def test_a_failed_operation_of_a_held_job_returns_to_training() -> None:
    drive = held()
    drive.feed(events.Repurposed(into=operation(worker(to=None), kind=SUSPEND)))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "hold"]
    drive.until("offloading")
    drive.fail("refused")
    drive.until("rolled-back")
    assert "release" in effect_tags(drive)


def test_a_suspended_job_is_handed_over_and_ends() -> None:
    drive = suspended()
    assert tags(drive.feed(events.ImageRequested(handoff=WISH))) == ["dump"]
    drive.until("done")
    assert drive.op.kind == CHECKPOINT
    assert effect_tags(drive)[-3:] == ["dump", "end", "release-pool"]
    assert not drive.op.workers[0].lost


def test_a_suspended_job_that_cannot_be_handed_over_is_suspended_as_before_and_can_be_resumed() -> None:
    drive = suspended()
    drive.feed(events.ImageRequested(handoff=WISH))
    drive.fail("refused")
    drive.until("suspended")
    assert not {"restore", "end"} & set(effect_tags(drive))
    drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    drive.until("done")
    assert drive.op.workers[0].gpu == "gpu1"


def test_after_a_restart_an_image_of_a_suspended_job_that_is_not_whole_leaves_it_suspended() -> None:
    drive = suspended()
    drive.feed(events.ImageRequested(handoff=WISH))
    drive.wanted.clear()
    (find,) = drive.feed(events.Recovered())
    assert find.tag == "dump"
    drive.fail("refused")
    assert tags(drive.wanted) == ["inspect"]
    drive.end(gpu=None, out_bytes=10, reservations={}, pool_bytes=10)
    assert drive.op.phase == "suspended"


def test_a_job_partly_on_its_gpu_is_not_dumped() -> None:
    drive = DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended")
    drive.op = drive.op.with_worker(drive.op.workers[0].replace(gpu="gpu0", is_parked=False))
    with pytest.raises(Refused, match="not suspended"):
        drive.feed(events.ImageRequested(handoff=WISH))
