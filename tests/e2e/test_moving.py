"""The product, whole: trainings under `hegmctl run`, moved and suspended by command, and not one loss different."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typing_extensions import Self

from hegmctl.connection import Connection, connect
from hegmd.protocol.messages import Jobs, JobsReply, Operations, OperationsReply
from tests.e2e.agented import SCRIPTS, undisturbed
from tests.e2e.daemon import RunningDaemon
from tests.e2e.forked import not_forked, started
from tests.e2e.moved_job import BARE, BRISK
from tests.e2e.references import TWO_RANKS
from tests.looks import pause, still_there
from tests.needs import need_torch
from tests.patience import HANG_S, longer_and_longer

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

ROOT = Path(__file__).parents[2]
LONG = str(SCRIPTS / "long.py")
# Holds all that a script prints before a reader comes.
PIPE_BYTES = 1 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path) as running:
        yield running


class Job:
    """A script under `hegmctl run`, and the commands about it."""

    def __init__(self, daemon: RunningDaemon, argv: list[str], *options: str, forks: bool = True) -> None:
        self.socket_path = str(daemon.socket_path)
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HEGM_")},
            "HEGM_SOCKET": self.socket_path,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{BRISK}",
            **BARE,
        }
        words = [sys.executable, "-m", "hegmctl", "run", *options, "--", sys.executable, *argv]
        start = started if forks else not_forked
        self.process = start(words, env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        fcntl.fcntl(self.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()

    def steps(self, count: int) -> None:
        """Read on until it has made so many steps more."""
        for _ in range(count):
            self.lines.append(self.stdout.readline())

    def output(self) -> str:
        """Return all its output, once it has succeeded. End our scripts that run until they get an order."""
        self.stdin.close()
        rest = self.stdout.read()
        assert self.process.wait(HANG_S) == 0
        return "".join(self.lines) + rest

    def command(self, *words: str, status: int = 0) -> list[dict[str, Any]]:
        """Return the reply of a command, in JSON."""
        ran = subprocess.run(
            [sys.executable, "-m", "hegmctl", *words, "--json"],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert ran.returncode == status, ran.stdout + ran.stderr
        return [json.loads(line) for line in (ran.stdout or ran.stderr).splitlines()]

    def operation(self, *words: str, status: int = 0) -> dict[str, Any]:
        """How the operation of a command ended."""
        ended: dict[str, Any] = self.command(*words, status=status)[-1]["operation"]
        return ended

    def connect(self) -> Connection:
        return connect(self.socket_path)

    def await_gpu(self) -> None:
        """Wait until it is on a GPU: its agent counts its memory at a boundary, some steps after the first."""
        with self.connect() as hegmd:
            while not any(process.pid == self.process.pid and process.gpus for process in hegmd.processes().processes):
                self.steps(1)

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_moves_and_suspensions_change_no_loss(daemon: RunningDaemon, loader_workers: int) -> None:
    argv = [LONG, str(loader_workers)]
    seed = random.Random(loader_workers)
    with Job(daemon, argv, "--gpu", "gpu0", forks=loader_workers == 0) as job:  # one is started as users start theirs
        pid = str(job.process.pid)
        job.await_gpu()
        gpu = 0
        for _ in range(2):
            job.steps(seed.randrange(5, 15))
            gpu = 1 - gpu
            moved = job.operation("migrate", pid, "--to", f"gpu{gpu}")
            assert (moved["phase"], moved["processes"][0]["gpu"]) == ("done", f"gpu{gpu}")
            assert 0 < moved["downtime_s"] < HANG_S
            job.steps(seed.randrange(1, 5))
            assert job.operation("suspend", pid)["phase"] == "suspended"
            assert job.operation("resume", pid)["phase"] == "done"
        is_as_undisturbed(argv, job.output())


def is_as_undisturbed(argv: list[str], printed: str) -> None:
    """Check that these numbers are those of an undisturbed run."""
    steps = len(printed.splitlines())
    assert steps > 0
    assert printed == undisturbed([*argv, str(steps)])


def test_ranks_stop_at_one_boundary_and_move_as_one(daemon: RunningDaemon, tmp_path: Path) -> None:
    script = str(SCRIPTS / "ranks.py")
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    with Job(daemon, [*launched, str(tmp_path / "moved")], "--gpu", "gpu0", forks=False) as job:
        with job.connect() as hegmd:
            while len(ranks := [process for process in hegmd.processes().processes if process.gpus]) < 2:
                assert job.process.poll() is None
                pause()
        pid = str(ranks[0].pid)
        moved = job.operation("migrate", pid, "--to", "gpu1")
        assert [(process["gpu"], process["state"]) for process in moved["processes"]] == [("gpu1", "running")] * 2
        # Issue 14, row 10: the pid that a user has is the launcher's, which was refused as a process on no GPU.
        launcher, both = job.process.pid, {rank.pid for rank in ranks}
        assert launcher not in both
        suspended = job.operation("suspend", str(launcher))
        assert suspended["phase"] == "suspended"
        assert {process["pid"] for process in suspended["processes"]} == both
        resumed = job.operation("resume", str(launcher))
        assert resumed["phase"] == "done"
        assert {process["pid"] for process in resumed["processes"]} == both
        assert job.operation("suspend", pid)["phase"] == "suspended"
        apart = job.operation("resume", str(ranks[1].pid), "--to", "gpu0,gpu1")
        assert _gpus_by_rank(apart) == ["gpu0", "gpu1"]
        exchanged = job.operation("migrate", pid, "--to", "gpu1,gpu0")
        assert _gpus_by_rank(exchanged) == ["gpu1", "gpu0"]
        steps = {"disconnecting", "locking", "checkpointing", "reloading", "releasing"}  # bytes move beside
        assert steps <= _phases(job, exchanged["id"])
        drained = job.command("drain", "gpu0")[-1]
        assert [_gpus_by_rank(operation) for operation in drained["operations"]] == [["gpu1", "gpu1"]]
        (tmp_path / "moved.stop").touch()
        job.output()
    moved_losses = [(tmp_path / f"moved.{rank}").read_text() for rank in range(2)]
    undisturbed([*TWO_RANKS, script, str(tmp_path / "expected"), str(len(moved_losses[0].splitlines()))])
    assert moved_losses == [(tmp_path / f"expected.{rank}").read_text() for rank in range(2)]
    assert all(moved_losses)


def _gpus_by_rank(operation: dict[str, Any]) -> list[str]:
    return [process["gpu"] for process in sorted(operation["processes"], key=lambda process: process["rank"])]


def _phases(job: Job, op_id: str) -> set[str]:
    """Those that its story has."""
    with job.connect() as hegmd:
        return {line.phase for line in hegmd.story(op_id).story}


@pytest.mark.xdist_group("memory of the node")
def test_a_suspended_job_has_freed_its_memory_and_shows_it(daemon: RunningDaemon, tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    with Job(daemon, [str(script)]) as job:
        pid = str(job.process.pid)
        job.await_gpu()
        job.steps(5)
        before = job.resident_bytes()
        (out,) = job.operation("suspend", pid)["processes"]
        assert out["size_bytes"] >= 128 * (1 << 20)
        assert before - job.resident_bytes() > 0.9 * out["size_bytes"]
        with job.connect() as hegmd:
            (shown,) = hegmd.processes().processes
            assert (shown.gpus, shown.held_bytes) == ((), out["size_bytes"])
            assert all(gpu.memory_used_bytes == 0 for gpu in hegmd.gpus().gpus)
        refused = job.command("migrate", pid, "--to", "gpu1", status=9)
        assert "operation 1" in refused[0]["error"]["message"]
        job.operation("resume", pid, "--to", "gpu1")
        assert job.resident_bytes() > 0.9 * before
        job.steps(5)


LARGE = """
import torch
from torch.utils.data import DataLoader
weights = torch.nn.Parameter(torch.randn(32, 1 << 20))
optimizer = torch.optim.SGD([weights], lr=1e-3)
for batch in DataLoader(range(100_000)):
    loss = (weights[0, :8] * batch).sum()
    loss.backward()
    weights.grad = None
    print(loss.item(), flush=True)
"""


def test_a_killed_daemon_costs_a_suspended_job_nothing(daemon: RunningDaemon) -> None:
    argv = [LONG, "0"]
    with Job(daemon, argv) as job:
        pid = str(job.process.pid)
        job.await_gpu()
        job.steps(10)
        job.operation("suspend", pid)
        daemon.stop(signal.SIGKILL)
        daemon.start()
        with job.connect() as hegmd:
            while not any(process.agent for process in hegmd.processes().processes):
                pause()  # the agent comes back by itself
            assert hegmd.call(Operations(), OperationsReply).operations[0].phase in {"suspended", "settling"}
        job.command("op", "1", "--follow")
        assert job.operation("resume", pid)["phase"] == "done"
        is_as_undisturbed(argv, job.output())


STUCK = """
import threading, torch
from torch.utils.data import DataLoader
weights = torch.nn.Parameter(torch.randn(1000))
optimizer = torch.optim.SGD([weights], lr=1e-3)
for step, batch in enumerate(DataLoader(range(100_000))):
    loss = (weights[:8] * batch).sum()
    loss.backward()
    optimizer.step()
    print(loss.item(), flush=True)
    if step > 100 and __import__("os").path.exists(__file__ + ".stop"):
        threading.Event().wait()
"""


def test_a_job_without_a_next_batch_is_left_alone_after_the_limit(daemon: RunningDaemon, tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    with Job(daemon, [str(script)]) as job:
        job.steps(5)
        job.await_gpu()
        (tmp_path / "stuck.py.stop").touch()
        for limit_s in longer_and_longer(1.0):  # in which all before the boundary has to be done
            ended = job.operation("migrate", str(job.process.pid), "--to", "gpu1", "--timeout", f"{limit_s}", status=8)
            assert ended["phase"] == "rolled-back"
            if "boundary" in ended["failure"]["message"]:
                break
        assert "boundary" in ended["failure"]["message"]
        assert job.process.poll() is None


def test_run_changes_nothing_for_a_command(daemon: RunningDaemon) -> None:
    environ = {**os.environ, "HEGM_SOCKET": str(daemon.socket_path)}
    words = [sys.executable, "-m", "hegmctl", "run", "--"]
    ran = subprocess.run(
        [*words, "sh", "-c", "cat; exit 7"], env=environ, input=b"in", capture_output=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, b"in", b"")
    killed = subprocess.run([*words, "sh", "-c", "kill -TERM $$"], env=environ, check=False)
    assert killed.returncode == -signal.SIGTERM
    same = subprocess.run(
        [*words, "sh", "-c", "echo $$ $(ps -o pgid= -p $$)"], env=environ, capture_output=True, check=False
    )
    pid, group = same.stdout.split()
    assert pid != group, "it was put into a process group of its own"
    missing = subprocess.run([*words, "no-such-program-here"], env=environ, capture_output=True, check=False)
    assert b"no-such-program-here" in missing.stderr
    assert missing.returncode == 127


def test_run_starts_a_daemon_of_its_own_that_ends_with_the_job(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEGM_")}
    environ["XDG_RUNTIME_DIR"] = str(tmp_path)
    own = tmp_path / "own.sock"
    words = [sys.executable, "-m", "hegmctl", "--socket", str(own), "run", "--simulate", "2x1GiB", "--"]
    with subprocess.Popen([*words, "cat"], env=environ, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stderr is not None
        assert b"started hegmd" in job.stderr.readline()
        with connect(str(own)) as hegmd:
            assert len(hegmd.gpus().gpus) == 2
            assert job.stdin is not None
            job.stdin.close()
            assert job.wait(HANG_S) == 0
        daemons = [
            process for process in psutil.process_iter(["cmdline"]) if str(own) in (process.info["cmdline"] or ())
        ]
        assert len(daemons) == 1
        assert not still_there(daemons, 20), "it outlives its last job"
    assert b"stopped" in Path(f"{own}.log").read_bytes()


def test_run_starts_its_own_daemon_again_where_that_was_killed(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEGM_")}
    own = tmp_path / "own.sock"
    words = [sys.executable, "-m", "hegmctl", "--socket", str(own), "run", "--simulate", "2x1GiB", "--"]
    words += ["sh", "-c", "echo registered; exec cat"]

    def running() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)

    with running() as job:
        assert job.stderr is not None
        assert job.stdout is not None
        assert b"started hegmd" in job.stderr.readline()
        assert job.stdout.readline() == b"registered\n"
        with connect(str(own)) as hegmd:
            (known,) = hegmd.call(Jobs(), JobsReply).jobs
        (daemon,) = [one for one in psutil.process_iter(["cmdline"]) if str(own) in (one.info["cmdline"] or ())]
        daemon.kill()
        daemon.wait(HANG_S)
        with running() as again:
            assert again.stderr is not None
            assert again.stdout is not None
            assert b"started hegmd" in again.stderr.readline()
            assert again.stdout.readline() == b"registered\n"
            with connect(str(own)) as hegmd:
                assert [one.id for one in hegmd.call(Jobs(all=True), JobsReply).jobs] == [known.id, "j2"]
        assert job.stdin is not None
        job.stdin.close()
        assert job.wait(HANG_S) == 0
    daemons = [process for process in psutil.process_iter(["cmdline"]) if str(own) in (process.info["cmdline"] or ())]
    assert not still_there(daemons, 20)
