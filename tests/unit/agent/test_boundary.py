"""The hook in loaders' iterators: what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest

from hegmd.agent.boundary import watch_loaders
from hegmd.agent.quiesce import Gate


class _Ending:
    """An iterator that has two items."""

    def __init__(self) -> None:
        self.left = 2

    def __iter__(self) -> _Ending:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


@pytest.mark.thorough
def test_an_iterator_that_was_read_to_its_end_stayed_until_a_collection() -> None:
    """The hook kept the traceback of its end in a variable: with the iterator, a loader's workers lived on."""

    class Iterators(_Ending):
        def __next__(self) -> int:
            return super().__next__()

    module: Any = ModuleType("dataloader")
    module._BaseDataLoaderIter = Iterators
    watch_loaders(module, Gate())
    gc.collect()
    gc.disable()
    try:
        iterator = Iterators()
        gone = weakref.ref(iterator)
        assert list(iterator) == [1, 0]
        del iterator
        assert gone() is None
    finally:
        gc.enable()
