"""Ranks whose library takes long to disconnect or to connect, while the daemon or a rank of theirs is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmctl.connection import Connection
from hegmd.migration.run.task import AT_REST
from hegmd.protocol.operations import Operation
from tests.e2e.agented import SCRIPTS, undisturbed
from tests.e2e.daemon import RunningDaemon
from tests.e2e.references import TWO_RANKS
from tests.e2e.test_moving import Job
from tests.looks import pause
from tests.needs import need_torch
from tests.wide import quick_first

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded"), pytest.mark.xdist_group("ranks")]
need_torch()

SCRIPT = str(SCRIPTS / "ranks.py")
# The functions of gloo's that the agent calls in these phases.
HALTS = {"disconnecting": "abort", "reconnecting": "allreduce"}


def _ranks(job: Job, count: int = 2) -> list[int]:
    """The pids of the ranks, in their order, once all are on a GPU."""
    with job.connect() as hegmd:
        while len(found := [process for process in hegmd.processes().processes if process.gpus]) < count:
            assert job.process.poll() is None
            pause()
    return [process.pid for process in sorted(found, key=lambda process: (process.agent and process.agent.rank) or 0)]


@contextmanager
def _halted(job: Job, path: Path, pid: int, phase: str) -> Iterator[str]:
    """The operation that moves the job, in whose phase rank 1 is held until the block is over."""
    fifo = Path(f"{path}.fifo")
    os.mkfifo(fifo)
    words = [sys.executable, "-m", "hegmctl", "migrate", str(pid), "--to", "gpu1", "--json"]
    client = subprocess.Popen(words, env=job.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with fifo.open("wb", buffering=0) as there:  # opens when rank 1 waits
            with job.connect() as hegmd:
                op = _under_way(hegmd)
                bytes_are = {"disconnecting": "out", "reconnecting": "parked"}[phase]
                while {process.state for process in op.processes} != {bytes_are}:  # they move meanwhile
                    pause()
                    op = _under_way(hegmd)
            assert op.phase == phase
            yield op.id
            try:
                there.write(b"\n")
            except BrokenPipeError:  # it was killed
                fifo.unlink()
    finally:
        client.kill()
        client.wait()


def _under_way(hegmd: Connection) -> Operation:
    (op,) = [operation for operation in hegmd.operations().operations if operation.phase not in AT_REST]
    return op


def _end(job: Job, op_id: str) -> str:
    with job.connect() as hegmd:
        while (phase := hegmd.story(op_id).operation.phase) not in AT_REST:
            pause()
    return phase


@pytest.mark.parametrize("phase", quick_first(("reconnecting", "disconnecting"), 1))
def test_a_daemon_killed_while_ranks_disconnect_or_reconnect_loses_nothing(tmp_path: Path, phase: str) -> None:
    losses = tmp_path / "moved"
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, str(losses), "-1", HALTS[phase]]
    with RunningDaemon(tmp_path) as daemon, Job(daemon, argv, "--gpu", "gpu0") as job:
        first, _ = _ranks(job)
        with _halted(job, losses, first, phase) as op_id:
            daemon.stop(signal.SIGKILL)
            daemon.start()
        assert _end(job, op_id) == "done"
        (tmp_path / "moved.stop").touch()
        job.output()
    moved = [(tmp_path / f"moved.{rank}").read_text() for rank in range(2)]
    undisturbed([*TWO_RANKS, SCRIPT, str(tmp_path / "expected"), str(len(moved[0].splitlines()))])
    assert moved == [(tmp_path / f"expected.{rank}").read_text() for rank in range(2)]
    assert all(moved)


@pytest.mark.parametrize("phase", quick_first(("disconnecting", "reconnecting"), 1))
def test_a_rank_killed_while_ranks_disconnect_or_reconnect_leaves_nothing_behind(tmp_path: Path, phase: str) -> None:
    losses = tmp_path / "moved"
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, str(losses), "-1", HALTS[phase]]
    with RunningDaemon(tmp_path) as daemon, Job(daemon, argv, "--gpu", "gpu0") as job:
        first, second = _ranks(job)
        with _halted(job, losses, first, phase) as op_id:
            os.kill(second, signal.SIGKILL)
        assert _end(job, op_id) in ("rolled-back", "lost")
        assert job.process.wait() != 0
        with job.connect() as hegmd:
            assert not hegmd.processes().processes


def test_eight_ranks_move_as_one(tmp_path: Path) -> None:
    losses = tmp_path / "moved"
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", "8", SCRIPT, str(losses)]
    with RunningDaemon(tmp_path) as daemon, Job(daemon, argv, "--gpu", "gpu0") as job:
        first = _ranks(job, 8)[0]
        moved = job.operation("migrate", str(first), "--to", "gpu1")
        assert [(process["gpu"], process["state"]) for process in moved["processes"]] == [("gpu1", "running")] * 8
        (tmp_path / "moved.stop").touch()
        job.output()
    output = [(tmp_path / f"moved.{rank}").read_text() for rank in range(8)]
    words = [TWO_RANKS[0], "8", *TWO_RANKS[2:]]
    undisturbed([*words, SCRIPT, str(tmp_path / "expected"), str(len(output[0].splitlines()))])
    assert output == [(tmp_path / f"expected.{rank}").read_text() for rank in range(8)]


def test_ranks_that_keep_their_contexts_keep_their_communicators(tmp_path: Path) -> None:
    losses = tmp_path / "moved"
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, str(losses)]
    with RunningDaemon(tmp_path) as daemon, Job(daemon, argv, "--gpu", "gpu0") as job:
        first = _ranks(job)[0]
        suspended = job.operation("suspend", "--keep-context", str(first))
        assert [process["state"] for process in suspended["processes"]] == ["out", "out"]
        daemon.stop(signal.SIGKILL)
        daemon.start()
        assert _end(job, suspended["id"]) == "suspended"
        resumed = job.operation("resume", str(first))
        assert [(process["gpu"], process["state"]) for process in resumed["processes"]] == [("gpu0", "running")] * 2
        with job.connect() as hegmd:
            effects = {effect for line in hegmd.story(resumed["id"]).story for effect in line.effects}
        assert not any(word in effect for effect in effects for word in ("disconnect", "reconnect", "lock"))
        (tmp_path / "moved.stop").touch()
        job.output()
    moved = [(tmp_path / f"moved.{rank}").read_text() for rank in range(2)]
    undisturbed([*TWO_RANKS, SCRIPT, str(tmp_path / "expected"), str(len(moved[0].splitlines()))])
    assert moved == [(tmp_path / f"expected.{rank}").read_text() for rank in range(2)]


def test_ranks_in_a_long_step_were_planned_without_their_communicators_after_a_start_of_the_daemon(
    tmp_path: Path,
) -> None:
    """Agents reported their sizes to a new daemon and not their groups: ranks left their GPUs with all groups
    connected.
    """
    losses, hold = tmp_path / "moved", tmp_path / "moved.hold"
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, str(losses)]
    with RunningDaemon(tmp_path) as daemon, Job(daemon, argv, "--gpu", "gpu0") as job:
        first, _ = _ranks(job)
        os.mkfifo(hold)
        with hold.open("wb"):  # opens when a rank reads it, and the other waits for that one
            hold.unlink()
            daemon.stop(signal.SIGKILL)
            daemon.start()
            _ranks(job)
            plan = job.command("migrate", str(first), "--to", "gpu1", "--dry-run")[-1]["plan"]
        assert any(note.startswith("2 ranks disconnect 1 group each") for note in plan["hazards"]), plan["hazards"]
        (tmp_path / "moved.stop").touch()
        job.output()
