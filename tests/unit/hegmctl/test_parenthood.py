"""How signals are waited for by a process that all are blocked in."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from tests.unit.hegmctl.running import ROOT

WAITS = """
import signal
from hegmctl.parenthood import Signals
with Signals() as signals:
    print("ready", flush=True)
    came = None
    while came is None or came.number != signal.SIGUSR1:
        came = signals.next({within_s})
        print("none" if came is None else (came.number, came.was_sent), flush=True)
"""


def waiting(within_s: str) -> subprocess.Popen[str]:
    environ = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    words = [sys.executable, "-c", WAITS.format(within_s=within_s)]
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)


def test_a_supervisor_stopped_during_its_wait_passes_on_no_phantom_signal() -> None:
    """sigtimedwait gave what nobody had filled in; that was passed on, and ended the supervisor: invalid argument."""
    with waiting("0.05") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "none\n"
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            select.poll().poll(100)  # what it waits for is over before it continues
            process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGUSR1)
        output = set(process.stdout.read().splitlines())
    assert process.returncode == 0
    assert output <= {"none", f"({signal.SIGCONT.value}, True)", f"({signal.SIGUSR1.value}, True)"}


def test_an_alarm_from_another_process_is_an_ordinary_signal() -> None:
    with waiting("None") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGALRM)
        assert process.stdout.readline() == f"({signal.SIGALRM.value}, True)\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.read() == f"({signal.SIGUSR1.value}, True)\n"
    assert process.returncode == 0
