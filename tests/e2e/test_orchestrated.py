"""Orchestrators' uses of jobs, with real CRIU: single steps, images at intervals, and another node."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import ENDS_WITHIN_S, ImageJob, daemon_with_criu, losses_alone
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

# Long enough for any speed: such a job has not ended when a few images of it exist.
LONG = 2000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with daemon_with_criu(tmp_path) as running:
        yield running


def test_a_job_is_quiesced_suspended_dumped_and_restored_in_steps_with_every_loss_the_same(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    expected = losses_alone(tmp_path / "alone")
    image = tmp_path / "image"
    with ImageJob(tmp_path / "job", daemon.socket_path, forks=False) as job:
        job.await_steps(20)
        held = job.operation("quiesce", str(job.pid), "--timeout", "30", "--hold", "15min")
        assert (held["phase"], held["processes"][0]["state"]) == ("holding", "parked")
        daemon.stop(signal.SIGKILL)
        losses = len(job.losses)
        daemon.start()
        assert job.operation("op", held["id"], "--follow")["phase"] == "holding"
        assert len(job.losses) == losses
        assert job.operation("resume", str(job.pid))["phase"] == "done"
        held = job.operation("quiesce", str(job.pid), "--hold", "15min")
        losses = len(job.losses)
        off = job.operation("offload", str(job.pid), "--timeout", "30")
        assert (off["id"], off["phase"], off["processes"][0]["state"]) == (held["id"], "suspended", "out")
        taken = tmp_path / "taken"
        taken.mkdir()
        (taken / "thesis.txt").touch()
        job.command("handoff", str(job.pid), str(taken), status=6)
        assert job.operation("op", off["id"])["phase"] == "suspended"
        done = job.operation("handoff", str(job.pid), str(image), "--timeout", "60")
        assert (done["id"], done["phase"], done["processes"][0]["state"]) == (held["id"], "done", "gone")
        assert len(job.losses) == losses
        lock = tmp_path / "locks" / str(os.getpid()) / "lock"
        assert lock.read_text().splitlines()[0] == str(image)
        job.process.wait(ENDS_WITHIN_S)
        job.operation("restore", str(image), "--to", "gpu1")
        assert not lock.exists()
        assert job.output() == expected


def test_scheduled_images_continue_under_the_next_daemon_and_the_newest_restores_on_another_node(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """Copied there as with any tool that keeps owner and mode: hegmd has no transport of its own."""
    images, there = tmp_path / "images", tmp_path / "there"
    every = ("--checkpoint-every", "1", "--keep", "1", "--dir", str(images), "--name", "train")
    expected = losses_alone(tmp_path / "alone", steps=LONG)
    with ImageJob(tmp_path / "job", daemon.socket_path, options=every, steps=LONG) as job:
        job.await_steps(5)
        _await(lambda: len(_whole(images)) == 1)
        (first,) = _whole(images)
        _await(lambda: first not in _whole(images))
        daemon.stop()
        before = _whole(images)[-1]
        daemon.start()
        _await(lambda: _whole(images)[-1] > before)
        daemon.stop()
    (tmp_path / "job" / "slow").unlink()
    newest = _whole(images)[-1]
    there.mkdir()
    (tmp_path / "other").mkdir()
    copied = f"tar -S -C {images} -cf - {newest} | tar -C {there} -xpf -"
    subprocess.run(["sh", "-ec", copied], check=True, timeout=HANG_S)
    program = [
        sys.executable,
        "-m",
        "tests.e2e.second_node",
        str(tmp_path / "other"),
        str(there / newest),
        str(job.pid),
    ]
    ran = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *program],
        env=job.environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert job.losses == expected


def _whole(images: Path) -> list[str]:
    """Those that have their names, oldest first."""
    return sorted(name for name in os.listdir(images) if not name.startswith("."))


def _await(is_so: Callable[[], bool]) -> None:
    """Poll until it is true; only the log reports images."""
    until = monotonic() + ENDS_WITHIN_S
    while not is_so():
        assert monotonic() < until, "no image came, or none went"
        select.select([], [], [], 0.02)
