"""The node as checks see it, and the words they have for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.node.doctor.facts import NodeFacts, clipped, counted, listed, size_text, version_numbers
from tests.cells import in_one_test
from tests.unit.node.doctor.node import FileNode, gpu


def test_missing_values_are_none(node: FileNode) -> None:
    facts = node.facts()
    node.write("a/file", "text")
    assert facts.read("a/file") == "text"
    assert facts.read("missing") is None
    assert facts.read("a/file/below") is None
    assert facts.names_in("a") == ("file",)
    assert facts.names_in("missing") == ()


@pytest.mark.parametrize(("text", "number"), [("12\n", 12), ("0x10de\n", 0x10DE), ("max\n", None), ("", None)])
def test_numbers_in_files(node: FileNode, text: str, number: int | None) -> None:
    node.write("number", text)
    assert node.facts().read_int("number") == number


def test_settings_of_the_kernel_are_read_piece_by_piece() -> None:
    """A read of several MiB from /proc/sys failed with ENOMEM: the kernel makes a buffer of the size asked for."""
    facts = NodeFacts(
        vendors=(),
        gpus=(),
        simulated=False,
        user_mode=True,
        under_systemd=False,
        socket_path=Path("/nowhere/hegmd.sock"),
        state_dir=Path("/nowhere"),
    )
    assert facts.kernel_release


def test_the_largest_gpu_is_of_those_that_are_known(node: FileNode) -> None:
    facts = node.facts(gpus=(gpu(0, memory_total_bytes=None), gpu(1, memory_total_bytes=5), gpu(2)))
    largest = facts.largest_gpu()
    assert largest is not None
    assert largest.id == "gpu2"
    assert node.facts(gpus=(gpu(0, memory_total_bytes=None),)).largest_gpu() is None


@in_one_test(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536 * 1024**2, "1.5 GiB"),
        (141 * 1024**3, "141 GiB"),
        (3 * 1024**5, "3072 TiB"),
    ],
)
def test_sizes_read_well(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@in_one_test(
    ("text", "numbers"),
    [
        ("6.8.0-45-generic", (6, 8, 0)),
        ("580.159.04", (580, 159, 4)),
        ("4.1", (4, 1)),
        ("4.2rc1", (4, 2)),
        ("devel", ()),
        ("", ()),
    ],
)
def test_versions_compare_by_their_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers


def test_lines_are_short_and_clean() -> None:
    assert clipped("two\nlines\x1b[31m") == "two lines [31m"
    assert clipped("x" * 200, 10) == "x" * 9 + "…"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert listed([]) == ""
    assert (counted(1, "GPU"), counted(2, "NVSwitch", "es")) == ("1 GPU", "2 NVSwitches")
