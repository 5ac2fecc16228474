"""If a test finds no space to write, one sentence reports it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.room import MIB, NEEDED, SHARED_MEMORY, sentence_on, skip_without


def test_a_run_on_a_full_disk_was_a_thousand_errors_without_a_reason(tmp_path: Path) -> None:
    """The folder need not be there yet; the sentence has both figures and the way out."""
    total_bytes = shutil.disk_usage(tmp_path).total
    message = sentence_on(tmp_path / "to" / "be" / "made", total_bytes + MIB)
    assert message is not None
    assert message.startswith(f"{tmp_path} has ")
    assert f"need {(total_bytes + MIB) // MIB} MiB" in message
    assert "TMPDIR=" in message


def test_enough_disk_space_gives_no_message(tmp_path: Path) -> None:
    assert sentence_on(tmp_path, 0) is None


def test_shared_memory_is_made_larger_and_not_elsewhere() -> None:
    message = sentence_on(SHARED_MEMORY, shutil.disk_usage(SHARED_MEMORY).total + MIB)
    assert message is not None
    assert "remount,size=" in message
    assert "TMPDIR" not in message


def test_a_test_that_needs_more_is_skipped_with_the_amount(tmp_path: Path) -> None:
    skip_without(tmp_path, 0)
    with pytest.raises(pytest.skip.Exception, match="MiB free, and this needs"):
        skip_without(tmp_path, shutil.disk_usage(tmp_path).total + MIB)


def test_end_to_end_tests_need_more_space_than_quick_ones() -> None:
    assert NEEDED["end to end"][None] > NEEDED["quick"][None]
