"""A failed run ends with the names of its failed tests, one in a line, however long the values are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comparisons import compared

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (bytes(9000), bytes(5000) + b"\1" + bytes(3999), "9000 bytes == 9000 bytes; at byte 5000 they are"),
        (bytearray(300), memoryview(bytes(299)), "300 bytes == 299 bytes; at byte 299 they are b'\\x00' and b''"),
        ([b"same", bytes(300)], [b"same", bytes(301)], "at [1]: 300 bytes == 301 bytes"),
        ({"a": (1, bytes(300))}, {"a": (1, bytes(299) + b"x")}, "at ['a']: at [1]: 300 bytes"),
    ],
)
def test_the_first_difference_of_long_bytes_is_shown(left: object, right: object, expected: str) -> None:
    assert str(compared(left, right)).startswith(expected)


@pytest.mark.parametrize(
    ("left", "right"), [(b"a", b"b"), (bytes(300), bytes(300)), ([1, bytes(300)], [2, bytes(301)]), ("a" * 300, 3)]
)
def test_other_values_are_left_to_pytest(left: object, right: object) -> None:
    assert compared(left, right) is None


@pytest.mark.thorough
def test_a_failed_run_in_ci_ended_with_thousands_of_lines_of_bytes_and_not_with_its_failed_tests(
    tmp_path: Path,
) -> None:
    """No reader could see which of 5,624 tests had failed."""
    failing = tmp_path / "test_failing.py"
    failing.write_text(
        "from tests.conftest import *\n"
        "def test_bytes(): assert bytes(9000) == bytes(9001)\n"
        "def test_lines(): assert False, '\\n' * 50\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest", str(failing)]
    environ = {**os.environ, "CI": "true"}
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    ended = [line.partition("::")[2] for line in lines[-3:-1]]
    assert (ended, lines[-1].split()[:2]) == (["test_bytes", "test_lines"], ["2", "failed"]), ran.stdout + ran.stderr
    (summary,) = [line for line in lines if line.startswith("FAILED") and "test_bytes" in line]
    assert "9000 bytes == 9001 bytes; at byte 9000" in summary
    assert ran.stdout.count("\\x00") < 20
