"""How long a job stood, by the events of its operation."""

from __future__ import annotations

from hegmd.migration import events
from hegmd.migration.blackout import timed
from tests.unit.migration.operations import operation, worker


def test_a_job_stands_from_its_first_thread_until_all_go_on() -> None:
    op = operation(worker("a", parked=True), worker("b"))
    op = timed(events.Parked(effect=1, worker="a", boundary=4), op, 10.0)
    op = timed(events.Parked(effect=2, worker="b", boundary=4), op, 11.0)
    assert (op.stood_since, op.blackout_s) == (10.0, None)
    op = timed(events.Released(effect=3, worker="b"), op, 12.0)
    assert (op.stood_since, op.blackout_s) == (10.0, 2.0)
    op = op.replace(workers=tuple([one.replace(parked=False) for one in op.workers]))
    op = timed(events.Released(effect=4, worker="a"), op, 12.5)
    assert (op.stood_since, op.blackout_s) == (None, 2.5)


def test_an_instant_from_before_a_reboot_is_none() -> None:
    op = operation(stood_since=1e6)
    op = timed(events.Released(effect=3, worker="a"), op, 12.0)
    assert (op.stood_since, op.blackout_s) == (None, None)


def test_the_time_at_rest_is_not_counted() -> None:
    op = operation(stood_since=10.0)
    op = timed(events.ResumeAsked(to={}), op, 500.0)
    assert timed(events.Released(effect=3, worker="a"), op, 501.0).blackout_s == 1.0
