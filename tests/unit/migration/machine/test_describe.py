"""The public record of an operation: the events that its steps cause."""

from __future__ import annotations

from pathlib import Path

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration.machine import events
from hegmd.migration.machine.describe import (
    HAPPENINGS,
    Happening,
    busy_message,
    description,
    happenings,
    state_of,
    waiting,
)
from hegmd.migration.machine.operation import CHECKPOINT, RESTART, SUSPEND, Failure, ImageRequest
from tests.unit.migration.operations import DrivenOperation, operation, tags, worker


def _happenings(drive: DrivenOperation) -> list[Happening]:
    return [happening for before, event, after, _ in drive.taken for happening in happenings(before, event, after)]


def _kinds(drive: DrivenOperation) -> list[str]:
    found = [happening.kind for happening in _happenings(drive)]
    assert set(found) <= HAPPENINGS.keys()
    return found


def test_a_move_that_goes_well_is_worth_no_more_than_its_beginning_and_end() -> None:
    assert _kinds(DrivenOperation(operation()).until("done")) == []


def test_a_rollback_is_reported_once_with_its_reason() -> None:
    drive = DrivenOperation(operation()).until("offloading")
    drive.fail()
    drive.on(lambda: tags(drive.wanted) == ["inspect"])
    drive.end(parked=True)
    drive.until("rolled-back")
    assert _kinds(drive) == ["operation.rolling-back"]
    assert "offload failed" in _happenings(drive)[0].message


def test_a_refusal_before_any_change_is_not_a_rollback() -> None:
    drive = DrivenOperation(operation())
    drive.feed(events.Recovered())
    assert _kinds(drive) == ["operation.recovered"]


def test_a_job_that_is_held_is_an_error_with_the_command() -> None:
    drive = DrivenOperation(operation()).until("checkpointing")
    drive.fail()
    drive.on(lambda: tags(drive.wanted) == ["inspect"])
    drive.end(parked=True, out_bytes=10)
    drive.on(lambda: tags(drive.wanted) == ["reload"])
    drive.fail()
    assert _kinds(drive) == ["operation.rolling-back", "operation.found", "operation.held"]
    assert _happenings(drive)[-1].severity == "error"
    assert "hegmctl resume" in _happenings(drive)[-1].message


def test_a_process_that_was_stopped_while_it_was_restored_was_in_the_log_alone() -> None:
    op = DrivenOperation(operation()).until("restoring").op
    assert waiting(op) is None
    waits = waiting(op, stopped=(4711,))
    assert waits is not None
    assert (waits.why, waits.next) == ("process 4711 is stopped by a signal or a debugger", "kill -CONT 4711")
    waits = waiting(op, stopped=(4711, 4712))
    assert waits is not None
    assert (waits.why[:24], waits.next) == ("processes 4711 4712 are ", "kill -CONT 4711 4712")
    assert description(op, stopped=(4711,)).waits == waiting(op, stopped=(4711,))


def test_an_ended_job_is_not_reported_as_waiting_for_its_agent() -> None:
    """Issue 14, row 11: `settling waits: the agent is not connected`, and then that it is gone."""
    drive = DrivenOperation(operation()).until("quiescing")
    drive.feed(events.AgentLost(worker="a"))
    pid = drive.op.workers[0].pid
    assert waiting(drive.op) is not None
    assert waiting(drive.op, ending=(pid,)) is None
    assert description(drive.op, ending=(pid,)).waits is None


def test_a_job_parked_for_its_image_was_reported_as_stopped_with_a_resume_command() -> None:
    """A client that followed this hint had a job that wrote to files past the state in its image."""
    wish = ImageRequest(path="/images/one", uid=0, gid=0, root_pid=4711)
    drive = DrivenOperation(operation(worker(to=None), kind=CHECKPOINT, image=wish)).until("handing")
    assert waiting(drive.op, stopped=(4711,)) is None
    drive.until("ending")
    assert waiting(drive.op, stopped=(4711,)) is None
    left = wish.replace(leave_running=True)
    drive = DrivenOperation(operation(worker(to=None), kind=CHECKPOINT, image=left)).until("restoring")
    assert waiting(drive.op, stopped=(4711,)) is not None, "by then CRIU has let it go"


def test_a_job_killed_while_its_image_is_written_is_lost_and_the_event_names_the_image() -> None:
    wish = ImageRequest(path="/images/one", uid=0, gid=0, leave_running=True)
    drive = DrivenOperation(operation(worker(to=None, kept_gpu="gpu0"), kind=CHECKPOINT, image=wish)).until("restoring")
    drive.feed(events.WorkerExited(worker="a", why="it is not there any more"))
    drive.until("lost")
    record = description(drive.op)
    assert record.failure is not None
    assert record.note == "its image is complete; restore it with: hegmctl restore /images/one"


def test_more_bytes_were_moved_than_there_were() -> None:
    """Pool segments have whole pages, and the message was: 6.0 MiB of 112.0 KiB."""
    op = DrivenOperation(operation()).until("offloading").op
    record = description(op, moved_bytes=1 << 50)
    assert record.moved_bytes == record.size_bytes


def test_a_recovery_reports_the_former_state_and_the_one_found() -> None:
    drive = DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended")
    assert _kinds(drive) == ["operation.suspended"]
    drive.taken.clear()
    drive.feed(events.Recovered())
    drive.end(parked=True, out_bytes=10, gpu=None, reservations={}, pool_bytes=10)
    assert [happening.message for happening in _happenings(drive)] == [
        "operation op1 was suspended when hegmd was stopped",
        "operation op1: process 197 parked on no GPU, 10 bytes of it offloaded",
        "operation op1: suspended",
    ]


def test_a_process_that_is_found_to_have_exited_is_also_reported() -> None:
    drive = DrivenOperation(operation()).until("offloading")
    drive.feed(events.Recovered())
    drive.taken.clear()
    drive.feed(events.WorkerExited(worker="a"))
    assert "has ended" in _happenings(drive)[0].message


def test_an_operation_that_continues_or_has_ended_waits_for_nothing() -> None:
    assert waiting(DrivenOperation(operation()).until("offloading").op) is None
    assert (
        waiting(DrivenOperation(operation()).until("done").op, HegmError(UNAVAILABLE, "the disk is full", "look at it"))
        is None
    )


def test_a_suspended_job_names_the_command_that_resumes_it() -> None:
    waits = waiting(DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended").op)
    assert waits is not None
    assert waits.next == "hegmctl resume 197"


def test_a_suspended_job_was_to_be_resumed_and_stopped_again_for_an_image() -> None:
    op = DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended").op
    assert busy_message(op, 197, CHECKPOINT)[1].startswith("write it into an image: hegmctl handoff 197 DIR")
    assert busy_message(op, 197)[1] == "run: hegmctl resume 197"
    saved = op.workers[0].replace(method=RESTART, state_saved=True, gpu=None)
    for kind in (CHECKPOINT, None):  # `hegmctl resume` of an exited job found no supervisor to start it
        hint = busy_message(op.replace(workers=(saved,)), 197, kind)[1]
        assert hint == f"run: hegmctl run --allow-restart --resume {op.id} -- COMMAND"


def test_a_quiesced_job_reports_the_reason() -> None:
    drive = DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended")
    drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    drive.fail("refused")
    waits = waiting(drive.op)
    assert waits is not None
    assert (waits.why, waits.next) == ("the job is parked: reserve failed", "hegmctl resume 197")


def test_a_missing_agent_and_a_stage_that_does_not_end_are_named() -> None:
    drive = DrivenOperation(operation()).until("verifying")
    drive.feed(events.AgentLost(worker="a"))
    waits = waiting(drive.op)
    assert waits is not None
    assert "the agent of process 197 is not connected" in waits.why
    retried = drive.op.replace(attempts=3).with_worker(drive.op.workers[0].replace(waits=None))
    waits = waiting(retried)
    assert waits is not None
    assert "3 times" in waits.why
    assert "hegmctl op op1 --story" in waits.next


def test_an_unwritable_journal_is_named_as_the_reason_of_the_wait() -> None:
    trouble = HegmError(UNAVAILABLE, "the disk is full", "look at it")
    waits = waiting(DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended").op, trouble)
    assert waits is not None
    assert (waits.why, waits.next) == ("the operation is stopped: the disk is full", "look at it")


def test_every_event_of_operations_is_explained_to_operators() -> None:
    page = (Path(__file__).parents[4] / "docs" / "operations.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for kind in HAPPENINGS:
        explained = [meaning for kinds, meaning, *_ in rows if f"`{kind}`" in kinds]
        assert len(explained) == 1, kind
        assert len(explained[0].split()) > 3, kind


def test_the_duration_is_shown_once_the_operation_has_ended() -> None:
    done = operation(phase="done", created_utc=100.0)
    assert description(done, last_utc=108.5).took_s == 8.5
    assert description(done.replace(phase="sealing"), last_utc=108.5).took_s is None
    assert description(done).took_s is None, "of an operation whose story is forgotten nobody knows"
    assert description(done, last_utc=99.0).took_s == 0.0, "the clock was put back"


def test_only_an_operation_that_cannot_continue_alone_waits_for_a_person() -> None:
    suspended = DrivenOperation(operation(worker(to=None), kind=SUSPEND)).until("suspended").op
    assert state_of(description(suspended)) == "suspended"
    failed = suspended.replace(failure=Failure(code="refused", message="no memory", hint="free some"))
    assert state_of(description(failed)) == "waiting"
    moving = DrivenOperation(operation()).until("reloading").op
    assert state_of(description(moving)) == "moving"
    assert state_of(description(moving, stopped=[4711])) == "waiting"
    assert state_of(description(moving.replace(phase="holding"))) == "quiesced"
