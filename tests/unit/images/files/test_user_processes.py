"""Processes that write and read images with a user's rights, and the folder that is the daemon's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import anyio.lowlevel

from hegmd.images.files.private_directory import PrivateDirectory
from hegmd.images.files.user_processes import UserProcesses
from tests.unit.offspring import children


async def test_a_cancelled_start_leaves_no_process(process: subprocess.Popen[bytes]) -> None:
    """It would stay until the daemon ends. Once the test waited for the end of a child that was not its own."""
    others = children()
    assert process.pid in others
    processes = UserProcesses(in_unit=False, program=("/bin/sh", "-c", "read -r words"))  # which says nothing
    async with anyio.create_task_group() as tasks:
        await tasks.start(processes.run)
        async with anyio.create_task_group() as starting:
            starting.start_soon(processes.start, None)
            while not (children() - others):
                await anyio.lowlevel.checkpoint()
            starting.cancel_scope.cancel()
        while children() - others:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_a_private_folder_is_for_the_daemon_alone(tmp_path: Path) -> None:
    private = PrivateDirectory(tmp_path)
    assert os.fstat(private.fd).st_mode & 0o777 == 0o700
    await private.close()
