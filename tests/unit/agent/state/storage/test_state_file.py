"""A state file gives back what was written, to the bit, and is refused whole when a single bit of it is wrong."""

from __future__ import annotations

import os
import resource
import struct
from binascii import crc32
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hegmd.agent.state.storage import raw_copy, state_file, tags, tensors
from tests.cells import in_one_test
from tests.huge import huge_memory
from tests.needs import need_torch
from tests.unit.agent.state.drawn_values import Drawn, exact

pytestmark = [pytest.mark.xdist_group("torch")]
torch: Any = need_torch()

HEADER = struct.Struct("<8sIIQQQII")


@pytest.fixture
def fd() -> Iterator[int]:
    opened = os.memfd_create("state", os.MFD_CLOEXEC)
    yield opened
    os.close(opened)


def _through(fd: int, value: Any) -> Any:
    assert state_file.write(fd, value) == state_file.size_bytes(value) <= os.fstat(fd).st_size
    return state_file.read(fd)


@in_one_test("seed", range(60))
def test_values_of_any_type_are_restored_exactly(fd: int, seed: int) -> None:
    value = Drawn(seed).value(depth=4)
    assert exact(_through(fd, value)) == exact(value)


@pytest.mark.thorough
def test_huge_pages_which_know_no_write_take_a_state() -> None:
    """Every restart failed at its saving where the pool was in such pages: `write` answers with error 22."""
    value = {"weights": torch.arange(1_000_000), "step": 7}
    with huge_memory(state_file.size_bytes(value)) as fd:
        assert state_file.write(fd, value) == state_file.size_bytes(value)
        assert exact(state_file.read(fd)) == exact(value)


def test_a_descriptor_is_used_again_for_less_and_for_more(fd: int) -> None:
    for elements in (300_000, 10, 3_000_000):
        value = torch.arange(elements, dtype=torch.float32)
        assert torch.equal(_through(fd, value), value)


@pytest.mark.thorough
def test_pieces_larger_than_one_part_and_on_no_border(fd: int) -> None:
    value = [
        torch.arange(size, dtype=torch.uint8) for size in (1, 4095, 4097, (8 << 20) - 1, (8 << 20) + 4097, 17 << 20)
    ]
    followed: list[int] = []
    state_file.write(fd, value, followed.append)
    assert exact([part[-9:] for part in state_file.read(fd)]) == exact([part[-9:] for part in value])
    assert all(torch.equal(*pair) for pair in zip(value, state_file.read(fd), strict=True))


# ---- tensors --------------------------------------------------------------------------------------------------------


def test_views_of_one_storage_share_it_again(fd: int) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    found = _through(fd, {"row": base[1], "base": base, "columns": base.t()})
    found["row"][0] = -1.0
    assert found["base"][1, 0] == found["columns"][0, 1] == -1.0
    assert state_file.read(fd)["base"][1, 0] == 6.0, "what is read is private: the file stays"


def test_a_small_view_does_not_take_its_whole_storage_along(fd: int) -> None:
    whole = torch.randn(1000, 1000)
    assert state_file.size_bytes(whole[3]) < 16_384
    assert state_file.size_bytes(whole[:, 3]) < 16_384
    assert torch.equal(_through(fd, whole[:, 3]), whole[:, 3])


def test_memory_formats_stay_since_kernels_are_chosen_by_them(fd: int) -> None:
    value = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    assert _through(fd, value).is_contiguous(memory_format=torch.channels_last)


def test_a_restored_parameter_requires_a_gradient(fd: int) -> None:
    found = _through(fd, torch.nn.Parameter(torch.ones(3)))
    assert type(found) is torch.Tensor
    assert found.requires_grad
    assert found.is_leaf


def test_a_conjugate_view_and_a_negative_one_are_written_as_they_read(fd: int) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    found = _through(fd, [value.conj(), value.conj().imag])
    assert torch.equal(found[0], value.conj().resolve_conj())
    assert torch.equal(found[1], value.conj().imag.resolve_neg())


def test_the_former_device_of_a_tensor_is_stated(fd: int) -> None:
    assert tensors.was_on(_through(fd, torch.ones(2))) == torch.device("cpu")


def test_numpy_numbers_of_every_byte_order_are_restored(fd: int) -> None:
    value = {np.int64(3): np.arange(5, dtype=">i4"), "none": np.empty((0, 3)), "all": np.asfortranarray(np.eye(3))}
    assert exact(_through(fd, value)) == exact(value)


# ---- what cannot be written -----------------------------------------------------------------------------------------

_Pair = namedtuple("_Pair", "a b")  # noqa: PYI024 - what a script would have


def _unwritable() -> list[tuple[Any, str]]:
    return [
        ({"optimizer": [{"state": {3: {"fn": len}}}]}, "optimizer[0].state[3].fn is a function"),
        ([1, object()], "[1] is an object"),
        (lambda: 0, "the state is a function"),
        ({"p": _Pair(1, 2)}, "p is a tests.unit.agent.state.storage.test_state_file._Pair"),
        ({"d": defaultdict(list)}, "d is a defaultdict with a factory, which is code"),
        ({"t": torch.ones(2).to_sparse()}, "t is a tensor without ordinary memory (torch.sparse_coo, on cpu)"),
        ({"t": torch.ones(2, device="meta")}, "t is a tensor without ordinary memory (torch.strided, on meta)"),
        ({torch.ones(2): 1}, "the state has a key that is a torch.Tensor"),
        ([np.array([object()])], "[0] is a numpy array of object"),
        ([np.zeros(2, dtype=[("a", "i4")])], "[0] is a numpy array of [('a', '<i4')]"),
    ]


def test_values_that_cannot_be_written_are_named_by_their_path(fd: int) -> None:
    for value, message in _unwritable():
        with pytest.raises(state_file.UnsupportedValue) as caught:
            state_file.write(fd, value)
        assert str(caught.value) == message
        assert os.fstat(fd).st_size == 0, "nothing was written"


def test_a_value_that_contains_itself_is_refused(fd: int) -> None:
    inner: dict[str, Any] = {}
    value = [1, inner]
    inner["up"] = value
    with pytest.raises(state_file.UnsupportedValue, match=r"\[1\]\.up contains itself"):
        state_file.write(fd, value)


def test_an_object_shared_a_thousand_times_is_written_once(fd: int) -> None:
    value: Any = [1.5]
    for _ in range(60):
        value = (value, value)
    found = _through(fd, value)
    assert found[0] is found[1]
    assert state_file.size_bytes(value) == 4096


def test_depth_has_an_end_for_the_writer(fd: int) -> None:
    value: Any = 0
    for _ in range(tags.MAX_DEPTH):
        value = [value]
    assert exact(_through(fd, value)) == exact(value)
    with pytest.raises(state_file.UnsupportedValue, match=f"is inside more than {tags.MAX_DEPTH} containers"):
        state_file.write(fd, [value])


# ---- damage ---------------------------------------------------------------------------------------------------------


def _small() -> Any:
    return {"step": 7, "w": torch.arange(5.0), "moments": [torch.ones(3), 2.5], "name": "x" * 20}


def _file_of(value: Any) -> bytes:
    fd = os.memfd_create("whole", os.MFD_CLOEXEC)
    try:
        return os.pread(fd, state_file.write(fd, value), 0)
    finally:
        os.close(fd)


def _read(data: bytes) -> Any:
    fd = os.memfd_create("changed", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        return state_file.read(fd)
    finally:
        os.close(fd)


@pytest.mark.thorough
def test_a_file_that_was_cut_anywhere_is_refused() -> None:
    whole = _file_of(_small())
    for length in range(len(whole)):
        with pytest.raises(state_file.DamagedStateFile):
            _read(whole[:length])
    assert exact(_read(whole)) == exact(_small())


@pytest.mark.thorough
def test_a_file_with_any_bit_flipped_is_refused_or_the_same() -> None:
    """The gaps between segments hold bytes that no reader uses; all other bytes have a checksum."""
    whole = _file_of(_small())
    harmless = 0
    for place in range(len(whole.rstrip(b"\0"))):
        for bit in (1, 128):
            flipped = bytearray(whole)
            flipped[place] ^= bit
            try:
                assert exact(_read(bytes(flipped))) == exact(_small())
                harmless += 1
            except state_file.DamagedStateFile:
                continue
    assert harmless < 2 * 3 * 63, "no more than the gaps before the table's end and two pieces"


@pytest.mark.thorough
def test_a_flipped_bit_in_any_page_of_a_large_segment_is_reported() -> None:
    whole = bytearray(_file_of(torch.zeros(5 << 20, dtype=torch.float32)))
    whole[-(3 << 20)] ^= 4
    with pytest.raises(
        state_file.DamagedStateFile, match="1 of 3 parts do not match their checksums, the first at byte"
    ):
        _read(bytes(whole))


def test_two_pages_that_changed_places_are_found() -> None:
    value = torch.arange(1 << 14, dtype=torch.int64)
    whole = _file_of(value)
    start = len(whole) - value.nbytes
    swapped = whole[:start] + whole[start + 4096 : start + 8192] + whole[start : start + 4096] + whole[start + 8192 :]
    with pytest.raises(state_file.DamagedStateFile):
        _read(swapped)


@pytest.fixture
def short_files() -> Iterator[None]:
    """Nothing can be written beyond the first MiB of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_writing_that_was_cut_short_leaves_no_state_file(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with (tmp_path / "state").open("wb+") as file:
        state_file.write(file.fileno(), torch.zeros(2 << 20))
        request.getfixturevalue("short_files")
        with pytest.raises(OSError, match="File too large"):
            state_file.write(file.fileno(), torch.ones(1 << 20))
        with pytest.raises(state_file.DamagedStateFile, match="it is incomplete"):
            state_file.read(file.fileno())


# ---- foreign files --------------------------------------------------------------------------------------------------


def _forged(tree: bytes, sizes: tuple[int, ...] = (), version: int = 1, **header: int) -> bytes:
    """Return a file with correct checksums and any content."""
    sums = [0] * sum((size + (8 << 20) - 1) // (8 << 20) for size in sizes if size < 1 << 40)
    table = struct.pack(f"<{len(sizes)}Q{len(sums)}I", *sizes, *sums)
    length = (64 + len(tree) + len(table) + 4095) // 4096 * 4096
    header_fields = {"tree_bytes": len(tree), "pieces": len(sizes), "total_bytes": length} | header
    head = HEADER.pack(
        b"HEGMSTAT",
        version,
        0,
        header_fields["tree_bytes"],
        header_fields["pieces"],
        header_fields["total_bytes"],
        crc32(tree),
        crc32(table),
    ).ljust(60, b"\0")
    return (head + struct.pack("<I", crc32(head)) + tree + table).ljust(length, b"\0")


def test_a_valid_forged_file_is_read() -> None:
    assert _read(_forged(b"\0\0" + tags.TRUE)) is True


def test_a_newer_version_is_refused_with_both_numbers() -> None:
    with pytest.raises(state_file.DamagedStateFile, match="it is of version 2, and this hegmd reads version 1"):
        _read(_forged(b"\0\0" + tags.TRUE, version=2))


LARGE = b"\xff" * 8 + b"\x7f"
TENSOR = b"\x01\x07float32\x01"  # slot 0 from its start, one dimension
SMALL_TENSOR = b"\x01\x00\x07float32"


@in_one_test(
    "data",
    [
        pytest.param(_forged(b""), id="no tree at all"),
        pytest.param(_forged(b"\0\0"), id="a tree without a value"),
        pytest.param(_forged(b"\0\0NN"), id="two values"),
        pytest.param(_forged(b"\0\0\xfe"), id="an unknown tag"),
        pytest.param(_forged(b"\0\0" + tags.LIST + LARGE), id="a list of 2**63 values"),
        pytest.param(_forged(b"\0\0" + tags.STR + LARGE), id="a text of 2**63 bytes"),
        pytest.param(_forged(b"\0\0" + tags.INT + b"\xff" * 20), id="a number without an end"),
        pytest.param(_forged(LARGE + b"\0N"), id="2**63 storages"),
        pytest.param(_forged(b"\0" + LARGE + b"N"), id="2**63 tensors"),
        pytest.param(_forged(b"\0\0" + tags.LIST * 5000), id="a tree of one byte"),
        pytest.param(_forged(b"\0\0" + (tags.LIST + b"\1") * 5000 + b"N"), id="5000 lists in one another"),
        pytest.param(_forged(b"\0\0" + tags.LIST + b"\1" + tags.AGAIN + b"\0"), id="a list that contains itself"),
        pytest.param(_forged(b"\0\0" + tags.AGAIN + b"\5"), id="a reference to nothing"),
        pytest.param(_forged(b"\0\0" + tags.SET + b"\1" + tags.LIST + b"\0"), id="a set with a list in it"),
        pytest.param(_forged(b"\0\0" + tags.STR + b"\1\xff"), id="a text that is none"),
        pytest.param(_forged(b"\0\0" + tags.BYTES_BESIDE + b"\0"), id="a piece that is not there"),
        pytest.param(_forged(b"\0\0" + tags.TENSOR + b"\0"), id="a tensor that is not there"),
        pytest.param(_forged(b"\0\1" + SMALL_TENSOR + b"\1\4\1\3cpu\0" + tags.TENSOR + b"\0"), id="no bytes for it"),
        pytest.param(_forged(b"\0\1\0\0\5numel\0\3cpu\0N"), id="a dtype that is none"),
        pytest.param(_forged(b"\0\1\0\0\7float32\1\0\1\7nowhere\0N"), id="a device that is none"),
        pytest.param(_forged(b"\0\1\0\0\5int64\1\0\1\3cpu\1N"), id="a gradient of whole numbers"),
        pytest.param(_forged(b"\0\1\0\0\7float32\xff\1", ()), id="a tensor of 255 dimensions"),
        pytest.param(_forged(b"\0\0" + tags.NUMPY_SCALAR + b"\1O\x08" + b"\1" * 8), id="an object of numpy"),
        pytest.param(_forged(b"\0\0N", total_bytes=2**63), id="more bytes than the file has"),
        pytest.param(_forged(b"\0\0N", tree_bytes=2**63), id="a tree larger than the file"),
        pytest.param(_forged(b"\0\0N", pieces=2**60), id="more pieces than bytes"),
        pytest.param(_forged(b"\0\0N", sizes=(2**63,)), id="a piece larger than the file"),
        pytest.param(_forged(b"\0\0N", sizes=(2**63, 2**63)), id="two pieces whose sizes wrap around"),
    ],
)
def test_a_hostile_file_is_refused_and_takes_neither_time_nor_memory(data: bytes) -> None:
    with pytest.raises(state_file.DamagedStateFile):
        _read(data)


def test_a_tensor_that_reaches_beyond_its_bytes_is_refused() -> None:
    """In memory next to it lies something else."""
    whole = _file_of(torch.arange(4, dtype=torch.float32))
    tree_bytes = HEADER.unpack_from(whole)[3]
    tree = whole[64 : 64 + tree_bytes]
    for wrong in (tree.replace(b"\1\4\1", b"\1\5\1"), tree.replace(b"\1\4\1", b"\1\4\2")):
        assert wrong != tree
        head = HEADER.pack(*HEADER.unpack_from(whole)[:6], crc32(wrong), HEADER.unpack_from(whole)[7]).ljust(60, b"\0")
        with pytest.raises(state_file.DamagedStateFile, match="reaches beyond its bytes"):
            _read(head + struct.pack("<I", crc32(head)) + wrong + whole[64 + tree_bytes :])


@pytest.mark.thorough
def test_random_trees_with_right_checksums_are_refused_or_read() -> None:
    """The reader raises only Damaged, whatever the tree contains."""
    whole = [_file_of(Drawn(seed).value(depth=4)) for seed in range(8)]
    tree_of = [data[64 : 64 + HEADER.unpack_from(data)[3]] for data in whole]
    draw = Drawn(7).random
    refused = 0
    for _ in range(1500):
        tree = bytearray(draw.choice(tree_of))
        for _ in range(draw.randrange(1, 4)):
            tree[draw.randrange(len(tree))] = draw.randrange(256)
        try:
            _read(_forged(bytes(tree)))
        except state_file.DamagedStateFile:
            refused += 1
    assert refused > 500


def test_an_ordered_dict_stays_one(fd: int) -> None:
    value = OrderedDict([("b", 1), ("a", 2)])
    assert exact(_through(fd, value)) == exact(value)


# ---- filling --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_tensors_are_filled_in_place_whatever_their_make(fd: int) -> None:
    saved = [
        *(torch.randn(300, 400), torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last), torch.tensor(3.5)),
        *(torch.empty(0, 3), torch.randn(6, 4).t(), torch.randn(9 << 20), torch.tensor([1 + 2j]).conj()),
    ]
    wide = torch.zeros(4, 8)
    made = [*(torch.zeros_like(tensor) for tensor in saved), torch.zeros(300, 400, dtype=torch.float64), wide[:, ::2]]
    found = _through(fd, [*saved, saved[0], torch.ones(4, 4)])
    versions = [tensor._version for tensor in made]
    raw_copy.fill(zip(found, made, strict=True))
    for was, is_now in zip([*saved, saved[0].double(), torch.ones(4, 4)], made, strict=True):
        assert torch.equal(was, is_now)
        assert was.stride() == is_now.stride() or is_now.dtype is torch.float64 or is_now._base is wide
    assert torch.equal(wide[:, 1::2], torch.zeros(4, 4)), "what lies between was left alone"
    assert all(tensor._version > before for tensor, before in zip(made, versions, strict=True) if tensor.numel())


def test_a_tensor_of_another_shape_is_not_filled(fd: int) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        raw_copy.fill([(_through(fd, torch.ones(3)), torch.zeros(4))])
