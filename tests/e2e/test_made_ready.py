"""The process that is made ready for a restart, beside one that trains still: cancelled, used, and killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.connection import connect
from hegmd.pool import read_available_bytes
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import PACE_MS, SCRIPTS, MovedJob, Script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
pytest.importorskip("torch", reason="torch is not installed; `tools/setup.sh full` installs it")

ENOUGH_BYTES = 3 << 30


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path) as running:
        yield running


class EvaluatingJob(MovedJob):
    """A supervised training whose evaluation ends when a file goes: nobody leaves from there."""

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self.folder, self.evaluates = folder, folder / "evaluates"
        words = ["run", "--allow-restart", "--gpu", "gpu0", "--", sys.executable, str(SCRIPTS / "evaluating.py")]
        command = [sys.executable, "-m", "hegmctl", *words, str(self.evaluates)]
        Script.__init__(self, command, daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0

    def starts(self) -> list[list[str]]:
        """Of each start: its pid and its GPU."""
        return [line.split() for line in (self.folder / "starts").read_text().splitlines()]

    def asked_to(self, gpu: str, training: int) -> tuple[str, int]:
        """Ask for a restart there while it evaluates: the operation, and who waits to go on by then."""
        self.evaluates.touch()
        words = ("migrate", str(training), "--via", "restart", "--to", gpu, "--no-wait")
        op_id = str(self.operation(*words)["id"])
        while (waiting := self.next_to(training)) is None:
            self._read_on(PACE_MS)
        return op_id, waiting

    def next_to(self, training: int) -> int | None:
        """The other child of the supervisor, if it has one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next((int(pid) for pid in children if int(pid) != training), None)

    def phase_at_end(self, op_id: str) -> str:
        """How an operation ended, the job being read meanwhile."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while (phase := hegmd.story(op_id).operation.phase) not in ("done", "undone", "lost", "suspended"):
                self._read_on(PACE_MS)
        return phase


def test_it_goes_with_a_cancel_waits_for_its_turn_and_can_be_done_without(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    if (read_available_bytes() or 0) < ENOUGH_BYTES:
        pytest.skip("the node has no 3 GiB available, and makes nobody ready with less than 2")
    with EvaluatingJob(daemon, tmp_path) as job, connect(str(daemon.socket_path)) as hegmd:
        first = next(iter(job.places(1)))
        job.read_steps(3)
        cancelled, waiting = job.asked_to("gpu1", first)
        hegmd.cancel(cancelled)
        assert job.phase_at_end(cancelled) == "undone"
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
