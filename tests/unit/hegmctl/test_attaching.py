"""`hegmctl attach` before and after the agent arrives: the processes that it attaches to, and what it cleans up."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest

from hegmctl.answers import AttachAnswer, AttachedProcess
from hegmctl.attach_folder import Folder
from hegmctl.attaching import Target, ask, await_job, chosen, text_of
from hegmctl.remote_python import NoPython, RemotePython
from hegmctl.tables import PLAIN
from hegmd.errors import NOT_FOUND, USAGE, HegmError
from hegmd.protocol.snapshots import AgentInfo
from tests.unit.hegmctl.running import hegmctl

STATUS = "State:\tS (sleeping)\nTracerPid:\t0\nUid:\t{uid} {uid} {uid} {uid}\nGid:\t{gid} {gid} {gid} {gid}\n"


def show(proc: Path, *, uid: int, gid: int, start: int) -> Target:
    """A /proc with one process that has these."""
    (proc / "7").mkdir(exist_ok=True)
    (proc / "7" / "status").write_text(STATUS.format(uid=uid, gid=gid))
    (proc / "7" / "stat").write_text(f"7 (py (3) x) S {'0 ' * 18}{start} 0 0\n")
    return Target(7, str(proc))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"start": 6}, "there is no process 7"),
        ({"gid": 0x7FFF}, "changed its user or group"),
        ({"uid": 0x7FFF}, "changed its user or group"),
    ],
)
def test_a_reused_pid_is_not_attached_to(tmp_path: Path, more: dict[str, int], message: str) -> None:
    first = {"uid": os.geteuid(), "gid": os.getegid(), "start": 5}
    target = show(tmp_path, **first)
    target.judge_again()
    show(tmp_path, **{**first, **more})
    with pytest.raises(HegmError, match=message):
        target.judge_again()


def test_without_a_pid_or_with_no_name_for_a_job_nothing_is_attached_to() -> None:
    """Without a pid it ended with a traceback, and a name that no job can have was left out."""
    for words, says in (
        ((), "attach needs the pid"),
        ((str(os.getpid()), "--name", "a b"), "--name 'a b': a name begins"),
    ):
        ran = hegmctl("attach", *words)
        assert (ran.returncode, ran.stdout) == (USAGE.exit_status, "")
        assert says in ran.stderr


class Python:
    """The target's runtime, which has or has not taken the request when hegmctl withdraws it."""

    def __init__(self, folder: Folder, *, was_taken: bool, rights_taken: bool) -> None:
        self._folder, self._was_taken, self._rights_taken = folder, was_taken, rights_taken
        self.withdrawn = False

    def request(self, path: str) -> None:
        if self._rights_taken:
            os.rename(f"{self._folder.path}/asked", f"{self._folder.path}/taken")
        raise KeyboardInterrupt

    def withdraw(self) -> bool:
        self.withdrawn = True
        return not self._was_taken


@pytest.fixture
def folder() -> Iterator[Folder]:
    made = Folder((os.geteuid(), os.getegid()))
    yield made
    rmtree(made.path, ignore_errors=True)


@pytest.mark.parametrize(
    ("was_taken", "rights_taken", "is_left"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_an_interrupted_request_is_withdrawn_or_keeps_its_folder(
    folder: Folder, was_taken: bool, rights_taken: bool, is_left: bool
) -> None:
    """Another user could create a removed folder again and make the target run a script."""
    pidfd = os.pidfd_open(os.getpid())
    python: Any = Python(folder, was_taken=was_taken, rights_taken=rights_taken)
    try:
        folder.write("asked", "")
        with pytest.raises(KeyboardInterrupt), folder:
            ask(os.getpid(), pidfd, python, folder, time.monotonic(), 0.0)
    finally:
        os.close(pidfd)
    assert os.path.exists(folder.path) is is_left
    assert python.withdrawn is not rights_taken


LAUNCHER = """
import os, subprocess, sys
pipe = subprocess.PIPE
ranks = [subprocess.Popen(["cat"], env={**os.environ, "RANK": str(rank)}, stdin=pipe, stdout=pipe) for rank in range(2)]
for rank in ranks:
    rank.stdin.write(b"x\\n")
    rank.stdin.flush()
    rank.stdout.readline()
print(*[rank.pid for rank in ranks], flush=True)
sys.stdin.read()
"""


def test_the_ranks_without_an_agent_join_the_run_of_the_others() -> None:
    environ = {key: value for key, value in os.environ.items() if key != "RANK"}
    argv = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as launcher:
        assert launcher.stdout is not None
        first, second = map(int, launcher.stdout.readline().split())
        agent = AgentInfo(name="hegm", version="1", run="abc", job="late")
        target = Target(launcher.pid)
        assert [(one.pid, more) for one, more in chosen(target, {})] == [(first, {}), (second, {})]
        found = [(one.pid, more) for one, more in chosen(target, {first: agent})]
        assert found == [(second, {"HEGM_RUN": "abc", "HEGM_JOB": "late"})]
        assert len(chosen(target, {first: agent, second: agent})) == 2
        launcher.communicate("")


def test_a_job_that_the_daemon_does_not_know_yet_is_waited_for() -> None:
    answers: list[object] = [HegmError(NOT_FOUND, "no job", "wait"), SimpleNamespace(job=SimpleNamespace(name="late"))]

    def call(*_: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, HegmError):
            raise answer
        return answer

    snapshot = SimpleNamespace(processes=[SimpleNamespace(pid=os.getpid(), agent="an agent")])
    connection: Any = SimpleNamespace(processes=lambda: snapshot, call=call)
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert await_job(os.getpid(), pidfd, connection) == "late"
    finally:
        os.close(pidfd)


def test_strings_of_the_target_cannot_control_the_terminal() -> None:
    attached = AttachedProcess(
        pid=7, python_version="3.14", framework_version="\x1b[2J", job=None, unknown=("\x1b]0;x",)
    )
    assert "\x1b" not in "".join(text_of(AttachAnswer(processes=(attached,), socket="/run/hegmd"), PLAIN))


def test_a_page_that_cannot_be_read_does_not_hide_the_runtime(tmp_path: Path) -> None:
    path = tmp_path / "python-state"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
        file.truncate(0)
        with suppress(NoPython):  # from a Python older than 3.14
            RemotePython(os.getpid()).close()
