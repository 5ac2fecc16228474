"""Ranks that restart: all of them exit and start again, or none, whatever happens to one of them."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.migration.machine import events
from hegmd.migration.machine.next_effects import MAX_RETURNS
from hegmd.migration.machine.operation import BY_STATE, RESTART, Operation
from tests.unit.migration.operations import DrivenOperation, operation, tags, worker

NEW = {"a": (300, "token-300"), "b": (301, "token-301")}


def ranks(to: str = "gpu1") -> Operation:
    """Two ranks on gpu0, which have passed as many boundaries."""
    leaving = {"method": RESTART, "carrier": BY_STATE, "run": "run-1", "must_exit": True, "boundary": 4}
    members = [worker(name, to=to, rank=rank, **leaving) for rank, name in enumerate("ab")]
    return operation(*members, is_distributed=True)


def gone(drive: DrivenOperation, name: str) -> None:
    drive.feed(events.WorkerExited(worker=name, why="it ended"))
    drive.wanted = [wanted for wanted in drive.wanted if wanted.number in {one.number for one in drive.op.pending}]


def left() -> DrivenOperation:
    """Both have left, and are wanted elsewhere."""
    drive = DrivenOperation(ranks()).until("checkpointing")
    gone(drive, "a")
    gone(drive, "b")
    assert tags(drive.wanted) == ["restore", "restore"]
    return drive


def reborn(drive: DrivenOperation, name: str, gpu: str = "gpu1") -> None:
    index = next(index for index, wanted in enumerate(drive.wanted) if (wanted.tag, wanted.worker) == ("restore", name))
    drive.wanted.insert(0, drive.wanted.pop(index))
    pid, token = NEW[name]
    drive.end(landed=gpu, pid=pid, start_ticks=9, token=token, run="run-1", boundary=4)


def found(drive: DrivenOperation, gpu: str = "gpu1", **facts: Any) -> None:
    """End every look at who has come."""
    while (index := next((i for i, one in enumerate(drive.wanted) if one.tag == "inspect"), None)) is not None:
        drive.wanted.insert(0, drive.wanted.pop(index))
        drive.end(**{"parked": False, "boundary": 4, "gpu": gpu, "reservations": {gpu: 10}, "pool_bytes": 10, **facts})


def saved_twice(drive: DrivenOperation) -> bool:
    offloaded = [event.worker for _, event, *_ in drive.taken if isinstance(event, events.Offloaded)]
    return len(offloaded) != len(set(offloaded))


def test_all_ranks_exit_once_all_states_are_saved() -> None:
    drive = left()
    reborn(drive, "a")
    found(drive)
    assert drive.op.phase == "restoring"
    reborn(drive, "b")
    found(drive)
    drive.until("verifying")
    drive.end()
    assert drive.op.phase == "verifying"
    assert "release-pool" not in [tag for *_, wanted in drive.taken for tag in tags(wanted)]
    drive.until("done")
    assert [member.pid for member in drive.op.workers] == [300, 301]


def test_a_rank_that_dies_before_all_are_saved_prevents_the_restart() -> None:
    """The other had its state saved, and would have been started again alone."""
    drive = DrivenOperation(ranks()).until("offloading")
    drive.end()
    assert drive.op.workers[0].state_saved
    gone(drive, "b")
    gone(drive, "a")
    drive.until("rolled-back")
    assert all(member.has_exited and not member.lost for member in drive.op.workers)


def test_a_rank_that_does_not_leave_is_interrupted_after_another_has_left() -> None:
    """After a rollback it would have continued without the other ranks."""
    drive = DrivenOperation(ranks()).until("checkpointing")
    gone(drive, "a")
    drive.fail()
    found(drive, "gpu0", parked=True)
    assert drive.op.direction == "back"
    while tags(drive.wanted) != ["checkpoint"]:
        drive.end()
    gone(drive, "b")
    while tags(drive.wanted) != ["restore", "restore"]:
        drive.end()
    assert [(one.tag, one.worker, one.to_plain()["gpu"]) for one in drive.wanted] == [
        ("restore", "a", "gpu0"),
        ("restore", "b", "gpu0"),
    ]
    assert not saved_twice(drive)


@pytest.mark.parametrize("proven", [False, True])
def test_a_rank_that_falls_elsewhere_takes_the_others_back_with_it(proven: bool) -> None:
    """Also next to a rank that has passed its boundary: its state is as old as theirs, and is kept until all have."""
    drive = left()
    for name in "ab":
        reborn(drive, name)
    found(drive)
    if proven:
        drive.until("verifying")
        drive.end()
        assert drive.op.workers[0].verified
    gone(drive, "b")
    assert drive.op.direction == "back"
    while "checkpoint" not in tags(drive.wanted):
        drive.end()
    gone(drive, "a")
    while tags(drive.wanted) != ["restore", "restore"]:
        drive.end()
    assert {one.to_plain()["gpu"] for one in drive.wanted} == {"gpu0"}
    for name in "ab":
        reborn(drive, name, "gpu0")
    found(drive, "gpu0")
    drive.until("rolled-back")
    assert not saved_twice(drive)


def test_a_rank_of_an_earlier_start_does_not_count_for_the_next() -> None:
    """The launcher had restarted its ranks itself, and one connected although the operation no longer needed it."""
    drive = left()
    late = drive.wanted[1]
    reborn(drive, "a")
    gone(drive, "a")
    assert drive.op.direction == "back"
    pid, token = NEW["b"]
    drive.feed(events.Restored(effect=late.number, worker="b", landed="gpu1", pid=pid, start_ticks=9, token=token))
    assert drive.op.workers[1].is_absent


def returned(drive: DrivenOperation) -> None:
    """End everything until both are to be started where they were."""
    while tags(drive.wanted) != ["restore", "restore"]:
        assert drive.wanted or drive.op.phase == "settling", drive.op.phase
        absent = {worker.name for worker in drive.op.workers if worker.is_absent}
        if not drive.wanted:  # it waits before another start
            drive.now = drive.op.deadline or 0.0
            drive.feed(events.DeadlinePassed())
        elif drive.wanted[0].tag == "inspect" and drive.wanted[0].worker in absent:
            gone(drive, drive.wanted[0].worker)
        else:
            drive.end()
    assert {one.to_plain()["gpu"] for one in drive.wanted} == {"gpu0"}


def not_started(drive: DrivenOperation) -> None:
    """The start of both fails, as both report."""
    first, second = (wanted.number for wanted in drive.wanted)
    drive.wanted.clear()
    for number, name in ((first, "a"), (second, "b")):
        drive.feed(events.Failed(effect=number, worker=name, fault="broken", message="no supervisor", hint="wait"))


def test_a_rank_that_fell_once_on_its_way_back_left_all_suspended() -> None:
    """The states were held and the supervisor had ended, as for a launcher's port that was in use for a moment."""
    drive = left()
    reborn(drive, "b")
    gone(drive, "b")
    returned(drive)
    reborn(drive, "a", "gpu0")
    reborn(drive, "b", "gpu0")
    found(drive, "gpu0")
    gone(drive, "b")
    while "checkpoint" not in tags(drive.wanted):
        drive.end()
    gone(drive, "a")
    returned(drive)
    for name in "ab":
        reborn(drive, name, "gpu0")
    found(drive, "gpu0")
    drive.until("rolled-back")
    assert [member.gpu for member in drive.op.workers] == ["gpu0", "gpu0"]
    assert not saved_twice(drive)


def test_a_rank_stayed_alone_where_it_was_because_its_supervisor_was_away() -> None:
    """The rank should end with the others on their way back. Its supervisor took no order, so hegmd kept the rank."""
    drive = left()
    reborn(drive, "a")
    reborn(drive, "b")
    found(drive)
    gone(drive, "b")
    while "checkpoint" not in tags(drive.wanted):
        drive.end()
    drive.wanted.insert(0, drive.wanted.pop(tags(drive.wanted).index("checkpoint")))
    drive.fail()
    while "checkpoint" not in tags(drive.wanted):
        if drive.wanted:
            found(drive) if drive.wanted[0].tag == "inspect" else drive.end()
        else:
            drive.now = drive.op.deadline or 0.0
            drive.feed(events.DeadlinePassed())
    gone(drive, "a")
    returned(drive)
    for name in "ab":
        reborn(drive, name, "gpu0")
    found(drive, "gpu0")
    drive.until("rolled-back")
    assert [member.gpu for member in drive.op.workers] == ["gpu0", "gpu0"]


def test_ranks_whose_supervisor_was_away_for_a_moment_were_left_suspended() -> None:
    """It reconnects every five seconds. The next start waits for that, and has its memory reserved again."""
    drive = left()
    not_started(drive)
    returned(drive)
    not_started(drive)
    assert (drive.op.phase, drive.wanted) == ("settling", [])
    returned(drive)
    assert all(member.reservations["gpu0"] > 0 for member in drive.op.workers)
    for name in "ab":
        reborn(drive, name, "gpu0")
    found(drive, "gpu0")
    drive.until("rolled-back")


def test_a_rank_that_cannot_be_started_leaves_the_states_of_all_held_and_all_are_resumed() -> None:
    drive = left()
    not_started(drive)
    for _ in range(MAX_RETURNS):
        assert drive.op.direction == "back"
        returned(drive)
        not_started(drive)
    for effect in tuple(drive.wanted):
        gone(drive, effect.worker)
    while drive.wanted:
        drive.end()
    assert drive.op.phase == "suspended"
    assert all(member.is_absent and member.pool_bytes == 10 for member in drive.op.workers)
    drive.feed(events.ResumeRequested(to={"a": "gpu1", "b": "gpu1"}))
    while drive.wanted[0].tag != "restore":
        drive.end()
    for name in "ab":
        reborn(drive, name)
    found(drive)
    drive.until("done")


def test_a_resume_ends_a_rank_left_from_an_earlier_start() -> None:
    """One rank runs and the other is held: after the resume, the first would have stayed and the second waited."""
    drive = left()
    reborn(drive, "a")
    found(drive)
    held = drive.op.replace(phase="suspended", direction="hold", pending=())
    again = DrivenOperation(held)
    again.feed(events.ResumeRequested(to={"a": "gpu1", "b": "gpu1"}))
    while "checkpoint" not in tags(again.wanted):
        again.end()
    assert not {"park", "offload"}.intersection(tag for *_, wanted in again.taken for tag in tags(wanted))
    gone(again, "a")
    while "restore" not in tags(again.wanted):
        again.end()
    assert tags(again.wanted) == ["restore", "restore"]


def test_a_daemon_that_was_away_while_one_left_has_the_other_leave_without_saving_it_again() -> None:
    drive = DrivenOperation(ranks()).until("checkpointing")
    again = DrivenOperation(drive.op)
    again.feed(events.Recovered())
    again.wanted.clear()
    gone(again, "a")
    facts: dict[str, Any] = {
        "parked": True,
        "boundary": 5,
        "out_bytes": 0,
        "gpu": "gpu0",
        "reservations": {"gpu0": 10},
        "pool_bytes": 10,
    }
    inspection = next(one for one in again.op.pending if one.worker == "b")
    again.feed(events.Inspected(effect=inspection.number, worker="b", **facts))
    while "checkpoint" not in tags(again.wanted):
        again.end()
    assert "offload" not in [tag for *_, wanted in again.taken for tag in tags(wanted)]


def test_without_the_state_of_one_rank_no_rank_continues() -> None:
    drive = left()
    drive.fail("refused")
    drive.feed(events.WorkerExited(worker="b", why="it is not there any more", stateless=True))
    drive.wanted = [wanted for wanted in drive.wanted if wanted.number in {one.number for one in drive.op.pending}]
    while drive.wanted:
        assert drive.wanted[0].tag != "restore"
        drive.end()
    assert drive.op.phase == "lost"
