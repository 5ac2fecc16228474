"""The journal: what is written is what is read, wherever the writing was cut off, and nothing else ever is."""

from __future__ import annotations

import zlib
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.migration.journal import records as journal_records
from hegmd.migration.machine import events
from hegmd.migration.machine.operation import Operation
from hegmd.protocol import codec
from tests.cells import in_one_test
from tests.unit.migration.operations import DrivenOperation, operation, worker


class Book:
    """A journal of some lives, with the end of each record and the operations as they were there."""

    def __init__(self) -> None:
        self.data = journal_records.MAGIC
        self.ends: list[tuple[int, dict[str, Operation]]] = [(0, {}), (len(self.data), {})]
        self.operations: dict[str, Operation] = {}

    def begin(self, op: Operation) -> None:
        self._write(journal_records.opening(op, 1.0), op)

    def follow(self, drive: DrivenOperation) -> None:
        for before, event, after, wanted in drive.taken:
            record, _ = journal_records.step(before, event, after, wanted, now=drive.now, utc=2.0)
            self._write(record, after)

    def _write(self, record: bytes, op: Operation) -> None:
        self.data += record
        self.operations = {**self.operations, op.id: op}
        self.ends.append((len(self.data), self.operations))

    def at(self, length: int) -> tuple[int, dict[str, Operation]]:
        return max((end for end in self.ends if end[0] <= length), key=lambda end: end[0])


def _book() -> Book:
    book = Book()
    done = DrivenOperation(operation(worker("a"), worker("b"))).until("done")
    book.begin(done.taken[0][0])
    book.follow(done)
    turned = DrivenOperation(operation(id="op2")).until("checkpointing")
    turned.feed(events.CancelRequested(by="ada"))
    book.begin(turned.taken[0][0])
    book.follow(turned)
    return book


BOOK = _book()


def _operations(reading: journal_records.Reading) -> dict[str, Operation]:
    return {op: history.operation for op, history in reading.histories.items()}


def test_written_records_are_read() -> None:
    reading = journal_records.read(BOOK.data)
    assert _operations(reading) == BOOK.operations
    assert (reading.sound_bytes, reading.torn) == (len(BOOK.data), False)


def test_an_empty_file_is_an_empty_journal() -> None:
    assert journal_records.read(b"") == journal_records.Reading({}, 0, torn=False)


def _see_what_is_read_of(book: Book, length: int) -> None:
    reading = journal_records.read(book.data[:length])
    sound, operations = book.at(length)
    assert (reading.sound_bytes, reading.torn) == (sound, sound != length)
    assert _operations(reading) == operations


@pytest.mark.thorough
def test_a_journal_truncated_anywhere_is_read_up_to_the_last_whole_record() -> None:
    """At every byte of a journal of a few records: what a record means does not depend on how many are before it."""
    book = Book()
    refused = DrivenOperation(operation()).until("reserving")
    refused.feed(events.CancelRequested(by="ada"))
    book.begin(refused.taken[0][0])
    book.follow(refused)
    for length in range(len(book.data)):
        _see_what_is_read_of(book, length)


@pytest.mark.thorough
def test_a_truncated_long_journal_is_read_up_to_the_last_whole_record() -> None:
    """At the ends of all its records and beside them, and at a sample of what is between."""
    ends = {end + beside for end, _ in BOOK.ends for beside in (-1, 0, 1)} & set(range(len(BOOK.data)))
    for length in sorted(ends | set(range(0, len(BOOK.data), 61))):
        _see_what_is_read_of(BOOK, length)


@pytest.mark.thorough
def test_a_record_that_zeros_continue_was_not_written_to_its_end() -> None:
    random = Random(1)
    for length in random.sample(range(len(BOOK.data)), 300):
        reading = journal_records.read(BOOK.data[:length] + bytes(random.randrange(1, 5000)))
        sound, operations = BOOK.at(length)
        assert reading.sound_bytes == sound
        assert _operations(reading) == operations


def test_a_writer_continues_after_the_last_valid_record() -> None:
    sound = journal_records.read(BOOK.data[:-5]).sound_bytes
    op = operation(id="op3")
    reading = journal_records.read(BOOK.data[:sound] + journal_records.opening(op, 3.0))
    assert _operations(reading)["op3"] == op


@pytest.mark.thorough
@in_one_test("place", Random(2).sample(range(len(BOOK.data)), 400))
def test_a_flipped_bit_is_refused_or_is_in_the_unfinished_end(place: int) -> None:
    flipped = bytearray(BOOK.data)
    flipped[place] ^= 1 << place % 8
    with pytest.raises(journal_records.JournalBroken) as broken:
        journal_records.read(bytes(flipped))
    assert "damaged at byte" in broken.value.message
    assert broken.value.hint


def test_a_flipped_bit_in_a_length_does_not_drop_later_records() -> None:
    flipped = bytearray(BOOK.data)
    flipped[len(journal_records.MAGIC)] ^= 0x40
    with pytest.raises(journal_records.JournalBroken, match="the header of a record does not match its checksum"):
        journal_records.read(bytes(flipped))


@pytest.mark.thorough
@given(st.binary(max_size=200))
def test_anything_behind_a_sound_journal_is_an_unfinished_end_or_refused(rest: bytes) -> None:
    try:
        reading = journal_records.read(BOOK.data + rest)
    except journal_records.JournalBroken:
        return
    assert _operations(reading) == BOOK.operations


@pytest.mark.parametrize("other", [b"PK\x03\x04 something", b"HEGMOP", b"{}", b"HEGMOPS\x00rest"])
def test_another_file_is_refused_as_a_journal(other: bytes) -> None:
    if journal_records.MAGIC.startswith(other):
        assert journal_records.read(other).torn
        return
    with pytest.raises(journal_records.JournalBroken, match="not those of a journal"):
        journal_records.read(other)


def test_a_newer_journal_is_reported_as_newer() -> None:
    newer = b"HEGMOPS" + bytes([journal_records.VERSION + 1]) + BOOK.data[len(journal_records.MAGIC) :]
    with pytest.raises(
        journal_records.JournalTooNew, match="has version 3; this hegmd reads versions up to"
    ) as refused:
        journal_records.read(newer)
    assert "damaged" not in refused.value.message
    assert (
        "install the newer hegmd that wrote it again, and let its operations end before you go back"
        in refused.value.hint
    )


def test_an_older_journal_is_refused_and_kept() -> None:
    older = b"HEGMOPS" + bytes([journal_records.VERSION - 1]) + BOOK.data[len(journal_records.MAGIC) :]
    with pytest.raises(journal_records.JournalTooOld, match="has version 1; this hegmd reads version 2") as refused:
        journal_records.read(older)
    assert "damaged" not in refused.value.message
    assert "start the earlier hegmd again" in refused.value.hint


def _records() -> list[bytes]:
    ends = [end for end, _ in BOOK.ends[1:]]
    return [BOOK.data[start:end] for start, end in pairwise(ends)]


def test_a_missing_record_is_detected() -> None:
    records = _records()
    del records[4]
    with pytest.raises(journal_records.JournalBroken, match="follows event"):
        journal_records.read(journal_records.MAGIC + b"".join(records))


def test_a_duplicate_record_is_detected() -> None:
    records = _records()
    with pytest.raises(journal_records.JournalBroken, match="follows event"):
        journal_records.read(journal_records.MAGIC + b"".join([*records[:5], records[4], *records[5:]]))


def test_an_event_of_an_operation_that_never_began_is_detected() -> None:
    with pytest.raises(journal_records.JournalBroken, match="never began"):
        journal_records.read(journal_records.MAGIC + b"".join(_records()[1:]))


def test_values_that_fit_no_operation_are_refused_though_their_checksum_fits() -> None:
    entry: dict[str, Any] = journal_records.Entry(
        op="op9", seq=0, whole=True, values={"id": "op9"}, story=()
    ).to_plain()
    payload = codec.encode(entry)
    head = len(payload).to_bytes(4, "big") + zlib.crc32(payload).to_bytes(4, "big")
    record = head + zlib.crc32(head).to_bytes(4, "big") + payload + b"\xe5"
    with pytest.raises(journal_records.JournalBroken, match="is missing"):
        journal_records.read(journal_records.MAGIC + record)


def test_compaction_keeps_operations_and_their_stories() -> None:
    reading = journal_records.read(BOOK.data)
    small = journal_records.compacted(reading.histories.values())
    assert len(small) < len(BOOK.data)
    again = journal_records.read(small)
    assert again.histories == reading.histories


def test_events_continue_after_a_compaction() -> None:
    drive = DrivenOperation(operation()).until("offloading")
    small = journal_records.compacted([journal_records.History(drive.op)])
    before = drive.op
    wanted = drive.end()
    event = drive.taken[-1][1]
    record, line = journal_records.step(before, event, drive.op, wanted, now=1.0, utc=2.0)
    history = journal_records.read(small + record).histories["op1"]
    assert history.operation == drive.op
    assert history.story == (line,)


def test_compaction_forgets_the_oldest_ended_operations_only() -> None:
    done = DrivenOperation(operation()).until("done").op
    over = [journal_records.History(done.replace(id=f"op{number}")) for number in range(journal_records.REMEMBERED + 5)]
    running = journal_records.History(operation(id="running"))
    kept = journal_records.read(journal_records.compacted([running, *over])).histories
    assert "running" in kept
    assert len(kept) == journal_records.REMEMBERED + 1
    assert "op4" not in kept
    assert "op5" in kept


def test_a_story_has_a_line_for_each_event_and_a_bound() -> None:
    story = journal_records.read(BOOK.data).histories["op2"].story
    assert [line.event for line in story][:3] == ["", "begin", "reserved"]
    assert story[-1].event == "cancel-requested"
    assert "ada" in story[-1].detail
    history = journal_records.History(operation())
    line = journal_records.Line(utc=1.0, event="inspected", phase="settling")
    for _ in range(journal_records.STORY_LINES + 7):
        history = history.after(history.operation, line)
    assert (len(history.story), history.untold) == (journal_records.STORY_LINES, 7)
