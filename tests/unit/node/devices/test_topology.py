"""Descriptions of simulated nodes: their results, and the messages for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.errors import BAD_CONFIG, HegmError
from hegmd.node.devices.node_spec import (
    FaultSpec,
    LinkSpec,
    ProcessSpec,
    default_gpu,
    full_mesh,
    parse_size,
    write_size,
)
from hegmd.node.devices.topology import parse_topology
from tests.cells import in_one_test

EXAMPLES = Path(__file__).resolve().parents[4] / "contrib" / "simulation"


# The line of each mistake is in MISTAKEN, in order; a missing key has its table's line.
FULL_OF_MISTAKES = """\
links = "every"
colour = "red"
[[gpu]]
name = 5
memroy = "8GiB"
count = 2
uuid = "A"
[[gpu.process]]
memory = "3GiB"
[[gpu]]
memory = "1GiB"
numa_node = -1
[[gpu.process]]
pid = 7
memory = "3GiB"
[[gpu.process]]
pid = true
[[link]]
between = ["gpu0", "gpu0"]
[[fault]]
target = "gpu9"
fault = "hang"
for_snapshots = 3
[[fault]]
"""
MISTAKEN = [1, 2, 3, 4, 5, 7, 8, 10, 12, 17, 19, 21, 23, 24, 24]


def described(folder: Path, text: str) -> str:
    path = folder / "node.toml"
    path.write_text(text)
    return str(path)


def refused(spec: str) -> HegmError:
    with pytest.raises(HegmError) as caught:
        parse_topology(spec)
    assert caught.value.code is BAD_CONFIG
    return caught.value


@in_one_test(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("80GB", 80 * 1000**3),
        ("1.5TiB", 3 << 39),
        ("512MiB", 512 << 20),
        ("7B", 7),
        ("9007199254740993B", None),
        ("8", None),
        ("GiB", None),
        ("8Gi", None),
        ("-1GiB", None),
        ("1e3GiB", None),
        ("", None),
    ],
)
def test_sizes_are_exact_and_need_a_unit(text: str, size_bytes: int | None) -> None:
    assert parse_size(text) == size_bytes


@in_one_test("text", ["0 B", "1 B", "1023 B", "1 KiB", "1536 MiB", "8 GiB", "8589934593 B", "3 TiB"])
def test_sizes_are_written_as_they_are_read(text: str) -> None:
    size_bytes = parse_size(text)
    assert size_bytes is not None
    assert write_size(size_bytes) == text


def test_the_short_form_gives_that_many_alike_and_all_linked() -> None:
    node = parse_topology("3x8GiB")
    assert node.gpus == tuple(default_gpu(index, 8 << 30) for index in range(3))
    assert node.links == (LinkSpec((0, 1)), LinkSpec((0, 2)), LinkSpec((1, 2)))
    assert parse_topology(" 3 X 8 GiB ") == node


@pytest.mark.thorough
def test_identities_are_the_same_in_every_run_and_never_twice() -> None:
    node = parse_topology("256x1GiB")
    assert len({gpu.uuid for gpu in node.gpus}) == len({gpu.pci_address for gpu in node.gpus}) == 256
    assert node.gpus[255].uuid == parse_topology("256x2GiB").gpus[255].uuid


@in_one_test(
    ("spec", "message"),
    [
        ("0x8GiB", "cannot simulate 0 GPUs"),
        ("257x8GiB", "cannot simulate 257 GPUs"),
        ("2x8", "'8' is not an amount of memory"),
        ("2x0GiB", "'0GiB' is not an amount of memory"),
        ("/nonexistent/node.toml", "No such file"),
        ("/", "Is a directory"),
        ("", "directory"),
        ("a\0b", "null byte"),
        ("x" * 5000, "too long"),
    ],
)
def test_an_invalid_spec_is_refused_with_the_right_form(spec: str, message: str) -> None:
    error = refused(spec)
    assert message in error.message
    assert "2x8GiB" in error.hint


def test_a_description_creates_the_whole_node(tmp_path: Path) -> None:
    node = parse_topology(
        described(
            tmp_path,
            """
            compute_version = "13.0"
            [[gpu]]
            count = 2
            memory = "8GiB"
            name = "A"
            persistence = true
            [[gpu.process]]
            pid = 12
            memory = "1GiB"
            [[gpu.process]]
            pid = 13
            kind = "graphics"
            [[gpu]]
            memory = "4GiB"
            uuid = "SIM-x"
            pci_address = "0001:02:03.4"
            [[link]]
            between = ["gpu2", "gpu0"]
            kind = "nvlink"
            lanes = 18
            bytes_per_s = 450_000_000_000
            [[fault]]
            target = "vendor"
            fault = "error"
            after_snapshots = 3
            for_snapshots = 2
            """,
        )
    )
    assert [(gpu.name, gpu.memory_bytes, gpu.persistence, len(gpu.processes)) for gpu in node.gpus] == [
        ("A", 8 << 30, True, 2),
        ("A", 8 << 30, True, 0),
        ("Simulated GPU", 4 << 30, None, 0),
    ]
    assert node.gpus[0].processes == (ProcessSpec(12, 1 << 30, "compute"), ProcessSpec(13, None, "graphics"))
    assert (node.gpus[1].uuid, node.gpus[1].pci_address) == (default_gpu(1, 0).uuid, default_gpu(1, 0).pci_address)
    assert (node.gpus[2].uuid, node.gpus[2].pci_address) == ("SIM-x", "0001:02:03.4")
    assert node.links == (LinkSpec((2, 0), "nvlink", 18, 450_000_000_000),)
    assert node.faults == (FaultSpec("vendor", "error", 3, 2),)
    assert node.compute_version == "13.0"


def test_links_are_all_or_none_unless_described(tmp_path: Path) -> None:
    gpus = '[[gpu]]\ncount = 3\nmemory = "1GiB"\n'
    assert parse_topology(described(tmp_path, gpus)).links == full_mesh(3)
    assert parse_topology(described(tmp_path, 'links = "all"\n' + gpus)).links == full_mesh(3)
    assert parse_topology(described(tmp_path, 'links = "none"\n' + gpus)).links == ()


def test_all_mistakes_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    path = described(tmp_path, FULL_OF_MISTAKES)
    error = refused(path)
    problems = error.facts["problems"]
    assert isinstance(problems, list)
    assert [problem["line"] for problem in problems] == MISTAKEN
    assert all(problem["hint"] for problem in problems)
    assert error.message.splitlines()[4] == f"{path}:5: gpu[0].memroy: is not known; did you mean memory?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no GPU"),
        ("gpu = 5", "gpu: 5 does not fit"),
        ("gpu = [1]", "gpu: [1] does not fit"),
        ('[[gpu]]\nmemory = "1GiB"\ncount = 200\n[[gpu]]\nmemory = "1GiB"\ncount = 100', "300 GPUs are too many"),
        ('[[gpu]]\nmemory = "1GiB"\nuuid = "A"\n[[gpu]]\nmemory = "1GiB"\nuuid = "A"', "2 GPUs have the uuid A"),
        ('links = "all"\n[[gpu]]\nmemory="1GiB"\ncount=2\n[[link]]\nbetween = ["gpu0", "gpu1"]', "[[link]] tables as"),
        ('[[gpu]]\nmemory = "1GiB"\n[[fault]]\ntarget = "vendor"\nfault = "ecc"', "write one of lost, error, hang"),
        ("[[gpu]\n", "is not TOML"),
        ("[[gpu]]\nmemory = 8GiB", "line 2"),
    ],
)
def test_an_invalid_node_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(described(tmp_path, text)).message


def test_a_file_that_is_not_text_or_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b"\xff\xfe[[gpu]]")
    assert "is not TOML" in refused(str(path)).message
    path.write_bytes(b"#" * (2 << 20))
    assert "is larger than" in refused(str(path)).message


def test_tables_written_inline_are_understood(tmp_path: Path) -> None:
    node = parse_topology(described(tmp_path, 'gpu = [{memory = "1GiB"}, {memory = "2GiB", name = "B"}]'))
    assert [(gpu.memory_bytes, gpu.name) for gpu in node.gpus] == [(1 << 30, "Simulated GPU"), (2 << 30, "B")]
    error = refused(described(tmp_path, '\ngpu = [{memory = "1GiB"}, {memory = 2}]'))
    assert ":2: gpu[1].memory: 2 does not fit" in error.message


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_that_are_shipped_can_be_used(path: Path) -> None:
    assert parse_topology(str(path)).gpus
    assert path.name in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("table", ["", "[[gpu]]", "[[gpu]]\n[[gpu.process]]", "[[link]]", "[[fault]]"])
def test_the_example_of_every_key_has_every_key(tmp_path: Path, table: str) -> None:
    error = refused(described(tmp_path, f'{table}\n"?" = 1\n'))
    known = next(line for line in error.message.splitlines() if "?: is not known" in line).partition("known here are ")
    keys = known[2].split(", ")
    text = (EXAMPLES / "every-key.toml").read_text()
    assert [key for key in keys if f"{key} = " not in text and f"{key}]]" not in text] == []
    assert len(keys) >= 3
