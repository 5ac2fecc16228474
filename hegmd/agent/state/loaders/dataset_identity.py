"""Whether a loader's data are the same as before, judged by what its dataset consists of.

A dataset that a script makes again on its way to the loop, for example from random numbers, has the same size and other
rows. No item is requested: a dataset may count its items, draw from a generator of its own, or open files.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from binascii import crc32

from ..code.assignments import ATTRIBUTE, changes_of
from ..values.duck_types import FUNCTION, METHOD, attribute_of, class_of, is_a
from . import sampler_rng

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_DEEP = 4
_MAX_PARTS = 256
_MAX_BYTES = 1 << 20
_PASSED: Any = (FUNCTION, METHOD, type)


def sums_of(dataset: Any) -> dict[str, int]:
    """Return a checksum of each part of the dataset, by its name."""
    return dict(_sums(dataset, "", 0, {}))


def _sums(thing: Any, name: str, depth: int, met: dict[int, Any]) -> Iterator[tuple[str, int]]:
    if id(thing) in met:
        return
    met[id(thing)] = thing
    for key, value in getattr(thing, "__dict__", {}).items():
        if key.startswith("__") or is_a(value, *_PASSED):
            continue
        if depth < _DEEP and _is_part(value):
            yield from _sums(value, f"{name}.{key}", depth + 1, met)
        else:
            yield f"{name}.{key}", _sum(value, 0, 0)


def _is_part(value: Any) -> bool:
    data: Any = sys.modules.get("torch.utils.data")
    return data is not None and is_a(value, data.Dataset)


def counts(dataset: Any) -> bool:
    """Return True if reading an item changes the dataset, or may: then no item can be read for a test."""
    getter = getattr(class_of(dataset), "__getitem__", None)
    code = getattr(getter, "__code__", None)
    drawn, is_whole = sampler_rng.held_within([dataset])
    if drawn or not is_whole:
        return True
    return code is not None and any(found.kind == ATTRIBUTE for found in changes_of(code).found)


class DatasetSources:
    """The objects that a dataset's rows come from, without keeping them alive: addresses are reused."""

    def __init__(self, dataset: Any) -> None:
        parts, self._indices = _parts_of(dataset)
        self._parts = [_reference_to(found) for found in parts]

    def are_of(self, dataset: Any) -> bool:
        """Return True if that dataset's rows come from the same parts."""
        parts, indices = _parts_of(dataset)
        if indices != self._indices or len(parts) != len(self._parts):
            return False
        return all(reference() is found for reference, found in zip(self._parts, parts))


def _parts_of(dataset: Any) -> tuple[list[Any], int]:
    tensors, inner, indices = (getattr(dataset, name, None) for name in ("tensors", "dataset", "indices"))
    if is_a(tensors, tuple):
        return [*(tensors or ())], 0
    if inner is not None and is_a(indices, list, range):
        parts, before = _parts_of(inner)
        return parts, crc32(repr(indices).encode(), before)
    return [dataset], 0


def _reference_to(found: Any) -> Any:
    try:
        return weakref.ref(found)
    # no weak references, such as a list or a tuple: kept alive as long as the loader's place is remembered
    except TypeError:
        return lambda: found


def _sum(item: Any, so_far: int, depth: int) -> int:
    if attribute_of(item, "untyped_storage") is not None:
        return _sum_of_tensor(item, so_far)
    if attribute_of(item, "tobytes") is not None and attribute_of(item, "dtype") is not None:
        if item.dtype.hasobject:
            return so_far
        some = item.reshape(-1)[:: item.nbytes // _MAX_BYTES + 1]
        return crc32(some.tobytes(), crc32(repr(item.shape).encode(), so_far))
    if is_a(item, str, bytes, int, float, range, type(None)):
        return crc32(repr(item).encode(), so_far)
    if depth < _DEEP and is_a(item, list, tuple, dict):
        values: Any = list(item.items()) if is_a(item, dict) else item
        so_far = crc32(repr(len(values)).encode(), so_far)
        for found in values[:: len(values) // _MAX_PARTS + 1]:
            so_far = _sum(found, so_far, depth + 1)
        return so_far
    return crc32(type(item).__qualname__.encode(), so_far)


def _sum_of_tensor(item: Any, so_far: int) -> int:
    if item.layout is not sys.modules["torch"].strided or item.device.type == "meta":
        return so_far
    every = item.numel() * item.element_size() // _MAX_BYTES + 1
    some = item.detach().reshape(-1)[::every].cpu().contiguous()
    bytes_of_it = ctypes.string_at(some.data_ptr(), some.numel() * some.element_size())
    return crc32(bytes_of_it, crc32(repr(tuple(item.shape)).encode(), so_far))
