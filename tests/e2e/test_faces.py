"""Other programs move jobs through the library, and get the reason if that is impossible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.async_connection import connect_async
from hegmctl.connection import connect
from hegmd.errors import REFUSED, HegmError
from tests.e2e.daemon import RunningDaemon

pytestmark = pytest.mark.e2e


@pytest.fixture
def daemon(socket_dir: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(socket_dir) as running:
        yield running


def test_a_process_without_an_agent_is_refused_with_the_reason(daemon: RunningDaemon) -> None:
    with connect(str(daemon.socket_path)) as hegmd:
        hegmd.simulate_hold("gpu0", 1 << 30)
        for ask in (lambda: hegmd.migrate(os.getpid(), "gpu1"), lambda: hegmd.suspend(os.getpid(), dry_run=True)):
            with pytest.raises(HegmError, match="agent") as caught:
                ask()
            assert caught.value.code is REFUSED
        assert hegmd.operations().operations == ()


async def test_the_asynchronous_library_returns_the_same(daemon: RunningDaemon) -> None:
    async with connect_async(str(daemon.socket_path)) as hegmd:
        await hegmd.simulate_hold("gpu0", 1 << 30)
        with pytest.raises(HegmError, match="agent"):
            await hegmd.migrate(os.getpid(), "gpu1")
        with pytest.raises(HegmError, match="not suspended"):
            await hegmd.resume(os.getpid())
        assert (await hegmd.operations()).operations == ()
