"""The agent packs the places of its storages for a message, and no information is lost."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.agent.answers import ReportSender
from hegmd.agent.ipc_storages import View
from hegmd.agent.quiesce import Gate
from hegmd.agent.torch_state import LapTimer
from hegmd.errors import BAD_REQUEST, HegmError
from hegmd.protocol.agents import AgentReport, Order, packed, unpacked

SPOTS = [(0, 0, 700), (0, 1024, 5 << 30), (2, (1 << 64) - 1, 1)]


class Three:
    """The attributes of exported storages that the answer needs."""

    size_bytes = 701 + (5 << 30)
    short_bytes = 0
    laps = LapTimer()

    def __len__(self) -> int:
        return len(SPOTS)


def answered(order: Order) -> AgentReport:
    reports: list[AgentReport] = []
    answers, view = ReportSender(Gate()), View(0, 0, 0)
    answers.send = reports.append
    view.handles, view.spots = [b"h" * 64] * 3, list(SPOTS)
    shown: Any = Three()
    answers.view(order, shown, view)
    (report,) = reports
    return report


def test_an_agent_took_longer_to_write_positions_than_to_copy_the_bytes() -> None:
    """A training has a thousand tensors, and an agent's msgpack is in Python."""
    report = answered(Order(order=1, do="export"))
    assert report.places is not None
    assert len(report.places) == 24 * len(SPOTS)
    assert unpacked(report.places) == SPOTS


def test_an_incomplete_place_is_refused() -> None:
    with pytest.raises(HegmError, match="23 bytes are no whole places of 24") as refused:
        unpacked(packed(SPOTS)[:23])
    assert refused.value.code is BAD_REQUEST
