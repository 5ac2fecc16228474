"""The code sees changes wherever a value can be, and keeps no object alive by comparing it."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

from hegmd.agent.state.code import named_values
from hegmd.agent.state.code.drift import print_of
from hegmd.agent.state.loaders.dataset_identity import sums_of
from tests.cells import in_one_test
from tests.needs import need_torch

pytestmark = [pytest.mark.xdist_group("torch")]
torch: Any = need_torch()


def grown(value: list[object]) -> list[object]:
    return [*value, None]


@in_one_test(
    ("before", "after"),
    [
        (1, True),
        (0.1, 0.2),
        ("a", "b"),
        ([1, 2], [1, 3]),
        ([[1], {"a": {"b": 1}}], [[1], {"a": {"b": 2}}]),
        ({"a": 1}, {"b": 1}),
        ({1, 2}, {1, 3}),
        (deque([1]), deque([2])),
        (bytearray(b"a"), bytearray(b"b")),
        (np.zeros(3), np.array([0.0, 0.0, 1e-9])),
        (np.float32(1), np.float32(2)),
    ],
)
def test_another_value_has_another_print(before: object, after: object) -> None:
    assert print_of(before) != print_of(after)
    assert print_of(before) == print_of(before)


def test_a_tensor_written_to_in_place_has_another_print() -> None:
    tensor = torch.zeros(3)
    before = print_of(tensor)
    tensor += 1
    assert print_of(tensor) != before


def test_no_number_is_the_same_as_itself() -> None:
    assert print_of(float("nan")) == print_of(float("nan"))


@pytest.mark.thorough
def test_prints_keep_nothing_alive() -> None:
    class Thing: ...

    thing = Thing()
    held = weakref.ref(thing)
    prints = print_of([thing, {"a": thing}])
    del thing
    gc.collect()
    assert held() is None
    assert prints


def test_values_made_from_text_are_restored() -> None:
    for value in (Fraction(1, 3), PurePosixPath("/a"), bytearray(b"x"), torch.bfloat16, torch.Size([2, 3])):
        found = named_values.value_of(named_values.form_of(value))
        assert found == value
        assert type(found) is type(value)


def test_a_state_makes_nothing_that_it_names_itself() -> None:
    assert named_values.value_of((named_values.MADE, "os", "system", "true")) is None
    assert named_values.value_of((named_values.MADE, "antigravity", "Size", [1])) is None
    assert named_values.marked((named_values.NAME, "os", "system"), print) is None
    assert named_values.value_of((named_values.ENUM, "os", "environ", "PATH")) is None


class Counting:
    """A dataset that gives another item each time, and counts them."""

    def __init__(self) -> None:
        self.given = 0
        self.own = random.Random(1)
        self.rows = torch.arange(4.0)

    def __getitem__(self, index: int) -> int:
        self.given += 1
        return self.own.randrange(100)


def test_comparing_a_dataset_read_one_of_its_items() -> None:
    """A dry run then changed the numbers with which the training continued."""
    dataset = Counting()
    before = dataset.own.getstate()
    sums = sums_of(dataset)
    assert (dataset.given, dataset.own.getstate()) == (0, before)
    dataset.rows += 1
    changed = sums_of(dataset)
    assert {name for name, found in sums.items() if changed[name] != found} == {".rows"}
