"""A journal that an older hegmd wrote: read, continued with, and never misread when it is damaged.

`journals/v2.journal` is a recording; it is never written again. `make bench-chaos` flips each bit of each byte; here
the test flips all of the beginning, and a part of the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hegmd.migration.journal import records
from hegmd.migration.journal.file import NAME, JournalFile
from hegmd.migration.machine import events
from hegmd.migration.machine.machine import TERMINAL, handle
from hegmd.migration.machine.operation import Operation
from tests.simulation.damage import SAMPLE, cut, flip_bits, record_ends

DATA = SAMPLE.read_bytes()
TOLD: dict[str, Any] = json.loads(SAMPLE.with_suffix(".json").read_text())
ENDS = record_ends(DATA)
# The record of a whole operation and some of events: small enough for everything to be tried.
BEGINNING = DATA[: ENDS[5]]


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_every_flipped_bit_in_the_beginning_is_refused(part: int) -> None:
    places = range(part * len(BEGINNING) // 4, (part + 1) * len(BEGINNING) // 4)
    assert list(flip_bits(BEGINNING, places)) == []


@pytest.mark.thorough
def test_a_flipped_bit_anywhere_is_refused() -> None:
    assert list(flip_bits(DATA, range(len(BEGINNING), len(DATA), 11), bits=[3])) == []


@pytest.mark.thorough
@pytest.mark.parametrize("tail", [b"", bytes(1), bytes(700)], ids=["cut", "one zero", "zeros"])
def test_a_journal_that_ends_anywhere_is_read_up_to_its_last_whole_record(tail: bytes) -> None:
    assert list(cut(BEGINNING, range(len(BEGINNING) + (not tail)), tail)) == []
    assert list(cut(DATA, range(len(BEGINNING), len(DATA), 31), tail)) == []


def test_a_block_of_the_disk_that_was_lost_is_refused() -> None:
    """All but the last block, which looks like one that was never written."""
    for start in range(0, len(DATA) - 1024, 512):
        with pytest.raises(records.JournalBroken):
            records.read(DATA[:start] + bytes(512) + DATA[start + 512 :])


def test_two_blocks_of_the_disk_that_changed_places_are_refused() -> None:
    for start in range(0, len(DATA) - 1024, 512):
        first, second = DATA[start : start + 512], DATA[start + 512 : start + 1024]
        with pytest.raises(records.JournalBroken):
            records.read(DATA[:start] + second + first + DATA[start + 1024 :])


def test_damage_that_is_read_is_reported() -> None:
    wrong = bytearray(BEGINNING)
    assert list(flip_bits(bytes(wrong) + bytes(40), [len(wrong) + 20], bits=[])) == []
    assert list(cut(BEGINNING, [len(BEGINNING)], tail=b"")) == []
    assert list(cut(BEGINNING, [ENDS[3]], tail=BEGINNING[ENDS[3] : ENDS[4]])) != []


@pytest.mark.parametrize("op_id", TOLD)
def test_records_of_an_older_hegmd_are_read_correctly(op_id: str) -> None:
    history = records.read(DATA).histories[op_id]
    found: dict[str, Any] = history.operation.to_plain()
    meant = dict(TOLD[op_id]["operation"])  # later records do not fit in it
    for worker, meant_worker in zip(found["workers"], meant.pop("workers"), strict=True):
        assert {name: worker[name] for name in meant_worker} == meant_worker
    for pending, meant_pending in zip(found["pending"], meant.pop("pending"), strict=True):
        assert {name: pending[name] for name in meant_pending} == meant_pending
    meant_limits = meant.pop("limits")
    assert {name: found["limits"][name] for name in meant_limits} == meant_limits
    assert {name: found[name] for name in meant} == meant
    assert [line.event for line in history.story] == TOLD[op_id]["events"]


def test_operations_of_an_older_hegmd_are_continued(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    gone_on: dict[str, Operation] = {}
    with JournalFile(tmp_path) as file:
        histories = dict(file.open().histories)
        assert set(histories) == set(TOLD)
        for op_id, history in histories.items():
            before = history.operation
            if before.phase in TERMINAL:
                gone_on[op_id] = before
                continue
            event = events.Recovered()
            gone_on[op_id], wanted = handle(before, event, 5.0)
            assert {effect.tag for effect in wanted} == {"inspect"}
            file.append(records.step(before, event, gone_on[op_id], wanted, now=5.0, utc=6.0)[0], ())
    read = records.read((tmp_path / NAME).read_bytes()).histories
    assert {op_id: history.operation for op_id, history in read.items()} == gone_on
    assert [line.event for line in read["2"].story] == [*TOLD["2"]["events"], "recovered"]


def test_a_journal_with_a_field_of_a_later_release_is_accepted() -> None:
    """An older hegmd after a newer one, of the same format, reads what it knows."""
    history = records.read(DATA).histories["2"]
    plain = {**history.operation.to_plain(), "colour": "green"}
    assert Operation.from_plain(plain, "journal") == history.operation


def test_a_journal_of_a_newer_format_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    newer = DATA[: len(records.MAGIC) - 1] + bytes([records.VERSION + 1]) + DATA[len(records.MAGIC) :]
    (tmp_path / NAME).write_bytes(newer)
    with (
        JournalFile(tmp_path) as file,
        pytest.raises(records.JournalBroken, match=r"the journal of operations .*operations\.journal has version"),
    ):
        file.open()
    assert (tmp_path / NAME).read_bytes() == newer
