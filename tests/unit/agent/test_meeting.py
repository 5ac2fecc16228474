"""Ranks that count their boundaries differently stop at one place: a parked one continues if another waits for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from hegmd.agent.meeting import _MAX_ROUNDS, Meeting, ranks_awaited
from hegmd.agent.rank_agreement import Ranks, require_server
from tests.patience import HANG_S

Group = tuple[int, int, list[tuple[int, int]], list[tuple[int, int]]]


class Store:
    """The store of a job."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]


class Met:
    """Two ranks that meet; the test sets how far each is."""

    def __init__(self) -> None:
        self.collectives = [4, 4]
        self._news = threading.Condition()
        store = Store()
        self.ranks = [
            Meeting(9, partial(Ranks, store, rank, 2), partial(self._positions, rank), self._note).start(0)
            for rank in range(2)
        ]

    def _positions(self, rank: int) -> dict[str, list[Any]]:
        return {"world": [rank, self.collectives[rank], [], []]}

    def _note(self) -> None:
        with self._news:
            self._news.notify_all()

    def expect(self, rank: int, *facts: str) -> str:
        """Wait until one of these is so of the rank, and return it."""
        with self._news:
            found = self._news.wait_for(lambda: [fact for fact in facts if getattr(self.ranks[rank], fact)], HANG_S)
        assert found, facts
        return found[0]


@pytest.fixture
def met() -> Iterator[Met]:
    made = Met()
    yield made
    for one in made.ranks:
        one.end()


def test_a_stage_without_a_loader_made_its_pipeline_wait_until_the_limit(met: Met) -> None:
    """Rank 0 was parked before a step in which rank 1 was already: neither reached the boundary of the other's
    count.
    """
    met.collectives[1] = 5
    met.ranks[0].park()
    met.expect(0, "is_awaited")
    met.expect(1, "is_uncounted")
    met.ranks[0].go_on()
    assert not met.ranks[0].is_awaited
    met.collectives[0] = 5
    met.ranks[0].park()
    met.ranks[1].park()
    for rank in range(2):
        met.expect(rank, "has_met")


def test_ranks_whose_collectives_always_differ_meet_all_the_same(met: Met) -> None:
    """A rank continues some times because a parked one is ahead, and no longer: their numbers are no measure then."""
    met.collectives[1] = 5
    met.ranks[1].park()
    rounds = 0
    met.ranks[0].park()
    while met.expect(0, "has_met", "is_awaited") == "is_awaited":
        rounds += 1  # more than three if rank 0 is judged before it is known that rank 1 is parked
        met.ranks[0].go_on()
        met.ranks[0].park()
    met.expect(1, "has_met")
    assert rounds >= 3


def test_ranks_that_wait_for_each_other_at_each_boundary_were_parked_until_the_limit(met: Met) -> None:
    """Each had received for its next step what the other sends in that step. A suspend failed after a minute."""
    met.collectives[1] = 5
    for _ in range(_MAX_ROUNDS):
        assert not met.ranks[0].never_meets
        met.ranks[0].park()
        met.expect(0, "is_awaited")
        met.ranks[0].go_on()
    met.expect(0, "never_meets")


def test_a_rank_is_awaited_for_a_message_also_by_a_parked_one() -> None:
    stages: list[Group] = [(0, 2, [(1, 3)], []), (1, 2, [], [(0, 2)])]
    statements = [{"parked": True, "unmatched": True, "groups": {"": one}} for one in stages]
    assert ranks_awaited(statements) == {1: False}
    statements[1]["groups"] = {"": (1, 2, [], [(0, 3)])}
    assert ranks_awaited(statements) == {}


def test_a_stores_server_that_did_not_answer_stopped_the_agent_for_its_timeout() -> None:
    """The agent's own thread made the connection. Now the rank has not met while it is made, and then parks alone."""
    is_tried, has_answered, has_news = threading.Event(), threading.Event(), threading.Event()

    def ranks() -> Ranks:
        is_tried.set()
        assert has_answered.wait(HANG_S)
        raise ConnectionResetError

    meeting = Meeting(9, ranks, dict, has_news.set).start(0)
    assert is_tried.wait(HANG_S)
    meeting.park()
    assert not meeting.has_met
    has_answered.set()
    assert has_news.wait(HANG_S)
    assert meeting.has_met


def test_a_stores_server_that_had_ended_was_tried_for_its_timeout() -> None:
    """The ranks of a killed launcher took 46 s to find that they cannot meet, and an operation got no answer."""

    class Server:
        host, port = "127.0.0.1", 0

    class Prefixed:
        underlying_store = Server()

    with socket.create_server((Server.host, 0)) as listening:
        Server.port = listening.getsockname()[1]
        require_server(Prefixed())
    with pytest.raises(ConnectionRefusedError):
        require_server(Prefixed())
