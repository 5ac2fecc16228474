"""What a start does with the note of a restore that its predecessor was killed in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hegmd.criu.population import population_of
from hegmd.half_revived import FOLDER_NAME, HalfRevived
from hegmd.pool import Pool
from hegmd.protocol.images import ImageProcess, Manifest

SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"
OP = "7"


@contextmanager
def sleeper(**environ: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").replace("\0", " ")


def noted(folder: Path, pid: int, command: str, **changes: object) -> HalfRevived:
    """The notes, with one of a restore of that process that began before it was there."""
    notes = HalfRevived(folder)
    process = ImageProcess(pid=pid, parent_pid=None, uid=0, command=command)
    notes.note(OP, Manifest(root_pid=pid, processes=(process,)), None)
    file = folder / FOLDER_NAME / OP
    file.write_text(json.dumps({**json.loads(file.read_text()), "since_ticks": 0, **changes}))
    return notes


async def test_what_came_back_of_a_job_without_hegmctl_run_stayed_without_its_bytes(tmp_path: Path) -> None:
    """It was known by the environment of `hegmctl run` alone: its bytes were given back, and it stood for good."""
    with sleeper() as process:
        await noted(tmp_path, process.pid, command_of(process.pid)).clear((), (), Pool(1 << 20))
        assert process.wait(10) == -9
    assert list((tmp_path / FOLDER_NAME).iterdir()) == []


async def test_a_note_that_could_not_be_taken_away_ended_a_job_that_had_long_come_back(tmp_path: Path) -> None:
    with sleeper() as process:
        ticks = population_of([process.pid]).start_ticks[process.pid]
        notes = noted(tmp_path, process.pid, command_of(process.pid), unit="hegm-no-such.service")
        await notes.clear(("8",), ((process.pid, ticks),), Pool(1 << 20))
        assert process.poll() is None
    assert list((tmp_path / FOLDER_NAME).iterdir()) == []


async def test_who_has_the_number_by_now_and_is_somebody_else_is_let_be(tmp_path: Path) -> None:
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
        assert process.wait(10) == -9
