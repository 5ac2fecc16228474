"""Real CRIU for the tests: which one, jobs to dump, and everything that is left of them ended afterwards.

`make criu` unpacks one into build/criu; the distribution's own is taken where it is new enough. If there is none, or
the machine does not let it work, the tests that need it are skipped with the reason.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest

from hegmd.images.criu.needs import Needs, needs_of
from hegmd.node.criu_program import WANTED, Criu, version_of
from hegmd.node.processes.process_set import end_all, population_of
from hegmd.node.processes.process_tree import read_tree
from hegmd.system.programs import find_program
from tests.patience import HANG_S

ENDS_WITHIN_S = HANG_S
UNPACKED = Path(__file__).parents[2] / "build" / "criu" / "bin" / "criu"


def _without_a_space(program: Path) -> str:
    """CRIU does not read maps of memory in which its own files have a space in their names: a copy for this run."""
    if " " not in str(program):
        return str(program)
    folder = Path(tempfile.mkdtemp(prefix="hegm-criu-", dir="/var/tmp"))
    folder.chmod(0o755)  # CRIU is run with the rights of others, too
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(program.parents[1], folder / "criu", symlinks=True)
    return str(folder / "criu" / "bin" / "criu")


@cache
def find_criu() -> Criu | str:
    """Return the CRIU to test with, or the reason why there is none."""
    if os.geteuid() != 0:
        return "CRIU needs root"
    program = _without_a_space(UNPACKED) if UNPACKED.exists() else find_program("criu")
    if program is None:
        return "there is no CRIU here; `make criu` gets one"
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    version = output.partition("Version:")[2].split()[0]
    if version_of(version) < WANTED:
        return f"CRIU {version} is too old; `make criu` gets a newer one"
    checked = subprocess.run([program, "check"], capture_output=True, text=True, check=False)
    return Criu(program, version) if checked.returncode == 0 else f"CRIU does not work here: {checked.stderr[-200:]}"


def criu_or_skip() -> Criu:
    """Return the CRIU to test with; skip the test if there is none."""
    found = find_criu()
    if isinstance(found, str):
        pytest.skip(found)
    return found


class Job:
    """A job as a user starts it: its process, and what it says line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def line(self) -> str:
        """The next line that it says; waits for it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def needs(self, **more: object) -> Needs:
        """Return what CRIU needs to dump the process tree now."""
        return needs_of(read_tree(self.pid), **more)  # type: ignore[arg-type] # passed on as they are

    def gone(self) -> int:
        """Its exit status, once it is no more."""
        status = self.process.wait(timeout=HANG_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


@contextmanager
def job(argv: Sequence[str], **options: object) -> Iterator[Job]:
    """Start it, with its own Python for the first word if that is a script; ended with all its descendants."""
    given: dict[str, object] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True, **options}
    given.setdefault("start_new_session", True)  # CRIU refuses a job whose session leader is outside
    process: subprocess.Popen[str] = subprocess.Popen(argv, **given)  # type: ignore[call-overload] # as they are given
    started = Job(process)
    try:
        yield started
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                end_all(population_of(member.pid for member in read_tree(process.pid).members))
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def directory(path: Path) -> Iterator[int]:
    """A directory by descriptor, made if it is not there."""
    path.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def ended_after(pids: Sequence[int]) -> Iterator[None]:
    """The processes with those pids are ended at the end; for what a restore brings back."""
    try:
        yield
    finally:
        end_all(population_of(pids))


def python(text: str) -> list[str]:
    """The command of a script given as text."""
    return [sys.executable, "-c", text]


def tell(pid: int, number: signal.Signals = signal.SIGUSR1) -> None:
    """Send a job its cue."""
    os.kill(pid, number)


@contextmanager
def pipe() -> Iterator[tuple[TextIO, int]]:
    """A pipe: its lines as they arrive, and the end to write to."""
    ours, theirs = os.pipe()
    try:
        with open(ours) as reader:
            yield reader, theirs
    finally:
        os.close(theirs)


def ends(pid: int) -> bool:
    """Wait for a process to end; false when it does not."""
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([held], [], [], ENDS_WITHIN_S)[0])
    finally:
        os.close(held)
