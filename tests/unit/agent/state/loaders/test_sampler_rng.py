"""The random generators that a dataset may draw from: all that it reaches, or a note that the search was cut short."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from hegmd.agent.state.loaders.sampler_rng import held_within

RNG = random.Random(1)


class Turned:
    shared = random.Random(2)

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __call__(self, row: Any, rng: random.Random = random.Random(4)) -> Any:  # noqa: B008 - what scripts do
        return row, rng, RNG


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(5)


class Rows:
    def __init__(self, *parts: Any) -> None:
        self.transform = {"both": list(parts)}


class Part:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


def drawn(found: random.Random) -> float:
    return found.random()


def test_generators_within_a_dataset_were_not_found_below_its_own_attributes() -> None:
    partial = functools.partial(drawn, random.Random(6))
    inner = random.Random(7)
    dataset = Part(Rows(Turned(), Slotted(), partial, lambda: inner))
    found, is_whole = held_within([dataset])
    assert is_whole
    assert {one.random() for one in found} == {random.Random(seed).random() for seed in range(1, 8)}


@pytest.mark.thorough
def test_long_lists_of_plain_rows_are_not_searched_but_others_are() -> None:
    assert held_within([Rows([("a.png", 1)] * 100_000)]) == ([], True)
    assert held_within([Rows([Slotted() for _ in range(20_000)])])[1] is False
    assert held_within([Rows([Slotted() for _ in range(20_000)])], is_brief=True) == ([], True)


def test_excluded_objects_are_not_searched() -> None:
    sampler = Part(Rows(random.Random(8)))
    assert held_within([sampler], [sampler.dataset]) == ([], True)
