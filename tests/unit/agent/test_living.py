"""The second look, which is a short one, finds what going through all objects finds."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from hegmd.agent.living import Living


class Thing:
    """What is looked for."""


class Other(Thing):
    """And what comes from it."""


class Bare:
    """Nothing can refer to one weakly."""

    __slots__ = ("held",)


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    """None but those that a test asks for."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    yield
    if was_on:
        gc.enable()


def _ids(living: Living, *wanted: type[object]) -> list[set[int]]:
    return [{id(item) for item in items} for items in living.of(*wanted)]


def _all(*wanted: type[object]) -> list[set[int]]:
    return _ids(Living(), *wanted)


HAPPENS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a young collection": lambda: gc.collect(0),
    "one of the middle": lambda: gc.collect(1),
    "a whole one": gc.collect,
}


@pytest.mark.parametrize("name", HAPPENS)
def test_what_was_made_and_what_has_gone_since_is_known(name: str) -> None:
    living, old = Living(), [Thing() for _ in range(20)]
    gc.collect()
    living.of(Thing, Bare)
    young: list[Any] = [Other() for _ in range(5)]
    del old[::2]
    HAPPENS[name]()
    young += [Thing(), Other()]
    found = _ids(living, Thing, Bare)
    assert found == _all(Thing, Bare)
    assert {id(item) for item in (*old, *young)} <= found[0]


def test_the_second_look_goes_through_the_young_ones_alone() -> None:
    """Or nothing is gained: the others are known by weak references."""
    living, kept = Living(), [Thing() for _ in range(3)]
    gc.collect()
    living.of(Thing)
    looked: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if on and event == "gc.get_objects":
            looked.append(str(arguments[0]))

    on = True
    sys.addaudithook(watch)
    assert _ids(living, Thing)[0] >= {id(item) for item in kept}
    on = False
    assert looked == ["0", "1"] if sys.version_info < (3, 14) else looked == ["-1"]


def test_objects_that_nothing_can_refer_to_weakly_have_all_gone_through_again() -> None:
    living, kept = Living(), [Bare()]
    cast(Any, kept[0]).held = kept  # the collector knows of one that may be part of a ring
    gc.collect()
    for _ in range(2):
        assert id(kept[0]) in _ids(living, Bare)[0]
    with pytest.raises(TypeError):
        weakref.ref(kept[0])
    kept.clear()


def test_other_classes_are_not_answered_from_what_is_known_of_these() -> None:
    living, kept = Living(), [Thing(), Other()]
    gc.collect()
    living.of(Thing)
    assert _ids(living, Other) == [{id(kept[1])}]


def test_any_order_of_making_dropping_and_collecting_is_followed() -> None:
    chance, living = random.Random(7), Living()
    kept: list[Any] = []
    for _ in range(300):
        match chance.randrange(6):
            case 0 | 1:
                kept += [chance.choice((Thing, Other))() for _ in range(chance.randrange(4))]
            case 2:
                del kept[: chance.randrange(4)]
            case 3:
                gc.collect(chance.choice((0, 0, 0, 1, 2)))
            case 4:
                kept.append([Thing()])
            case _:
                assert _ids(living, Thing) == _all(Thing)
