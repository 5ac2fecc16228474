"""A thread whose signals cannot be held back is not parked: the order fails with the reason, and the training
continues.

Each case is a process of its own, since it is the main thread that holds signals back.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_S

ROOT = Path(__file__).parents[3]

BEFORE = """
import _thread, ctypes, os, resource, signal, sys, threading
from hegmd.agent.orders import Orders
from hegmd.agent.quiesce import PARK, ParkRequest, Gate, wait_at_lock
from hegmd.agent.signals import CannotHoldSignals, HeldSignals
from hegmd.protocol.messages import Order

def state():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()), wakeup, sorted(os.listdir("/proc/self/fd"))

def no_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), 4096))

def descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))

def no_threads():
    used_bytes = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (64 << 20), resource.RLIM_INFINITY))
    _thread.stack_size(1 << 30)

def threads():
    _thread.stack_size(0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

_, notices = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(notices)
os.listdir("/proc/self/fd")
"""


def _run(script: str, *, may_complain: bool = False) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + script],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert may_complain or not done.stderr, done.stderr


@pytest.mark.parametrize("short_of", ["descriptors", "threads"])
def test_a_job_out_of_a_resource_died_of_an_order_to_park(short_of: str) -> None:
    """The error of the call was raised in the script's `next()`, with all signals left blocked."""
    _run(f"""
gate, reports, before = Gate(), [], state()
orders = Orders(gate)
orders.begin(reports.append)
orders.obey(Order(order=1, do="park", limit_s=30.0), None)
no_{short_of}()
gate.explicit_boundary()
{short_of}()
orders.tick()
assert (gate.parked, gate.requested, gate.count) == (False, False, 1)
assert [(one.order, one.result) for one in reports] == [(1, "failed")], reports
assert "signals cannot be blocked" in reports[0].message, reports
assert "ulimit" in reports[0].hint, reports
assert state() == before, (state(), before)

# Later, when there are some again, it parks, and holds them back.
orders.obey(Order(order=2, do="park", limit_s=30.0), None)
seen = []
def interrupt():
    while sys._current_frames()[threading.main_thread().ident].f_code is not wait_at_lock.__code__:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGUSR1)
def let_go(number):
    seen.append(number)
    gate.withdraw()
gate.on_change = lambda: gate.parked and _thread.start_new_thread(interrupt, ())
gate.on_signal = let_go
signal.signal(signal.SIGUSR1, lambda *_: seen.append(gate.parked))
gate.explicit_boundary()
assert seen == [signal.SIGUSR1, False], seen
assert state()[:2] == before[:2], (state(), before)
""")


@pytest.mark.thorough
def test_an_error_of_another_thread_leaves_no_signal_blocked() -> None:
    """It is raised at whatever step the thread has come to, so it is raised at each of them, one after the other.

    Python up to 3.11 may raise it in the thread that was just started instead, and says so: that one was waited for in
    vain, for ever.
    """
    _run(
        """
class Raised(Exception):
    pass

raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
me, before = ctypes.c_ulong(threading.get_ident()), state()
raised_at = set()

def trace(frame, event, _arg):
    if frame.f_code is HeldSignals._hold.__code__ and event == "line" and frame.f_lineno not in raised_at:
        raised_at.add(frame.f_lineno)
        sys.settrace(None)
        frame.f_trace = None
        raise_in(me, ctypes.py_object(Raised))
    return trace

while True:
    known = len(raised_at)
    sys.settrace(trace)
    try:
        with HeldSignals(lambda number: None, begin_limit_s=0.5):
            pass
    except (Raised, CannotHoldSignals):
        pass
    sys.settrace(None)
    if len(raised_at) == known:
        break
assert len(raised_at) > 6, raised_at
# The threads that had begun to read end by themselves, and close what they read from.
while _thread._count() or state() != before:
    assert state()[:2] == before[:2], (state(), before)
""",
        may_complain=True,
    )


def test_a_second_thread_continued_when_its_signals_could_not_be_blocked() -> None:
    """The storages may already be offloaded: any thread that arrives has to park, with its signals or without."""
    _run("""
gate = Gate()
stood = threading.Semaphore(0)
gate.on_change = stood.release
gate.ask(ParkRequest(PARK))
training = threading.Thread(target=gate.explicit_boundary)
training.start()
stood.acquire()
seen = []
def let_go():
    seen.append(sorted(gate.parked_threads))
    gate.withdraw()
gate.on_change = let_go
no_descriptors()
gate.explicit_boundary()
descriptors()
assert seen == [sorted((training.ident, threading.get_ident()))], seen
training.join()
""")
