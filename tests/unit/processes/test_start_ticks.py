"""Whether a process is there, asked while there is no descriptor to look with: a real limit."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration.runner import ended
from hegmd.processes.procfs import start_ticks_of
from tests.unit.processes.pretended_proc import Start


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_live_process_was_gone_for_a_daemon_without_descriptors() -> None:
    known = start_ticks_of(os.getpid())
    assert known is not None
    with no_descriptors(), pytest.raises(HegmError) as hidden:
        start_ticks_of(os.getpid())
    assert hidden.value.code is UNAVAILABLE
    assert start_ticks_of(os.getpid()) == known
    assert start_ticks_of(2**22 + 1) is None


async def test_an_operation_lost_its_process_when_descriptors_were_short(start: Start) -> None:
    """The end of a process is waited for; one that cannot be seen for a moment is looked at again."""
    asked: list[bool] = []
    process = start()
    ticks = start_ticks_of(process.pid)
    again, over = anyio.Event(), anyio.Event()

    def lives() -> bool:
        asked.append(True)
        if len(asked) == 1:
            with no_descriptors():
                return start_ticks_of(process.pid) == ticks
        again.set()
        return start_ticks_of(process.pid) == ticks

    async def wait() -> None:
        await ended(process.pid, lives)
        over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await again.wait()
        assert not over.is_set()
        process.kill()
    assert over.is_set()
