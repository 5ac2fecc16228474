"""Orders about bytes: how an answer to one continues to what carries them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hegmd.agent.byte_orders import ByteOrders
from hegmd.protocol.agents import Order


class Shown:
    """Five storages that were shown to the daemon."""

    def __init__(self) -> None:
        self.filled: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return 5

    def fill(self, first: int, count: int) -> None:
        self.filled.append((first, count))


@pytest.mark.parametrize(("first", "count", "filled"), [(None, None, (0, 5)), (2, None, (2, 5)), (1, 3, (1, 3))])
def test_the_order_limits_how_many_storages_are_filled(
    first: int | None, count: int | None, filled: tuple[int, int]
) -> None:
    shown, reports = Shown(), list[dict[str, Any]]()
    carrying = SimpleNamespace(shown=lambda _do: shown, held_bytes=7)
    standing: Any = SimpleNamespace(carrying=carrying, require_parked=lambda _do: None)
    answers: Any = SimpleNamespace(done=lambda order, **values: reports.append({"order": order, **values}))
    ByteOrders(standing, answers).table()["filled"](Order(order=4, do="filled", first=first, count=count), None)
    assert shown.filled == [filled]
    assert reports == [{"order": 4, "held_bytes": 7}]
