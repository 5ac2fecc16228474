"""The pool in real 2 MiB pages: a job's bytes go into them and come back, and all pages are free afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.memory.pool_memory import read_huge_free_bytes
from hegmd.memory.sizes import HUGE_PAGE_BYTES
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import SCRIPTS, BareJob, undisturbed_steps
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("memory of the node"), pytest.mark.usefixtures("preloaded")]
need_torch()

PAGES = 64
WANTED = Path("/proc/sys/vm/nr_hugepages")
TRAINING = [sys.executable, str(SCRIPTS / "in_a_thread.py")]


@pytest.fixture
def _huge_pages() -> Iterator[None]:
    """Allocate so many huge pages, if they are free; restore the number afterwards."""
    before = WANTED.read_text() if WANTED.exists() else ""
    if not before or not os.access(WANTED, os.W_OK):
        pytest.skip("only root can set huge pages aside, where the kernel has them")
    try:
        WANTED.write_text(str(int(before) + PAGES))
        if read_huge_free_bytes() < PAGES * HUGE_PAGE_BYTES:
            pytest.skip(f"the node has no {PAGES} free pages of 2 MiB in one piece each")
        yield
    finally:
        WANTED.write_text(before)


@pytest.mark.usefixtures("_huge_pages")
def test_a_job_goes_through_huge_pages_and_gives_them_back(socket_dir: Path, tmp_path: Path) -> None:
    draw = random.Random(31)
    config = tmp_path / "hegmd.toml"
    config.write_text('[pool]\nmemory = "nameless"\n')  # few machines have a hugetlbfs mounted for names
    with RunningDaemon(socket_dir, "--config", str(config)) as daemon, BareJob(TRAINING, daemon, tmp_path) as job:
        pid = str(job.process.pid)
        job.read_steps(1)
        job.places(1)
        for _ in range(2):
            job.read_steps(draw.randint(1, 12))
            job.operation("suspend", pid)
            assert _page_sizes(daemon.process.pid) == {HUGE_PAGE_BYTES}
            job.operation("resume", pid)
            assert not _page_sizes(daemon.process.pid)
            job.move(job.process.pid)
        assert not _page_sizes(daemon.process.pid)
        assert not _page_sizes(job.process.pid)
        assert job.steps() == undisturbed_steps(*TRAINING)


def _page_sizes(pid: int) -> set[int]:
    """Return the page sizes of the memory for bytes in flight that a process has open."""
    found: set[int] = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(fd).startswith("/memfd:hegm"):
                found.add(fd.stat().st_blksize)
    return found
