"""The node made of files, for every test of the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.node.doctor.node import FileNode


@pytest.fixture
def node(tmp_path: Path) -> FileNode:
    return FileNode(tmp_path)
