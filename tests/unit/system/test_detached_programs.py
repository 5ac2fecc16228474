"""Programs that are to outlive the call that starts them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import anyio
import pytest

from hegmd.system.detached_programs import start_apart


def saying(word: bytes) -> Callable[[int], list[str]]:
    """Return a program that reports its start before anyone could check whether it is still wanted."""

    def argv_for(fd: int) -> list[str]:
        os.write(fd, word)
        return ["/bin/true"]

    return argv_for


async def test_readiness_is_reported() -> None:
    ended: list[bool] = []
    started = await start_apart(saying(b"ready"), deadline_s=10.0, end=lambda: ended.append(True))
    assert (started.word, started.status, ended) == (b"ready", None, [])


async def test_a_program_that_becomes_ready_just_as_its_caller_is_cancelled_is_ended() -> None:
    """Its pid was in a result that was dropped: a restored job stayed, parked, that no operation knew of."""
    ended: list[bool] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await start_apart(saying(b"ready"), deadline_s=10.0, end=lambda: ended.append(True))
    assert scope.cancelled_caught
    assert ended == [True]


async def test_a_program_that_reports_nothing_ends_at_the_deadline() -> None:
    ended: list[bool] = []
    started = await start_apart(lambda _told: ["/bin/false"], deadline_s=10.0, end=lambda: ended.append(True))
    assert (started.word, started.status, ended) == (b"", 1, [])


async def test_a_limit_on_files_that_leaves_no_number_for_the_reply_leaks_no_descriptor() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        with pytest.raises(OSError, match="Too many open files"):
            await start_apart(lambda _told: ["/bin/false"], deadline_s=10.0, end=lambda: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
