"""The storages that the agent vouches for: they come back with the same bytes, objects, views and versions."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hegmd.agent import addresses, cuda_state, torch_state, transfer
from hegmd.errors import HegmError
from tests.needs import need_torch

torch: Any = need_torch()

pytestmark = [
    pytest.mark.leaks_allowed("PyTorch sets variables of its own when its compiler is first imported"),
    pytest.mark.xdist_group("torch"),
]


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def _addresses(found: torch_state.FoundStorages) -> set[int]:
    return {storage.data_ptr() for storage in found.storages}


def _reason(found: torch_state.FoundStorages, size_bytes: int) -> list[str]:
    return [why for why, (_, left_bytes) in found.left_alone.items() if left_bytes >= size_bytes]


def _remembering(address: int) -> Callable[[], int]:
    return lambda: address


def _progress(_so_far_bytes: int) -> None:
    pass


@pytest.mark.thorough
def test_parameters_gradients_state_and_views_are_restored_exactly(memory: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 300)).sum().backward()
    optimizer.step()
    row = model[0].weight.detach()[3]
    strided = torch.randn(50, 40).t()[::2]
    tensors = [*model.state_dict(keep_vars=True).values(), *(p.grad for p in model.parameters()), row, strided]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    before = [(t.detach().clone(), t._version, t.stride(), t.requires_grad, id(t.untyped_storage())) for t in tensors]
    found = torch_state.find()
    assert {t.untyped_storage().data_ptr() for t in tensors} <= _addresses(found)
    os.truncate(memory, transfer.required_bytes(found.sizes))
    offloaded = transfer.offload(os.dup(memory), found.storages, found.sizes, _progress)
    assert {t.untyped_storage().nbytes() for t in tensors} == {0}
    offloaded.bring_back(memory, _progress)
    offloaded.close()
    for tensor, (values, *rest) in zip(tensors, before, strict=True):
        now = [tensor._version, tensor.stride(), tensor.requires_grad, id(tensor.untyped_storage())]
        assert now == rest
        assert torch.equal(tensor.detach(), values)
    assert row.data_ptr() == model[0].weight[3].data_ptr()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.randn(70_001).share_memory_(), torch_state.SHARED),
        (lambda: torch.frombuffer(bytearray(280_004), dtype=torch.float32), torch_state.OTHER_OWNER),
    ],
)
def test_storages_that_cannot_be_freed_unnoticed_stay_with_a_reason(make: Any, why: str) -> None:
    held = make()
    found = torch_state.find()
    assert why in _reason(found, 280_004)
    assert held.untyped_storage().data_ptr() not in _addresses(found)


def test_a_tensor_shared_with_numpy_is_not_offloaded() -> None:
    pytest.importorskip("numpy")
    tensor = torch.randn(70_001)
    array = tensor.numpy()
    assert tensor.untyped_storage().data_ptr() not in _addresses(torch_state.find())
    assert array.shape == (70_001,)


@pytest.mark.thorough
def test_storages_of_a_pending_graph_stay_until_its_backward_pass() -> None:
    weight = torch.randn(300, 300, requires_grad=True)
    output = (torch.randn(4, 300) @ weight).relu()
    assert output.untyped_storage().data_ptr() not in _addresses(torch_state.find())
    output.sum().backward()
    found = torch_state.find()
    assert output.untyped_storage().data_ptr() in _addresses(found)


def test_frozen_parameters_are_left_to_the_driver() -> None:
    """`gc.freeze()` hides objects from every scan. Tensors that are seen through others have owners that are not."""
    hidden, shared = torch.randn(700), torch.randn(800)
    gc.freeze()
    try:
        part, fresh = shared.detach()[10:], torch.randn(900)
        found = torch_state.find()
    finally:
        gc.unfreeze()
        # The run's own million objects were frozen too. Otherwise each later collection goes through them: 1.4 s each.
        gc.freeze()
    assert fresh.data_ptr() in _addresses(found)
    assert not {hidden.data_ptr(), shared.data_ptr()} & _addresses(found)
    assert torch_state.UNSEEN_OWNER in _reason(found, part.untyped_storage().nbytes())


@pytest.mark.thorough
def test_fake_and_meta_tensors_weigh_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(12_345_678)
    meta = torch.empty(12_345_678, device="meta")
    assert sum(torch_state.find().sizes) < 12_345_678
    assert fake.shape == meta.shape


def test_the_smallest_storages_stay_if_there_is_less_memory_than_surveyed() -> None:
    found = torch_state.FoundStorages()
    for size_bytes in (100, 50_000, 7_000):
        found.take(object(), size_bytes)
    found.keep_what_fits(60_000, transfer.required_bytes)
    assert found.sizes == [50_000]
    assert found.left_alone == {torch_state.OUT_OF_MEMORY: [2, 7_100]}


def test_too_little_memory_changes_nothing(memory: int) -> None:
    tensor = torch.arange(10_000)
    with pytest.raises(HegmError, match="memory for 0 was given"):
        transfer.offload(memory, [tensor.untyped_storage()], [80_000], _progress)
    assert tensor.sum() == 49_995_000


def test_bytes_of_another_offload_are_refused_and_nothing_is_lost(memory: int) -> None:
    tensor = torch.arange(10_000)
    os.truncate(memory, transfer.required_bytes([80_000]))
    first = transfer.offload(os.dup(memory), [tensor.untyped_storage()], [80_000], _progress)
    other = os.memfd_create("other", os.MFD_CLOEXEC)
    os.truncate(other, transfer.required_bytes([80_000]))
    with pytest.raises(HegmError, match="does not hold"):
        first.bring_back(other, _progress)
    os.close(other)
    first.bring_back(first.fd, _progress)
    first.close()
    assert tensor.sum() == 49_995_000


@pytest.mark.thorough
def test_a_storage_whose_address_the_script_kept_was_written_to_where_it_had_been() -> None:
    """Issue 14, row 5: after a move a ctypes array over a tensor wrote to the memory that it had had before."""
    by_array, by_number, by_object, in_function = (torch.zeros(1000 + n) for n in range(4))
    free = torch.zeros(2000)
    array = (ctypes.c_float * 1000).from_address(by_array.data_ptr())
    number = by_number.data_ptr()
    held = [types.SimpleNamespace(deeper={"address": by_object.data_ptr()})]
    function = _remembering(in_function.data_ptr())
    found = torch_state.find()
    tensors = (by_array, by_number, by_object, in_function)
    assert not {t.data_ptr() for t in tensors} & _addresses(found)
    assert free.data_ptr() in _addresses(found)
    assert _reason(found, 4 * 4000) == [torch_state.ADDRESS_KEPT]
    del array, number, held, function
    found = torch_state.find()
    assert {t.data_ptr() for t in tensors} <= _addresses(found)


def test_a_survey_finds_objects_of_other_classes_in_the_same_look() -> None:
    kind: Any = type("Communicator", (), {})
    one, derived, tensor = kind(), type("Derived", (kind,), {})(), torch.zeros(1000)
    found = torch_state.find(also=(kind,))
    assert {id(one), id(derived)} == set(map(id, found.others))
    assert tensor.data_ptr() in _addresses(found)


def test_a_search_for_addresses_keeps_no_local_alive() -> None:
    """Up to Python 3.12 a frame keeps a copy of its variables after they were read."""
    tensor = torch.zeros(1000)
    watched = weakref.ref(tensor)
    mine = locals()
    torch_state.find()
    assert mine["tensor"] is tensor, "what the script itself has asked for stays as it is"
    del mine
    torch_state.find()
    del tensor
    assert watched() is None


@pytest.mark.thorough
def test_the_agents_own_reference_to_a_storage_is_not_the_scripts() -> None:
    """Its own records of the last survey kept every storage with the driver from then on, on two H200."""
    tensor = torch.zeros(1000)
    segments = cuda_state.Segments.__new__(cuda_state.Segments)
    segments.known = [tensor.data_ptr()]  # type: ignore[attr-defined]  # one more of its records
    thread = threading.Thread(target=segments.stream_of, args=(segments,))
    found = torch_state.find()
    assert thread is not None
    assert tensor.data_ptr() in _addresses(found)


def test_an_array_of_another_library_that_holds_only_an_address_is_found() -> None:
    """Issue 14, row 5: arrays of CuPy and Numba over a tensor hold its object, not its storage."""
    array = types.SimpleNamespace(__cuda_array_interface__={"data": (0x7F00_0000_0000, False)})
    assert 0x7F00_0000_0000 in addresses.kept([array])
    assert addresses.kept([types.SimpleNamespace()]) == addresses.kept([]), "one that does not say is no failure"


def test_a_view_of_a_split_tensor_that_was_written_to_failed_the_survey() -> None:
    """PyTorch raises when asked whether it is a leaf. FSDP1 has such views, and its jobs counted as on no GPU."""
    whole = torch.zeros(6, requires_grad=True) + 0
    parts = torch.split(whole, 2)
    with torch.no_grad():
        whole.add_(1)
    with pytest.raises(RuntimeError):
        _ = parts[0].is_leaf
    found = torch_state.find()
    assert whole.untyped_storage().data_ptr() in _addresses(found), found.left_alone
