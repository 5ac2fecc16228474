"""What the contract tests of several modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stubs.build import build_stub


@pytest.fixture(scope="session")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ROCm with the stub AMD SMI. The binding keeps the library that it finds first, so a process has one."""
    rocm = tmp_path_factory.mktemp("rocm")
    (rocm / "lib").mkdir()
    build_stub("amdsmi", rocm / "lib")
    (rocm / ".info").mkdir()
    (rocm / ".info" / "version").write_text("7.0.2-56\n")
    before = os.environ.get("ROCM_PATH")
    os.environ["ROCM_PATH"] = str(rocm)
    yield rocm
    os.environ.pop("ROCM_PATH")
    if before is not None:
        os.environ["ROCM_PATH"] = before
