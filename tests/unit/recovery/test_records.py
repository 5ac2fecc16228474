"""What outlives the daemon of a protected job."""

from __future__ import annotations

from pathlib import Path

from hegmd.protocol.recovery import RECOVERED, RecoveryAttempt
from hegmd.recovery.policy import Budget
from hegmd.recovery.records import MAX_ATTEMPTS, JobSnapshots, SnapshotFiles
from hegmd.recovery.starts import give_up_hint


def test_a_record_is_read_as_it_was_written_and_one_that_is_damaged_is_removed(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    assert list(files.load()) == []
    attempt = RecoveryAttempt(fell_utc=3.5, why="ended by signal 9", step=12, from_step=10, trained_s=2.0)
    record = JobSnapshots(job="j7", uid=1000, ranks=2, launched=True, gpus=("gpu0",), generation=4, bad=(3,))
    record = record.with_attempt(attempt).spending(Budget(1, 0, 12))
    files.save(record)
    (tmp_path / "recovery" / "j8.json").write_text("{")
    assert list(files.load()) == [record]
    assert not (tmp_path / "recovery" / "j8.json").exists()
    assert record.budget == Budget(1, 0, 12)
    files.forget("j7")
    files.forget("j7")
    assert list(files.load()) == []


def test_a_newer_state_of_a_recovery_takes_the_place_of_the_older_and_the_oldest_are_forgotten() -> None:
    record = JobSnapshots(job="j1", uid=0)
    for number in range(MAX_ATTEMPTS + 5):
        attempt = RecoveryAttempt(fell_utc=float(number), why="ended by signal 9")
        record = record.with_attempt(attempt).with_attempt(attempt.replace(result=RECOVERED))
    assert len(record.attempts) == MAX_ATTEMPTS
    assert {one.result for one in record.attempts} == {RECOVERED}
    assert record.attempts[-1].fell_utc == MAX_ATTEMPTS + 4


def test_the_user_of_a_job_that_is_given_up_is_told_what_can_be_done() -> None:
    record = JobSnapshots(job="j7", uid=1000)
    assert "--resume j7 -- COMMAND continues from it" in give_up_hint(record, has_whole=True)
    assert "it has no images" in give_up_hint(record, has_whole=False)
    assert "hegmctl restore --newest /images " in give_up_hint(record.replace(images="/images"), has_whole=False)
