"""Disturbances before and during operations: bad requests, other programs, kills, upgrades."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import ROOT, SCRIPTS, BareJob, MovedJob, undisturbed_steps
from tests.looks import pause
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

MIB = 1 << 20
TRAINING = [sys.executable, str(SCRIPTS / "in_a_thread.py")]


def test_bad_requests_are_refused_with_a_next_step_and_the_job_trains_on(socket_dir: Path, tmp_path: Path) -> None:
    config = socket_dir / "hegmd.toml"
    config.write_text(f"[pool]\nbudget_bytes = {4 * MIB}\n")
    with RunningDaemon(socket_dir, "--config", str(config)) as daemon, BareJob(TRAINING, daemon, tmp_path) as job:
        pid = str(job.process.pid)
        job.read_steps(2)
        job.places(1)
        refusals = {
            ("migrate", pid, "--to", "gpu7"): "no GPU gpu7",
            ("migrate", pid, "--to", "gpu0"): "on gpu0 already",
            ("migrate", pid, "--to", "gpu1"): "pool",  # 4 MiB are not enough for it
            ("suspend", pid): "pool",
            ("migrate", str(os.getpid()), "--to", "gpu1"): "is on no GPU",
            ("migrate", "4194304", "--to", "gpu1"): "process 4194304 does not exist",
            ("resume", pid): "not suspended",
            ("swap", pid, str(os.getpid())): str(os.getpid()),
            ("drain", "gpu9"): "no GPU",
            ("cancel", "99"): "99",
        }
        for words, message in refusals.items():
            assert message in job.refusal(*words)["message"], words
            if words[0] != "cancel":
                assert message in job.refusal(*words, "--dry-run")["message"], words
        assert job.places(1) == {job.process.pid: "gpu0"}
        assert job.steps() == undisturbed_steps(*TRAINING)


def test_a_full_gpu_is_refused_and_accepted_once_it_has_memory(socket_dir: Path, tmp_path: Path) -> None:
    with RunningDaemon(socket_dir) as daemon, BareJob(TRAINING, daemon, tmp_path) as job:
        pid = job.process.pid
        job.read_steps(2)
        job.places(1)
        with connect(str(daemon.socket_path)) as other:
            other.simulate_hold("gpu1", 8 * 1024 * MIB - 4096)
            refused = job.refusal("migrate", str(pid), "--to", "gpu1")
            assert "gpu1 has" in refused["message"]
        while job.places(1) == {pid: "gpu0"} and _used_bytes(daemon, "gpu1"):
            pause()  # the daemon notices the end of the connection in its own time
        job.move(pid)
        assert job.steps() == undisturbed_steps(*TRAINING)


def _used_bytes(daemon: RunningDaemon, gpu: str) -> int:
    with connect(str(daemon.socket_path)) as hegmd:
        (used,) = [known.memory_used_bytes for known in hegmd.gpus().gpus if known.id == gpu]
        assert used is not None
        return used


# ---- a process that ends, or becomes another program -----------------------------------------------------------------

BECOMES = """
import os, subprocess, sys, threading, torch
from torch.utils.data import DataLoader
_, tell, stuck_at, *then = sys.argv

def become():
    sys.settrace(lambda *_: None)  # as a debugger does: the agent does not stop this thread
    subprocess.run(["cat", tell], stdout=subprocess.DEVNULL)
    os.execv(then[0], then)

if sys.version_info >= (3, 12):
    for tool in (3, 4):
        sys.monitoring.use_tool_id(tool, "the script's")
threading.Thread(target=become, daemon=True).start()
weights = torch.nn.Parameter(torch.randn(10_000))
optimizer = torch.optim.SGD([weights], lr=1e-3)
for step, batch in enumerate(DataLoader(range(100_000))):
    (weights[:8] * batch).sum().backward()
    optimizer.step()
    print("step first", step, flush=True)
    if step == int(stuck_at):
        threading.Event().wait()
"""


@pytest.fixture
def becoming(tmp_path: Path) -> tuple[list[str], Path]:
    """Return the command of a script that becomes the training on demand, and the pipe for the demand."""
    script, tell = tmp_path / "becomes.py", tmp_path / "tell"
    script.write_text(BECOMES)
    os.mkfifo(tell)
    return [sys.executable, str(script), str(tell)], tell


def _pieces(daemon: RunningDaemon) -> list[str]:
    """Memory for bytes in flight that the daemon has in its hands."""
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    return [target for fd in folder.iterdir() if "hegm-pool-" in (target := os.readlink(fd))]


def _at_its_end(daemon: RunningDaemon, job: MovedJob, op: str) -> dict[str, Any]:
    """The operation, once it is over."""
    job.answer("op", op, "--follow")
    ended: dict[str, Any] = job.answer("op", op)["operation"]
    assert not _pieces(daemon), "the pool still has memory for it"
    return ended


def test_a_process_that_becomes_another_program_while_suspended_ends_the_operation_and_no_more(
    socket_dir: Path, tmp_path: Path, becoming: tuple[list[str], Path]
) -> None:
    words, tell = becoming
    with RunningDaemon(socket_dir) as daemon, BareJob([*words, "-1", *TRAINING], daemon, tmp_path) as job:
        pid = job.process.pid
        job.read_steps(3)
        job.places(1)
        suspended = job.operation("suspend", str(pid))
        assert _pieces(daemon)
        first = len(job.lines)
        tell.write_text("become the training")
        job.read_steps(1)
        ended = _at_its_end(daemon, job, suspended["id"])
        assert ended["failure"]["message"]
        place = job.places(1)[pid]
        job.answer("migrate", str(pid), "--to", "gpu1" if place == "gpu0" else "gpu0")
        after = [line for line in job.steps()[first:] if not line.startswith("step first")]
        assert after == undisturbed_steps(*TRAINING)


def test_a_process_that_execs_during_an_order_to_stop_is_left_alone(
    socket_dir: Path, tmp_path: Path, becoming: tuple[list[str], Path]
) -> None:
    words, tell = becoming
    with RunningDaemon(socket_dir) as daemon, BareJob([*words, "200", *TRAINING], daemon, tmp_path) as job:
        pid = job.process.pid
        job.places(1)  # which it has to be at a boundary for
        job.read_steps(201 - len(job.lines))  # there is no next one now
        op = job.operation("migrate", str(pid), "--to", "gpu1", "--no-wait")["id"]
        while job.answer("op", op)["operation"]["phase"] != "quiescing":
            pass
        tell.write_text("become the training")
        job.read_steps(1)
        ended = _at_its_end(daemon, job, op)
        assert ended["phase"] == "rolled-back"
        assert str(pid) in ended["failure"]["message"]
        assert [line for line in job.steps() if not line.startswith("step first")] == undisturbed_steps(*TRAINING)


def test_a_process_killed_while_suspended_leaves_nothing_behind(socket_dir: Path, tmp_path: Path) -> None:
    with RunningDaemon(socket_dir) as daemon, BareJob(TRAINING, daemon, tmp_path) as job:
        pid = job.process.pid
        job.read_steps(3)
        job.places(1)
        suspended = job.operation("suspend", str(pid))
        assert _pieces(daemon)
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        ended = _at_its_end(daemon, job, suspended["id"])
        assert [process["state"] for process in ended["processes"]] == ["lost"]
        assert "exited" in ended["failure"]["message"]
        assert str(pid) in job.refusal("resume", str(pid))["message"]
        assert (_used_bytes(daemon, "gpu0"), _used_bytes(daemon, "gpu1")) == (0, 0)


# ---- another release of hegmd ----------------------------------------------------------------------------------------


class OtherRelease(RunningDaemon):
    """hegmd as a later release: the same code under another version, in a folder of its own."""

    def __init__(self, folder: Path, installed: Path) -> None:
        super().__init__(folder)
        shutil.copytree(ROOT / "hegmd", installed / "hegmd", ignore=shutil.ignore_patterns("__pycache__"))
        version = installed / "hegmd" / "__init__.py"
        lines = version.read_text().splitlines()
        version.write_text("\n".join('__version__ = "99.0"' if "__version__ =" in line else line for line in lines))
        self._installed = installed

    def command(self) -> list[str]:
        """Return the command to run, with that folder before all others."""
        python, _, _, *words = super().command()
        start = (
            f"import sys, runpy; sys.path[0] = {str(self._installed)!r}; runpy.run_module('hegmd', run_name='__main__')"
        )
        return [python, "-c", start, *words]


@contextmanager
def _upgraded(before: RunningDaemon, installed: Path) -> Iterator[RunningDaemon]:
    before.stop()
    with OtherRelease(before.folder, installed) as after:
        with connect(str(after.socket_path)) as hegmd:
            assert hegmd.welcome.daemon_version == "99.0"
        yield after


def test_an_upgrade_of_the_daemon_does_not_affect_training_or_suspended_jobs(socket_dir: Path, tmp_path: Path) -> None:
    with (
        RunningDaemon(socket_dir) as daemon,
        BareJob(TRAINING, daemon, tmp_path) as trains,
        BareJob(TRAINING, daemon, tmp_path) as waits,
    ):
        for job in (trains, waits):
            job.read_steps(random.Random(job.process.pid).randint(2, 12))
            job.places(1)
        assert waits.operation("suspend", str(waits.process.pid))["phase"] == "suspended"
        with _upgraded(daemon, tmp_path / "later") as after:
            for job in (trains, waits):
                job.attend(after)
            trains.move(trains.process.pid)
            assert waits.operation("resume", str(waits.process.pid))["phase"] == "done"
            waits.move(waits.process.pid)
            expected = undisturbed_steps(*TRAINING)
            assert trains.steps() == expected
            assert waits.steps() == expected


def _flip(piece: Path, place: int = 10_003) -> None:
    with piece.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_a_bit_that_flipped_while_a_job_was_suspended_was_used_silently(socket_dir: Path, tmp_path: Path) -> None:
    """Issue 14, row 3: `resume` reported success, and every later loss was wrong."""
    with RunningDaemon(socket_dir) as daemon, BareJob(TRAINING, daemon, tmp_path) as job:
        pid = str(job.process.pid)
        job.read_steps(2)
        job.places(1)
        assert job.operation("suspend", pid)["phase"] == "suspended"
        while not list((socket_dir / "state" / "sums").glob("[0-9]*")):
            pause()
        identity = (socket_dir / "state" / "identity").read_text()[:16]
        (piece,) = Path(f"/dev/shm/hegmd-{os.geteuid()}-{identity}").glob("hegm-pool-*")
        _flip(piece)
        ended = job.ended("resume", pid)
        assert ended["phase"] == "suspended"
        assert f"the bytes of process {pid}: chunk 0 of" in ended["failure"]["message"]
        assert "pool.verify" in ended["failure"]["hint"]
        _flip(piece)
        assert job.operation("resume", pid)["phase"] == "done"
        assert job.steps() == undisturbed_steps(*TRAINING)
