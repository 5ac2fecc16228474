"""What becomes of a job whose image is looked at after a restart, when that is not waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest

from hegmd.criu.population import population_of
from hegmd.external import Rights
from hegmd.handoff import Handoff
from hegmd.lock_files import LockFiles
from hegmd.meeting import MeetingPlaces
from hegmd.migration.operation import CHECKPOINT
from hegmd.migration.operation import Handoff as Wish
from hegmd.pool import Pool
from hegmd.workers import Workers
from tests.unit.migration.operations import operation


class SlowDisk:
    """Images on a disk that does not answer before somebody gives up."""

    def __init__(self) -> None:
        self.asked = anyio.Event()

    async def open(self, _path: str, _rights: Rights) -> NoReturn:
        self.asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    async def sweep(self, _path: str, _rights: Rights) -> list[str]:
        return []


async def _none() -> NoReturn:
    raise AssertionError


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that stands still, as after a dump."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as job:
        try:
            os.kill(job.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, job.pid, os.WSTOPPED)
            yield job.pid
        finally:
            job.kill()


@pytest.mark.parametrize("is_stopping", [True, False], ids=["the daemon ends", "somebody cancels"])
async def test_a_job_ran_on_beyond_its_whole_image_when_the_daemon_was_stopped_again(
    is_stopping: bool, stopped: int, tmp_path: Path
) -> None:
    """The next daemon found the image whole and ended the job, with files grown that the image has the sizes of."""
    disk: Any = SlowDisk()
    parts = (lambda: disk, MeetingPlaces(tmp_path / "hegmd.sock"), Workers(), Pool(1 << 20))
    handoff = Handoff(*parts, criu=_none, look=_none, in_unit=False, locks=LockFiles(None))
    ticks = population_of([stopped]).start_ticks[stopped]
    wish = Wish(path="/images/one", uid=os.geteuid(), gid=os.getegid(), root_pid=stopped, root_ticks=ticks)
    op = operation(kind=CHECKPOINT, handoff=wish)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(handoff.find, op)
        await disk.asked.wait()
        if is_stopping:
            handoff.stop()
        tasks.cancel_scope.cancel()
    assert (state(stopped) == "T") is is_stopping
