"""A training that is moved while the disk of the daemon's journal is full, or cannot be written: a real small one.

The daemon has a mount namespace of its own with a tmpfs of 256 KiB for its state directory; the test fills it and makes
it read-only from outside.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import Self

from hegmctl.connection import connect
from tests.e2e.agented import undisturbed
from tests.e2e.daemon import RunningDaemon
from tests.e2e.mounting import NAMESPACE, why_no_mounts
from tests.e2e.test_moving import Job
from tests.looks import pause
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

# Trains until it gets the command to stop, or for so many epochs, and prints a number of each epoch in full.
SCRIPT = """
import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader
told, most = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
epochs = 0
while epochs < most and not told.exists():
    for batch in DataLoader(torch.arange(6400.0).reshape(100, 64) / 6400, batch_size=5, shuffle=True):
        loss = (model(batch) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(float(loss.item()).hex(), flush=True)
    epochs += 1
"""
SIZE = "256k"


class SmallDisk(RunningDaemon):
    """A daemon whose state directory is on a disk of its own, which outlives it for as long as `disk` runs."""

    def __enter__(self) -> Self:
        self.state_dir = self.folder / "state"
        self.state_dir.mkdir()
        mount = f"mount -t tmpfs -o size={SIZE},mode=700 hegm {self.state_dir} && echo mounted && exec cat"
        self.disk = subprocess.Popen(
            [*NAMESPACE, "sh", "-c", mount], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.disk.stdout is not None
        assert self.disk.stdout.readline() == "mounted\n"
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.log.close()
        self.disk.communicate()

    def command(self) -> list[str]:
        return [*self._inside(), *super().command()]

    def _inside(self) -> list[str]:
        return ["nsenter", "--mount", f"--target={self.disk.pid}", f"--wd={os.getcwd()}"]

    def on_disk(self, script: str) -> str:
        """Return the output of a shell script that runs in the state directory."""
        words = [*self._inside(), "sh", "-c", f"cd {self.state_dir} && {script}"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def fill(self) -> None:
        """Leave no free block."""
        self.on_disk("dd if=/dev/zero of=filling bs=4k 2>/dev/null || true")
        assert self.on_disk("df --output=avail . | tail -1").strip() == "0"

    def empty(self) -> None:
        self.on_disk("rm filling")

    def make(self, how: str) -> None:
        """ro or rw."""
        self.on_disk(f"mount -o remount,{how} .")

    def kinds(self) -> list[str]:
        """Return the kinds of all events."""
        with connect(str(self.socket_path)) as hegmd:
            return [event.kind for event in hegmd.events()]


class Training(Job):
    """A training that continues until `ended`, which compares every number with an undisturbed run."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.script = daemon.folder / "training.py"
        self.script.write_text(SCRIPT)
        self.stop_file = daemon.folder / "stop"
        super().__init__(daemon, [str(self.script), str(self.stop_file), "1000000"])

    @property
    def pid(self) -> str:
        return str(self.process.pid)

    def ended(self) -> None:
        self.stop_file.touch()
        printed = self.output()
        self.stop_file.unlink()
        epochs = len(printed.splitlines())
        assert printed == undisturbed([str(self.script), str(self.stop_file), str(epochs)])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDisk]:
    why = why_no_mounts()
    if why is not None:
        pytest.skip(why)
    with SmallDisk(tmp_path) as running:
        yield running


def test_on_a_full_disk_no_move_begins_and_a_started_one_ends(daemon: SmallDisk) -> None:
    with Training(daemon) as job:
        job.steps(3)
        assert job.operation("suspend", job.pid)["phase"] == "suspended"
        daemon.fill()
        assert job.operation("resume", job.pid)["phase"] == "done", "the room that was reserved was not enough"
        refused = job.command("migrate", job.pid, "--to", "gpu1", status=14)[-1]["error"]
        assert "cannot be extended for an operation: No space left on device" in refused["message"]
        assert "df -h" in refused["hint"]
        job.steps(3)
        daemon.empty()
        assert job.operation("migrate", job.pid, "--to", "gpu1")["phase"] == "done"
        job.ended()
    assert daemon.kinds().count("operation.journal-failed") == daemon.kinds().count("operation.journal-mended") == 1


def test_a_daemon_on_a_read_only_disk_reports_it_and_the_job_waits_for_the_next_daemon(daemon: SmallDisk) -> None:
    """No test can make a disk read-only while files on it are open for writing, so this happens between two daemons."""
    with Training(daemon) as job:
        job.steps(3)
        job.operation("suspend", job.pid)
        daemon.stop(signal.SIGKILL)
        daemon.make("ro")
        with pytest.raises(RuntimeError, match="Read-only file system"):
            daemon.start()
        daemon.make("rw")
        daemon.start()
        job.command("op", "1", "--follow")
        assert job.operation("resume", job.pid)["phase"] == "done"
        job.ended()


def test_after_a_kill_with_a_full_disk_the_next_daemon_resumes_the_job(daemon: SmallDisk) -> None:
    with Training(daemon) as job:
        job.steps(3)
        job.operation("suspend", job.pid)
        daemon.stop(signal.SIGKILL)
        daemon.fill()
        daemon.start()
        with job.connect() as hegmd:
            while not any(process.agent for process in hegmd.processes().processes):
                pause()
        assert "operation.journal-failed" in daemon.kinds()
        (shown,) = job.command("ops")[-1]["operations"]
        assert "the operation is stopped" in shown["waits"]["why"]
        assert "df -h" in shown["waits"]["next"]
        daemon.empty()
        job.command("op", "1", "--follow")
        assert job.operation("resume", job.pid)["phase"] == "done"
        job.ended()
