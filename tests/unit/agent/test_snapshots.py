"""A snapshot waits for its boundary and never holds anybody up: any other order comes first."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hegmd.protocol.messages import Order
from tests.unit.agent.test_exact_park import _Rank


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Rank]:
    monkeypatch.setenv("HEGM_ALLOW_RESTART", "1")
    made = _Rank()
    yield made
    made.end()


def _snapshot(rank: _Rank, number: int, *, at: int | None = None, exact: bool = False) -> None:
    slot = os.memfd_create("slot")
    os.truncate(slot, 1 << 20)
    rank.orders.obey(Order(order=number, do="snapshot", generation=1, limit_s=60.0, at=at, exact=exact), slot)


def test_another_order_ends_a_snapshot_that_waits_for_its_boundary(rank: _Rank) -> None:
    _snapshot(rank, 1)
    rank.park(2, at=1)
    assert [(report.order, report.result) for report in rank.reports] == [(1, "failed")]
    assert "another order came first" in rank.reports[0].message
    rank.let_pass()
    assert rank.wait_until_parked() == 1


def test_a_count_is_answered_beside_it_and_a_later_snapshot_takes_its_place(rank: _Rank) -> None:
    _snapshot(rank, 1)
    rank.orders.obey(Order(order=2, do="count"), None)
    _snapshot(rank, 3)
    assert [(report.order, report.result) for report in rank.reports] == [(2, "done"), (1, "failed")]
    rank.orders.end()


def test_one_for_a_boundary_that_was_passed_fails_at_once_and_parks_nobody(rank: _Rank) -> None:
    rank.let_pass(3)
    rank.wait_until_passed(3)
    _snapshot(rank, 1, at=2, exact=True)
    assert [(report.order, report.result, report.boundary) for report in rank.reports] == [(1, "failed", 3)]
    rank.let_pass()
    rank.wait_until_passed()


def test_a_daemon_that_ends_meanwhile_leaves_no_parked_training(rank: _Rank) -> None:
    _snapshot(rank, 1)
    rank.orders.end()
    rank.let_pass(2)
    rank.wait_until_passed(2)
    assert not rank.gate.requested
