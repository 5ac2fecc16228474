"""Whether a loader's data are the same as they were: told by one of its items, and by what its dataset is made of.

A dataset that a script makes anew on its way to the loop, out of random numbers for instance, has the same size and
other rows. No item is asked of one that workers read: it may open files, which are not to be open before they fork.
"""

from __future__ import annotations

import ctypes
import weakref
from binascii import crc32

from . import generators
from .kinds import is_a

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DEEP = 4


def sum_of(dataset: Any) -> int | None:
    """A checksum of the item in its middle; None where there is none that would be the same each time."""
    before = generators.read_shared()
    try:
        item = dataset[len(dataset) // 2]
        return _sum(item, 0, 0) if generators.read_shared() == before else None
    except Exception:  # noqa: BLE001 - a dataset of any make; nothing is told by one that cannot be asked
        return None
    finally:
        generators.set_shared(before)


class Makings:
    """What a dataset's rows come from, without keeping it alive: addresses are given out again."""

    def __init__(self, dataset: Any) -> None:
        parts, self._indices = _parts_of(dataset)
        self._parts = [_reference_to(found) for found in parts]

    def are_of(self, dataset: Any) -> bool:
        """Whether that one's rows come from the same."""
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
    except TypeError:  # a list or a tuple, for instance: it stays as long as the loader's place is remembered
        return lambda: found


def _sum(item: Any, so_far: int, depth: int) -> int:
    if hasattr(item, "untyped_storage"):
        whole = item.detach().cpu().contiguous()
        return crc32(ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size()), so_far)
    if hasattr(item, "tobytes"):
        return crc32(item.tobytes(), so_far)
    if is_a(item, str, bytes, int, float):
        return crc32(repr(item).encode(), so_far)
    if depth < _DEEP and is_a(item, list, tuple, dict):
        values: Any = item.values() if is_a(item, dict) else item
        for found in values:
            so_far = _sum(found, so_far, depth + 1)
    return so_far
