"""Attempts to park that other threads prevent: the training is parked only briefly, and parked again later."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import CodeType
from typing import Any, cast

import pytest

from hegmd.agent.orders import Orders
from hegmd.agent.quiesce import Gate
from hegmd.protocol.messages import AgentReport, Order
from tests.patience import HANG_S

MAX_PARK_S = 0.02
SCRIPT = """
def main({call}, fd, told):
    while {call}(fd, 1) != b'.':
        told.append('woke')
"""
WAITING, COMPUTING = "read", "multiply"


class Script:
    """A training thread that passes boundaries without end, another thread that waits, and orders to both."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.gate = Gate()
        self.reports: list[AgentReport] = []
        self.orders = Orders(self.gate)
        self.orders.begin(self.reports.append)
        self.woke: list[str] = []
        self._wakes: list[int] = []
        self._threads: list[threading.Thread] = []
        self._over = False
        self._start(self._train)

    def _start(self, target: Callable[..., object], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args)
        thread.start()
        self._threads.append(thread)
        return thread

    def _train(self) -> None:
        while not self._over:
            self.gate.explicit_boundary()

    def start_beside(self, call: str) -> threading.Thread:
        """Start a thread of the script that is in a call until it is woken; only its name is visible."""
        woken, wakes = os.pipe()
        self._wakes += [wakes, woken]
        names: dict[str, Any] = {}
        code: CodeType = compile(SCRIPT.format(call=call), str(self._folder / "train.py"), "exec")
        exec(code, names)
        return self._start(names["main"], os.read, woken, self.woke)

    def wake(self, data: bytes = b"x") -> None:
        os.write(self._wakes[0], data)

    def park(self, limit_s: float = HANG_S, *, at: int | None = None) -> None:
        exact = at is not None
        order = Order(order=1, do="park", limit_s=limit_s, max_park_s=MAX_PARK_S, at=at, exact=exact)
        self.orders.obey(order, None)

    def tick_until(self, holds: Callable[[], bool]) -> None:
        deadline = monotonic() + HANG_S
        while not holds():
            assert monotonic() < deadline
            self.orders.tick()

    def end(self) -> None:
        self._over = True
        self.orders.obey(Order(order=99, do="withdraw"), None)
        for wakes in self._wakes[::2]:
            os.write(wakes, b".")
        for thread in self._threads:
            thread.join(HANG_S)
        for fd in self._wakes:
            os.close(fd)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    made = Script(tmp_path)
    yield made
    made.end()


@pytest.mark.thorough
def test_an_order_that_will_be_refused_does_not_park_the_training_for_its_limit(script: Script) -> None:
    """Issue 14, row 4: it fell from 41.8 to 1.5 steps/s, with one gap of 13.5 s, because another thread was busy."""
    script.start_beside(COMPUTING)
    script.park()
    script.tick_until(lambda: script.gate.parked)
    script.tick_until(lambda: not script.gate.parked)
    ran_on_from = script.gate.count
    script.tick_until(lambda: script.gate.count > ran_on_from)
    assert not script.reports
    script.tick_until(lambda: script.gate.parked)
    script.wake(b".")
    script.tick_until(lambda: bool(script.reports))
    (parked,) = script.reports
    assert parked.result == "done"
    assert parked.parked_s is not None
    assert parked.parked_s >= MAX_PARK_S


@pytest.mark.thorough
def test_the_downtime_of_a_refused_order_is_reported(script: Script) -> None:
    """Issue 14, row 4: `ops` showed no downtime."""
    script.start_beside(COMPUTING)
    script.park(limit_s=10 * MAX_PARK_S)
    script.tick_until(lambda: bool(script.reports))
    (refused,) = script.reports
    assert refused.result == "failed"
    assert "train.py" in refused.message
    assert refused.parked_s is not None
    assert refused.parked_s > 0


def test_a_withdrawn_order_reports_how_long_the_training_was_parked(script: Script) -> None:
    script.start_beside(COMPUTING)
    script.park()
    script.tick_until(lambda: script.gate.parked)
    script.tick_until(lambda: not script.gate.parked)
    script.orders.obey(Order(order=2, do="withdraw"), None)
    assert [report.result for report in script.reports] == ["failed", "done"]
    assert (script.reports[-1].parked_s or 0.0) >= MAX_PARK_S


@pytest.mark.thorough
def test_a_rank_that_missed_its_boundary_reports_it_immediately(script: Script) -> None:
    """The other ranks are parked at that boundary, and continue to another one together."""
    script.start_beside(COMPUTING)
    script.park(at=script.gate.count + 100_000)
    script.tick_until(lambda: bool(script.reports))
    (refused,) = script.reports
    assert refused.result == "failed"
    assert not script.gate.parked


def test_a_waiting_thread_prevented_a_move(script: Script) -> None:
    """Issue 14, row 4: another Python thread was in its own time.sleep. Now it is stopped when it wakes."""
    thread = script.start_beside(WAITING)
    script.park()
    script.tick_until(lambda: bool(script.reports))
    assert [report.result for report in script.reports] == ["done"]
    script.wake()
    script.tick_until(lambda: thread.ident in script.gate.parked_threads)
    assert script.woke == []
    script.orders.obey(Order(order=2, do="withdraw"), None)
    script.tick_until(lambda: script.woke == ["woke"])


def test_a_parked_thread_continues_if_no_daemon_returns(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that parks a thread has to release it itself."""
    monkeypatch.setenv("HEGM_PARK_LIMIT_S", "0.01")
    thread = script.start_beside(WAITING)
    script.park()
    script.tick_until(lambda: bool(script.reports))
    script.wake()
    script.tick_until(lambda: thread.ident in script.gate.parked_threads)
    script.orders.end()
    script.tick_until(lambda: script.woke == ["woke"])


def test_other_threads_are_released_before_script_code_runs_in_the_agents_thread(script: Script) -> None:
    """One of them may hold a lock that this code needs."""
    thread = script.start_beside(WAITING)
    script.park()
    script.tick_until(lambda: bool(script.reports))
    script.wake()
    script.tick_until(lambda: thread.ident in script.gate.parked_threads)
    script.gate.release_other_threads()
    script.tick_until(lambda: script.woke == ["woke"])
    assert script.gate.parked


def test_a_step_of_the_communicators_ends_before_the_daemon_is_given_up() -> None:
    """The next daemon would find them neither connected nor disconnected."""

    class Step:
        is_over = False
        is_due = 0.0
        waited = False

        def result(self) -> list[str]:
            self.waited = True
            return []

    orders, step = Orders(Gate()), Step()
    orders.begin(lambda _: None)
    orders._bytes._stepping = (1, cast(Any, step))
    orders.end()
    assert step.waited
    assert orders._bytes.next_deadline() is None
