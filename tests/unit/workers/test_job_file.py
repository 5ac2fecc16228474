"""The file of jobs and the look at their first processes, where the disk or the kernel has nothing to give."""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.memory.pool_memory import make_memory
from hegmd.memory.pool_names import Key, PieceName, Source
from hegmd.memory.pool_places import PoolDirectory
from hegmd.workers.job_file import DAMAGED_NAME, MAGIC, NAME, JobFile, JobRecord, JobSaving
from hegmd.workers.jobs import Jobs
from hegmd.workers.supervisors import Supervisors
from hegmd.workers.workers import Workers
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import running, start_ticks
from tests.unit.workers.test_jobs import registered

UID = os.geteuid()


def record(number: int, pid: int | None = None, boot: str = "") -> JobRecord:
    return JobRecord(
        number=number,
        name="a",
        uid=UID,
        runs=(f"r{number}",),
        command="",
        started_utc=0.0,
        boot=boot,
        pid=pid,
        start_ticks=None if pid is None else 7,
        is_gone=pid is None,
    )


class Operations:
    def __init__(self, end: str | None = None) -> None:
        self._end = end

    def holds(self, job: JobRecord) -> bool:
        return False

    is_being_written = holds

    def end_of(self, job: JobRecord, since_ticks: int = 0) -> str | None:
        return self._end


@pytest.mark.thorough
async def test_a_daemon_without_descriptors_continues_and_takes_no_job_for_ended(tmp_path: Path) -> None:
    """It could neither open a descriptor of the first process nor read its start time, and all its tasks ended."""

    def scarce(pid: int) -> int | None:
        raise HegmError(UNAVAILABLE, f"hegmd cannot find out whether process {pid} exists", "try again")

    boot = (await anyio.Path("/proc/sys/kernel/random/boot_id").read_text()).strip()
    JobFile(tmp_path).save(3, [record(1, os.getpid(), boot), record(2, 1 << 22, boot)])
    jobs = Jobs(Workers(scarce), Supervisors(scarce), scarce, Operations())
    jobs.open(tmp_path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(jobs.run)
        await anyio.wait_all_tasks_blocked()
        assert [job.is_gone for job in jobs] == [False, True], "of the second the kernel says that it does not exist"
        tasks.cancel_scope.cancel()


def test_an_unreadable_file_does_not_count_as_missing(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(HegmError, match="cannot be read: Is a directory"):
        JobFile(tmp_path).load()


def test_the_next_number_of_a_damaged_file_is_not_used_again(tmp_path: Path) -> None:
    JobFile(tmp_path).save(42, [record(3)])  # the jobs in between have been forgotten
    with (tmp_path / NAME).open("ab") as file:
        file.write(b" ")
    assert JobFile(tmp_path).load() == (42, [])


async def test_lines_that_a_full_disk_refused_are_written_later(tmp_path: Path) -> None:
    blocked = tmp_path / f".{NAME}.new"
    blocked.mkdir()
    saving = JobSaving(retry_s=0.001)
    saving.open(tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(saving.run)
        saving.change(2, [record(1)])
        await saving.until_saved()
        assert not (tmp_path / NAME).exists()
        blocked.rmdir()
        with anyio.fail_after(HANG_S):
            while not (tmp_path / NAME).exists():
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert JobFile(tmp_path).load() == (2, [record(1)])


@pytest.mark.parametrize(("end", "is_taken"), [(None, False), ("written into the image", True)])
async def test_the_status_of_a_process_that_an_operation_ended_is_not_the_jobs(
    tmp_path: Path, end: str | None, is_taken: bool
) -> None:
    """A job that was written into an image and comes back at once has the restored process as its first."""
    JobFile(tmp_path).save(2, [record(1).replace(status=-9)])
    workers = Workers(start_ticks)
    jobs = Jobs(workers, Supervisors(start_ticks), start_ticks, Operations(end))
    jobs.open(tmp_path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        await tasks.start(jobs.run)
        agent = ModelAgent(workers, os.getpid())
        agent.about = {"run": "r1"}
        await agent.attend(tasks)
        with anyio.fail_after(HANG_S):
            while not next(iter(jobs)).members:
                await jobs.changed.wait()
        (job,) = jobs
        assert (job.pid, job.status) == ((os.getpid(), None) if is_taken else (None, -9))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("body", [b"[1]", b"{}", b'{"next": null}', b'{"next": 1e400}', b"[" * 100_000])
def test_a_file_that_fits_its_checksum_and_holds_something_else_is_damaged(tmp_path: Path, body: bytes) -> None:
    """The daemon did not start, with a traceback."""
    (tmp_path / NAME).write_bytes(b"%s %08x\n" % (MAGIC, zlib.crc32(body)) + body)
    assert JobFile(tmp_path).load() == (1, [])
    assert (tmp_path / DAMAGED_NAME).exists()


async def test_the_id_of_a_job_whose_snapshot_is_left_was_given_to_another_job(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    """A full disk had kept the daemon from recording the job, and then it was killed."""
    snapshot, folder = PieceName(Key("j4", "0.0"), 4096, "ab", Source(UID, 1)), tmp_path / "memory"
    async with running(tmp_path):
        pass
    make_memory(snapshot, 4096, places=[PoolDirectory(folder, huge=False)], huge=False).close()
    assert (folder / str(snapshot)).exists()
    async with running(tmp_path) as node:
        assert await registered(node, process.pid, "one") == "j5"
