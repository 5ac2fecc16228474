"""A new daemon reads the record of a restore in which its predecessor was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.images.criu import parent as attendants
from hegmd.images.restore_records import FOLDER_NAME, RestoreRecords
from hegmd.memory.pool import Pool
from hegmd.node.processes.process_set import population_of
from hegmd.protocol.images import ImageProcess, Manifest
from tests.patience import HANG_S

ATTENDANT = Path(attendants.__file__)
SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"
OP = "7"


@contextmanager
def sleeper(*words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", SLEEPER, *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").replace("\0", " ")


def noted(folder: Path, pid: int, command: str, **changes: object) -> RestoreRecords:
    """The notes, with one of a restore of that process that began before it was there."""
    notes = RestoreRecords(folder)
    process = ImageProcess(pid=pid, parent_pid=None, uid=0, command=command)
    notes.note(OP, Manifest(root_pid=pid, processes=(process,)), None)
    file = folder / FOLDER_NAME / OP
    file.write_text(json.dumps({**json.loads(file.read_text()), "since_ticks": 0, **changes}))
    return notes


async def test_a_restored_job_without_hegmctl_run_stayed_without_its_bytes(tmp_path: Path) -> None:
    """It was known by the environment of `hegmctl run` alone: its bytes were freed, and it stayed parked forever."""
    with sleeper() as process:
        await noted(tmp_path, process.pid, command_of(process.pid)).clear((), (), Pool(1 << 20))
        assert process.wait(HANG_S) == -9
    assert list((tmp_path / FOLDER_NAME).iterdir()) == []


# The parent starts this in place of CRIU, and it still works: its own child is not yet a process of a job.
AT_WORK = "import os, sys, time\nprint('ready', flush=True)\nif os.fork() == 0: time.sleep(600)\nsys.stdin.read()"


@contextmanager
def attended(root: int) -> Iterator[subprocess.Popen[str]]:
    """An attendant with something at work that continues until its input is closed."""
    ready, tells = os.pipe()
    argv = [sys.executable, "-SE", str(ATTENDANT), "tend", str(tells), str(root), "--", sys.executable, "-c", AT_WORK]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, pass_fds=(tells,), **pipes) as attendant:
        os.close(tells)
        assert attendant.stdout is not None
        assert attendant.stdout.readline() == "ready\n"
        yield attendant
    os.close(ready)


async def test_a_criu_that_restores_ends_with_its_killed_daemon(tmp_path: Path) -> None:
    """Its processes appeared later, with pids that a second restore of the image used too."""
    root = 1 << 22  # no process has that number
    notes = RestoreRecords(tmp_path)
    process = ImageProcess(pid=root, parent_pid=None, uid=0, command="python train.py")
    notes.note(OP, Manifest(root_pid=root, processes=(process,)), None)
    with attended(root) as attendant:
        assert attendant.stdin is not None
        assert attendant.stdout is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(notes.clear, (), (), Pool(1 << 20))
            attendant.stdin.close()  # CRIU ends meanwhile, before the message or after it
        assert attendant.wait(0) is not None
        assert attendant.stdout.read() == "", "nobody of them has the pipe any more"


def test_a_restore_that_no_note_could_be_written_of_does_not_begin(tmp_path: Path) -> None:
    """A daemon killed then would leave a job behind that no record names."""
    (tmp_path / FOLDER_NAME).write_text("a file")
    with pytest.raises(HegmError, match="the record of a restore cannot be written: File exists"):
        RestoreRecords(tmp_path).note(OP, Manifest(), None)


async def test_an_undeletable_record_ended_a_job_that_had_been_restored_before(tmp_path: Path) -> None:
    with sleeper() as process:
        ticks = population_of([process.pid]).start_ticks[process.pid]
        notes = noted(tmp_path, process.pid, command_of(process.pid), unit="hegm-no-such.service")
        await notes.clear(("8",), ((process.pid, ticks),), Pool(1 << 20))
        assert process.poll() is None
    assert list((tmp_path / FOLDER_NAME).iterdir()) == []


async def test_another_process_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    with sleeper() as process:
        await noted(tmp_path, process.pid, "python train.py").clear((), (), Pool(1 << 20))
        assert process.poll() is None
        command = command_of(process.pid)
        await noted(tmp_path, process.pid, command, boot="another").clear((), (), Pool(1 << 20))
        assert process.poll() is None
        await noted(tmp_path, process.pid, command, since_ticks=1 << 60).clear((), (), Pool(1 << 20))
        assert process.poll() is None
        await noted(tmp_path, process.pid, command).clear((OP,), (), Pool(1 << 20))  # it has begun
        assert process.poll() is None


async def test_a_job_is_known_by_its_run_whatever_it_calls_itself(tmp_path: Path) -> None:
    with sleeper(HEGM_RUN="one") as process:
        await noted(tmp_path, process.pid, "python train.py", runs=["one"]).clear((), (), Pool(1 << 20))
        assert process.wait(HANG_S) == -9


async def test_a_process_just_created_by_criu_is_recognised(tmp_path: Path) -> None:
    """Its attendant was killed, and it had the job's number permanently."""
    with sleeper("restore", "--images-dir", "/proc/self/fd/8") as half, sleeper() as stranger:
        for process in (stranger, half):
            await noted(tmp_path, process.pid, "python train.py").end_left(OP)
        assert half.wait(HANG_S) == -9
        assert stranger.poll() is None
