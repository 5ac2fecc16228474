"""How signals are waited for by a process that all are blocked in."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from hegmctl.parenthood import ENDS_WITHIN_S, EndRequest
from tests.looks import pause
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
# A supervisor of a command that no signal ends, and what it takes the command's end for.
SUPERVISES = """
import os, sys
from hegmctl.slurm import NeverRestarted
from hegmctl.supervisor import Start, Supervisor
class Telling(NeverRestarted):
    def started(self, pid, *, was_ready=False):
        print(pid, flush=True)
    def ended(self, status, *, sent_signal):
        print(status, sent_signal, flush=True)
        return False
Supervisor(Telling(), print).run(Start(sys.argv[1:], os.environ))
"""
# Handles SIGTERM, and fails when it reads a line.
TRAINS_ON = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
print("ready", flush=True)
sys.stdin.readline()
sys.exit(3)
"""


def waiting(within_s: str) -> subprocess.Popen[str]:
    environ = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    words = [sys.executable, "-c", WAITS.format(within_s=within_s)]
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)


def test_a_supervisor_stopped_during_its_wait_passes_on_no_phantom_signal() -> None:
    """sigtimedwait returned uninitialised data, which the supervisor passed on: it ended with "invalid argument"."""
    with waiting("0.05") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "none\n"
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            select.poll().poll(100)  # the awaited event happens before it continues
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


def test_a_signal_that_the_user_had_ignored_is_no_wish_to_end_the_command() -> None:
    """With nohup no job was recovered any more once its terminal was closed, though its command trained on."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    words = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-c", SUPERVISES, "sleep", "infinity"]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        command = int(supervisor.stdout.readline())
        supervisor.send_signal(signal.SIGHUP)
        while signal.SIGHUP in _pending(supervisor.pid):
            pause()
        os.kill(command, signal.SIGKILL)
        assert supervisor.stdout.read() == "-9 None\n"


def _pending(pid: int) -> set[int]:
    """The signals that a process has got and not taken."""
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    mask = int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_a_command_that_fails_long_after_a_handled_signal_was_not_ended_by_it() -> None:
    """A job that had handled a SIGTERM and trained on was not recovered when it failed hours later."""
    request = EndRequest()
    assert request.number(now=5.0) is None
    request.note(signal.SIGTERM, now=5.0)
    assert request.number(now=5.0 + ENDS_WITHIN_S / 2) == signal.SIGTERM
    assert request.number(now=5.0 + ENDS_WITHIN_S) is None


def test_a_command_that_fails_after_a_signal_was_ended_by_it() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    words = [sys.executable, "-c", SUPERVISES, sys.executable, "-c", TRAINS_ON]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environ, stdin=pipe, stdout=pipe, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdin is not None
        assert "ready\n" in [supervisor.stdout.readline(), supervisor.stdout.readline()]
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.stdout.readline() == "handled\n"
        supervisor.stdin.write("\n")
        supervisor.stdin.flush()
        assert supervisor.stdout.read() == f"3 {signal.SIGTERM.value}\n"
