"""The properties that two nodes must share; with an idle process on this node."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hegmd.images.criu.node import describe, differences
from hegmd.node.processes.process_tree import read_tree


@pytest.fixture(scope="module")
def here() -> Iterator[dict[str, Any]]:
    """Not of the process of the tests, which may have mapped files of other tests."""
    idle = [sys.executable, "-c", "print('idle', flush=True); input()"]
    with subprocess.Popen(idle, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield describe(read_tree(process.pid))
        process.kill()


@pytest.fixture
def there(here: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(here)


def a_library(there: dict[str, Any]) -> str:
    return next(path for path in there["files"] if "/libc.so" in path)


def test_a_node_does_not_differ_from_itself(here: dict[str, Any]) -> None:
    assert here["files"][a_library(here)]["build_id"]
    assert here["processor"]
    assert differences(here) == differences(copy.deepcopy(here))
    assert (differences(here).refusals, differences(here).notes) == ((), ())


def test_another_build_of_a_library_is_refused_by_name(there: dict[str, Any]) -> None:
    library = a_library(there)
    there["files"][library]["build_id"] = "0123"
    (reason,) = differences(there).refusals
    assert reason.message.startswith(f"{library} is another build: its build id was 0123 and is ")
    assert "container image" in reason.hint


def test_a_missing_library(there: dict[str, Any]) -> None:
    there["files"]["/nowhere/libtorch.so"] = {"size_bytes": 7, "build_id": None}
    (reason,) = differences(there).refusals
    assert reason.message == "/nowhere/libtorch.so does not exist, and the job has it mapped"


def test_a_mapped_file_of_another_size(there: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"12345678")
    there["files"] = {"/data.bin": {"size_bytes": 7, "build_id": None}}
    (reason,) = differences(there, root=tmp_path).refusals
    assert reason.message == "/data.bin has 8 bytes and had 7"


def test_a_lesser_processor_is_refused_and_a_better_one_is_not(there: dict[str, Any]) -> None:
    there["processor"] = [*there["processor"], "avx10_9"]
    (reason,) = differences(there).refusals
    assert "lacks avx10_9" in reason.message
    there["processor"] = []
    assert differences(there).refusals == ()


def test_another_architecture_is_the_only_reported_reason(there: dict[str, Any]) -> None:
    there["machine"] = "s390x"
    there["files"] = {"/nowhere": {"size_bytes": 7, "build_id": None}}
    (reason,) = differences(there).refusals
    assert "s390x" in reason.message


def test_another_kernel_is_only_noted(there: dict[str, Any]) -> None:
    there["kernel"] = "6.1.0-9"
    found = differences(there)
    assert (found.refusals, len(found.notes)) == ((), 1)
    assert "6.1.0-9" in found.notes[0]
