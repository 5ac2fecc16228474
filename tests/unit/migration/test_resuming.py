"""Resumes with a time limit, and how the resume of a restore is named."""

from __future__ import annotations

from hegmd.errors import TIMEOUT
from hegmd.migration.machine import events
from hegmd.migration.machine.operation import RESTORE, SUSPEND
from tests.unit.migration.operations import DrivenOperation, operation, worker


def _suspending() -> DrivenOperation:
    return DrivenOperation(operation(worker(to=None), kind=SUSPEND))


def test_a_resume_that_takes_too_long_is_suspended_again() -> None:
    """The steps have their limits; who waited for all of them had none."""
    drive = _suspending().until("suspended")
    drive.feed(events.ResumeRequested(to={"a": "gpu0"}, limit_s=7.0))
    assert drive.op.deadline == drive.now + 7.0
    drive.now += 5.0
    drive.on(lambda: drive.op.phase == "restoring")
    assert drive.op.deadline == drive.now + 2.0, "a new step has what is left of it"
    drive.now += 2.0
    drive.feed(events.DeadlinePassed())
    assert drive.until("suspended").op.workers[0].offloaded
    assert drive.op.failure is not None
    assert (drive.op.failure.code, drive.op.failure.message) == (
        TIMEOUT.name,
        "operation op1 did not finish restoring within 7 s",
    )
    assert drive.op.deadline is None
    drive.feed(events.ResumeRequested(to={"a": "gpu0"}))
    assert drive.until("done").op.due is None


def test_a_resume_that_has_its_bytes_back_is_not_turned_round_by_its_time() -> None:
    drive = _suspending().until("suspended")
    drive.feed(events.ResumeRequested(to={"a": "gpu0"}, limit_s=7.0))
    drive.on(lambda: drive.op.phase == "verifying")
    assert drive.op.deadline == drive.now + drive.op.limits.verify_s


def test_a_resume_keeps_its_time_across_a_restart_of_the_daemon() -> None:
    """The deadline is of another clock."""
    drive = _suspending().until("suspended")
    drive.now = 1_000_000.0
    drive.feed(events.ResumeRequested(to={"a": "gpu0"}, limit_s=7.0))
    drive.now = 3.0
    drive.feed(events.Recovered())
    assert drive.op.due == 10.0


def test_the_operation_of_a_restore_is_called_restore() -> None:
    drive = DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended")
    drive.op = drive.op.replace(kind=RESTORE)
    drive.feed(events.ResumeRequested(to={"a": "gpu0"}))
    assert drive.until("done").op.kind == RESTORE
