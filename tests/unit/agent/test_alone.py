"""Parked without a daemon: after any error on the way, the agent tries again at a later time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hegmd.agent.orders import Orders
from hegmd.agent.quiesce import Gate
from hegmd.protocol.messages import AgentReport, Order
from tests.patience import HANG_S

PATIENCE_S = HANG_S


class BlockedGate(Gate):
    """A gate that does not open, for lack of some resource."""

    stuck = True

    def withdraw(self) -> bool:
        if self.stuck:
            raise MemoryError("no memory to open it")
        return super().withdraw()


def _parked(gate: BlockedGate) -> tuple[Orders, threading.Thread]:
    """Orders with one to park that has stopped a thread, and is not answered yet."""
    orders, reports, news = Orders(gate), list[AgentReport](), threading.Semaphore(0)
    orders.begin(reports.append)
    gate.on_change = news.release
    orders.obey(Order(order=1, do="park", limit_s=PATIENCE_S), None)
    thread = threading.Thread(target=gate.explicit_boundary)
    thread.start()
    assert news.acquire(timeout=PATIENCE_S)
    assert gate.parked
    return orders, thread


def test_a_thread_resumes_although_the_daemon_ended_during_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEGM_PARK_LIMIT_S", "0")
    gate = BlockedGate()
    orders, thread = _parked(gate)
    with pytest.raises(MemoryError):
        orders.end()
    assert orders.next_deadline() is not None
    gate.stuck = False
    orders.tick()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert orders.next_deadline() is None


def test_a_thread_resumes_after_a_failed_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEGM_PARK_LIMIT_S", "0")
    gate = BlockedGate()
    orders, thread = _parked(gate)
    with pytest.raises(MemoryError):
        orders.end()
    with pytest.raises(MemoryError):
        orders.tick()
    assert orders.next_deadline() is not None
    gate.stuck = False
    gate.withdraw()
    thread.join(PATIENCE_S)


def test_a_process_that_never_trained_disconnects_without_parking(tmp_path: Path) -> None:
    """The launcher of ranks got the message that its training thread is not parked; it has none."""
    gate = Gate()
    orders, reports = Orders(gate), list[AgentReport]()
    orders.begin(reports.append)
    orders.obey(Order(order=1, do="aside", path=str(tmp_path / "place"), limit_s=PATIENCE_S), None)
    assert [report.result for report in reports] == ["done"]
    assert orders.aside is not None
    orders.end()
    assert orders.next_deadline() is None

    training, answers = Gate(), list[AgentReport]()
    training.explicit_boundary()
    orders = Orders(training)
    orders.begin(answers.append)
    orders.obey(Order(order=1, do="aside", path=str(tmp_path / "place"), limit_s=PATIENCE_S), None)
    assert [report.result for report in answers] == ["failed"]
    assert orders.aside is None
