"""A snapshot waits for its boundary and delays no other order: an order that does more than a query comes first."""

from __future__ import annotations

import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from time import monotonic
from typing import Any, cast

import pytest

from hegmd.agent.snapshots import SnapshotFetch
from hegmd.agent.state.storage.shadow import CopyStopped
from hegmd.agent.trap import NoCollection
from hegmd.protocol.messages import Order
from hegmd.protocol.slots import RECORD_BYTES, SlotRecord, unpacked
from tests.looks import pause
from tests.patience import HANG_S
from tests.unit.agent.test_exact_park import _Rank

END, PAUSE_S = 8192, 0.001
RECORD = SlotRecord(generation=1, step=2, rank=0, ranks=1, size_bytes=4, taken_utc=3.0, took_s=0.5)


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
    assert "another order arrived first" in rank.reports[0].message
    rank.let_pass()
    assert rank.wait_until_parked() == 1


def test_a_count_is_answered_during_a_snapshot_and_a_later_snapshot_replaces_it(rank: _Rank) -> None:
    _snapshot(rank, 1)
    rank.orders.obey(Order(order=2, do="count"), None)
    _snapshot(rank, 3)
    assert [(report.order, report.result) for report in rank.reports] == [(2, "done"), (1, "failed")]
    rank.orders.end()


def test_a_survey_is_answered_while_a_snapshot_waits_for_its_boundary(rank: _Rank) -> None:
    """Surveys ended snapshots and snapshots ended surveys: a job whose steps are slow was never protected."""
    _snapshot(rank, 1, at=3)
    rank.orders.obey(Order(order=2, do="survey", limit_s=HANG_S), None)
    rank.let_pass()
    _tick_until(rank, lambda: rank.reports)
    assert [(report.order, report.result) for report in rank.reports] == [(2, "done")]
    assert rank.news.acquire(timeout=HANG_S)
    assert not rank.gate.parked
    rank.let_pass(2)
    assert rank.wait_until_parked() == 3
    rank.orders.end()


def test_a_survey_during_an_ending_snapshot_is_answered_at_the_next_boundary(rank: _Rank) -> None:
    _snapshot(rank, 1, at=9)
    rank.orders.obey(Order(order=2, do="survey", limit_s=HANG_S), None)
    _snapshot(rank, 3, at=9)
    rank.orders.obey(Order(order=4, do="survey", limit_s=HANG_S), None)
    assert [(report.order, report.result) for report in rank.reports] == [(1, "failed"), (2, "failed")]
    rank.orders._end_snapshot("as if it was late")
    rank.orders.tick()
    rank.let_pass()
    _tick_until(rank, lambda: len(rank.reports) == 4)
    assert [(one.order, one.result) for one in rank.reports[2:]] == [(3, "failed"), (4, "done")]


def test_a_survey_during_a_snapshot_has_a_limit_and_yields_to_other_orders(rank: _Rank) -> None:
    _snapshot(rank, 1, at=9)
    rank.orders.obey(Order(order=2, do="survey", limit_s=PAUSE_S), None)
    _tick_until(rank, lambda: rank.reports)
    assert [(report.order, report.result, report.held_bytes) for report in rank.reports] == [(2, "done", 0)]
    rank.orders.obey(Order(order=3, do="survey", limit_s=HANG_S), None)
    rank.park(4, at=1)
    assert [(one.order, one.result) for one in rank.reports[1:]] == [(1, "failed"), (3, "failed")]
    rank.orders.end()


def test_a_snapshot_for_a_passed_boundary_fails_immediately_and_parks_no_thread(rank: _Rank) -> None:
    rank.let_pass(3)
    rank.wait_until_passed(3)
    _snapshot(rank, 1, at=2, exact=True)
    assert [(report.order, report.result, report.boundary) for report in rank.reports] == [(1, "failed", 3)]
    rank.let_pass()
    rank.wait_until_passed()


def test_a_daemon_that_ends_during_a_move_leaves_no_parked_training(rank: _Rank) -> None:
    _snapshot(rank, 1)
    rank.orders.end()
    rank.let_pass(2)
    rank.wait_until_passed(2)
    assert not rank.gate.requested


class Rest:
    """The rest of a state: written once it is released, or dropped if it is no longer wanted."""

    def __init__(self) -> None:
        self.finish = threading.Event()
        self.waited = threading.Event()

    def write(self, fd: int, is_over: Callable[[], bool]) -> None:
        while not self.finish.wait(PAUSE_S):
            if is_over():
                raise CopyStopped
            self.waited.set()
        os.pwrite(fd, b"rest", 0)


@pytest.fixture
def slot() -> Iterator[int]:
    made = os.memfd_create("slot")
    os.truncate(made, END + RECORD_BYTES)
    yield made
    os.close(made)


def _fetch(rank: _Rank, slot: int) -> Rest:
    """The training continues, and the rest of its snapshot is being written."""
    rest, reply = Rest(), {"size_bytes": 4, "parked_s": 0.5, "begin_anew": ()}
    fetching = SnapshotFetch(os.dup(slot), END, cast("Any", rest), RECORD)
    rank.orders.snapshots.fetch(fetching, 7, reply)
    assert rest.waited.wait(HANG_S)
    return rest


def _record(slot: int) -> SlotRecord | None:
    return unpacked(os.pread(slot, RECORD_BYTES, END))


def _tick_until(rank: _Rank, fact: Callable[[], object]) -> None:
    while not fact():
        rank.orders.tick()
        threading.Event().wait(PAUSE_S)


def test_the_reply_comes_once_the_rest_is_written_and_queries_are_answered_meanwhile(rank: _Rank, slot: int) -> None:
    rest = _fetch(rank, slot)
    rank.orders.obey(Order(order=8, do="count"), None)
    assert [report.order for report in rank.reports] == [8]
    assert _record(slot) is None
    assert rank.orders.next_deadline() is not None
    rest.finish.set()
    _tick_until(rank, lambda: len(rank.reports) == 2)
    (_, report), reports = rank.reports, _record(slot)
    assert (report.order, report.result, report.parked_s, report.size_bytes) == (7, "done", 0.5, 4)
    assert report.copied_s is not None
    assert (reports, os.pread(slot, 4, 0)) == (RECORD, b"rest")
    assert rank.orders.next_deadline() is None


def test_an_order_cancels_a_snapshot_in_progress_first(rank: _Rank, slot: int) -> None:
    _fetch(rank, slot)
    rank.park(8, at=1)
    assert [(report.order, report.result) for report in rank.reports] == [(7, "failed")]
    assert "another order arrived first" in rank.reports[0].message
    assert _record(slot) is None
    rank.orders.end()


def test_a_stopped_copy_kept_its_sums_in_memory_until_the_garbage_collector_ran(rank: _Rank, slot: int) -> None:
    with NoCollection():
        known = weakref.ref(_fetch(rank, slot))
        rank.park(8, at=1)
        _tick_until(rank, lambda: known() is None)
    rank.orders.end()


def test_a_failed_copy_beside_a_park_kept_its_sums_in_memory_until_the_garbage_collector_ran(slot: int) -> None:
    class FullRest(Rest):
        def write(self, fd: int, is_over: Callable[[], bool]) -> None:
            raise OSError(28, "No space left on device")

    rest = FullRest()
    with NoCollection():
        with pytest.raises(OSError, match="No space left") as raised:
            SnapshotFetch(os.dup(slot), 0, cast("Any", rest), RECORD).write_now()
        known = weakref.ref(rest)
        del raised, rest
        deadline = monotonic() + HANG_S
        while known() is not None:  # the thread of the copy is ending
            assert monotonic() < deadline
            pause()


def test_a_snapshot_is_completed_although_the_daemon_ends(rank: _Rank, slot: int) -> None:
    rest = _fetch(rank, slot)
    rank.orders.end()
    rank.orders.begin(rank.reports.append)
    rest.finish.set()
    _tick_until(rank, lambda: rank.orders.next_deadline() is None)
    assert (rank.reports, _record(slot)) == ([], RECORD)


def _more_in_child(rank: _Rank, own: int) -> int:
    """Return how many descriptors a forked child has beyond its parent's `own`, once it has closed what it can."""
    with pytest.warns(DeprecationWarning, match="fork") if sys.version_info >= (3, 12) else nullcontext():
        child = os.fork()
    if child == 0:
        rank.orders.snapshots.close_in_child()
        os._exit(len(os.listdir("/proc/self/fd")) - own)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_releases_the_slot(rank: _Rank, slot: int) -> None:
    own = len(os.listdir("/proc/self/fd"))
    rest = _fetch(rank, slot)
    assert _more_in_child(rank, own) == 0
    rest.finish.set()
    _tick_until(rank, lambda: len(rank.reports) == 1)
    assert _record(slot) == RECORD


def test_a_child_forked_before_the_boundary_of_a_snapshot_kept_the_slot(rank: _Rank) -> None:
    """Workers of a loader that persist had its memory until they ended."""
    own = len(os.listdir("/proc/self/fd"))
    _snapshot(rank, 1)
    assert _more_in_child(rank, own) == 0
    rank.orders.end()


# ---- beside the park of an operation


def _has_passed(rank: _Rank, before: int) -> bool:
    return rank.gate.count > before or rank.gate.parked


def _park(rank: _Rank, number: int, slot: int | None, *, at: int = 1) -> None:
    order = Order(order=number, do="park", generation=number, at=at, exact=True, limit_s=HANG_S)
    rank.orders.obey(order, None if slot is None else os.dup(slot))


@pytest.fixture
def written(rank: _Rank) -> list[int]:
    """The states that the training was asked for, of four bytes each."""
    found: list[int] = []

    def snapshot(fd: int | None, _most_bytes: int, begin: Callable[[], object]) -> tuple[int, tuple[str, ...], None]:
        assert fd is not None
        begin()
        os.pwrite(fd, b"rest", 0)
        found.append(fd)
        return 4, (), None

    rank.orders.snapshots.save = snapshot
    return found


def test_a_training_parked_for_an_image_writes_its_state_first_and_once(
    rank: _Rank, slot: int, written: list[int]
) -> None:
    own = len(os.listdir("/proc/self/fd"))
    _park(rank, 5, slot)
    rank.let_pass()
    _tick_until(rank, lambda: rank.reports)
    record = _record(slot)
    assert [(report.order, report.result) for report in rank.reports] == [(5, "done")]
    assert rank.gate.parked
    assert record is not None
    assert (record.generation, record.step, record.size_bytes, os.pread(slot, 4, 0)) == (5, 1, 4, b"rest")
    assert len(written) == 1
    assert len(os.listdir("/proc/self/fd")) == own, "the image would have the slot"


def test_an_image_is_written_though_its_boundary_has_no_state_to_keep(rank: _Rank, slot: int) -> None:
    def refuse(*_which: object) -> Any:
        raise ValueError("not here")

    rank.orders.snapshots.save = refuse
    _park(rank, 5, slot)
    rank.let_pass()
    _tick_until(rank, lambda: rank.reports)
    assert [(report.order, report.result) for report in rank.reports] == [(5, "done")]
    assert (rank.gate.parked, _record(slot)) == (True, None)


def test_a_rest_of_a_state_is_written_before_the_park_is_answered(rank: _Rank, slot: int) -> None:
    rest = Rest()
    rest.finish.set()
    rank.orders.snapshots.save = lambda _fd, _most, _begin: (4, (), cast("Any", rest))
    _park(rank, 5, slot)
    rank.let_pass()
    _tick_until(rank, lambda: rank.reports)
    assert (os.pread(slot, 4, 0), rank.gate.parked) == (b"rest", True)
    assert _record(slot) is not None


@pytest.mark.parametrize("ending", ["withdraw", "park", "daemon"])
def test_a_failed_park_releases_the_slot(rank: _Rank, slot: int, written: list[int], ending: str) -> None:
    own = len(os.listdir("/proc/self/fd"))
    _park(rank, 5, slot)
    if ending == "withdraw":
        rank.orders.obey(Order(order=6, do="withdraw"), None)
    elif ending == "park":
        _park(rank, 6, None, at=2)
    else:
        rank.orders.end()
    assert len(os.listdir("/proc/self/fd")) == own
    rank.let_pass(2)
    if ending == "park":
        _tick_until(rank, lambda: len(rank.reports) == 2)
    else:
        rank.wait_until_passed(2)
    assert (written, _record(slot)) == ([], None)


@pytest.mark.parametrize("seed", range(20))
def test_the_slot_has_a_whole_snapshot_of_its_boundary_or_none_whatever_happens(
    rank: _Rank, slot: int, written: list[int], seed: int
) -> None:
    """Orders, boundaries and ends of the daemon in any order. A park that is done is of the boundary that it names."""
    draw = random.Random(seed)
    for number in range(1, 41):
        do = draw.choice(("park", "park", "plain", "withdraw", "release", "snapshot", "pass", "pass", "tick", "daemon"))
        at = rank.gate.count + draw.randint(0, 2)
        if do in ("park", "plain"):
            _park(rank, number, slot if do == "park" else None, at=at)
        elif do == "snapshot":
            rank.orders.obey(Order(order=number, do="snapshot", generation=number, limit_s=HANG_S), os.dup(slot))
        elif do == "pass":
            before = rank.gate.count
            if not rank.gate.parked:
                rank.let_pass()
                _tick_until(rank, partial(_has_passed, rank, before))
        elif do == "daemon":
            rank.orders.end()
            rank.orders.begin(rank.reports.append)
        elif do != "tick":
            rank.orders.obey(Order(order=number, do=do, limit_s=HANG_S), None)
        rank.orders.tick()
        record = _record(slot)
        assert record is None or (record.size_bytes, os.pread(slot, 4, 0)) == (4, b"rest")
        assert record is None or record.step <= rank.gate.count
    rank.orders.end()
    rank.gate.withdraw()


def test_a_parked_training_is_not_written_again(rank: _Rank, slot: int, written: list[int]) -> None:
    _park(rank, 5, None)
    rank.let_pass()
    _tick_until(rank, lambda: rank.reports)
    _park(rank, 6, slot)
    rank.orders.tick()
    assert [(report.order, report.result) for report in rank.reports] == [(5, "done"), (6, "done")]
    assert (written, _record(slot)) == ([], None)
