"""The objects of some classes that Python's collector knows of, found once more without going through all the others.

Going through 300,000 objects takes 40 ms, in which a job stands. It was gone through a moment before, while the job
trained, so the second time is for what is left of the objects found then and for the young ones: what was made since is
in the collector's two youngest generations, unless one of the collections that move objects to the oldest has been in
between. Then all are gone through again, as they are on a Python whose collector has other generations.
"""

from __future__ import annotations

import gc
import sys
from _weakref import ref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# From 3.14 on the collector moves objects to its oldest generation bit by bit. It knows one only without the lock.
_HAS_GENERATIONS = sys.version_info < (3, 14) and getattr(sys, "_is_gil_enabled", lambda: True)()
_YOUNG = (0, 1)


class Living:
    """The objects of classes that come from these. May be asked from several threads, one at a time."""

    def __init__(self) -> None:
        self._wanted: tuple[type[object], ...] = ()
        self._moved: tuple[int, ...] | None = None  # None: nothing is known of earlier looks
        self._known: list[Any] = []

    def of(self, *wanted: type[object]) -> tuple[list[Any], ...]:
        """Those of each, in no order. Asks for their type: `isinstance` would run code of proxies."""
        moved = _moves_to_the_oldest()
        kinds = [with_subclasses(base) for base in wanted]
        of_any: frozenset[type[object]] = frozenset(kind for those in kinds for kind in those)
        if self._moved == moved and self._wanted == wanted and _HAS_GENERATIONS:
            young = [item for number in _YOUNG for item in gc.get_objects(generation=number) if type(item) in of_any]
            found = _each_once([*young, *(item for known in self._known if (item := known()) is not None)])
        else:
            # All of the process stands meanwhile, so the loop has nothing but a look into a set in it.
            found = [item for item in gc.get_objects() if type(item) in of_any]
        self._note(wanted, moved, found)
        return tuple([item for item in found if type(item) in those] for those in kinds)

    def _note(self, wanted: tuple[type[object], ...], moved: tuple[int, ...], found: list[Any]) -> None:
        self._wanted, self._moved = wanted, moved
        try:
            self._known = [ref(item) for item in found]
        except TypeError:  # a class may have no place for weak references: it would be lost sight of
            self._moved, self._known = None, []


def with_subclasses(base: type[object]) -> frozenset[type[object]]:
    """The class and all that come from it. Asks `type` itself: a class may have methods of its own of any name."""
    found: set[type[object]] = set()
    left: list[type[object]] = [base]
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left.extend(type.__subclasses__(kind))
    return frozenset(found)


def _moves_to_the_oldest() -> tuple[int, ...]:
    """How often that has happened: by collections of the two older generations, and by freezing."""
    return (*(told["collections"] for told in gc.get_stats()[1:]), gc.get_freeze_count())


def _each_once(objects: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in objects}.values())
