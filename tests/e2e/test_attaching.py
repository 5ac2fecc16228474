"""`hegmctl attach`: the agent for trainings that run already, and every reason against it, which changes nothing.

A real CPython 3.14 with a pretend PyTorch; with a real PyTorch in the wide cell, where `tools/pythons.sh --torch` has
fetched one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from hegmctl.connection import connect
from hegmd.protocol.messages import InspectJob, JobReply
from hegmd.protocol.snapshots import AgentInfo
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import SCRIPTS, MovedJob, Script, environment
from tests.e2e.test_agent_pythons import find_python
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
PRETEND = str(ROOT / "tests" / "stubs" / "loop")
NOBODY = 65534
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
LOOP = f"""
import sys
sys.path.insert(0, {PRETEND!r})
import torch
optimizer = torch.optim.optimizer.Optimizer()
for number in torch.utils.data.dataloader.DataLoader(int(sys.argv[1])):
    optimizer.step()
    print("step", number, flush=True)
"""
BARE_LOOP = """
import time
for number in range(100_000):
    print("step", number, flush=True)
    time.sleep(0.01)
"""
LAUNCHER = """
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
print("step", *[rank.pid for rank in ranks], flush=True)
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with tempfile.TemporaryDirectory(prefix="hegm-", dir="/tmp") as folder, RunningDaemon(Path(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def python() -> str:
    return find_python("python3.14")


class RunningJob(MovedJob):
    """A script that was started without hegm, and the commands about it."""

    def __init__(self, words: list[str], daemon: RunningDaemon, **more: str) -> None:
        self.more = more
        Script.__init__(self, words, None)
        self._daemon = daemon
        self._gpu = 0
        self.folder = tempfile.TemporaryDirectory(prefix="hegm-", dir="/tmp")
        self.environ = {**environment(daemon.socket_path), "TMPDIR": self.folder.name}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        self.folder.cleanup()

    def attach(self, *options: str) -> list[dict[str, Any]]:
        """Attach to it; return what is reported of its processes."""
        attached: list[dict[str, Any]] = self.answer("attach", *options, str(self.process.pid))["processes"]
        return attached

    def agent(self) -> AgentInfo | None:
        """Its agent, as the daemon sees it now."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            return next(
                (process.agent for process in hegmd.processes().processes if process.pid == self.process.pid), None
            )

    def goes_on(self) -> None:
        """Check that it trains undisturbed: each step once, and nothing on its standard error."""
        self.read_steps(3)
        assert self._steps() == [f"step {number}" for number in range(len(self._steps()))]
        assert self._error_text() == ""


def loop(python: str, count: int = 1_000_000) -> list[str]:
    return [python, "-c", LOOP, str(count)]


def test_a_training_that_runs_already_becomes_a_job(daemon: RunningDaemon, python: str) -> None:
    count = 5000
    with RunningJob(loop(python, count), daemon, CUDA_VISIBLE_DEVICES="0") as job:
        job.read_steps(3)
        (attached,) = job.attach("--name", "late")
        assert (attached["python_version"], attached["framework_version"]) == ("3.14", "2.99.0+stub")
        assert attached["job"] == "late"
        with connect(str(daemon.socket_path)) as hegmd:
            (note,) = hegmd.call(InspectJob(job="late"), JobReply).job.notes
        assert "attached while it ran" in note
        assert "the initial values of the script's variables" in note
        agent = job.agent()
        assert agent is not None
        assert agent.job == "late"
        assert agent.unknown == tuple(attached["unknown"])
        assert "the passes over data loaders that began earlier" in agent.unknown
        while not (job.agent() or agent).boundary:
            job.read_steps(1)
        again = job.refusal("attach", str(job.process.pid))
        assert again["message"] == f"process {job.process.pid} has an agent already"
        assert job.steps() == [f"step {number}" for number in range(count)]
        assert job._error_text() == ""
        assert not os.listdir(job.folder.name)


def test_the_ranks_of_a_launcher_become_one_job(daemon: RunningDaemon, python: str) -> None:
    with RunningJob([sys.executable, "-c", LAUNCHER, *loop(python, 5000)], daemon) as job:
        while len(job._steps()) <= 1 + len(set(job._steps()[1:])):  # until both have begun
            job.read_steps(1)
        pids = [int(pid) for pid in next(line for line in job.lines if len(line.split()) == 3).split()[1:]]
        assert [one["pid"] for one in job.attach()] == pids
        with connect(str(daemon.socket_path)) as hegmd:
            agents = {process.pid: process.agent for process in hegmd.processes().processes if process.pid in pids}
        runs = {(agent.rank, agent.run) for agent in agents.values() if agent is not None}
        assert {rank for rank, _ in runs} == {0, 1}
        assert len({run for _, run in runs}) == 1
        assert len(job.steps()) == 1 + 2 * 5000


def test_attaching_to_a_training_without_python_code_fails_and_can_be_retried(
    daemon: RunningDaemon, python: str
) -> None:
    with RunningJob(loop(python), daemon) as job:
        job.read_steps(3)
        before = [sys.executable, "-m", "hegmctl"]
        # Nothing reads what it prints: its main thread waits in a write, which is no Python code.
        ran = subprocess.run(
            [*before, "attach", "--timeout", "2", str(job.process.pid), "--json"],
            env=job.environ,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert "ran no Python code for 2 s" in ran.stderr
        assert json.loads(ran.stderr)["error"]["code"] == "timeout"
        job.goes_on()
        assert job.agent() is None
        assert not os.listdir(job.folder.name)
        assert job.attach()[0]["pid"] == job.process.pid


def refused(job: RunningJob, message: str, hint: str, pid: int | None = None) -> None:
    error = job.refusal("attach", str(job.process.pid if pid is None else pid))
    assert message.format(pid=job.process.pid) in error["message"]
    assert hint.format(pid=job.process.pid) in error["hint"]


def test_a_training_that_cannot_be_attached_is_refused_and_continues(daemon: RunningDaemon, python: str) -> None:
    """Issue 19, outcome 7: each with its own message, the process unchanged."""
    with RunningJob(loop(python), daemon) as job:
        pid = job.process.pid
        job.read_steps(3)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        refused(job, "process {pid} is stopped by a signal", "kill -CONT {pid}")
        os.kill(pid, signal.SIGCONT)
        job.goes_on()
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.ptrace(PTRACE_SEIZE, pid, None, None), os.strerror(ctypes.get_errno())
        refused(job, "process {pid} is under a debugger", "detach the debugger")
        os.kill(pid, signal.SIGSTOP)  # it can be released only where it is stopped
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        libc.ptrace(PTRACE_DETACH, pid, None, None)
        os.kill(pid, signal.SIGCONT)
        job.goes_on()


@pytest.mark.parametrize(
    ("words", "more", "message", "hint"),
    [
        (["-c", BARE_LOOP], {}, "process {pid} has not loaded PyTorch", "hegmctl ps"),
        (["-c", LOOP, "1000000"], {"PYTHON_DISABLE_REMOTE_DEBUG": "1"}, "(PYTHON_DISABLE_REMOTE_DEBUG)", "the driver"),
        (["-X", "disable-remote-debug", "-c", LOOP, "1000000"], {}, "(-X disable-remote-debug)", "the driver"),
    ],
    ids=["no PyTorch", "disabled by a variable", "disabled by an option"],
)
def test_a_python_that_cannot_be_attached_is_refused_and_keeps_running(
    daemon: RunningDaemon, python: str, words: list[str], more: dict[str, str], message: str, hint: str
) -> None:
    with RunningJob([python, *words], daemon, **more) as job:
        job.read_steps(3)
        refused(job, message, hint)
        job.goes_on()


def test_an_older_python_gets_a_hint_to_the_slower_method(daemon: RunningDaemon) -> None:
    with RunningJob(loop(sys.executable), daemon) as job:
        job.read_steps(3)
        version = ".".join(map(str, sys.version_info[:2]))
        if sys.version_info >= (3, 14):
            pytest.skip("this Python is not older than 3.14")
        refused(job, f"runs Python {version}, and attaching needs CPython 3.14 or later", "hegmctl migrate {pid} --to")
        job.goes_on()


def test_a_missing_process_or_one_without_python_is_refused(daemon: RunningDaemon) -> None:
    words = ["sh", "-c", "number=0; while :; do echo step $number; number=$((number + 1)); sleep 0.01; done"]
    with RunningJob(words, daemon) as job:
        job.read_steps(3)
        refused(job, "process {pid} runs no CPython", "name the process that trains")
        job.goes_on()
        gone = job.process.pid
    with RunningJob(words, daemon) as job:
        assert job.refusal("attach", str(gone))["code"] == "not-found"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process can be started by root only")
def test_another_user_s_process_is_refused(daemon: RunningDaemon, python: str) -> None:
    with RunningJob(loop(python), daemon) as job:
        job.read_steps(3)
        code = (
            "import os, sys; from hegmctl.attaching import Target; target = Target(int(sys.argv[1]));"
            f"os.setuid({NOBODY}); target.judge()"
        )
        argv = [sys.executable, "-c", code, str(job.process.pid)]
        ran = subprocess.run(argv, env=job.environ, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert f"process {job.process.pid} belongs to user root" in ran.stderr
        job.goes_on()


@pytest.mark.wide
def test_an_attached_training_is_moved_and_changes_no_loss(daemon: RunningDaemon) -> None:
    """Issue 19, outcome 7, with the real PyTorch for CPython 3.14."""
    python = find_python("python3.14-torch")
    words = [python, str(SCRIPTS / "schedules.py")]
    alone = subprocess.run(words, env=environment(None), capture_output=True, text=True, timeout=HANG_S, check=True)
    with RunningJob(words, daemon) as job:
        job.read_steps(3)
        job.attach()
        pid = job.process.pid
        assert job.places(1) == {pid: "gpu0"}
        job.move(pid)
        job.read_steps(5)
        job.suspend_and_resume(pid)
        no_restart = job.refusal("migrate", str(pid), "--via", "restart", "--to", "gpu0")
        assert "was attached while it ran" in no_restart["message"]
        expected = [line for line in alone.stdout.splitlines() if line.startswith("step")]
        assert job.steps() == expected
