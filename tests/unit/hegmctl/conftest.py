"""A daemon that answers well, and a connection to it. Files of tests that need another one have their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.connection import Connection, connect
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import FakeDaemon
from tests.unit.hegmctl.forking import forked_clients
from tests.unit.hegmctl.running import environment


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    with forked_clients(environment()):
        yield


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(socket_path, node.answers()) as daemon:
        yield daemon


@pytest.fixture
def hegmd(daemon: FakeDaemon) -> Iterator[Connection]:
    with connect(str(daemon.path), timeout_s=HANG_S) as connection:
        yield connection
