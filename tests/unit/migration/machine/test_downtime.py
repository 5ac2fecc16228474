"""The downtime of a job, from the events of its operation."""

from __future__ import annotations

from hegmd.migration.machine import events
from hegmd.migration.machine.downtime import timed
from tests.unit.migration.operations import operation, worker


def test_downtime_counts_from_the_first_parked_thread_until_all_continue() -> None:
    op = operation(worker("a", is_parked=True), worker("b"))
    op = timed(events.Parked(effect=1, worker="a", boundary=4), op, 10.0)
    op = timed(events.Parked(effect=2, worker="b", boundary=4), op, 11.0)
    assert (op.parked_since, op.downtime_s) == (10.0, None)
    op = timed(events.Released(effect=3, worker="b"), op, 12.0)
    assert (op.parked_since, op.downtime_s) == (10.0, 2.0)
    op = op.replace(workers=tuple([one.replace(is_parked=False) for one in op.workers]))
    op = timed(events.Released(effect=4, worker="a"), op, 12.5)
    assert (op.parked_since, op.downtime_s) == (None, 2.5)


def test_an_instant_from_before_a_reboot_is_ignored() -> None:
    op = operation(parked_since=1e6)
    op = timed(events.Released(effect=3, worker="a"), op, 12.0)
    assert (op.parked_since, op.downtime_s) == (None, None)


def test_the_time_of_a_suspension_is_not_counted() -> None:
    op = operation(parked_since=10.0)
    op = timed(events.ResumeRequested(to={}), op, 500.0)
    assert timed(events.Released(effect=3, worker="a"), op, 501.0).downtime_s == 1.0


def test_an_operation_that_ended_undone_showed_no_downtime() -> None:
    """Issue 14, row 4: the training was parked in every attempt, and none of that counted as downtime."""
    op = operation(worker("a"))
    why = {"fault": events.BROKEN, "message": "thread b is at train.py:3, not parked", "hint": "ask again"}
    op = timed(events.Failed(effect=1, worker="a", parked_s=1.5, **why), op, 20.0)
    assert (op.parked_since, op.downtime_s) == (None, 1.5)


def test_downtime_of_earlier_attempts_counts_too() -> None:
    """Issue 14, row 4."""
    op = operation(worker("a", is_parked=True))
    op = timed(events.Parked(effect=1, worker="a", boundary=4, parked_s=1.25), op, 10.0)
    op = op.replace(workers=tuple([one.replace(is_parked=False) for one in op.workers]))
    assert timed(events.Released(effect=2, worker="a"), op, 10.5).downtime_s == 1.75


def test_a_cancelled_operation_reports_the_duration_of_its_attempts() -> None:
    """Issue 14, row 4."""
    op = timed(events.Withdrawn(effect=1, worker="a", parked_s=0.5), operation(worker("a")), 20.0)
    assert (op.parked_since, op.downtime_s) == (None, 0.5)


def test_ranks_that_continue_to_another_boundary_do_not_park_on_the_way() -> None:
    """Issue 14, row 4."""
    op = operation(worker("a", is_parked=True), worker("b"))
    op = timed(events.Parked(effect=1, worker="a", boundary=4), op, 10.0)
    op = timed(events.PassedBoundary(effect=2, worker="b", boundary=4, parked_s=0.5), op, 10.5)
    assert (op.parked_since, op.downtime_s) == (None, 0.5)
    op = timed(events.Parked(effect=3, worker="a", boundary=6), op, 50.0)
    op = timed(events.Parked(effect=4, worker="b", boundary=6), op, 50.25)
    op = op.replace(workers=tuple([one.replace(is_parked=False) for one in op.workers]))
    assert timed(events.Released(effect=5, worker="b"), op, 51.0).downtime_s == 1.5
