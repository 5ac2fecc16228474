"""How long the agent waits before it calls again."""

from __future__ import annotations

from hegmd.agent.channel import FIRST_PAUSE_S, LONGEST_PAUSE_S, next_pause_s


def test_daemons_killed_one_after_the_other_left_a_parked_job_standing_for_seconds_more() -> None:
    """Each connection had been of use and did not last, and the next came later and later."""
    assert next_pause_s(LONGEST_PAUSE_S, 0.5, was_of_use=True) == FIRST_PAUSE_S


def test_where_nobody_listens_it_calls_less_and_less_often() -> None:
    pauses_s = [FIRST_PAUSE_S]
    while pauses_s[-1] < LONGEST_PAUSE_S:
        pauses_s.append(next_pause_s(pauses_s[-1], 0.0, was_of_use=False))
    assert pauses_s == sorted(set(pauses_s))
    assert len(pauses_s) > 4
    assert next_pause_s(LONGEST_PAUSE_S, 0.0, was_of_use=False) == LONGEST_PAUSE_S
    assert next_pause_s(LONGEST_PAUSE_S, LONGEST_PAUSE_S + 1, was_of_use=False) == FIRST_PAUSE_S
