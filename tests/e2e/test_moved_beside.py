"""Trainings beside the threads of the libraries that people watch them with: each is moved at once.

Issue 14, row 4: a thread in a sleep of its own kept a training from being moved, and stopped it for the whole time
limit. Lightning with its default progress bar could never be moved.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import SCRIPTS, BareJob, MovedJob, steps_alone

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded_frameworks"), pytest.mark.xdist_group("frameworks")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with tempfile.TemporaryDirectory(prefix="hegm-", dir="/tmp") as folder, RunningDaemon(Path(folder)) as running:
        yield running


@pytest.mark.parametrize("library", ["tqdm", "rich", "tensorboard", "wandb"])
def test_a_training_is_moved_beside_the_threads_of(library: str, daemon: RunningDaemon, tmp_path: Path) -> None:
    script = str(SCRIPTS / "helped.py")
    with BareJob([sys.executable, script, library], daemon, tmp_path) as job:
        job.read_steps(5)
        (pid,) = job.places(1)
        job.move(pid)
        job.read_steps(5)
        job.suspend_and_resume(pid)
        assert job.steps() == steps_alone([sys.executable, script, "none"])


def test_lightning_is_moved_with_each_of_its_progress_bars(daemon: RunningDaemon, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPTS / "lightning_bars.py")]
    with MovedJob(words, daemon, tmp_path) as job:
        for bar in ("RichProgressBar", "TQDMProgressBar", "NoneType"):
            while not any(line.startswith(f"step {bar} 9 ") for line in job.lines):
                job.read_steps(1)
            job.move(next(iter(job.places(1))))
            assert job.lines[-1].startswith(f"step {bar} "), "it was moved while that one was shown"
        assert job.steps() == steps_alone(words, tmp_path)
