"""Trainings as people write them, with the frameworks they use, moved and suspended by command while they run.

No number that they print and no byte that they write differs from those of an undisturbed run beside them.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.agented import SCRIPTS as TRAINING
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import SCRIPTS, BareJob, MovedJob, files_in, steps_alone
from tests.wide import telling

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded_frameworks"), pytest.mark.xdist_group("frameworks")]

# Each with what it needs to be installed.
NEEDS = {
    "hf_trainer": ("torch", "transformers", "accelerate"),
    "lightning_fit": ("torch", "lightning"),
    "accelerated": ("torch", "accelerate"),
    "schedules": ("torch",),
    "progress": ("torch", "tqdm"),
    "two_models": ("torch",),
    "mixed_precision": ("torch", "numpy"),
    "in_a_thread": ("torch",),
    "numpy_boundaries": ("numpy",),
}
# Other scripts here and in test_moving.py do what these do.
AS_OTHERS = {"schedules", "two_models", "progress", "in_a_thread"}
# Those of frameworks, which ask it for more, and one of plain PyTorch, come with PyTorch's compiler.
WITH_COMPILER = {"hf_trainer", "lightning_fit", "accelerated", "two_models"}
# Files that each leaves behind, beside its output.
FILES = {"mixed_precision": 11, "numpy_boundaries": 1, "hf_trainer": 3, "lightning_fit": 1}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for all, as on a node; each job finds it as the previous one has left it."""
    with tempfile.TemporaryDirectory(prefix="hegm-", dir="/tmp") as folder, RunningDaemon(Path(folder)) as running:
        yield running


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Folders for the files of the undisturbed run and of the moved one."""
    made = tmp_path / "undisturbed", tmp_path / "moved"
    for folder in made:
        folder.mkdir()
    return made


def _require(modules: tuple[str, ...]) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `pip install -e '.[frameworks]'` does that")


@pytest.mark.parametrize("name", telling(zip(NEEDS, strict=True), [(name,) for name in NEEDS if name not in AS_OTHERS]))
def test_a_training_prints_and_writes_the_same_when_it_is_moved(
    name: str, daemon: RunningDaemon, folders: tuple[Path, Path]
) -> None:
    _require(NEEDS[name])
    words = [sys.executable, str(SCRIPTS / f"{name}.py")]
    kind = MovedJob if name in WITH_COMPILER else BareJob
    with kind(words, daemon, folders[1]) as job:
        job.read_steps(1)
        job.places(1)
        job.disturb(job.process.pid, random.Random(name), longest_run=12)
        assert job.steps() == steps_alone(words, folders[0])
    assert files_in(folders[1]) == files_in(folders[0])
    assert len(files_in(folders[1])) == FILES.get(name, 0)


def test_a_training_started_by_a_script_and_a_launcher_is_moved(
    daemon: RunningDaemon, folders: tuple[Path, Path]
) -> None:
    _require(("torch",))
    words = ["sh", str(SCRIPTS / "nested.sh"), sys.executable]
    with BareJob(words, daemon, folders[1]) as job:
        job.read_steps(3)  # the launcher's one, and two of the training's
        (pid,) = job.places(1)
        assert pid != job.process.pid
        job.disturb(pid, random.Random(21), longest_run=12)
        launcher, *steps, shell = job.steps()
        assert (launcher.rpartition(" ")[0], shell) == ("step launcher", "step done")
        assert steps == steps_alone([sys.executable, str(SCRIPTS / "two_models.py")], folders[0])


def test_models_on_two_gpus_with_a_process_for_each_are_moved_as_one_job(
    daemon: RunningDaemon, folders: tuple[Path, Path]
) -> None:
    """One process has one simulated GPU; the processes of one run take the place of a script with several GPUs."""
    _require(("torch",))
    words = [sys.executable, str(TRAINING / "ensemble.py")]
    draw = random.Random(22)
    with MovedJob(words, daemon, folders[1], gpu=None) as job:
        job.read_steps(1)
        first, second = job.places(2)
        before = job.places(2)
        assert set(before.values()) == {"gpu0", "gpu1"}
        job.read_steps(draw.randint(1, 12))
        job.answer("swap", str(first), str(second))
        assert job.places(2) == {first: before[second], second: before[first]}
        job.read_steps(draw.randint(1, 12))
        out = job.operation("suspend", str(first))
        assert {process["state"] for process in out["processes"]} == {"out"}
        assert job.places(0) == {}
        job.operation("resume", str(second))
        assert job.places(2) == {first: before[second], second: before[first]}
        job.read_steps(draw.randint(1, 12))
        job.operation("migrate", str(second), "--to", "gpu1")
        assert job.places(2) == dict.fromkeys((first, second), "gpu1")
        assert job.steps() == steps_alone(words, folders[0])
    assert files_in(folders[1]) == files_in(folders[0])
    assert len(files_in(folders[1])) == 2


def test_processes_that_wait_for_each_other_within_a_batch_are_never_harmed(
    daemon: RunningDaemon, folders: tuple[Path, Path]
) -> None:
    """If one rank is parked and the other reaches no boundary, the job continues on its GPU."""
    _require(("torch",))
    words = [sys.executable, str(TRAINING / "distilled.py")]
    outcomes = set()
    with MovedJob(words, daemon, folders[1]) as job:
        job.read_steps(2)
        places = job.places(2)
        for _ in range(4):
            to = "gpu1" if "gpu0" in places.values() else "gpu0"
            ended = job.ended("migrate", str(next(iter(places))), "--to", to, "--timeout", "0.5")
            if ended["phase"] == "rolled-back":
                # Half a second may be over, on a machine that has others to do, when both stand already.
                assert "boundary" in ended["failure"]["message"] or "did not finish" in ended["failure"]["message"]
                assert ended["failure"]["hint"]
            assert job.places(2) == (dict.fromkeys(places, to) if ended["phase"] == "done" else places)
            outcomes.add(ended["phase"])
            places = job.places(2)
        assert job.steps() == steps_alone(words, folders[0])
    assert outcomes <= {"done", "rolled-back"}


def test_a_numpy_script_runs_unharmed_and_is_refused_in_words(
    daemon: RunningDaemon, folders: tuple[Path, Path]
) -> None:
    """It holds no GPU and tells no boundary; with `hegm.boundary()` in it, it is stopped and moved like any other."""
    _require(("numpy",))
    words = [sys.executable, str(SCRIPTS / "numpy_alone.py")]
    with MovedJob(words, daemon, folders[1]) as job:
        job.read_steps(5)
        for command in (("migrate", "--to", "gpu1"), ("suspend",), ("resume",)):
            refused = job.refusal(command[0], str(job.process.pid), *command[1:])
            assert str(job.process.pid) in refused["message"]
        assert job.steps() == steps_alone(words, folders[0])
    assert files_in(folders[1]) == files_in(folders[0])
    assert len(files_in(folders[1])) == 1
