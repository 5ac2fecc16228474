"""The pool in real 2 MiB pages: a job's bytes go into them and come back, and the pages are the node's again."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.pages import HUGE_PAGE_BYTES
from hegmd.pool import read_huge_free_bytes
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import SCRIPTS, MovedJob, Script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
pytest.importorskip("torch", reason="PyTorch is not installed; `make test` installs it")

PAGES = 32
WANTED = Path("/proc/sys/vm/nr_hugepages")
TRAINING = [sys.executable, str(SCRIPTS / "in_a_thread.py")]


@pytest.fixture
def huge_free_bytes() -> Iterator[int]:
    """So many are free; as many as before are there again afterwards."""
    before = WANTED.read_text() if WANTED.exists() else ""
    if not before or not os.access(WANTED, os.W_OK):
        pytest.skip("only root can set huge pages aside, where the kernel has them")
    try:
        WANTED.write_text(str(int(before) + PAGES))
        free_bytes = read_huge_free_bytes()
        if free_bytes < PAGES * HUGE_PAGE_BYTES:
            pytest.skip(f"the node has no {PAGES} free pages of 2 MiB in one piece each")
        yield free_bytes
    finally:
        WANTED.write_text(before)


def test_a_job_goes_through_huge_pages_and_gives_them_back(
    socket_dir: Path, tmp_path: Path, huge_free_bytes: int
) -> None:
    draw = random.Random(31)
    with (
        RunningDaemon(socket_dir) as daemon,
        Script(TRAINING, None, tmp_path) as undisturbed,
        MovedJob(TRAINING, daemon, tmp_path) as job,
    ):
        pid = str(job.process.pid)
        job.read_steps(1)
        job.places(1)
        for _ in range(2):
            job.read_steps(draw.randint(1, 12))
            job.operation("suspend", pid)
            assert read_huge_free_bytes() < huge_free_bytes, "its bytes are in ordinary pages"
            job.operation("resume", pid)
            _until_free(huge_free_bytes)
            job.move(job.process.pid)
        _until_free(huge_free_bytes)
        assert job.steps() == undisturbed.steps()


def _until_free(size_bytes: int) -> None:
    """The agent closes its descriptor after it has said that all is back."""
    while read_huge_free_bytes() != size_bytes:
        pass
