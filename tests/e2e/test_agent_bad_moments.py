"""Scripts that fork, become another program or raise in a thread at the order to stop, or while parked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.agented import Training, environment, undisturbed
from tests.e2e.scripted_daemon import PATIENCE_S, ScriptedDaemon
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]


def test_a_forked_child_has_no_agent_and_trains_on(socket_path: Path) -> None:
    need_torch()
    code = (
        "import os, torch\n"
        "from torch.utils.data import DataLoader\n"
        "fds = set(os.listdir('/proc/self/fd'))\n"
        "next(iter(DataLoader([1])))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    sockets = [n for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')]\n"
        "    links = [os.readlink(f'/proc/self/fd/{n}') for n in sockets]\n"
        "    threads = len(os.listdir('/proc/self/task'))\n"
        "    next(iter(DataLoader([1])))\n"
        "    os._exit(threads - 1 + sum(link.startswith('socket:') for link in links))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "input()\n"
    )
    with ScriptedDaemon(socket_path) as daemon:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(socket_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        agent = daemon.attended()
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        assert agent.order("park", limit_s=0.05).result == "failed"  # the parent's connection is open
        process.communicate("\n", timeout=HANG_S)
        assert process.returncode == 0


FORKING = """
import os, threading, hegm, random
random.seed(5)
weight = 0.0
for step in range(600):
    for _ in range(300):
        weight += 1e-3 * (random.gauss(1, 1) - weight)
    if step % 40 == 7:
        child = os.fork()
        if child == 0:
            for _ in range(5):
                hegm.boundary()
            os._exit(11)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(weight.hex())
    hegm.boundary()
"""


def test_a_script_that_forks_during_an_order_continues_with_its_children(socket_path: Path, tmp_path: Path) -> None:
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    (tmp_path / "hegm.py").write_text("def boundary(): pass\n")
    expected = undisturbed([str(script)])
    (tmp_path / "hegm.py").unlink()
    assert expected.count("child 11") == 15
    with ScriptedDaemon(socket_path) as daemon, Training([str(script)], socket_path) as training:
        agent = daemon.attended()
        for at in (5, 30, 45, 90, 150, 300):
            parking = agent.send("park", at=at)  # asked, and not yet there when it forks
            assert agent.answer(parking).result == "done"
            agent.done("release", limit_s=PATIENCE_S)
        assert training.result() == (0, expected, "")


FORKED_WHILE_PARKED = """
import os, signal, socketserver, sys, threading, hegm

class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        signal.signal(signal.SIGUSR1, lambda *_: (self.request.send(b"12"), os._exit(12)))
        hegm.boundary()
        os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            pass

class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    pass

server = Server(sys.argv[1], Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not os.path.exists(sys.argv[2]):
    hegm.boundary()
"""


def test_a_signal_to_a_child_forked_while_parked_resumed_its_parent(socket_path: Path, tmp_path: Path) -> None:
    """The child had inherited the descriptor that tells the agent of signals.

    A server of the standard library forks it, because the agent stops the script's own threads while it is parked. The
    child is not stopped.
    """
    script, served, stop = tmp_path / "script.py", tmp_path / "s", tmp_path / "stop"
    script.write_text(FORKED_WHILE_PARKED)
    words = [str(script), str(served), str(stop)]
    with ScriptedDaemon(socket_path) as daemon, Training(words, socket_path) as training:
        agent = daemon.attended()
        agent.done("park", limit_s=PATIENCE_S)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(HANG_S)
            asking.connect(str(served))
            assert asking.recv(2) == b"12"
        assert agent.done("survey").parked
        agent.done("withdraw")
        stop.touch()
        assert training.result() == (0, "", "")


RAISES = """
import ctypes, os, subprocess, sys, threading, hegm
_, tell, told, stop = sys.argv

def interrupt_when_told(ident):
    subprocess.run(["cat", tell], stdout=subprocess.DEVNULL)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(TimeoutError))
    subprocess.run(["tee", told], input=b"done", stdout=subprocess.DEVNULL)

threading.Thread(target=interrupt_when_told, args=(threading.get_ident(),)).start()
try:
    while True:
        hegm.boundary()
except TimeoutError:
    print("caught", flush=True)
while not os.path.exists(stop):
    hegm.boundary()
"""


def test_an_exception_of_a_watchdog_is_caught_at_the_same_place_as_without_the_agent(
    socket_path: Path, tmp_path: Path
) -> None:
    """The watchdog wakes while the training is parked, is stopped there, and raises when the training runs again."""
    words, tell, told, stop = _script_with_fifos(tmp_path, RAISES)
    with ScriptedDaemon(socket_path) as daemon, Training(words, socket_path) as training:
        agent = daemon.attended()
        agent.done("park", limit_s=PATIENCE_S)
        tell.write_text("raise")
        assert agent.done("survey").parked
        agent.done("release", limit_s=PATIENCE_S)
        assert told.read_text() == "done"
        agent.done("park", limit_s=PATIENCE_S)  # its gate is as it was
        agent.done("release", limit_s=PATIENCE_S)
        stop.touch()
        assert training.result() == (0, "caught\n", "")


EXECS = """
import os, signal, subprocess, sys, threading, hegm
_, tell, told, stop = sys.argv

def exec_when_told():
    subprocess.run(["cat", tell], stdout=subprocess.DEVNULL)
    os.execv(sys.executable, [sys.executable, sys.argv[0], "", "", stop])

if tell:
    threading.Thread(target=exec_when_told).start()
else:
    print("second", signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
while not os.path.exists(stop):
    hegm.boundary()
"""


def test_a_process_that_execs_when_released_connects_again(socket_path: Path, tmp_path: Path) -> None:
    """The thread that starts the program wakes while the training is parked. Signals are as they were before."""
    words, tell, _, stop = _script_with_fifos(tmp_path, EXECS)
    with ScriptedDaemon(socket_path) as daemon, Training(words, socket_path) as training:
        first = daemon.attended()
        first.done("park", limit_s=PATIENCE_S)
        tell.write_text("exec")
        assert first.done("survey").parked
        first.send("release", limit_s=PATIENCE_S)  # its answer may come too late: the thread runs at once
        first.wait_until_gone()
        second = daemon.attended()
        assert first.attended is not None
        assert second.attended is not None
        assert second.attended.token != first.attended.token
        assert not second.attended.parked
        second.done("park", limit_s=PATIENCE_S)
        second.done("release", limit_s=PATIENCE_S)
        stop.touch()
        assert training.result() == (0, "second set()\n", "")


def _script_with_fifos(folder: Path, text: str) -> tuple[list[str], Path, Path, Path]:
    """The words that start it; the pipe that tells it to act, the one on which it says that it has, and its end."""
    script, tell, told, stop = (folder / name for name in ("script.py", "tell", "told", "stop"))
    script.write_text(text)
    os.mkfifo(tell)
    os.mkfifo(told)
    return [str(script), str(tell), str(told), str(stop)], tell, told, stop
