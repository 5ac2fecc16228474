"""Trainings as people write them, with the frameworks they use, moved and suspended by command while they run.

No number that they print differs in a single bit from those of an undisturbed run beside them.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import SCRIPTS, MovedJob, Script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

# Each with what it needs to be installed.
NEEDS = {
    "hf_trainer": ("torch", "transformers", "accelerate"),
    "lightning_fit": ("torch", "lightning"),
    "accelerated": ("torch", "accelerate"),
    "schedules": ("torch",),
    "progress": ("torch", "tqdm"),
    "two_models": ("torch",),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_training_prints_the_same_when_it_is_moved(name: str, socket_dir: Path) -> None:
    missing = [module for module in NEEDS[name] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `pip install -e '.[frameworks]'` does that")
    words = [sys.executable, str(SCRIPTS / f"{name}.py")]
    with (
        RunningDaemon(socket_dir) as daemon,
        Script(words, None) as undisturbed,
        MovedJob(words, daemon) as job,
    ):
        job.read_steps(1)
        job.disturb(job.process.pid, random.Random(name), longest_run=12)
        assert job.steps() == undisturbed.steps()


def test_a_training_started_by_a_script_and_a_launcher_is_moved(socket_dir: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    words = ["sh", str(SCRIPTS / "nested.sh"), sys.executable]
    with (
        RunningDaemon(socket_dir) as daemon,
        Script(words, None) as undisturbed,
        MovedJob(words, daemon) as job,
    ):
        job.read_steps(3)  # the launcher's one, and two of the training's
        (pid,) = job.pids(1)
        assert pid != job.process.pid
        job.disturb(pid, random.Random(21), longest_run=12)
        assert job.steps() == undisturbed.steps()
