"""A training thread that continues to the head of its loop under a trace, and is parked there."""

from __future__ import annotations

import sys

from hegmd.agent import addresses
from hegmd.agent.state.script.capture_points import CapturePointCheck


def test_a_survey_of_a_job_parked_at_the_head_of_its_loop_unset_its_variables() -> None:
    """A job with --recover that was suspended at the boundary of a snapshot ended with UnboundLocalError when resumed.

    Up to Python 3.12, CPython sets the variables of a traced function from a copy, which the survey had emptied.
    """
    surveyed: list[list[int]] = []
    check = CapturePointCheck(lambda: surveyed.append(addresses.numbers()))

    def train() -> int:
        total, address = 0, 1 << 40
        for step in range(4):
            total += step
            if step == 1:
                check.will_do(sys._getframe())
        return total + address

    assert train() == 6 + (1 << 40)
    assert len(surveyed) == 1
    assert 1 << 40 in surveyed[0]
