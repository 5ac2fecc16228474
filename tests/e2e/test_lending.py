"""A training lends its GPU memory with hegm.released(): others can use it meanwhile, and no loss changes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import PACE_MS, SCRIPTS, BareJob, undisturbed_steps
from tests.looks import pause
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]

SCRIPT = [sys.executable, str(SCRIPTS / "lending.py")]
WEIGHT_BYTES = 256 * 64 * 4


class LendingJob(BareJob):
    """The script, which stops in each block until it is answered."""

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        path = folder / "answers"
        os.mkfifo(path)
        self._answers = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # as a reader too, since an open would wait for one
        super().__init__([*SCRIPT, str(path)], daemon)

    def value_of(self, word: str) -> str:
        """Read until a line begins with that word; return the rest of it."""
        while True:
            for line in self.lines:
                if line.startswith(word + " "):
                    return line.removeprefix(word + " ")
            assert self._read(), self._error_text()

    def answer_block(self) -> None:
        """Let the script continue."""
        os.write(self._answers, b"go on\n")

    def close(self) -> None:
        os.close(self._answers)

    @property
    def daemon(self) -> RunningDaemon:
        return self._daemon

    def errors(self) -> str:
        return self._error_text()

    def wait_until_verified(self) -> None:
        """Wait for the end of its last operation, which comes after the batch that proves it."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while (last := hegmd.operations().operations[-1]).phase != "done":
                assert last.phase != "rolled-back", last
                self._read_on(PACE_MS)

    def wait_until_suspended(self) -> None:
        """Wait until its daemon knows that it is; the job is in a block, and makes no steps."""
        while (phases := self.phases()) != [("suspend", "suspended")]:
            assert phases == [("suspend", "settling")], phases
            pause()

    def phases(self) -> list[tuple[str, str]]:
        """Kind and phase of every operation that the daemon knows."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            return [(op.kind, op.phase) for op in hegmd.operations().operations]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LendingJob]:
    need_torch()
    with RunningDaemon(tmp_path) as daemon, LendingJob(daemon, tmp_path) as started:
        try:
            yield started
        finally:
            started.close()


def test_memory_is_free_in_a_block_and_back_after_it_also_if_the_block_raised(job: LendingJob) -> None:
    assert job.value_of("first") == "0", job.errors()
    assert job.phases() == [("suspend", "suspended")]
    job.answer_block()
    assert job.value_of("nested") == "0", "a block within a block changes nothing"
    job.answer_block()
    assert job.value_of("after") == str(WEIGHT_BYTES)
    assert job.value_of("second") == "0", "no batch is needed between two blocks"
    job.answer_block()
    assert job.value_of("raised") == f"of the script {WEIGHT_BYTES}"
    assert "only the training thread" in job.value_of("thread")
    assert job.value_of("end") == str(WEIGHT_BYTES)
    job.wait_until_verified()
    assert job.phases() == [("resume", "done")] * 3
    job.answer_block()
    assert job.steps() == undisturbed_steps(*SCRIPT)


def test_the_job_resumes_from_a_block_in_which_its_daemon_died_with_the_next_daemon_and_with_none(
    job: LendingJob,
) -> None:
    assert job.value_of("first") == "0", job.errors()
    daemon = job.daemon
    daemon.stop(signal.SIGKILL)
    daemon.start()
    job.attend(daemon)
    job.wait_until_suspended()  # the next daemon takes it over
    job.answer_block()
    job.answer_block()
    assert job.value_of("after") == str(WEIGHT_BYTES)
    assert job.value_of("second") == "0"
    daemon.stop(signal.SIGKILL)
    job.answer_block()
    assert job.value_of("raised") == f"of the script {WEIGHT_BYTES}", "it came back by itself, and lent nothing then"
    job.answer_block()
    assert job.steps() == undisturbed_steps(*SCRIPT)
    assert "lends no GPU memory: no hegmd answers" in job.errors()
