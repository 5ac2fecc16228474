"""The leak check itself: it sees each kind of leak, and waits for what is about to end by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.leaks import RUN_MARK, ProcessResources, end_run
from tests.patience import HANG_S

ROOT = Path(__file__).parents[2]


def test_an_open_descriptor_is_detected() -> None:
    before = ProcessResources.take()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert len(before.leaks()) == 2
    assert before.leaks() == []


@pytest.mark.thorough
def test_a_reused_descriptor_number_is_detected() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        before = ProcessResources.take()
        number = ours.fileno()
        with open(os.devnull) as other:
            os.dup2(other.fileno(), number)
        assert before.leaks() == [f"descriptor {number}: {os.devnull}"]
    ours.close()


class _EndsWhenJoined(threading.Thread):
    """A thread that ends when a caller joins it: one that is about to end, without a race."""

    def __init__(self) -> None:
        self.release = threading.Event()
        super().__init__(target=self.release.wait, name="ending")

    def join(self, timeout: float | None = None) -> None:
        self.release.set()
        super().join(timeout)


def test_a_leaked_thread_is_detected() -> None:
    release = threading.Event()
    before = ProcessResources.take()
    staying = threading.Thread(target=release.wait, name="staying")
    staying.start()
    assert "thread staying" in before.leaks(grace_s=0)
    release.set()
    staying.join()
    assert before.leaks() == []


@pytest.mark.thorough
def test_a_thread_that_is_about_to_end_is_waited_for() -> None:
    before = ProcessResources.take()
    ending = _EndsWhenJoined()
    ending.start()
    assert before.leaks() == []
    assert not ending.is_alive()


@pytest.mark.thorough
def test_a_live_child_and_an_unreaped_dead_child_are_detected() -> None:
    before = ProcessResources.take()
    living = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    text = "\n".join(before.leaks())
    assert f"child {living.pid}: sleep" in text
    assert f"child {dead.pid}: true (zombie)" in text
    before.clear_children()
    assert before.leaks() == []
    # psutil has reaped them; Popen has to know, or it warns.
    living.returncode = dead.returncode = 0


@pytest.mark.thorough
def test_a_changed_process_state_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessResources.take()
    monkeypatch.setenv("HEGM_LEAK_TEST", "1")
    monkeypatch.chdir(tmp_path)
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found = before.leaks()
    signal.signal(signal.SIGUSR1, handler)
    assert [line.split(":")[0] for line in found] == ["environment", "handler of SIGUSR1", "working directory"]


LAUNCHES = """
import signal, subprocess

def test_with_a_launcher():
    subprocess.run(["sh", "-c", "setsid sh -c 'echo runs >&3; exec sleep 1000' 3>{fifo} &"], check=True)
    signal.pause()
"""


def _marked(words: list[str], mark: str | None, **more: object) -> subprocess.Popen[str]:
    """A program of the run of that name, or of none, whose output tells which of its processes are alive."""
    environ = {name: value for name, value in os.environ.items() if name != RUN_MARK}
    environ.update({} if mark is None else {RUN_MARK: mark})
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload] # by name


@pytest.mark.thorough
def test_processes_left_by_a_launcher_are_ended_with_the_run_and_no_others() -> None:
    """Issue 14, row 18: the ranks of a launcher that was killed stayed, each in a session of its own."""
    own, other = os.urandom(8).hex(), os.urandom(8).hex()
    orphaned = ["sh", "-c", "setsid sleep 1000 & echo runs"]
    with _marked(orphaned, own) as ours, _marked(orphaned, other) as others:
        assert ours.stdout is not None
        assert others.stdout is not None
        assert (ours.stdout.readline(), others.stdout.readline()) == ("runs\n", "runs\n")
        ours.wait(HANG_S)
        others.wait(HANG_S)
        assert len(end_run(own)) == 1
        assert ours.stdout.read() == ""  # the last process that could write there is gone
        assert end_run(own) == []
        assert len(end_run(other)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("workers", ["0", "1"])
def test_sigint_to_a_whole_run_left_processes_behind(workers: str, tmp_path: Path) -> None:
    """Issue 14, row 18."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    test = tmp_path / "test_launches.py"
    test.write_text(LAUNCHES.format(fifo=fifo))
    words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    own = {"cwd": ROOT, "start_new_session": True}
    with _marked([*words, "-n", workers, str(test)], None, **own) as run, fifo.open() as messages:
        assert messages.readline() == "runs\n"
        os.killpg(run.pid, signal.SIGINT)
        output, _ = run.communicate(timeout=HANG_S)
        assert run.returncode != 0, output
        assert messages.read() == ""  # the last process that could write there is gone


@pytest.mark.xdist_group("a group")
def test_tests_of_a_group_ran_at_the_same_time_in_several_workers(request: pytest.FixtureRequest) -> None:
    """pytest-xdist 3.8 notes groups where pytest 9.2 does not look, and says nothing.

    Each worker built the packages and imported the frameworks, and tests of the node's memory met one another.
    """
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@a group")
