"""Processes that are ended because they train without the agent, with real processes and a file like PyTorch's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hegmctl.agentless import LOOK_EVERY_S, AgentlessWatch
from tests.patience import HANG_S

INJECT = "/opt/hegmd/agent/inject"
# Maps each file that it is told to, and reports it. `title`: writes over its own environment, as setproctitle does.
TRAINS = """
import mmap, sys
if "title" in sys.argv:
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(bytes(end - begin))
files = [open(path, "r+b") for path in sys.argv[1:] if "/" in path]
maps = [mmap.mmap(file.fileno(), 4096) for file in files]
print("mapped", flush=True)
sys.stdin.read()
"""

WRAPS = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")
# A script that starts another process before it continues, and has what that file is mapped.
_PROBES = """
import mmap, subprocess, sys
file = open(sys.argv[1], "rb")
held = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
subprocess.run(sys.argv[2:])
"""


@contextmanager
def running(*words: str, path: str | None, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    environ = {"PATH": "/usr/bin:/bin", **({} if path is None else {"PYTHONPATH": path})}
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "mapped\n"
            yield process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()


@pytest.fixture
def torch(tmp_path: Path) -> str:
    path = tmp_path / "libtorch_cpu.so"
    path.write_bytes(bytes(4096))
    return str(path)


@pytest.mark.parametrize("word", ["-I", "-E", "-S"])
def test_a_python_that_excludes_the_agent_does_not_train_from_the_start(torch: str, word: str) -> None:
    with running(sys.executable, word, "-c", TRAINS, torch, path=INJECT) as process:
        found = AgentlessWatch().check(process.pid, 0.0, None)
        assert found is not None
        assert f"process {process.pid} (" in found
        assert f"the option {word} leaves hegmd's agent out" in found
        assert process.wait(timeout=HANG_S) == -9


@pytest.mark.thorough
def test_a_wrapper_that_drops_the_environment_is_ended_with_its_children(torch: str) -> None:
    script = 'env -u PYTHONPATH "$@"; echo again'
    with running("sh", "-c", script, "sh", sys.executable, "-c", TRAINS, torch, path=INJECT) as process:
        (training,) = psutil.Process(process.pid).children()
        found = AgentlessWatch().check(process.pid, 0.0, None)
        assert found is not None
        assert found.startswith(f"process {training.pid} (")
        assert "its PYTHONPATH leaves hegmd's agent out" in found
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert training.wait(timeout=HANG_S) in (-9, None)


@pytest.mark.parametrize("words", [("title",), ()])
def test_a_process_that_may_have_the_agent_is_left_alone(torch: str, words: tuple[str, ...]) -> None:
    path = "/mine" if words else f"/mine:{INJECT}"
    with running(sys.executable, "-c", TRAINS, torch, *words, path=path) as process:
        assert AgentlessWatch().check(process.pid, 0.0, None) is None
        assert process.poll() is None


def test_a_process_without_pytorch_is_left_alone_and_checked_again(torch: str) -> None:
    lookout = AgentlessWatch()
    with running(sys.executable, "-I", "-c", TRAINS, path=None) as process:
        assert lookout.check(process.pid, 1.0, None) is None
        assert lookout.look_at >= 1.0 + LOOK_EVERY_S
    with running(sys.executable, "-I", "-c", TRAINS, torch, path=None) as process:
        assert lookout.check(process.pid, 1.0, None) is None
        assert lookout.check(process.pid, lookout.look_at, None) is not None


def test_processes_of_other_users_are_not_checked(torch: str) -> None:
    words = ("sh", "-c", '"$@"; true', "sh", sys.executable, "-I", "-c", TRAINS, torch)
    with running(*words, path=None) as process:
        (other,) = psutil.Process(process.pid).children()
        assert AgentlessWatch().check(other.pid, 0.0, None) is None
        assert other.is_running()


def probes(torch: str) -> tuple[str, ...]:
    """A training that looks at PyTorch by another Python as well."""
    return (sys.executable, "-c", _PROBES, torch)


@pytest.mark.parametrize(
    ("by", "has_agent", "hands_on", "is_spared"),
    [
        ("training", True, True, True),
        ("training", True, False, False),
        ("training", False, True, False),
        ("wrapper", True, True, False),
        ("shell", True, True, False),
    ],
    ids=["on its way", "without the state", "without the agent", "a wrapper in Python", "a shell"],
)
def test_a_probe_for_pytorch_by_a_starting_script_ended_the_whole_job(
    torch: str, tmp_path: Path, by: str, has_agent: bool, hands_on: bool, is_spared: bool
) -> None:
    """A process like `subprocess.run([sys.executable, "-I", "-c", "import torch"])` before its first loader."""
    words = {"training": probes(torch), "wrapper": WRAPS, "shell": ("sh", "-c", '"$@"; true', "sh")}[by]
    path = INJECT if has_agent else "/mine"
    with (tmp_path / "right").open("w") as right:
        fds = (right.fileno(),) if hands_on else ()
        with running(*words, sys.executable, "-I", "-c", TRAINS, torch, path=path, fds=fds) as process:
            assert (AgentlessWatch().check(process.pid, 0.0, right.fileno()) is None) == is_spared
            assert (process.poll() is None) == is_spared or process.wait(timeout=HANG_S) == -9
