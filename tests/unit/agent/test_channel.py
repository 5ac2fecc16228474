"""The agent's connection: how long it waits before it calls again, and what it tells of its environment."""

from __future__ import annotations

import pytest

from hegmd.agent.channel import FIRST_PAUSE_S, LONGEST_PAUSE_S, next_pause_s, periodic_images


def test_daemons_killed_one_after_the_other_left_a_parked_job_standing_for_seconds_more() -> None:
    """Each connection had been of use and did not last, and the next came later and later."""
    assert next_pause_s(LONGEST_PAUSE_S, 0.5, was_of_use=True) == FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("600:3:/images", (600.0, 3, "/images")),
        ("0.5:1:/a:b", (0.5, 1, "/a:b")),
        *((text, None) for text in (None, "", "600:3", "often:3:/images", "600:three:/images")),
    ],
)
def test_a_wish_for_images_that_cannot_be_read_is_none(text: str | None, wish: tuple[float, int, str] | None) -> None:
    read = periodic_images(text)
    assert wish == (None if read is None else (read.every_s, read.keep, read.path))


def test_where_nobody_listens_it_calls_less_and_less_often() -> None:
    pauses_s = [FIRST_PAUSE_S]
    while pauses_s[-1] < LONGEST_PAUSE_S:
        pauses_s.append(next_pause_s(pauses_s[-1], 0.0, was_of_use=False))
    assert pauses_s == sorted(set(pauses_s))
    assert len(pauses_s) > 4
    assert next_pause_s(LONGEST_PAUSE_S, 0.0, was_of_use=False) == LONGEST_PAUSE_S
    assert next_pause_s(LONGEST_PAUSE_S, LONGEST_PAUSE_S + 1, was_of_use=False) == FIRST_PAUSE_S
