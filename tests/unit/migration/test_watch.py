"""The end of a process without an agent, also if there is no handle of it."""

from __future__ import annotations

import os
import resource
import subprocess

import anyio
import anyio.lowlevel
import pytest

from hegmd.system.process_ends import ended
from tests.patience import HANG_S

Child = subprocess.Popen[bytes]
TURNS = 50


@pytest.mark.thorough
async def test_a_lack_of_descriptors_does_not_end_operations(process: Child) -> None:
    """pidfd_open failed with EMFILE, which ended the runner and all its operations."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    over = anyio.Event()

    async def watch() -> None:
        await ended(process.pid, lambda: True)
        over.set()

    async with anyio.create_task_group() as tasks:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            tasks.start_soon(watch)
            for _ in range(TURNS):
                await anyio.lowlevel.checkpoint()
            assert not over.is_set()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        process.kill()
    assert over.is_set()


async def test_a_reused_pid_is_an_exit(process: Child) -> None:
    with anyio.fail_after(HANG_S):
        await ended(process.pid, lambda: False)
