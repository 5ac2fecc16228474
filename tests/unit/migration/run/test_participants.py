"""What the methods and carriers are told of a process, as its operation knows it."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.migration.machine.operation import CHECKPOINT, HOLD, Handoff
from hegmd.migration.run.participants import Cast
from hegmd.workers.workers import Workers
from tests.unit.migration.operations import operation, worker


@pytest.mark.parametrize(
    ("about", "goes_on"),
    [
        ({}, True),
        ({"lockstep": True}, False),
        ({"heading": HOLD}, False),
        ({"kind": CHECKPOINT, "handoff": Handoff(path="/image", uid=1, gid=1, leave_running=True)}, False),
    ],
)
def test_one_that_waits_for_others_or_for_an_image_is_not_told_of_as_going_on_at_once(
    about: dict[str, Any], goes_on: bool
) -> None:
    """What is held beside it until it goes on would be held for as long as they take."""
    op = operation(worker(), **about)
    cast = Cast(Workers(lambda _: None), {}, {}, start_ticks=lambda _: None, imager=None)
    assert cast.subject(op, op.workers[0]).goes_on is goes_on
