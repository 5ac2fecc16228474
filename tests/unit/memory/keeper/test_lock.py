"""Starting a keeper while another one already has the lock but does not listen yet."""

from __future__ import annotations

import fcntl
import os
import select
import socket
from pathlib import Path

import anyio
import anyio.to_thread
import psutil

from hegmd.memory.keeper.wire import LOCK_NAME, SOCKET_NAME
from hegmd.system.programs import start_keeper


def has_come_to_the_lock(folder: Path) -> bool:
    """Whether a process that was started for that directory has its lock open."""
    for process in psutil.Process().children():
        try:
            opened = {file.path for file in process.open_files()}
            if str(folder) in process.cmdline() and str(folder / LOCK_NAME) in opened:
                return True
        except psutil.Error:
            continue
    return False


async def test_a_keeper_that_has_the_lock_but_does_not_listen_yet_is_waited_for(tmp_path: Path) -> None:
    """Three keepers started together: a slow one had the lock, and another ended with an error after five seconds."""
    lock = os.open(tmp_path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start_keeper, tmp_path)
            while not await anyio.to_thread.run_sync(has_come_to_the_lock, tmp_path):
                await anyio.to_thread.run_sync(select.poll().poll, 10)
            at = os.open(tmp_path, os.O_RDONLY)
            listening.bind(f"/proc/self/fd/{at}/{SOCKET_NAME}")
            listening.listen(1)
            os.close(at)
    os.close(lock)
