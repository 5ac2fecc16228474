"""`hegmctl run --slurm` at a signal of Slurm, if it cannot start the process that sends the request to the daemon."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from hegmctl.connection import connect
from hegmctl.slurm import SlurmSignals, resume
from hegmd.protocol import messages as m
from hegmd.protocol.connection import IncomingRequest
from hegmd.protocol.jobs import SUSPENDED
from hegmd.protocol.operations import Operation, Reason
from tests.looks import pause
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, saying
from tests.unit.hegmctl.running import ROOT

# A stub of Python that writes how it was called.
STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >"{called}.new"
mv "{called}.new" "{called}"
"""
# A parent as of `hegmctl run --slurm`, whose Python is not there yet.
SUPERVISES = """
import os, sys
from hegmctl.slurm import NeverRestarted, SlurmSignals
from hegmctl.supervisor import Start, Supervisor
say = lambda text: print(text, file=sys.stderr, flush=True)
slurm = SlurmSignals("j1", "/run/socket", {}, 30.0, say, python=sys.argv[1])
command = ["/bin/sh", "-c", "echo trains; read line; exit 7"]
sys.exit(Supervisor(NeverRestarted(), say, slurm).run(Start(command, os.environ)))
"""

# The same, whose command is started once more.
STARTED_AGAIN = SUPERVISES.replace(
    "sys.exit(Supervisor(NeverRestarted()",
    """
class Once(NeverRestarted):
    starts = 0
    def ended(self, status, *, sent_signal):
        self.starts += 1
        return self.starts < 2
    def next_start(self):
        return Start(command, os.environ)
sys.exit(Supervisor(Once()""",
)


def _stand_in(path: Path, called: Path) -> None:
    new = path.with_suffix(".new")
    new.write_text(STAND_IN.format(called=called))
    new.chmod(0o755)
    new.rename(path)


def _await(path: Path) -> str:
    until = monotonic() + HANG_S
    while not path.exists():
        assert monotonic() < until
        pause()
    return path.read_text().strip()


@pytest.mark.thorough
def test_a_spawn_that_fails_ends_no_command_and_is_tried_again_until_it_succeeds(tmp_path: Path) -> None:
    """The error of posix_spawn ended `run --slurm`, and the job was suspended for ever after SIGCONT."""
    python, called = tmp_path / "python", tmp_path / "called"
    environ = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    words = [sys.executable, "-c", SUPERVISES, str(python)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "trains\n"
        parent.send_signal(signal.SIGTSTP)
        assert parent.stderr.readline() == (
            "Slurm suspends this job, but hegmctl cannot start a process that notifies hegmd: "
            "No such file or directory; trying again\n"
        )
        _stand_in(python, called)
        assert _await(called) == "-m hegmctl.slurm suspend j1 /run/socket 20"
        called.unlink()
        python.unlink()
        parent.send_signal(signal.SIGCONT)
        assert "Slurm resumes this job, but" in parent.stderr.readline()
        _stand_in(python, called)
        assert _await(called) == "-m hegmctl.slurm resume j1 /run/socket"
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stderr.read() == ""
    assert parent.returncode == 7


@pytest.mark.thorough
def test_a_job_stayed_suspended_for_ever_if_the_process_that_asks_for_its_resume_was_killed(tmp_path: Path) -> None:
    """It may wait for GPU memory for hours."""
    called = tmp_path / "called"
    python = tmp_path / "python"
    _stand_in(python, called)
    python.write_text(
        python.read_text() + f'[ -e "{tmp_path}/again" ] || {{ touch "{tmp_path}/again"; kill -9 $$; }}\n'
    )
    environ = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    words = [sys.executable, "-c", SUPERVISES, str(python)]
    with subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "trains\n"
        parent.send_signal(signal.SIGTSTP)
        _await(tmp_path / "again")
        for _ in range(2):  # the suspend is tried again, and so would be the resume
            assert _await(called) == "-m hegmctl.slurm suspend j1 /run/socket 20"
            called.unlink()
        parent.stdin.write("\n")
    assert parent.returncode == 7


def test_a_process_that_failed_each_time_filled_the_jobs_output_once_a_second() -> None:
    signals = SlurmSignals("j1", "/run/socket", {}, 30.0, print, python="/bin/false")
    signals.take(signal.SIGTSTP, 1, set())
    for wait_s in (1.0, 2.0, 4.0):
        pid = signals._asking_pid
        assert pid is not None
        _, status = os.waitpid(pid, 0)
        began = monotonic()
        signals.reaped(pid, status)
        assert signals.retry_at is not None
        assert began + wait_s <= signals.retry_at <= monotonic() + wait_s
        signals.retry_at = began
        signals.retry(set())
    asking = signals._asking_pid
    assert asking is not None
    signals.close()
    os.waitpid(asking, 0)


@pytest.mark.thorough
def test_a_process_without_a_descriptor_to_end_it_is_ended_and_started_again(tmp_path: Path) -> None:
    python, called = tmp_path / "python", tmp_path / "called"
    _stand_in(python, called)
    messages: list[str] = []
    slurm = SlurmSignals("j1", "/run/socket", {}, 30.0, messages.append, python=str(python))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # the standard ones only
    try:
        slurm.take(signal.SIGTSTP, os.getpid(), set())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.wait()
    why = "hegmctl cannot start a process that notifies hegmd: Too many open files; trying again"
    assert messages == [f"Slurm suspends this job, but {why}"]
    assert slurm.retry_at is not None
    while slurm.retry_at is not None:
        pause()
        slurm.retry(set())
    os.wait()
    assert _await(called) == "-m hegmctl.slurm suspend j1 /run/socket 20"
    slurm.close()


def test_a_signal_drops_the_retry_of_the_one_before(tmp_path: Path) -> None:
    messages: list[str] = []
    slurm = SlurmSignals("j1", "/run/socket", {}, 30.0, messages.append, python=str(tmp_path / "python"))
    slurm.take(signal.SIGTSTP, os.getpid(), set())
    assert slurm.retry_at is not None
    called = tmp_path / "called"
    _stand_in(tmp_path / "python", called)
    slurm.take(signal.SIGCONT, os.getpid(), set())
    os.wait()
    assert slurm.retry_at is None
    assert _await(called) == "-m hegmctl.slurm resume j1 /run/socket"
    slurm.close()


def test_an_ended_command_gets_no_requests(tmp_path: Path) -> None:
    """A suspension that was to be tried again came after SIGCONT, and the command that was started next stayed
    suspended.
    """
    messages: list[str] = []
    slurm = SlurmSignals(None, "/run/socket", {}, 30.0, messages.append, python=str(tmp_path / "python"))
    slurm.take(signal.SIGTSTP, os.getpid(), set())
    assert slurm.retry_at is not None
    slurm.ended()
    assert slurm.retry_at is None
    called = tmp_path / "called"
    _stand_in(tmp_path / "python", called)
    slurm.retry(set())
    slurm.take(signal.SIGCONT, os.getpid(), set())
    assert slurm.retry_at is None
    assert not called.exists()


def test_a_restarted_command_is_not_suspended_by_a_signal_to_its_predecessor(tmp_path: Path) -> None:
    python, called = tmp_path / "python", tmp_path / "called"
    environ = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    words = [sys.executable, "-c", STARTED_AGAIN, str(python)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "trains\n"
        parent.send_signal(signal.SIGTSTP)
        assert "trying again" in parent.stderr.readline()
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "trains\n"
        _stand_in(python, called)
        parent.send_signal(signal.SIGCONT)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stderr.read() == ""
    assert parent.returncode == 7
    assert not called.exists()


def test_a_job_that_failed_while_suspended_is_not_reported_on_its_gpu(socket_path: Path) -> None:
    job = m.Job(id="j1", name="train", state=SUSPENDED, started_utc=0.0, uid=0)
    messages: list[str] = []
    answers = {m.InspectJob: saying(m.JobReply(job=job)), m.Resume: saying(m.OperationReply(recovered="j1"))}
    with FakeDaemon(socket_path, {**node.answers(), **answers}):
        resume(lambda: connect(str(socket_path), timeout_s=HANG_S), "j1", messages.append)
    assert messages == ["Slurm resumes this job: it had failed, and is started again from its newest snapshot"]


def test_a_resume_that_was_rolled_back_is_retried(socket_path: Path) -> None:
    """The job counted as on its GPU, and stayed suspended for ever."""
    job = m.Job(id="j1", name="train", state=SUSPENDED, started_utc=0.0, uid=0)
    failure = Reason(code="refused", message="gpu0 does not answer", hint="run: hegmctl doctor")
    operation = Operation(id="4", kind="resume", phase="done", processes=(), created_utc=0.0, size_bytes=0)
    replies = [operation, operation.replace(phase="suspended", failure=failure)]

    def answer(_caller: Caller, _request: IncomingRequest) -> m.OperationReply:
        return m.OperationReply(operation=replies.pop())

    messages: list[str] = []
    answers = {m.InspectJob: saying(m.JobReply(job=job)), m.Resume: answer}
    with FakeDaemon(socket_path, {**node.answers(), **answers}):
        resume(lambda: connect(str(socket_path), timeout_s=HANG_S), "j1", messages.append)
    assert messages == [
        "Slurm resumes this job, which waits: gpu0 does not answer",
        "Slurm resumes this job: it is back on its GPU",
    ]
