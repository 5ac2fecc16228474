"""The ledger over a disk that fails: nothing is known that is not written, and what is stopped continues."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Event

import anyio
import anyio.to_thread
import pytest

from hegmd.errors import NOT_FOUND, HegmError
from hegmd.migration.journal import records
from hegmd.migration.journal.file import NAME, QUIET_COMPACT_BYTES
from hegmd.migration.journal.history import Ledger
from hegmd.migration.journal.records import History
from hegmd.migration.machine import events
from hegmd.migration.machine.machine import handle
from hegmd.migration.machine.operation import Failure, Operation
from hegmd.telemetry.events import EventLog
from tests.patience import HANG_S
from tests.simulation.disk import ModelDisk
from tests.unit.migration.operations import operation

FOLDER = Path("/model")


class FailingOnce(ModelDisk):
    """Fails the next sync if the test says so. With `goes_on`, each sync waits for that once it has begun."""

    fails = False
    begun: Event | None = None
    goes_on: Event | None = None

    def sync(self, fd: int) -> None:
        if self.begun is not None and self.goes_on is not None:
            self.begun.set()
            assert self.goes_on.wait(HANG_S)
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, "Input/output error")
        super().sync(fd)


def _opened(utc: Callable[[], float] = lambda: 1.0) -> tuple[Ledger, FailingOnce, EventLog]:
    disk, log = FailingOnce(Random(1)), EventLog()
    ledger = Ledger(FOLDER, log, disk=disk, retry_s=0.0, utc=utc)
    ledger.open()
    return ledger, disk, log


def _begun(op: Operation) -> tuple[History, bytes]:
    return History(op), records.opening(op, 1.0)


def _step(op: Operation) -> tuple[History, bytes]:
    event = events.Begin()
    after, wanted = handle(op, event, 0.0)
    return History(after), records.step(op, event, after, wanted, now=0.0, utc=1.0)[0]


def _on_disk(disk: ModelDisk) -> dict[str, Operation]:
    found = records.read(disk.read(FOLDER / NAME)).histories
    return {op_id: history.operation for op_id, history in found.items()}


def _kinds(log: EventLog) -> list[str]:
    return [event.kind for event in log.remembered()]


@pytest.mark.thorough
async def test_an_operation_that_could_not_be_written_is_not_known_and_the_next_one_is_taken() -> None:
    """Issue 4: once a write had failed with no operation under way, every later one was refused until a restart."""
    ledger, disk, log = _opened()
    disk.fails = True
    with pytest.raises(HegmError, match="Input/output error"):
        await ledger.enter(*_begun(operation(id="1")))
    with pytest.raises(HegmError) as unknown:
        ledger.history("1")
    assert unknown.value.code is NOT_FOUND
    assert ledger.next_id() == "1"
    assert ledger.trouble is not None
    await ledger.enter(*_begun(operation(id="1")))
    assert ledger.trouble is None
    assert _on_disk(disk) == {"1": operation(id="1")}
    assert _kinds(log) == ["operation.journal-failed", "operation.journal-mended"]
    ledger.close()


async def test_a_journal_compacted_while_an_operation_begins_has_it_once() -> None:
    """Issue 4: the journal held an operation twice, and no daemon started on it."""
    ledger, disk, _ = _opened()
    first, second, third = operation(id="1"), operation(id="2"), operation(id="3")
    await ledger.enter(*_begun(first))
    await ledger.enter(*_begun(second))
    disk.fails = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.write, *_step(first))  # fails, and leaves the file to be written again
        tasks.start_soon(ledger.write, *_step(second))  # does that
        tasks.start_soon(ledger.enter, *_begun(third))  # is in memory, but not yet written
    assert _on_disk(disk) == {op_id: history.operation for op_id, history in ledger.histories.items()}
    assert set(ledger.histories) == {"1", "2", "3"}
    ledger.close()


async def test_a_step_that_cannot_be_written_waits_and_stays_unpublished() -> None:
    ledger, disk, log = _opened()
    op = operation(id="1")
    await ledger.enter(*_begun(op))
    disk.read_only = True
    history, record = _step(op)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.write, history, record)
        while ledger.trouble is None:
            await anyio.lowlevel.checkpoint()
        assert ledger.history("1").operation == op
        assert _on_disk(disk) == {"1": op}
        disk.read_only = False
    assert ledger.history("1") == history
    assert _on_disk(disk) == {"1": history.operation}
    assert _kinds(log) == ["operation.journal-failed", "operation.journal-mended"]
    ledger.close()


async def test_a_start_on_an_unwritable_disk_is_reported() -> None:
    ledger, disk, _ = _opened()
    await ledger.enter(*_begun(operation(id="1")))
    ledger.close()
    disk.read_only = True
    log = EventLog()
    again = Ledger(FOLDER, log, disk=disk)
    again.open()
    assert set(again.histories) == {"1"}
    assert _kinds(log) == ["operation.journal-failed"]
    again.close()


async def test_only_the_newest_that_are_over_are_known() -> None:
    ledger, _, _ = _opened()
    for number in range(records.REMEMBERED + 3):
        await ledger.enter(*_begun(operation(id=str(number)).replace(phase="done")))
    ledger.forget_oldest()
    assert len(ledger.histories) == records.REMEMBERED
    assert "2" not in ledger.histories
    assert "3" in ledger.histories
    ledger.close()


async def test_an_ended_operation_is_known_after_a_restart_until_it_is_too_old() -> None:
    """The newest operation stays, however old: its id must not be reused. An unfinished operation stays too."""
    day_s = 86400.0
    ledger, disk, log = _opened(lambda: 20 * day_s)
    for op_id, phase, ended_utc in (("1", "done", 1.0), ("2", "suspended", 1.0), ("3", "lost", 5 * day_s)):
        op = operation(id=op_id).replace(phase=phase, created_utc=ended_utc)
        await ledger.enter(History(op), records.opening(op, ended_utc))
    ledger.close()
    for now_days, known in ((30, {"1", "2", "3"}), (31, {"2", "3"}), (90, {"2", "3"})):
        again = Ledger(FOLDER, log, disk=disk, utc=iter([now_days * day_s]).__next__)
        again.open()
        assert set(again.histories) == known
        assert again.next_id() == "4"
        again.close()


async def test_a_record_that_waited_when_hegmd_stopped_opened_the_journal_again() -> None:
    """The file stayed open, and the operation that was refused by then was in it for the next daemon."""
    ledger, disk, _ = _opened()
    refusals: list[HegmError] = []

    async def enter_late() -> None:
        try:
            await ledger.enter(*_begun(operation(id="2")))
        except HegmError as error:
            refusals.append(error)

    disk.begun, disk.goes_on = Event(), Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.enter, *_begun(operation(id="1")))
        await anyio.to_thread.run_sync(disk.begun.wait, HANG_S)
        tasks.start_soon(enter_late)
        tasks.start_soon(ledger.end)
        await anyio.wait_all_tasks_blocked()
        disk.goes_on.set()
    assert [refusal.message for refusal in refusals] == ["hegmd is stopping"]
    assert _on_disk(disk) == {"1": operation(id="1")}
    assert not disk.open_files


@pytest.mark.thorough
async def test_the_journal_is_made_small_before_an_operation_and_never_grew_beyond_a_bound() -> None:
    """Issue 14, row 17: it grew from 12.5 kB to 1.2 MB in ten minutes, and on up to more than 4 MiB."""
    ledger, disk, _ = _opened()
    sizes: list[int] = []
    for number in range(3 * records.REMEMBERED):
        op = operation(id=str(number))
        await ledger.enter(*_begun(op))
        over = op.replace(phase="done", failure=Failure(code="refused", message="x" * 4000, hint="y"))
        record, _ = records.step(op, events.Begin(), over, (), now=0.0, utc=1.0)
        await ledger.write(History(over), record)
        ledger.forget_oldest()
        sizes.append(len(disk.read(FOLDER / NAME)))
    small = len(records.compacted(ledger.histories.values()))
    assert max(sizes) <= small + QUIET_COMPACT_BYTES + 2 * small // records.REMEMBERED
    assert sizes != sorted(sizes)  # it was made small, and more than once
    ledger.close()
