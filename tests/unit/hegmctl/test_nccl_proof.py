"""The throwaway job of `hegmctl doctor --nccl` as processes: how far it is, how it ends, and that nothing is left."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hegmctl.nccl_proof import MoveFailed, Ranks, compare, operation_of
from hegmd.errors import BUSY, DISCONNECTED, EXTERNAL, REFUSED, TIMEOUT, Code, HegmError
from tests.cells import in_one_test
from tests.patience import HANG_S

# A stub of a Python with torchrun: two ranks that print the requested number of losses. Its last two words say that.
RANKS = """#!/bin/sh
shift 6
for rank in 0 1; do for step in $(seq "$1"); do echo "0x1.$step" >>"$2.$rank"; done; done
"""
FAILS = "#!/bin/sh\necho 'Traceback' >&2\necho 'RuntimeError: no NCCL here' >&2\necho '====' >&2\nexit 1\n"
TRAINS = """#!/bin/sh
shift 6
for rank in 0 1; do echo 0x1 >"$2.$rank"; printf 0x >>"$2.$rank"; done
while [ ! -e "$2.stop" ]; do sleep 0.01; done
"""


@contextmanager
def ranks(folder: Path, program: str, steps: int = 0) -> Generator[Ranks]:
    python = folder / "python"
    python.write_text(program)
    python.chmod(0o755)
    job = Ranks(str(python), str(folder / "job"), os.environ, steps)
    try:
        yield job
    finally:
        job.close()


def test_losses_are_whole_lines_of_each_rank(tmp_path: Path) -> None:
    with ranks(tmp_path, TRAINS) as job:
        job.wait_for_steps(1, HANG_S)
        assert job.losses() == [["0x1\n"]] * 2
        assert job.end(HANG_S) == 1


def test_a_job_that_ends_early_is_reported_with_its_error(tmp_path: Path) -> None:
    with ranks(tmp_path, FAILS) as job, pytest.raises(MoveFailed, match="RuntimeError: no NCCL here"):
        job.wait_for_steps(1, HANG_S)


def test_a_job_that_makes_no_step_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with ranks(tmp_path, TRAINS) as job:
        with pytest.raises(MoveFailed, match=r"completed no step for 0\.1 s"):
            job.wait_for_steps(2, 0.1)
        pid = job.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Behaves like a torchrun whose rank hangs while NCCL connects, in a session of its own.
HANGS = """#!/bin/sh
shift 6
setsid sh -c 'echo $$ >"$0"; exec sleep 1000' "$2.pid" &
wait
"""


def test_a_rank_that_hangs_before_its_first_step_is_ended_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.pid")
    with ranks(tmp_path, HANGS):
        pidfd = os.pidfd_open(int((tmp_path / "job.pid").read_text()))
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        assert poll.poll(HANG_S * 1000)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


@in_one_test(
    ("code", "has_begun", "is_verdict"),
    [
        (REFUSED, False, False),
        (BUSY, False, False),
        (TIMEOUT, False, False),
        (EXTERNAL, False, False),
        (DISCONNECTED, True, False),
        (TIMEOUT, True, True),
        (EXTERNAL, True, True),
    ],
)
def test_only_an_operation_that_failed_is_a_verdict(code: Code, has_begun: bool, is_verdict: bool) -> None:
    """A verdict is kept for the whole node: a busy daemon must not refuse all jobs of that combination."""

    def ask(on_progress: Any) -> Any:
        if has_begun:
            on_progress("parking")
        raise HegmError(code, "it did not work", "retry")

    with pytest.raises(MoveFailed if is_verdict else HegmError, match="it did not work"):
        operation_of("suspend", ask)


def test_a_different_loss_is_a_failure_and_named(tmp_path: Path) -> None:
    with ranks(tmp_path, RANKS, steps=3) as job:
        assert job.wait(HANG_S) == 3
        compare(job.losses(), job.losses(), 3)
        others = [*job.losses()[:1], ["0x1.1\n", "0x1.5\n", "0x1.3\n"]]
        with pytest.raises(MoveFailed, match="rank 1 has another loss at step 2"):
            compare(others, job.losses(), 3)
