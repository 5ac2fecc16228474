"""The real Slurm: a job of a higher partition gets the memory of a GPU before its first line, and no loss changes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.agented import SCRIPTS
from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import daemon_by
from tests.e2e.moved_job import undisturbed_steps
from tests.e2e.real_criu import criu_or_skip, find_criu
from tests.e2e.slurm_cluster import GRACE_S, SHIPPED, UNPACKED, Slurm, cluster
from tests.needs import need_torch

# One cluster for all tests, so all run on one worker.
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("slurm")]
need_torch()

# Steps of the undisturbed run with which all are compared that made no more.
MANY = 200
SCRIPT = [sys.executable, str(SCRIPTS / "until.py")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if not (UNPACKED / "usr/include/slurm/spank.h").exists():
        pytest.skip("there is no Slurm in build/slurm; tools/slurm.sh fetches it, which takes a network")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs jobs as their users, which takes root")
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc for the SPANK plugin")
    folder = tmp_path_factory.mktemp("slurm")
    criu = find_criu()
    given = RunningDaemon(folder) if isinstance(criu, str) else daemon_by(criu, folder)
    with given as daemon, cluster(folder, daemon.socket_path) as running:
        running.wait_until(lambda: "idle" in running.call("sinfo", "-h", "-o", "%T"))
        # This slurmd reads none from its file without a GPU.
        running.call("scontrol", "update", f"nodename={running.host}", "gres=gpu:1,shard:8")
        yield running


@dataclass
class Training:
    """A job of a lower partition. Its output is in the file `name`."""

    slurm: Slurm
    name: str
    job: str

    @property
    def stop(self) -> Path:
        return self.slurm.folder / f"{self.name}.stop"

    @property
    def printed(self) -> str:
        return self.slurm.text(self.name)

    def steps(self) -> int:
        return self.printed.count("\nstep") + self.printed.startswith("step")

    def goes_on(self) -> None:
        before = self.steps()
        self.slurm.wait_until(lambda: self.steps() > before + 20)

    def process(self) -> psutil.Process:
        """The training itself."""
        return next(
            process for process in psutil.process_iter() if str(self.stop) in _words(process) and _trains(process)
        )

    def is_as_undisturbed(self) -> None:
        """Let it end, and compare what it printed."""
        self.stop.touch()
        self.slurm.wait_until(lambda: "\nend" in self.printed)
        steps = [line for line in self.printed.splitlines() if line.startswith("step")]
        enough = MANY * -(-len(steps) // MANY)
        assert steps == undisturbed_steps(*SCRIPT, "", str(enough))[: len(steps)]
        self.slurm.wait_until(lambda: not self.slurm.call("squeue", "-h"))


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _trains(process: psutil.Process) -> bool:
    return _words(process)[1:2] == SCRIPT[1:]


def trained(slurm: Slurm, name: str, recipe: str) -> Training:
    """Submit a recipe, and wait until it trains."""
    slurm.grace_over.unlink(missing_ok=True)
    exports = f"ALL,HEGMCTL={slurm.folder}/hegmctl,HEGM_IMAGE_DIR={slurm.folder},HEGM_SLURM_GRACE={GRACE_S}"
    words = (f"{SHIPPED}/{recipe}", *SCRIPT, f"{slurm.folder}/{name}.stop")
    given = ("--parsable", "--export", exports, "-o", f"{slurm.folder}/{name}")
    training = Training(slurm, name, slurm.call("sbatch", *given, *words).strip())
    training.goes_on()
    return training


def gets_the_memory(slurm: Slurm, name: str, *words: str, until: str = "true") -> None:
    """Run a job of the higher partition, which finds the GPU empty in its first line.

    Then it ends the grace time of the suspended job, and itself after `until`.
    """
    ends = f"touch {slurm.grace_over}; {until}; touch {slurm.folder}/{name}.over"
    first_line = slurm.script(f"{name}.sh", f"{slurm.folder}/hegmctl gpus --json; {ends}")
    slurm.call("sbatch", "-p", "high", "-o", f"{slurm.folder}/{name}", *words, first_line)
    slurm.wait_until((slurm.folder / f"{name}.over").exists)
    gpus = json.loads(slurm.text(name).splitlines()[-1])["gpus"]
    assert gpus[0]["memory_used_bytes"] == 0, slurm.text("hooks.log")


def test_a_job_survives_the_grace_time_and_the_training_continues(slurm: Slurm) -> None:
    low = trained(slurm, "low", "gang.sh")
    pid = low.process().pid
    stopped = f"until grep -q 'State:.T' /proc/{pid}/status; do sleep 0.1; done"
    gets_the_memory(slurm, "high", until=stopped)
    assert "it is off its GPU" in low.printed
    low.goes_on()
    low.is_as_undisturbed()


def test_a_job_with_shards_gets_the_memory_of_one_that_the_plugin_started(slurm: Slurm) -> None:
    low = trained(slurm, "low-shards", "shards.sh")
    gets_the_memory(slurm, "high-shards", "--gres=shard:4")
    low.goes_on()
    low.is_as_undisturbed()


def test_a_requeued_training_continues_from_its_image(slurm: Slurm) -> None:
    criu_or_skip()
    low = trained(slurm, "low-requeued", "requeue.sh")
    gets_the_memory(slurm, "high-requeued")
    low.goes_on()
    assert "restore" in slurm.call(f"{slurm.folder}/hegmctl", "ops")
    low.is_as_undisturbed()
