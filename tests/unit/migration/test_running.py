"""The order in which effects are performed, and the connection that orders go over, without performing any."""

from __future__ import annotations

import pytest

from hegmd.migration.effects import Effect, Evacuate, GivePool, GiveRoom, Park, TakePool, TakeRoom, Withdraw
from hegmd.migration.journal import History
from hegmd.migration.running import Errand, Running
from tests.unit.migration.operations import operation

TAKE = TakePool(number=1, worker="a", cause=1, size_bytes=5)
ROOM = TakeRoom(number=1, worker="a", cause=1, gpu="gpu1", size_bytes=5)
PARK = Park(number=1, worker="a", cause=1, at=None, limit_s=5.0)
EVACUATE = Evacuate(number=1, worker="a", cause=1)


@pytest.mark.parametrize(
    ("earlier", "later", "waits"),
    [
        (TAKE, GivePool(number=2, worker="a", cause=1), True),
        (TAKE, GivePool(number=2, worker="b", cause=1), False),
        (TAKE, TakeRoom(number=2, worker="a", cause=1, gpu="gpu1", size_bytes=5), False),
        (ROOM, GiveRoom(number=2, worker="a", cause=1, gpu="gpu1"), True),
        (ROOM, GiveRoom(number=2, worker="a", cause=1, gpu="gpu0"), False),
        (TAKE, EVACUATE.replace(number=2), False),
        (PARK, Withdraw(number=2, worker="a", cause=1), False),
        (PARK.replace(number=3), Withdraw(number=2, worker="a", cause=1), False),
    ],
)
async def test_who_waits_for_whom(earlier: Effect, later: Effect, waits: bool) -> None:
    assert Errand(earlier, None).holds_up(later) is waits


async def test_an_order_waits_until_one_that_was_dropped_is_out_of_the_way() -> None:
    errand = Errand(PARK, None)
    errand.scope.cancel()
    assert errand.holds_up(Withdraw(number=2, worker="a", cause=1))


async def test_old_news_of_a_connection_do_not_take_the_place_of_newer() -> None:
    running = Running(History(operation()))
    for connection in (1, 3, 2, None):
        running.note_connection("a", connection)
    assert running.start(EVACUATE).heard == 3
    running.note_connection("a", 4)
    assert running.performing[1].heard == 3, "an order that was decided upon before went over a later connection"
    assert running.start(EVACUATE.replace(number=2, worker="b")).heard is None
