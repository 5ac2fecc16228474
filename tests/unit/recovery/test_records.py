"""The files of protected jobs that outlive the daemon."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from hegmd.protocol.recovery import RECOVERED, RecoveryAttempt
from hegmd.recovery.policy import Budget
from hegmd.recovery.records import MAX_ATTEMPTS, JobSnapshots, SnapshotFiles
from hegmd.recovery.starts import give_up_hint
from tests.patience import HANG_S


def test_records_round_trip_and_a_damaged_record_is_removed(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    assert files.load() == []
    attempt = RecoveryAttempt(failed_utc=3.5, why="ended by signal 9", step=12, from_step=10, trained_s=2.0)
    record = JobSnapshots(job="j7", uid=1000, ranks=2, launched=True, gpus=("gpu0",), generation=4, bad=(3,))
    record = record.with_attempt(attempt).spending(Budget(1, 0, 12))
    files.save({"j7": record})
    (tmp_path / "recovery" / "j8.json").write_text("{")
    assert files.load() == [record]
    assert not (tmp_path / "recovery" / "j8.json").exists()
    assert record.budget == Budget(1, 0, 12)
    files.save({})
    files.save({})
    assert files.load() == []


def test_only_changed_records_are_written(tmp_path: Path) -> None:
    files, first, second = SnapshotFiles(tmp_path), JobSnapshots(job="j1", uid=0), JobSnapshots(job="j2", uid=0)
    files.save({"j1": first, "j2": second})
    before = (tmp_path / "recovery" / "j1.json").stat().st_ino
    files.save({"j1": first, "j2": second.replace(generation=5)})
    assert (tmp_path / "recovery" / "j1.json").stat().st_ino == before
    assert [record.generation for record in SnapshotFiles(tmp_path).load()] == [0, 5]


def test_one_unwritable_record_does_not_prevent_the_others(tmp_path: Path) -> None:
    files, first, second = SnapshotFiles(tmp_path), JobSnapshots(job="j1", uid=0), JobSnapshots(job="j2", uid=0)
    (tmp_path / "recovery" / "j1.json").mkdir(parents=True)
    with pytest.raises(OSError, match=r"j1\.json"):
        files.save({"j1": first, "j2": second})
    (tmp_path / "recovery" / "j1.json").rmdir()
    assert SnapshotFiles(tmp_path).load() == [second]


async def test_a_hung_disk_does_not_block_the_daemon(tmp_path: Path) -> None:
    """Each snapshot's record was synced on the event loop: all jobs of the node waited for the disk."""
    record, blocked = JobSnapshots(job="j1", uid=0), tmp_path / "recovery" / ".j1.json.new"
    blocked.parent.mkdir()
    os.mkfifo(blocked)  # the write blocks until the FIFO is read
    files = SnapshotFiles(tmp_path, retry_s=0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(files.run)
        files.put({"j1": record})
        await anyio.wait_all_tasks_blocked()  # the event loop continues
        await anyio.to_thread.run_sync(lambda: os.close(os.open(blocked, os.O_RDONLY)))
        blocked.unlink()
        with anyio.fail_after(HANG_S):
            await files.until_saved()
            while SnapshotFiles(tmp_path).load() != [record]:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


def test_a_newer_attempt_replaces_the_older_and_the_oldest_are_dropped() -> None:
    record = JobSnapshots(job="j1", uid=0)
    for number in range(MAX_ATTEMPTS + 5):
        attempt = RecoveryAttempt(failed_utc=float(number), why="ended by signal 9")
        record = record.with_attempt(attempt).with_attempt(attempt.replace(result=RECOVERED))
    assert len(record.attempts) == MAX_ATTEMPTS
    assert {attempt.result for attempt in record.attempts} == {RECOVERED}
    assert record.attempts[-1].failed_utc == MAX_ATTEMPTS + 4


def test_the_hint_after_giving_up_names_a_command() -> None:
    record = JobSnapshots(job="j7", uid=1000)
    assert "--resume j7 -- COMMAND continues from it" in give_up_hint(record, has_whole=True)
    assert "it has no images" in give_up_hint(record, has_whole=False)
    assert "hegmctl restore --newest /images " in give_up_hint(record.replace(images="/images"), has_whole=False)
