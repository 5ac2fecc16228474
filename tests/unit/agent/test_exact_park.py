"""Ranks have to park at the same boundary: an order that arrives too late for it parks no rank, and a later one moves
parked ranks on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hegmd.agent.orders import Orders
from hegmd.agent.quiesce import Gate
from hegmd.protocol.messages import AgentReport, Order
from tests.patience import HANG_S

PATIENCE_S = HANG_S


class _Rank:
    """A training thread that passes a boundary whenever it is let, and the orders to it with what came of them."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.reports: list[AgentReport] = []
        self.orders = Orders(self.gate)
        self.orders.begin(self.reports.append)
        self.passed = threading.Semaphore(0)
        self.news = threading.Semaphore(0)
        self.gate.on_change = self.news.release
        self._may_pass = threading.Semaphore(0)
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._may_pass.acquire() and not self._over:
            self.gate.explicit_boundary()
            self.passed.release()

    def let_pass(self, times: int = 1) -> None:
        for _ in range(times):
            self._may_pass.release()

    def wait_until_passed(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.passed.acquire(timeout=PATIENCE_S)

    def wait_until_parked(self) -> int:
        """Return the boundary at which it is parked."""
        assert self.news.acquire(timeout=PATIENCE_S)
        assert self.gate.parked
        return self.gate.count

    def park(self, number: int, at: int) -> None:
        self.orders.obey(Order(order=number, do="park", at=at, exact=True, limit_s=PATIENCE_S), None)

    def results(self) -> list[tuple[int, str, int | None]]:
        return [(report.order, report.result, report.boundary) for report in self.reports]

    def end(self) -> None:
        self._over = True
        self.gate.withdraw()
        self.let_pass()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def rank() -> Iterator[_Rank]:
    made = _Rank()
    yield made
    made.end()


def test_the_boundaries_are_counted_without_the_training_thread(rank: _Rank) -> None:
    """A batch may take minutes: a listing of jobs gets the count immediately."""
    rank.let_pass(2)
    rank.wait_until_passed(2)
    rank.orders.obey(Order(order=7, do="count"), None)
    assert rank.results() == [(7, "done", 2)]
    assert not rank.gate.requested


def test_an_order_too_late_for_its_boundary_parks_no_rank(rank: _Rank) -> None:
    rank.let_pass(3)
    rank.wait_until_passed(3)
    rank.park(1, at=3)
    assert rank.results() == [(1, "failed", 3)]
    rank.let_pass()
    rank.wait_until_passed()


def test_an_order_in_time_stops_at_just_that_boundary(rank: _Rank) -> None:
    rank.park(1, at=3)
    rank.let_pass(3)
    assert rank.wait_until_parked() == 3
    assert rank.results() == []


def test_a_parked_thread_continues_to_a_later_boundary(rank: _Rank) -> None:
    rank.park(1, at=1)
    rank.let_pass()
    assert rank.wait_until_parked() == 1
    rank.park(2, at=3)
    rank.let_pass(2)
    assert rank.wait_until_parked() == 3
    assert rank.results() == [(1, "failed", 1)]


@pytest.mark.parametrize("question", ["survey", "weigh"])
def test_a_process_that_was_stopped_refused_to_park_because_it_had_yet_to_answer(rank: _Rank, question: str) -> None:
    """The daemon's request had timed out, and the move was rolled back."""
    rank.orders.obey(Order(order=1, do=question), None)
    rank.park(2, at=1)
    rank.let_pass()
    assert rank.wait_until_parked() == 1
    assert rank.results() == [(1, "failed", 0)]


def test_a_later_boundary_replaces_the_awaited_one(rank: _Rank) -> None:
    rank.let_pass()
    rank.wait_until_passed()
    rank.park(1, at=2)
    rank.park(2, at=4)
    assert rank.results() == [(1, "failed", 1)]
    rank.let_pass(3)
    assert rank.wait_until_parked() == 4
