"""A block of hegm.released(), with a gate and orders as in a job, and a daemon that is a list of requests."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hegmd.agent.lending import NO_DAEMON, Block, Lending
from hegmd.agent.orders import Orders
from hegmd.agent.quiesce import Gate
from hegmd.agent.trap import NoCollection
from hegmd.errors import BUSY, NOT_FOUND, REFUSED, HegmError
from hegmd.protocol.agents import AgentLend, AgentReclaim, Lent, Reclaimed
from hegmd.protocol.messages import AgentReport, Order
from tests.patience import HANG_S

PATIENCE_S = HANG_S


class _Job:
    """A training thread in one block, and the agent's side of it."""

    def __init__(self, body: Callable[[], None] = lambda: None) -> None:
        self.gate = Gate()
        self.orders = Orders(self.gate)
        self.reports: list[AgentReport] = []
        self.orders.begin(self.reports.append)
        self.lending = Lending(self.gate, self.orders)
        self.requests: list[AgentLend | AgentReclaim] = []
        self.warnings: list[str] = []
        self.raised: list[BaseException] = []
        self.in_body, self.may_end = threading.Event(), threading.Event()
        self._news = threading.Semaphore(0)
        self.gate.on_change = self._news.release
        self._body = body
        self._thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        try:
            with Block(lambda: self.lending, self.warnings.append):
                self.in_body.set()
                assert self.may_end.wait(PATIENCE_S)
                self._body()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.raised.append(error)

    def send(self, request: AgentLend | AgentReclaim) -> int:
        self.requests.append(request)
        return len(self.requests)

    def start(self) -> None:
        self._thread.start()
        self.tick_until(lambda: self.gate.parked)

    def comes_to_another_block(self) -> None:
        self.in_body.clear()
        self.may_end.clear()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()
        self.tick_until(lambda: self.gate.parked)

    def tick_until(self, condition: Callable[[], bool], *, alone: bool = False) -> None:
        """Act as the agent's thread does at each news."""
        while not condition():
            self._news.acquire(timeout=0.01)
            self.orders.tick()
            self.lending.tick(alone=alone)

    def ends(self, *, alone: bool = False) -> None:
        self.may_end.set()
        self.tick_until(lambda: not self._thread.is_alive(), alone=alone)

    def raise_in_thread(self, kind: type[Exception]) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(kind))

    def lend(self) -> None:
        """Come into the body of the block, with nothing to take away."""
        self.lending.connect(self.send)
        self.start()
        self.tick_until(lambda: bool(self.requests))
        assert self.lending.take_answer(1, Lent(operation="7"))
        assert self.in_body.wait(PATIENCE_S)


@contextmanager
def _lent_job(body: Callable[[], None] = lambda: None) -> Iterator[_Job]:
    job = _Job(body)
    job.lend()
    yield job
    assert not job.gate.lent
    assert not job.gate.parked


def _give(job: _Job, number: int, do: str, **how: object) -> None:
    order = Order(order=number, do=do).replace(**how)
    if not job.lending.postpones(order, None):
        job.orders.obey(order, None)


def test_the_thread_runs_its_body_and_counts_as_parked_until_it_is_released() -> None:
    with _lent_job() as job:
        assert job.gate.parked
        assert not job.gate.requested, "nothing stops what the body does"
        job.may_end.set()
        job.tick_until(lambda: isinstance(job.requests[-1], AgentReclaim))
        _give(job, 1, "release")
        job.ends()
        job.tick_until(lambda: bool(job.reports))
        assert (job.reports[-1].result, job.reports[-1].boundary) == ("done", 2), "the end of a block is a boundary"
        assert job.lending.take_answer(2, Reclaimed())
    assert job.warnings == []


def test_orders_that_reload_wait_for_the_end_of_the_block() -> None:
    """An operator resumes the job, or another rank has left its block before."""
    with _lent_job() as job:
        _give(job, 1, "release")
        job.lending.tick(alone=False)
        assert job.gate.lent
        assert not job.reports
        job.ends()
        assert not job.gate.requested


def test_an_exception_of_the_body_comes_out_after_the_storages_are_back() -> None:
    def fail() -> None:
        raise ValueError("of the script")

    with _lent_job(fail) as job:
        job.may_end.set()
        job.tick_until(lambda: isinstance(job.requests[-1], AgentReclaim))
        assert not job.raised
        _give(job, 1, "release")
        job.ends()
    assert [str(error) for error in job.raised] == ["of the script"]


def test_an_exception_for_a_thread_that_waits_kept_all_its_variables_until_the_garbage_collector_ran() -> None:
    class StopEpoch(Exception): ...

    with NoCollection(), _lent_job() as job:
        job.may_end.set()
        job.tick_until(lambda: isinstance(job.requests[-1], AgentReclaim))
        job.raise_in_thread(StopEpoch)
        _give(job, 1, "release")
        job.ends()
        known = weakref.ref(job.raised.pop())
        assert known() is None


def test_without_a_daemon_the_block_runs_with_its_storages_in_place() -> None:
    job = _Job()
    job.orders.end()
    job.start()
    job.tick_until(job.in_body.is_set, alone=True)
    assert not job.gate.parked
    job.ends(alone=True)
    assert job.warnings == [NO_DAEMON]


def test_a_refusal_is_reported_and_the_block_runs() -> None:
    job = _Job()
    job.lending.connect(job.send)
    job.start()
    job.tick_until(lambda: bool(job.requests))
    job.lending.take_answer(1, HegmError(REFUSED, "the pool is full", "free memory"))
    assert job.in_body.wait(PATIENCE_S)
    job.ends()
    assert job.warnings == ["the pool is full"]
    assert len(job.requests) == 1, "nothing has to be reclaimed"


def test_a_job_that_another_operation_has_lends_after_it() -> None:
    job = _Job()
    job.lending.connect(job.send)
    job.start()
    job.tick_until(lambda: bool(job.requests))
    job.lending.take_answer(1, HegmError(BUSY, "operation 3 has it", "ask again"))
    job.tick_until(lambda: len(job.requests) == 2)
    assert not job.in_body.is_set()
    job.lending.take_answer(2, Lent(operation="7"))
    assert job.in_body.wait(PATIENCE_S)
    _give(job, 1, "withdraw")
    job.ends()


def test_a_job_without_memory_to_resume_repeats_its_request() -> None:
    with _lent_job() as job:
        job.may_end.set()
        job.tick_until(lambda: len(job.requests) == 2)
        job.lending.take_answer(2, HegmError(REFUSED, "gpu0 is full", "free memory"))
        job.tick_until(lambda: len(job.requests) == 3)
        assert job.gate.parked
        _give(job, 1, "release")
        job.ends()


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_block_ends_without_a_daemon_and_with_a_daemon_that_has_forgotten_it(*, is_connected: bool) -> None:
    with _lent_job() as job:
        if is_connected:
            job.may_end.set()
            job.tick_until(lambda: len(job.requests) == 2)
            job.lending.take_answer(2, HegmError(NOT_FOUND, "no operation lends it", "run: hegmctl ops"))
        else:
            job.lending.disconnect()
            job.orders.end()
            assert job.orders.next_deadline() is None, "it is not brought back while the body runs"
        job.ends(alone=not is_connected)
    assert job.orders.changed_by_itself


def test_memory_lent_through_a_daemon_that_exits_is_reclaimed_later() -> None:
    job = _Job()
    job.lending.connect(job.send)
    job.start()
    job.tick_until(lambda: bool(job.requests))
    job.lending.disconnect()
    job.orders.end()
    job.tick_until(job.in_body.is_set)
    job.ends()
    job.lending.connect(job.send)
    job.lending.tick(alone=False)
    assert isinstance(job.requests[-1], AgentReclaim)
    job.lending.take_answer(2, HegmError(NOT_FOUND, "no operation lends it", "run: hegmctl ops"))
    job.lending.tick(alone=False)
    assert len(job.requests) == 2


def test_a_rank_at_its_block_is_found_at_the_boundary_that_all_ranks_were_given() -> None:
    job = _Job()
    job.lending.connect(job.send)
    job.start()
    _give(job, 1, "park", at=5, exact=True, limit_s=PATIENCE_S)
    job.tick_until(lambda: bool(job.reports))
    assert (job.reports[0].result, job.reports[0].boundary) == ("done", 5)
    job.lending.take_answer(1, Lent(operation="7"))
    assert job.in_body.wait(PATIENCE_S)
    job.may_end.set()
    _give(job, 2, "release")
    job.ends()
    assert job.gate.count == 6


def test_a_late_reply_about_one_block_is_not_used_for_the_next() -> None:
    """Another rank had the job resumed. The refusal of the second request kept the next block from lending."""
    with _lent_job() as job:
        job.may_end.set()
        job.tick_until(lambda: isinstance(job.requests[-1], AgentReclaim))
        _give(job, 1, "release")
        job.ends()
        job.comes_to_another_block()
        assert job.lending.take_answer(2, HegmError(REFUSED, "operation 7 has it, which is done", "wait"))
        job.tick_until(lambda: len(job.requests) == 3)
        assert isinstance(job.requests[-1], AgentLend)
        assert job.lending.take_answer(3, Lent(operation="8"))
        assert job.in_body.wait(PATIENCE_S)
        job.may_end.set()
        job.tick_until(lambda: isinstance(job.requests[-1], AgentReclaim))
        _give(job, 2, "release")
        job.ends()
    assert job.warnings == []


def test_another_thread_lends_nothing() -> None:
    job = _Job()
    job.gate.explicit_boundary()  # this thread trains
    job._thread.start()
    job.may_end.set()
    job.tick_until(lambda: not job._thread.is_alive())
    assert len(job.warnings) == 1
    assert "only the training thread" in job.warnings[0]
