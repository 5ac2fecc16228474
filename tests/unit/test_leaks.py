"""The leak check itself: it sees each kind of leak, and waits for what is about to end by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.leaks import Stock


def test_an_open_descriptor_is_seen() -> None:
    before = Stock.take()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert len(before.leaks()) == 2
    assert before.leaks() == []


@pytest.mark.thorough
def test_a_descriptor_number_used_again_for_something_else_is_seen() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        before = Stock.take()
        number = ours.fileno()
        with open(os.devnull) as other:
            os.dup2(other.fileno(), number)
        assert before.leaks() == [f"descriptor {number}: {os.devnull}"]
    ours.close()


class _EndsWhenJoined(threading.Thread):
    """Alive until somebody waits for it: the thread that is just about to end, without any race."""

    def __init__(self) -> None:
        self.release = threading.Event()
        super().__init__(target=self.release.wait, name="ending")

    def join(self, timeout: float | None = None) -> None:
        self.release.set()
        super().join(timeout)


def test_a_thread_that_stays_is_seen() -> None:
    release = threading.Event()
    before = Stock.take()
    staying = threading.Thread(target=release.wait, name="staying")
    staying.start()
    assert "thread staying" in before.leaks(grace_s=0)
    release.set()
    staying.join()
    assert before.leaks() == []


@pytest.mark.thorough
def test_a_thread_that_is_about_to_end_is_waited_for() -> None:
    before = Stock.take()
    ending = _EndsWhenJoined()
    ending.start()
    assert before.leaks() == []
    assert not ending.is_alive()


def test_a_living_child_and_a_dead_one_that_nobody_waited_for_are_seen() -> None:
    before = Stock.take()
    living = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    text = "\n".join(before.leaks())
    assert f"child {living.pid}: sleep" in text
    assert f"child {dead.pid}: true (zombie)" in text
    before.clear_children()
    assert before.leaks() == []
    # psutil has reaped them; Popen is told, so that it does not warn.
    living.returncode = dead.returncode = 0


def test_changed_process_state_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Stock.take()
    monkeypatch.setenv("HEGM_LEAK_TEST", "1")
    monkeypatch.chdir(tmp_path)
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found = before.leaks()
    signal.signal(signal.SIGUSR1, handler)
    assert [line.split(":")[0] for line in found] == ["environment", "handler of SIGUSR1", "working directory"]
