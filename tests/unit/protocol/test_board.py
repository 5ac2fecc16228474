"""The board: what is recorded of a rank is read back whole or not at all."""

from __future__ import annotations

import pytest

from hegmd.protocol.board import MAX_RECORD_BYTES, Board, board_bytes


def test_the_last_two_steps_of_each_rank_are_known() -> None:
    board = Board(bytearray(board_bytes(2)), 2)
    for step in range(4):
        board.write(1, step, b"state %d" % step)
    assert [board.read(1, step) for step in range(5)] == [None, None, b"state 2", b"state 3", None]
    assert board.read(0, 3) is None
    board.stamp(1, 4.5, 60.0, 3)
    assert board.progress(1) == (4.5, 60.0, 3)
    assert board.progress(0) == (0.0, 0.0, 0)
    board.clear()
    assert board.read(1, 3) is None


def test_a_record_that_was_being_written_does_not_count() -> None:
    memory = bytearray(board_bytes(1))
    board = Board(memory, 1)
    board.write(0, 6, b"whole")
    memory[memory.index(b"whole")] ^= 1
    assert board.read(0, 6) is None


def test_a_record_that_is_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match=f"{MAX_RECORD_BYTES + 1} bytes"):
        Board(bytearray(board_bytes(1)), 1).write(0, 0, bytes(MAX_RECORD_BYTES + 1))


def test_the_largest_records_of_two_ranks_do_not_overlap() -> None:
    memory = bytearray(board_bytes(2))
    board = Board(memory, 2)
    largest = [bytes([number]) * MAX_RECORD_BYTES for number in range(4)]
    for number, data in enumerate(largest):
        board.write(number // 2, number, data)
    for rank in range(2):
        board.stamp(rank, 1.0, 2.0, 3)
    assert [board.read(number // 2, number) for number in range(4)] == largest
    assert len(memory) == board_bytes(2)
