"""Processes that write and read images with a user's rights, and the folder that is the daemon's own."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil

from hegmd.images.files.private_directory import Private
from hegmd.images.files.user_processes import UserProcesses


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    """It would stay until the daemon ends."""
    processes = UserProcesses(in_unit=False, program=("/bin/sh", "-c", "read -r words"))  # which says nothing
    async with anyio.create_task_group() as tasks:
        await tasks.start(processes.run)
        async with anyio.create_task_group() as starting:
            starting.start_soon(processes.start, None)
            while not psutil.Process().children():
                await anyio.lowlevel.checkpoint()
            starting.cancel_scope.cancel()
        while psutil.Process().children():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_a_private_folder_is_for_the_daemon_alone(tmp_path: Path) -> None:
    private = Private(tmp_path)
    assert os.fstat(private.fd).st_mode & 0o777 == 0o700
    await private.close()
