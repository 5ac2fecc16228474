"""The process that is made ready for a restart, beside one that trains still: cancelled, used, killed, and late."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.connection import connect
from hegmd.memory.pool import read_available_bytes
from hegmd.protocol.operations import Operation
from tests.e2e.daemon import RunningDaemon
from tests.e2e.forking import READY_GATE
from tests.e2e.moved_job import BARE, PACE_MS, SCRIPTS, MovedJob, Script
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

ENOUGH_BYTES = 3 << 30


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    # A process that waits at a gate waits for this test, however slow the machine is.
    with RunningDaemon(tmp_path).configured("[restart]\nready_within_s = 45\n") as running:
        yield running


class EvaluationJob(MovedJob):
    """A supervised training whose evaluation, in which no restart is possible, ends when a file is deleted.

    With a pipe as a gate, a forked prestarted Python waits there before it begins.
    """

    def __init__(self, daemon: RunningDaemon, folder: Path, *options: str, forks: bool = True) -> None:
        self.folder, self.evaluates, self.gate = folder, folder / "evaluates", folder / "gate"
        self.notes, self.forks = folder / "notes", forks
        self.more = {**BARE, READY_GATE: str(self.gate), "HEGM_AGENT_DEBUG": str(self.notes)}
        script = [sys.executable, str(SCRIPTS / "evaluating.py"), str(self.evaluates)]
        command = [sys.executable, "-m", "hegmctl", "run", "--allow-restart", "--gpu", "gpu0", *options, "--", *script]
        Script.__init__(self, command, daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0

    def starts(self) -> list[list[str]]:
        """Return the pid and the GPU of each start."""
        return [line.split() for line in (self.folder / "starts").read_text().splitlines()]

    def asked_to(self, gpu: str, training: int) -> tuple[str, int]:
        """Ask for a restart there while it evaluates: the operation, and who waits to continue by then."""
        self.evaluates.touch()
        return self.migrated(gpu, training)

    def migrated(self, gpu: str, training: int) -> tuple[str, int]:
        """The same while it trains."""
        words = ("migrate", str(training), "--via", "restart", "--to", gpu, "--no-wait")
        op_id = str(self.operation(*words)["id"])
        while (waiting := self.next_to(training)) is None:
            self._read_on(PACE_MS)
        return op_id, waiting

    def next_to(self, training: int) -> int | None:
        """The other child of the supervisor, if it has one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next((int(pid) for pid in children if int(pid) != training), None)

    def kept_beside(self, training: int) -> int:
        """The process that is kept ready, once it waits for its turn: while it imports it opens what it imports."""
        while (kept := self.next_to(training)) is None or f"hegm agent {kept} " not in self._ready_notes():
            self._read_on(PACE_MS)
        return kept

    def _ready_notes(self) -> str:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return "\n".join(line for line in lines if ": ready: " in line)

    def is_supervised(self, training: int) -> None:
        """Wait until the daemon knows of the supervisor."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while not any(
                process.pid == training and process.agent and process.agent.supervised
                for process in hegmd.processes().processes
            ):
                self._read_on(PACE_MS)

    def story(self, op_id: str) -> Operation:
        """Return the state of that operation."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            return hegmd.story(op_id).operation

    def phase_at_end(self, op_id: str) -> str:
        """How an operation ended, the job being read meanwhile."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while (phase := hegmd.story(op_id).operation.phase) not in ("done", "rolled-back", "lost", "suspended"):
                self._read_on(PACE_MS)
        return phase


def test_a_prestarted_process_ends_with_a_cancel_and_can_be_done_without(daemon: RunningDaemon, tmp_path: Path) -> None:
    if (read_available_bytes() or 0) < ENOUGH_BYTES:
        pytest.skip("the node has no 3 GiB available, and makes nobody ready with less than 2")
    with EvaluationJob(daemon, tmp_path) as job:
        first = next(iter(job.places(1)))
        job.read_steps(3)
        cancelled, waiting = job.asked_to("gpu1", first)
        daemon.stop(signal.SIGKILL)
        daemon.start()
        assert job.next_to(first) == waiting
        with connect(str(daemon.socket_path)) as hegmd:
            hegmd.cancel(cancelled)
        assert job.phase_at_end(cancelled) == "rolled-back"
        while job.next_to(first) is not None:
            job._read_on(PACE_MS)
        moved, second = job.asked_to("gpu1", first)
        assert second != waiting
        assert job.starts() == [[str(first), "gpu0"]]
        job.evaluates.unlink()
        assert job.phase_at_end(moved) == "done"
        job.read_steps(2)
        back, killed = job.asked_to("gpu0", second)
        os.kill(killed, signal.SIGKILL)
        job.evaluates.unlink()
        assert job.phase_at_end(back) == "done"
        third = next(iter(job.places(1)))
        assert job.starts() == [[str(first), "gpu0"], [str(second), "gpu1"], [str(third), "gpu0"]]
        assert third != killed
        os.mkfifo(job.gate)
        last, fourth = job.migrated("gpu1", third)
        job.read_steps(20)  # the training was parked while the next Python imported PyTorch
        while (described := job.story(last)).phase == "reserving":
            job._read_on(PACE_MS)
        assert (described.phase, described.processes[0].state) == ("readying", "running")
        assert str(described.doing).startswith("it trains on until the next Python is ready: ")
        job.gate.write_bytes(b"\n")
        assert job.phase_at_end(last) == "done"
        assert next(iter(job.places(1))) == fourth
        ended, _waiting = job.migrated("gpu0", fourth)
        (tmp_path / "over").touch()
        assert job.phase_at_end(ended) == "done"  # it failed: no process to move was left
        assert job.story(ended).note == f"process {fourth} finished its training before it was moved"
        assert job.steps()


def test_a_prestarted_process_is_no_worker_until_its_turn_and_ends_with_the_job(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """Asked for with `--ready always`: it was started for the GPU that the job was on, and continues on another one.

    These Pythons are started, because what a started one has open is looked at.
    """
    if (read_available_bytes() or 0) < ENOUGH_BYTES:
        pytest.skip("the node has no 3 GiB available, and makes nobody ready with less than 2")
    with (
        EvaluationJob(daemon, tmp_path, "--ready", "always", forks=False) as job,
        connect(str(daemon.socket_path)) as hegmd,
    ):
        first = next(iter(job.places(1)))
        kept = job.kept_beside(first)
        assert {process.pid for process in hegmd.processes().processes} == {first}
        assert Path(f"/proc/{kept}/oom_score_adj").read_text() == "1000\n"
        assert sorted(os.listdir(f"/proc/{kept}/fd"))[:3] == ["0", "1", "2"]
        opened = [os.readlink(path) for path in Path(f"/proc/{kept}/fd").iterdir()]
        assert len(opened) == 4
        assert [target for target in opened if target.startswith("socket:")]
        daemon.stop(signal.SIGKILL)
        daemon.start()
        job.is_supervised(first)
        assert job.operation("migrate", str(first), "--via", "restart", "--to", "gpu1")["phase"] == "done"
        assert next(iter(job.places(1))) == kept
        assert job.starts() == [[str(first), "gpu0"], [str(kept), "gpu1"]]
        third = job.kept_beside(kept)
        assert third not in (first, kept)
        pidfd = os.pidfd_open(third)
        try:
            (tmp_path / "over").touch()
            assert job.steps()
            job.read_until(pidfd)
        finally:
            os.close(pidfd)
