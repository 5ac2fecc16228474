"""The gate: who counts, who is stopped where, and that an idle pass leaves no trace."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from time import monotonic

from hegmd.agent.other_threads import busy_threads
from hegmd.agent.quiesce import CALL, PARK, STEPS_WITHOUT_LOADER, Gate, ParkRequest
from hegmd.agent.trap import NoCollection
from tests.patience import HANG_S

PATIENCE_S = HANG_S


def _ask_loader(gate: Gate) -> None:
    """Do what the hook in a loader's iterator does."""
    if threading.get_ident() == gate.thread:
        gate.count += 1
        if gate.requested:
            gate.at_boundary()
    else:
        gate.batch_from_other_thread()


def _step(gate: Gate) -> None:
    """Do what the hook after an optimizer's step does."""
    if threading.get_ident() == gate.thread:
        gate.step()
    else:
        gate.other_thread_steps()


class _Script:
    """A script's thread that the test makes take its next step, and the gate's messages."""

    def __init__(self, gate: Gate, step: Callable[[Gate], None]) -> None:
        self.gate = gate
        self._step = step
        self._go = threading.Semaphore(0)
        self._did = threading.Semaphore(0)
        self._over = False
        self.news = threading.Semaphore(0)
        gate.on_change = self.news.release
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._over:
                return
            self._step(self.gate)
            self._did.release()

    def start_step(self) -> None:
        self._go.release()

    def finish_step(self) -> bool:
        return self._did.acquire(timeout=PATIENCE_S)

    def steps(self, times: int) -> None:
        for _ in range(times):
            self.start_step()
            assert self.finish_step()

    def wait_for_news(self) -> None:
        assert self.news.acquire(timeout=PATIENCE_S)

    def end(self) -> None:
        self._over = True
        self._go.release()
        self._thread.join(PATIENCE_S)


def test_batches_of_the_training_thread_are_counted() -> None:
    gate = Gate()
    for _ in range(5):
        _ask_loader(gate)
        _step(gate)
    assert gate.count == 5
    assert not gate.parked


def test_it_parks_at_the_requested_boundary_and_continues_when_released() -> None:
    gate = Gate()
    script = _Script(gate, _ask_loader)
    script.steps(2)
    gate.ask(ParkRequest(PARK, at=4))
    script.steps(1)
    assert not gate.parked
    script.start_step()
    script.wait_for_news()
    assert (gate.parked, gate.count) == (True, 4)
    gate.release_and_watch()
    assert script.finish_step()
    assert gate.passed is None
    script.steps(1)
    assert gate.passed == 5
    assert not gate.requested
    script.end()


def test_a_count_that_is_past_means_the_next_boundary() -> None:
    gate = Gate()
    script = _Script(gate, _ask_loader)
    script.steps(7)
    gate.ask(ParkRequest(PARK, at=3))
    script.start_step()
    script.wait_for_news()
    assert gate.count == 8
    assert gate.withdraw()
    assert script.finish_step()
    script.end()


def test_a_withdrawn_request_leaves_no_trace() -> None:
    gate = Gate()
    gate.ask(ParkRequest(PARK, at=100))
    assert not gate.withdraw()
    _ask_loader(gate)
    assert (gate.requested, gate.parked, gate.count) == (False, False, 1)


def test_a_call_is_made_in_the_training_thread() -> None:
    gate = Gate()
    callers: list[int] = []
    script = _Script(gate, _ask_loader)
    gate.ask(ParkRequest(CALL, call=lambda: callers.append(threading.get_ident())))
    script.steps(1)
    assert callers == [gate.thread]
    assert gate.passed == 1
    script.end()


def test_a_late_reply_is_not_matched_to_the_next_call() -> None:
    """On a busy machine a survey exceeded its limit, and the next order was sent. The reply to the survey then
    completed that order, which had not run yet.
    """
    gate = Gate()

    def late() -> None:
        gate.withdraw()
        gate.ask(ParkRequest(CALL, call=lambda: None))

    gate.ask(ParkRequest(CALL, call=late))
    _ask_loader(gate)
    assert gate.passed is None
    _ask_loader(gate)
    assert gate.passed == 2


def test_without_a_loader_every_step_is_a_boundary() -> None:
    gate = Gate()
    for _ in range(6):
        _step(gate)
    assert gate.count == 6


def test_several_steps_a_batch_are_one_boundary_until_the_loader_is_out_of_play() -> None:
    gate = Gate()
    for _ in range(3):
        _ask_loader(gate)
        for _ in range(STEPS_WITHOUT_LOADER):
            _step(gate)
    assert gate.count == 3
    for _ in range(4):
        _step(gate)
    assert gate.count == 7


def test_a_loader_that_another_thread_reads_ahead_is_not_counted_but_stopped() -> None:
    gate = Gate()
    reader = _Script(gate, _ask_loader)
    reader.steps(3)  # before anything is stepped, it is mistaken for the training thread
    _step(gate)
    assert gate.thread == threading.get_ident()
    assert gate.count == 1
    reader.steps(2)
    assert gate.count == 1
    gate.ask(ParkRequest(PARK))
    reader.start_step()
    reader.wait_for_news()
    assert len(gate.parked_threads) == 1
    assert not gate.parked
    gate.withdraw()
    assert reader.finish_step()
    reader.end()


def test_a_boundary_by_hand_is_the_only_one_from_then_on() -> None:
    gate = Gate()
    _ask_loader(gate)
    gate.explicit_boundary()
    _ask_loader(gate)
    _step(gate)
    gate.explicit_boundary()
    assert gate.count == 3


def test_an_inert_gate_parks_no_thread() -> None:
    gate = Gate()
    _ask_loader(gate)
    gate.ask(ParkRequest(PARK))
    gate.make_inert()
    _ask_loader(gate)
    gate.ask(ParkRequest(PARK))
    gate.explicit_boundary()
    assert not gate.requested


class _ScriptThread:
    """A script's thread at a boundary at which it has to park; the test can delay it while its agent is notified."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.notified = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.raised: list[BaseException] = []
        self.gate.on_change = self._tell
        self.gate.ask(ParkRequest(PARK))
        self.thread = threading.Thread(target=self._pass)
        self.thread.start()
        assert self.notified.acquire(timeout=PATIENCE_S)

    def _tell(self) -> None:
        self.notified.release()
        assert self.go_on.wait(PATIENCE_S)

    def _pass(self) -> None:
        try:
            self.gate.explicit_boundary()
        except BaseException as error:  # noqa: BLE001 - passed to the test
            self.raised.append(error)

    def is_parked(self) -> bool:
        reasons = busy_threads(self.gate.parked_threads, frozenset())
        return self.gate.parked and f"thread {self.thread.name} has not stopped" not in list(reasons)

    def come_to_a_stand(self) -> None:
        self.go_on.set()
        deadline = monotonic() + PATIENCE_S
        while not self.is_parked():
            assert monotonic() < deadline

    def let_go(self) -> None:
        self.gate.withdraw()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def test_a_thread_about_to_park_does_not_count_as_parked() -> None:
    """A signal's handler could still run in it, and would have found the storages gone."""
    script = _ScriptThread()
    assert script.gate.parked
    assert not script.is_parked()
    script.come_to_a_stand()
    script.let_go()
    assert not script.raised


def test_a_thread_that_something_was_raised_in_left_and_was_still_counted_as_parked() -> None:
    script = _ScriptThread()
    ident = script.thread.ident
    assert ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(TimeoutError))
    script.go_on.set()
    assert script.notified.acquire(timeout=PATIENCE_S), "it has left"
    script.come_to_a_stand()
    script.let_go()
    assert [type(error) for error in script.raised] == [TimeoutError]
    assert not script.gate.parked


def test_an_exception_for_a_parked_thread_kept_all_variables_of_the_script_until_the_garbage_collector_ran() -> None:
    class StopEpoch(Exception): ...

    script = _ScriptThread()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(script.thread.ident or 0), ctypes.py_object(StopEpoch))
    with NoCollection():
        script.come_to_a_stand()
        script.let_go()
        known = weakref.ref(script.raised.pop())
        assert known() is None
