"""Two ranks of torchrun that leave together, and are started again together: exact for each, and never half."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import BARE, RANKED, SLOWLY_MS, MovedJob, Script, by_rank
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("ranks")]
need_torch()


def _launch() -> list[str]:
    """Two ranks that meet at a port of their own, always at the same one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, "--max-restarts", "1")
    return [sys.executable, *words, RANKED]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path) as running:
        yield running


class RankedJob(MovedJob):
    """Both ranks under one supervisor, which go no faster than they are read."""

    more = BARE

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self.folder = folder
        words = [sys.executable, "-m", "hegmctl", "run", "--allow-restart", "--gpu", "gpu0", "--", *_launch()]
        Script.__init__(self, words, daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0

    def _read_on(self, pace_ms: int) -> None:
        super()._read_on(max(pace_ms, SLOWLY_MS))  # one command and two ranks on few processors

    def read_until_phase(self, op_id: str, *phases: str) -> str:
        """Read on until the operation is in one of these; in which."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while (phase := hegmd.story(op_id).operation.phase) not in phases:
                self._read_on(SLOWLY_MS)
            return phase

    def read_until_there(self, path: Path) -> None:
        """Read on until there is such a file."""
        while not path.exists():
            self._read_on(SLOWLY_MS)

    def gpus_by_rank(self) -> list[str]:
        """The GPU of each rank in their order, once all are on one."""
        self.places(2)
        with connect(str(self._daemon.socket_path)) as hegmd:
            agents = [process for process in hegmd.processes().processes if process.agent and process.gpus]
        found = {process.agent.rank: process.gpus[0].gpu for process in agents if process.agent}
        return [found[rank] for rank in range(2)]

    def starts(self) -> list[tuple[str, ...]]:
        """Return, for each start, its rank, its GPU, and EXTRA."""
        lines = (self.folder / "starts").read_text().splitlines()
        return sorted(tuple(line.split()[1:]) for line in lines)


class LaunchedRanks(RankedJob):
    """The same of torchrun itself, which may start them anew."""

    forks = False

    def repeats_only(self, undisturbed: dict[str, list[str]]) -> None:
        """Read to the end: each rank made the undisturbed steps and no others, some of them again."""
        lines = by_rank(self.steps())
        assert set(lines["0"]) == set(undisturbed["0"])
        assert set(lines["1"]) == set(undisturbed["1"])


def test_two_ranks_are_started_again_twice_and_neither_differs(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_ranks: dict[str, list[str]]
) -> None:
    """The second time by a daemon that is killed meanwhile. Their launcher, which may start them again, never does."""
    with RankedJob(daemon, tmp_path) as job:
        first = next(iter(job.places(2)))
        job.read_steps(13)
        plan = job.answer("migrate", str(first), "--via", "restart", "--to", "gpu1", "--dry-run")["plan"]
        assert plan["is_distributed"]
        assert {worker["method"] for worker in plan["workers"]} == {"restart"}
        words = ("--via", "restart", "--to", "gpu1", "--env", "EXTRA=1")
        moved = job.operation("migrate", str(first), *words)
        assert moved["phase"] == "done"
        assert {process["gpu"] for process in moved["processes"]} == {"gpu1"}
        job.read_steps(70)
        back = job.operation("migrate", str(job.process.pid), "--via", "restart", "--to", "gpu1,gpu0", "--no-wait")
        op_id = str(back["id"])
        job.read_until_phase(op_id, "restoring")
        daemon.stop(signal.SIGKILL)
        daemon.start()
        assert job.read_until_phase(op_id, "done", "rolled-back", "suspended") == "done"
        assert job.gpus_by_rank() == ["gpu1", "gpu0"]
        assert by_rank(job.steps()) == undisturbed_ranks
        assert job.starts() == sorted(
            (rank, *environment) for rank in "01" for environment in (("gpu0", "-"), ("gpu1", "1"), ("gpu1,gpu0", "1"))
        )
    assert not list((daemon.folder / "state").glob("restart-*.lock"))


@pytest.mark.wide  # the next test has the same failures, and one more
def test_when_a_rank_fails_on_another_gpu_all_continue_where_they_were(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_ranks: dict[str, list[str]]
) -> None:
    """At its first step, mostly before anybody has heard that it is back, and then once more: its launcher starts all
    ranks again, where gloo has them wait for those of before."""
    with LaunchedRanks(daemon, tmp_path) as job:
        first = next(iter(job.places(2)))
        job.read_steps(9)
        turned = job.ended("migrate", str(first), "--via", "restart", "--to", "gpu1", "--env", "FALLS=1")
        assert turned["phase"] == "rolled-back", turned
        assert {process["gpu"] for process in turned["processes"]} == {"gpu0"}
        job.repeats_only(undisturbed_ranks)


def test_a_rank_that_fell_once_more_on_its_way_back_left_the_job_suspended(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_ranks: dict[str, list[str]]
) -> None:
    """A single failure of any rank there was the end of the rollback, and of the supervisor."""
    with LaunchedRanks(daemon, tmp_path) as job:
        first = next(iter(job.places(2)))
        job.read_steps(9)
        words = ("--via", "restart", "--to", "gpu1", "--env", "FALLS=1", "--env", "AGAIN=1", "--no-wait")
        op_id = str(job.operation("migrate", str(first), *words)["id"])
        job.read_until_there(tmp_path / "fell")
        job.read_until_phase(op_id, "verifying")
        (tmp_path / "fell").write_text("fall")
        assert job.read_until_phase(op_id, "rolled-back", "suspended") == "rolled-back"
        assert job.gpus_by_rank() == ["gpu0", "gpu0"]
        job.repeats_only(undisturbed_ranks)
