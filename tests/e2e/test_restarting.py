"""A training that leaves and is started again elsewhere by its supervisor: exact, bounded, and never twice.

Longer than 400 lines because every test has the same training, under the same supervisor and daemon.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import BARE, LEAVING, SLOWLY_MS, MovedJob, Script
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e]
need_torch()

TWO_VENDORS = Path(__file__).parents[2] / "contrib" / "simulation" / "two-vendors.toml"
PATIENCE_S = HANG_S
PACE_MS = 10
# These trainings come to their end, and are not to meanwhile: test_made_ready has those that train on until then.
IN_TURN = '[restart]\nready = "in-turn"\n'


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path).configured(IN_TURN) as running:
        yield running


class SupervisedJob(MovedJob):
    """The training under a supervisor, which goes no faster than it is read."""

    more = BARE

    def __init__(
        self, daemon: RunningDaemon, folder: Path, *options: str, resumes: str | None = None, gpu: str = "gpu0"
    ) -> None:
        self.folder = folder
        again = () if resumes is None else ("--resume", resumes)
        words = ("run", "--allow-restart", *(() if resumes else ("--gpu", gpu)), *again, *options)
        Script.__init__(
            self, [sys.executable, "-m", "hegmctl", *words, "--", sys.executable, LEAVING], daemon.socket_path, folder
        )
        self._daemon = daemon
        self._gpu = 0

    def starts(self) -> list[list[str]]:
        """Return, for each start, its pid, its GPU, EXTRA, its Python's prefix, and the vendors' variables."""
        return [line.split() for line in (self.folder / "starts").read_text().splitlines()]

    def trains(self) -> int:
        """Return the training's pid once it is on a GPU."""
        return next(iter(self.places(1)))

    def on_cpu(self) -> int:
        """Return the training's pid once it trains on the CPU."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while True:
                for process in hegmd.processes().processes:
                    if process.agent is not None and process.agent.on_cpu and not process.gpus:
                        assert [way.way for way in process.ways if way.possible] == ["restart"]
                        return process.pid
                self._read_on(SLOWLY_MS)

    def request_restart(self, pid: int, *words: str) -> str:
        """Ask for a restart without waiting for it; the operation's id. The start after it waits at its gate."""
        gate = self.folder / "gate"
        os.mkfifo(gate)
        words = ("migrate", str(pid), "--via", "restart", "--to", "gpu1", "--env", f"HELD={gate}", "--no-wait", *words)
        return str(self.operation(*words)["id"])

    def waiting(self) -> int:
        """The pid of the start that waits at its gate."""
        waits = self.folder / "waits"
        while not waits.exists():
            self.read_on()
        return int(waits.read_text())

    def let_in(self) -> None:
        """Open its gate."""
        (self.folder / "gate").write_bytes(b"")

    def read_on(self) -> None:
        """Read a line, if there is one."""
        self._read_on(PACE_MS)

    def read_to_the_end(self) -> list[str]:
        """Return every line of a step, once no process has its output open."""
        while self._read():
            pass
        return self._steps()


class LaunchedJob(SupervisedJob):
    """The same under `hegm-launcher`, which knows files and REST as well as the daemon."""

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        own = {"CHECKPOINT_DIR": folder / "checkpoint", "CTRL_PORT": self._port, "POLL_INTERVAL": "0.05", "GPU": "gpu0"}
        environ = [f"HEGM_{name}={value}" for name, value in own.items()]
        words = ["env", *environ, sys.executable, "-m", "hegmcompat.launcher_cli", sys.executable, LEAVING]
        Script.__init__(self, words, daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0

    @property
    def lock(self) -> Path:
        return self.folder / "checkpoint" / str(self.process.pid) / "lock"

    def asks(self, path: str, what: dict[str, Any]) -> Any:
        """Ask its REST interface while it is read; the answer."""
        with ThreadPoolExecutor(1) as asking:
            future = asking.submit(self._ask, path, what)
            while not future.done():
                self.read_on()
            return future.result()

    def _ask(self, path: str, what: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(what), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def test_a_training_goes_from_vendor_to_vendor_with_another_python_and_environment(
    tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """Named by its own pid, then by its supervisor's; both times not one number differs."""
    other = _other_python(tmp_path / "other")
    alone = RunningDaemon(tmp_path, "--simulate", str(TWO_VENDORS)).configured(IN_TURN)
    with alone as daemon, SupervisedJob(daemon, tmp_path) as job:
        first = job.trains()
        job.read_steps(13)
        refused = job.refusal("migrate", str(first), "--to", "gpu1")
        assert "gpu1 has another chip" in refused["message"]
        assert "--via restart" in refused["hint"]
        words = ("--via", "restart", "--to", "gpu1", "--env", "EXTRA=1", "--python", str(other / "bin/python3"))
        plan = job.answer("migrate", str(first), *words, "--dry-run")["plan"]
        assert plan["workers"][0]["method"] == "restart"
        assert "a new process continues" in plan["hazards"][0]
        assert f"bin/python3 (cpython {platform.python_version()})" in plan["hazards"][-1]
        refused = job.refusal("migrate", str(first), *words[:-1], "true")
        assert "true is no Python: asked for its version, it says nothing" in refused["message"]
        moved = job.operation("migrate", str(first), *words)
        assert (moved["phase"], moved["processes"][0]["gpu"]) == ("done", "gpu1")
        job.read_steps(4)
        back = job.operation("migrate", str(job.process.pid), "--via", "restart", "--to", "gpu0")
        assert (back["phase"], back["processes"][0]["gpu"]) == ("done", "gpu0")
        assert job.steps() == undisturbed_leaving
        gpus = [(gpu, extra, prefix == str(other)) for _pid, gpu, extra, prefix, *_seen in job.starts()]
        assert gpus == [("gpu0", "-", False), ("gpu1", "1", True), ("gpu0", "1", True)]
        nvidia, amd = "SIM-00000000-0000-4000-8000-000000000000", "SIM-00000000-0000-4000-8000-000000000001"
        assert [tuple(start[4:]) for start in job.starts()] == [("-", "-"), ("-", amd), (nvidia, "-")]
    assert not list((daemon.folder / "state").glob("restart-*.lock"))


def test_a_training_on_the_cpu_goes_to_a_gpu_and_back(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """Restarts went from GPU to GPU only: the daemon did not list a training on the CPU, and refused requests for
    it.
    """
    with SupervisedJob(daemon, tmp_path, gpu="cpu") as job:
        first = job.on_cpu()
        job.read_steps(5)
        there = job.operation("migrate", str(first), "--via", "restart", "--to", "gpu0")
        assert (there["phase"], there["processes"][0]["gpu"]) == ("done", "gpu0")
        second = job.trains()
        job.read_steps(4)
        back = job.operation("migrate", str(job.process.pid), "--via", "restart", "--to", "cpu")
        assert (back["phase"], back["processes"][0]["gpu"]) == ("done", "cpu")
        assert job.on_cpu() not in (first, second)
        assert _used(daemon) == {"gpu0": 0, "gpu1": 0}
        assert job.steps() == undisturbed_leaving
        assert [start[1] for start in job.starts()] == ["cpu", "gpu0", "cpu"]


def test_after_a_failed_start_on_a_gpu_the_training_continues_on_the_cpu(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """No memory is reserved for it on the CPU, neither for the rollback nor by a daemon started since."""
    with SupervisedJob(daemon, tmp_path, gpu="cpu") as job:
        turned = job.ended("migrate", str(job.on_cpu()), "--via", "restart", "--to", "gpu1", "--env", "BROKEN=1")
        assert (turned["phase"], turned["processes"][0]["gpu"]) == ("rolled-back", "cpu")
        op_id = job.request_restart(job.on_cpu())
        job.waiting()
        daemon.stop(signal.SIGKILL)
        daemon.start()
        job.let_in()
        assert _followed(job, daemon, op_id)["phase"] == "done"
        assert job.steps() == undisturbed_leaving
        assert [start[1] for start in job.starts()] == ["cpu", "gpu1", "gpu1", "cpu", "gpu1"]


def _used(daemon: RunningDaemon) -> dict[str, int]:
    with connect(str(daemon.socket_path)) as hegmd:
        return {gpu.id: gpu.memory_used_bytes or 0 for gpu in hegmd.gpus().gpus}


def _other_python(folder: Path) -> Path:
    """Another environment with the same packages, so another Python to its starter."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python3").symlink_to(Path(sys.executable).resolve())
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    configuration = Path(sys.prefix) / "pyvenv.cfg"
    if not configuration.exists():
        pytest.skip("this Python is in no environment of its own")
    (folder / "pyvenv.cfg").write_text(configuration.read_text())
    return folder


def test_after_a_failed_start_elsewhere_the_training_continues_where_it_was(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    with SupervisedJob(daemon, tmp_path) as job:
        first = job.trains()
        job.read_steps(7)
        turned = job.ended("migrate", str(first), "--via", "restart", "--to", "gpu1", "--env", "BROKEN=1")
        assert (turned["phase"], turned["processes"][0]["gpu"]) == ("rolled-back", "gpu0")
        assert "ended with 5 before its first boundary, started 2 times" in turned["failure"]["message"]
        assert job.steps() == undisturbed_leaving
        assert [start[1] for start in job.starts()] == ["gpu0", "gpu1", "gpu1", "gpu0"]


def test_the_next_daemon_continues_with_the_process_that_was_starting(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    with SupervisedJob(daemon, tmp_path) as job:
        first = job.trains()
        job.read_steps(7)
        op_id = job.request_restart(first)
        second = job.waiting()
        daemon.stop(signal.SIGKILL)
        daemon.start()
        job.let_in()
        assert _followed(job, daemon, op_id)["phase"] == "done"
        assert job.trains() == second
        assert job.steps() == undisturbed_leaving
        assert len(job.starts()) == 2


def test_after_its_supervisor_is_killed_only_the_process_itself_continues(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """While the started process lives, no other is started from the same state; once it trains, the operation has
    it.
    """
    with SupervisedJob(daemon, tmp_path) as job:
        first = job.trains()
        job.read_steps(7)
        op_id = job.request_restart(first)
        second = job.waiting()
        job.process.kill()
        assert _phase(job, daemon, op_id, "suspended")["failure"] is not None
        refused = subprocess.run(
            [sys.executable, "-m", "hegmctl", "run", "--allow-restart", "--resume", op_id, "--", "true"],
            env=job.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert refused.returncode == 98
        assert "is still running" in refused.stderr
        job.let_in()
        assert _followed(job, daemon, op_id)["phase"] == "done"
        assert job.trains() == second
        assert job.read_to_the_end() == undisturbed_leaving
        assert len(job.starts()) == 2


def test_a_training_killed_before_its_supervisor_knew_of_its_return_is_not_started_again(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """From its old state, whose batches had been made: the daemon saw it at a boundary, and its report came too
    late.
    """
    with SupervisedJob(daemon, tmp_path) as job:
        first = job.trains()
        job.read_steps(7)
        op_id = job.request_restart(first)
        second = job.waiting()
        job.process.send_signal(signal.SIGSTOP)
        job.let_in()
        assert _followed(job, daemon, op_id)["phase"] == "done"
        assert _notes(second, op_id) == b"back\0\0\0\0+"
        os.kill(second, signal.SIGKILL)
        job.process.send_signal(signal.SIGCONT)
        job.read_to_the_end()
        assert job.process.wait(PATIENCE_S) == -signal.SIGKILL
        assert len(job.starts()) == 2


def test_a_state_without_a_supervisor_is_held_and_resumed_later(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """Supervisor and process are both killed, and the daemon after them: the state exists, and another process
    continues from it.

    Also from disk, if requested, which takes no memory then. The daemon refused this.
    """
    with SupervisedJob(daemon, tmp_path) as job:
        op_id = _held(job, daemon)
        spilled = job.operation("suspend", "--spill", str(job.starts()[0][0]))
        assert (spilled["phase"], spilled.get("failure")) == ("suspended", None)
        assert _in_memory_bytes(daemon) == 0
        daemon.stop(signal.SIGKILL)
        daemon.start()
        before = job.read_to_the_end()
    with SupervisedJob(daemon, tmp_path, resumes=op_id) as again:
        assert _followed(again, daemon, op_id)["phase"] == "done"
        assert again.steps() == undisturbed_leaving[len(before) :]


def test_a_held_state_could_not_be_dropped(daemon: RunningDaemon, tmp_path: Path) -> None:
    with SupervisedJob(daemon, tmp_path) as job:
        op_id = _held(job, daemon)
        assert _in_memory_bytes(daemon) > 0
        dropped = job.answer("cancel", op_id, "--drop", "--yes")["operation"]
        assert (dropped["phase"], dropped["failure"]["code"]) == ("rolled-back", "cancelled")
        assert _in_memory_bytes(daemon) == 0
        assert "it has ended and keeps no state" in job.refusal("cancel", op_id, "--drop", "--yes")["message"]


def _notes(pid: int, op_id: str) -> bytes:
    """Return the content of the restore lock file that a process has open."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        if f"restart-{op_id}.lock" in os.readlink(path):
            return path.read_bytes()
    raise AssertionError(f"process {pid} has no right to go on")


def _held(job: SupervisedJob, daemon: RunningDaemon) -> str:
    """Have its state held by an operation, whose id that is: supervisor and process are both killed."""
    first = job.trains()
    job.read_steps(7)
    op_id = job.request_restart(first)
    second = job.waiting()
    job.process.kill()
    os.kill(second, signal.SIGKILL)
    _phase(job, daemon, op_id, "suspended")
    return op_id


def _in_memory_bytes(daemon: RunningDaemon) -> int:
    with connect(str(daemon.socket_path)) as hegmd:
        lines = hegmd.metrics().text.splitlines()
    return next(int(line.split()[-1]) for line in lines if line.startswith('hegmd_pool_bytes{what="memory"}'))


def _followed(job: SupervisedJob, daemon: RunningDaemon, op_id: str) -> dict[str, Any]:
    """How an operation ended, the job being read meanwhile."""
    return _phase(job, daemon, op_id, "done", "rolled-back", "lost")


def _phase(job: SupervisedJob, daemon: RunningDaemon, op_id: str, *phases: str) -> dict[str, Any]:
    with connect(str(daemon.socket_path)) as hegmd:
        while True:
            operation = hegmd.story(op_id).operation
            if operation.phase in phases:
                return dict(operation.to_plain())
            job.read_on()


def test_a_launcher_of_hegm_and_a_daemon_move_one_training_in_turn(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """The daemon moves it to another GPU, then HeGM's REST interface with its lock, and no number differs."""
    with LaunchedJob(daemon, tmp_path) as job:
        first = job.trains()
        job.read_steps(9)
        moved = job.operation("migrate", str(first), "--via", "restart", "--to", "gpu1")
        assert (moved["phase"], moved["processes"][0]["gpu"]) == ("done", "gpu1")
        second = job.trains()
        job.read_steps(3)
        assert job.asks("/checkpoint", {"pids": [second]})["results"] == {str(second): "checkpoint-ready"}
        assert job.lock.exists()
        assert job.asks("/resume", {"all": True})["results"] == {str(job.process.pid): "lock-removed"}
        assert job.steps() == undisturbed_leaving
        assert [start[1] for start in job.starts()] == ["gpu0", "gpu1", "gpu1"]
        assert not job.lock.exists()


def test_the_steps_of_a_restart_are_reported_as_they_happen(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Beside its story, which says it afterwards; and what is counted knows that it was one."""
    with SupervisedJob(daemon, tmp_path) as job:
        first = job.trains()
        job.read_steps(2)
        way = next(way for way in job.answer("ps", str(first))["processes"][0]["ways"] if way["way"] == "restart")
        assert way["possible"], way
        op_id = job.request_restart(first)
        job.waiting()
        with connect(str(daemon.socket_path)) as hegmd:
            while hegmd.story(op_id).operation.doing != "Python starts and imports":
                job.read_on()
            job.let_in()
            assert _followed(job, daemon, op_id)["phase"] == "done"
            story = hegmd.story(op_id)
            lines = [line.detail for line in story.story if line.event == "came-on"]
            first_said, loads = [detail.partition("doing ")[2] for detail in lines]
            assert (first_said, loads) == ("Python starts and imports", "it loads")
            assert story.operation.way == "restart"
            counted = 'hegmd_operations_total{kind="migrate",way="restart",end="done"} 1'
            assert counted in hegmd.metrics().text
