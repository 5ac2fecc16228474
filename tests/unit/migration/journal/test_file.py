"""The journal's file on disks that are full, cannot be written or fail, and on the real one."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from hegmd.errors import HegmError
from hegmd.migration.journal import records as journal_records
from hegmd.migration.journal.disk import Disk
from hegmd.migration.journal.file import NAME, OPERATION_BYTES, JournalFile
from hegmd.migration.journal.records import History
from hegmd.migration.machine.operation import Operation
from tests.simulation.disk import ModelDisk
from tests.unit.migration.operations import DrivenOperation, operation, worker

FOLDER = Path("/model")


def _disk(*, can_reserve: bool = False) -> ModelDisk:
    disk = ModelDisk(Random(1))
    disk.can_reserve = can_reserve
    return disk


def _opened(disk: Disk, folder: Path = FOLDER) -> JournalFile:
    file = JournalFile(folder, disk)
    file.open()
    return file


def _read(disk: ModelDisk) -> dict[str, Operation]:
    histories = journal_records.read(disk.read(FOLDER / NAME)).histories
    return {op_id: history.operation for op_id, history in histories.items()}


OP = operation()
OPENING = journal_records.opening(OP, 1.0)
OTHER = operation(id="op2")


def test_a_record_on_a_full_disk_is_truncated_and_the_next_one_follows_the_last_whole_one() -> None:
    """Issue 4: after a moment with a full disk the daemon rewrote the whole journal, which takes more space."""
    disk = _disk()
    with _opened(disk) as file:
        file.append(OPENING, [])
        disk.full = True
        for _ in range(5):
            with pytest.raises(HegmError, match="No space left"):
                file.append(journal_records.opening(OTHER, 2.0), [])
            assert _read(disk) == {"op1": OP}
        assert file.trouble is not None
        assert not file.is_due
        disk.full = False
        file.append(journal_records.opening(OTHER, 2.0), [])
        assert file.trouble is None
        assert _read(disk) == {"op1": OP, "op2": OTHER}


def test_after_a_failed_sync_everything_is_rewritten_before_the_next_record() -> None:
    disk = _disk()
    with _opened(disk) as file:
        file.append(OPENING, [])
        disk.breaks = 2
        with pytest.raises(HegmError, match="Input/output error"):
            _append_until_it_fails(file)
        disk.mend()
        assert file.is_due
        old = disk.names[NAME]
        file.append(journal_records.opening(OTHER, 2.0), [History(OP)])
        assert disk.names[NAME] is not old
        assert _read(disk) == {"op1": OP, "op2": OTHER}
        assert disk.is_durable(NAME)


def _append_until_it_fails(file: JournalFile) -> None:
    for number in range(100):  # a disk that breaks does so at one sync or a later one
        file.append(journal_records.opening(operation(id=f"op{number + 10}"), 2.0), [History(OP)])


class FailingNames(ModelDisk):
    def sync_folder(self, folder: Path) -> None:
        if self.breaks:
            raise OSError(errno.EIO, "Input/output error")
        super().sync_folder(folder)

    def sync(self, fd: int) -> None:
        self.open_files[fd].durable = bytes(self.open_files[fd].data)


def test_records_do_not_go_to_a_file_that_has_lost_its_name() -> None:
    """Issue 4: when the folder could not be synced after the renaming, the old file was written to, without a name."""
    disk = FailingNames(Random(1))
    with _opened(disk) as file:
        file.append(OPENING, [])
        disk.breaks = 1
        with pytest.raises(HegmError, match="rewritten"):
            file.rewrite([History(OP)])
        with pytest.raises(HegmError, match="rewritten"):
            file.append(journal_records.opening(OTHER, 2.0), [History(OP)])
        disk.breaks = 0
        file.append(journal_records.opening(OTHER, 2.0), [History(OP)])
        assert _read(disk) == {"op1": OP, "op2": OTHER}


def test_a_part_of_a_new_journal_does_not_use_the_space_of_the_journal() -> None:
    """Issue 4: what was written of the new file stayed when the disk was full."""
    disk = _disk()
    with _opened(disk) as file:
        file.append(OPENING, [])
        disk.full = True
        with pytest.raises(HegmError, match="rewritten"):
            file.rewrite([History(OP)])
        assert set(disk.names) == {NAME}
        assert _read(disk) == {"op1": OP}


def test_a_journal_that_cannot_be_compacted_keeps_growing() -> None:
    """Issue 4: with the journal due to be made small and no room for that, operations stopped."""
    disk = _disk(can_reserve=True)
    with JournalFile(FOLDER, disk, compact_bytes=0) as file:
        file.open()
        file.append(OPENING, [])
        disk.full = True
        assert file.is_due
        file.append(journal_records.opening(OTHER, 2.0), [History(OP)])
        assert _read(disk) == {"op1": OP, "op2": OTHER}


def test_a_daemon_starts_on_an_unwritable_disk_and_continues_once_it_is_writable() -> None:
    """Issue 4: the daemon did not start, so parked jobs stayed parked."""
    disk = _disk()
    with _opened(disk) as file:
        file.append(OPENING, [])
    disk.scribble(NAME, b"")
    disk.read_only = True
    file = JournalFile(FOLDER, disk)
    assert list(file.open().histories) == ["op1"]
    assert file.trouble is not None
    assert "Read-only" in file.trouble.message
    with pytest.raises(HegmError, match="Read-only"):
        file.append(journal_records.opening(OTHER, 2.0), [History(OP)])
    disk.read_only = False
    file.append(journal_records.opening(OTHER, 2.0), [History(OP)])
    assert _read(disk) == {"op1": OP, "op2": OTHER}
    file.close()


def test_an_operation_needs_space_for_its_records_to_begin_and_then_has_it() -> None:
    """Issue 4: a disk that filled up during a move left the job parked until a person freed space."""
    disk = _disk(can_reserve=True)
    with _opened(disk) as file:
        file.append(OPENING, [], ahead_bytes=OPERATION_BYTES)
        disk.full = True
        drive = DrivenOperation(OP).until("done")
        for before, event, after, wanted in drive.taken:
            file.append(journal_records.step(before, event, after, wanted, now=1.0, utc=2.0)[0], [])
        assert _read(disk) == {"op1": drive.op}
        with pytest.raises(HegmError, match="extended for an operation"):
            file.append(journal_records.opening(OTHER, 2.0), [], ahead_bytes=OPERATION_BYTES)
        assert _read(disk) == {"op1": drive.op}


def test_the_reserved_space_is_enough_for_an_operation_on_eight_ranks() -> None:
    ranks = [worker(f"rank{index}", pid=1000 + index) for index in range(8)]
    drive = DrivenOperation(operation(*ranks, is_distributed=True)).until("done")
    records = [
        journal_records.step(before, event, after, wanted, now=1e6, utc=1.7e9)[0]
        for before, event, after, wanted in drive.taken
    ]
    assert sum(map(len, records)) < OPERATION_BYTES


def test_the_real_disk_has_the_reserved_space_and_the_written_length(tmp_path: Path) -> None:
    with _opened(Disk(), tmp_path) as file:
        file.append(OPENING, [], ahead_bytes=OPERATION_BYTES)
        found = file.path.stat()
        assert found.st_size == len(journal_records.MAGIC) + len(OPENING)
        assert found.st_blocks * 512 >= OPERATION_BYTES or found.st_blocks == 0  # 0: it reserves nothing
        assert found.st_mode & 0o777 == 0o600
    assert list(journal_records.read(file.path.read_bytes()).histories) == ["op1"]


def test_a_link_in_the_place_of_the_new_journal_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / NAME).with_suffix(".new").symlink_to(victim)
    file = JournalFile(tmp_path)
    file.open()
    assert file.trouble is not None
    assert victim.read_text() == "precious"
    file.close()
