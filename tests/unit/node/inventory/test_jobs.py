"""Jobs: results that come in time, late or never, and what is left of each."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

import anyio
import pytest

from hegmd.errors import Bug
from hegmd.node.inventory.jobs import Job
from tests.patience import HANG_S
from tests.unit.node.inventory.rig import joined


async def test_a_job_returns_the_result_of_its_work() -> None:
    job = Job(lambda: 7, name="hegmd-test")
    await job.wait()
    assert job.done
    assert job.result() == 7


async def test_a_job_raises_the_exception_of_its_work() -> None:
    def fail() -> None:
        raise LookupError("not there")

    job = Job(fail, name="hegmd-test")
    await job.wait()
    with pytest.raises(LookupError, match="not there"):
        job.result()


async def test_a_job_outlives_those_who_stopped_waiting_for_it() -> None:
    gate = threading.Event()
    job = Job(lambda: gate.wait(HANG_S), name="hegmd-test")
    with anyio.move_on_after(0):
        await job.wait()
    assert not job.done
    with pytest.raises(Bug):
        job.result()
    gate.set()
    await job.wait()
    assert job.result() is True


async def test_a_thread_job_reports_when_its_work_ended_and_not_when_it_was_noticed() -> None:
    now_s = 5.0
    gate = threading.Event()
    job = Job(lambda: gate.wait(HANG_S), name="hegmd-test", monotonic=lambda: now_s)
    now_s = 6.0
    gate.set()
    await job.wait()
    now_s = 9.0
    assert (job.started, job.ended, job.result()) == (5.0, 6.0, True)


async def test_letting_go_of_a_job_that_runs_is_fine_and_so_is_doing_it_twice() -> None:
    gate = threading.Event()
    job = Job(lambda: gate.wait(HANG_S), name="hegmd-test")
    job.abandon()
    job.abandon()
    await job.wait()  # no task waits any longer
    assert not job.done
    gate.set()
    await anyio.to_thread.run_sync(joined, "hegmd-test")


WITHOUT_DESCRIPTORS = """
import resource, anyio
from hegmd.node.inventory.jobs import Job

async def main():
    await anyio.sleep(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))
    job = Job(lambda: 7, name="hegmd-test")
    await job.wait()
    try:
        job.result()
    except OSError as error:
        print(error.strerror)

anyio.run(main)
"""


@pytest.mark.thorough
def test_a_job_that_cannot_start_without_descriptors_reports_that_as_its_result() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert (done.returncode, done.stdout) == (0, "Too many open files\n"), done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
