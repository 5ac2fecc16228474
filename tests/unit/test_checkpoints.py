"""What is said of files when a job is not brought back."""

from __future__ import annotations

from hegmd.checkpoints import to_cut_back
from hegmd.protocol.operations import Reason
from hegmd.reviving import Grown

LONGER = Grown("/log", 3, Reason(code="refused", message="/log has 5 bytes and had 3", hint="cut it back"))
TAKEN = Reason(code="refused", message="the job had the number 7, which process 7 has", hint="end that one")


def test_files_were_cut_back_for_a_restore_that_was_refused_all_the_same() -> None:
    """The job still ran: it lost its log, and nothing was restored."""
    assert to_cut_back([LONGER.reason, TAKEN], [LONGER]) == ()
    assert to_cut_back([TAKEN], [LONGER]) == ()


def test_files_are_named_where_cutting_them_back_is_all_that_is_needed() -> None:
    assert to_cut_back([LONGER.reason], [LONGER]) == [LONGER]
