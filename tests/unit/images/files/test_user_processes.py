"""Processes that write and read images with a user's rights, and the folder that is the daemon's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from hegmd.errors import Refused
from hegmd.images.files.private_directory import PrivateDirectory
from hegmd.images.files.user_processes import UserProcesses
from hegmd.system.programs import Rights
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


async def test_a_deleted_user_was_told_that_the_image_writer_ended_with_status_217(tmp_path: Path) -> None:
    runner = tmp_path / "systemd-run"
    runner.write_text("#!/bin/sh\nexit 217\n")
    runner.chmod(0o755)
    processes = UserProcesses(in_unit=True, path=str(tmp_path))
    async with anyio.create_task_group() as tasks:
        await tasks.start(processes.run)
        with pytest.raises(Refused, match="uid 4711 has no account on this node") as refused:
            await processes.start(Rights(4711, 4711))
        tasks.cancel_scope.cancel()
    assert "have root repeat the command" in refused.value.hint


async def test_a_private_folder_is_for_the_daemon_alone(tmp_path: Path) -> None:
    private = PrivateDirectory(tmp_path)
    assert os.fstat(private.fd).st_mode & 0o777 == 0o700
    await private.close()
