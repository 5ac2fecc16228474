"""Real processes to be looked at, a real table, and a pretended /proc."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.node.processes.table import ProcessTable
from tests.unit.node.processes.pretended_proc import PretendedProc, Start, end


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts children that do nothing until they are killed, at the latest at the end of the test."""
    children: list[subprocess.Popen[bytes]] = []

    def run(*argv: str | bytes) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(argv or ("sleep", "1000"), stdin=subprocess.PIPE)
        children.append(child)
        return child

    yield run
    for child in children:
        end(child)


@pytest.fixture
def table() -> Iterator[ProcessTable]:
    table = ProcessTable()
    yield table
    table.close()


@pytest.fixture
def proc(tmp_path: Path) -> PretendedProc:
    return PretendedProc(tmp_path)
