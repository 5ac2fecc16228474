"""The facts of a process that methods and carriers get from its operation."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.migration.machine.operation import CHECKPOINT, HOLD, ImageRequest
from hegmd.migration.run.participants import Participants
from hegmd.workers.workers import Workers
from tests.unit.migration.operations import operation, worker


@pytest.mark.parametrize(
    ("about", "goes_on"),
    [
        ({}, True),
        ({"is_distributed": True}, False),
        ({"direction": HOLD}, False),
        ({"kind": CHECKPOINT, "image": ImageRequest(path="/image", uid=1, gid=1, leave_running=True)}, False),
    ],
)
def test_a_process_that_waits_for_others_or_an_image_does_not_count_as_resuming_at_once(
    about: dict[str, Any], goes_on: bool
) -> None:
    """Otherwise other resources would stay held for the duration of these steps."""
    op = operation(worker(), **about)
    cast = Participants(Workers(lambda _: None), {}, {}, start_ticks=lambda _: None, imager=None)
    assert cast.subject(op, op.workers[0]).goes_on is goes_on


@pytest.mark.parametrize("stays_bytes", [None, 0, 600])
def test_an_unknown_amount_that_stays_is_not_reported_as_zero(stays_bytes: int | None) -> None:
    op = operation(worker().replace(stays_bytes=stays_bytes))
    cast = Participants(Workers(lambda _: None), {}, {}, start_ticks=lambda _: None, imager=None)
    assert cast.subject(op, op.workers[0]).stays_bytes == stays_bytes
