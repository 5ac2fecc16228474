"""Which objects of torchdata are iterators that a restart handles, and which passes no code iterates any more."""

from __future__ import annotations

import types
from typing import Any

import pytest

from hegmd.agent.state.loaders import stateful_loader


class _Iterator:
    """Like torchdata's: its loader keeps it beyond its pass."""

    _finished = False

    def __next__(self) -> int:
        return 1


_Iterator.__module__ = stateful_loader.MODULE


class _Loader:
    num_workers = 2

    def __init__(self) -> None:
        self.snapshot_every_n_steps = 1
        self._iterator = _Iterator()


_Loader.__module__ = stateful_loader.MODULE


def test_a_pass_that_only_its_loader_has_is_left() -> None:
    loader = _Loader()
    assert stateful_loader.is_left(loader._iterator)
    options = types.SimpleNamespace(batches=loader._iterator)
    assert not stateful_loader.is_left(loader._iterator)
    options.batches._finished = True
    assert stateful_loader.is_left(loader._iterator)


def test_passes_of_other_loaders_never_count_as_left() -> None:
    assert not stateful_loader.is_left(iter([1]))


def test_its_loader_is_the_scripts_and_its_iterators_are_not() -> None:
    loader = _Loader()
    assert stateful_loader.restores_by_own_state(loader)
    assert not stateful_loader.is_part(loader)
    assert stateful_loader.is_part(loader._iterator)
    assert not stateful_loader.restores_by_own_state(types.SimpleNamespace(num_workers=2))


@pytest.mark.parametrize("given", [0, 1])
def test_loader_workers_are_refused_unless_declared_deterministic(given: int) -> None:
    loader: Any = _Loader()
    (refused,) = stateful_loader.OwnLoaderState(loader).refusals(given)
    assert ("may draw random numbers" in refused.what) is (given == 0)
