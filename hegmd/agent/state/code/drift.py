"""Finds what has changed in the script since it first reached its loop, by comparing two moments.

`assignments` finds what the code names. Other changes are found only by comparison: a variable that a closure counts
with, a default that is altered, an attribute set by `setattr` or on a library's object, a list that a hook fills. So
all places that can hold a value are read when the script first reaches a loop, and their fingerprints are kept, which
keep nothing alive. Variables of running functions are left out, because the code says more about them, such as which
are not read again.
"""

from __future__ import annotations

import sys
import weakref
from binascii import crc32
from collections import deque

from ..values.duck_types import FUNCTION, class_of, is_a, members_of
from .assignments import changes_of
from .script_objects import cells_of, set_value, users_modules, values_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .script_objects import Instances

OWN, OTHERS, CELL, FUNCTIONS, DEFAULT, GLOBAL = "own", "others", "cell", "function", "default", "global"
_SCALARS = frozenset((bool, int, complex, type(None), str, bytes, float))
_CONTAINERS: Any = (list, dict, set, deque, bytearray)
_LONGEST = 512
_MAX_BYTES = 1 << 20
_DEEP = 4
_THEIR_OWN = ("tqdm",)  # packages whose objects restore themselves


class Holder:
    """An object with places for values: an instance, a function, a cell of one, a module."""

    __slots__ = ("kind", "name", "thing")

    def __init__(self, kind: str, name: str, thing: Any) -> None:
        self.kind = kind
        self.name = name
        self.thing = thing

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, id(self.thing)

    def values(self) -> list[tuple[str, Any]]:
        """Return the values in its places, with their names."""
        thing: Any = self.thing
        if self.kind == OWN:
            return values_of(thing)
        if self.kind == OTHERS:
            return [(key, value) for key, value in thing.__dict__.items() if not key.startswith("_")]
        if self.kind == CELL:
            return [("", thing.cell_contents)]
        if self.kind == FUNCTIONS:
            return [(key, value) for key, value in thing.__dict__.items() if key != "__wrapped__"]
        if self.kind == DEFAULT:
            defaults: list[Any] = [*enumerate(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).items()]
            return [(str(key), value) for key, value in defaults if is_a(value, *_CONTAINERS)]
        members = members_of(thing)
        return [(key, value) for key, value in members.items() if not (key.startswith("__") or is_a(value, FUNCTION))]

    def put(self, key: str, value: Any) -> None:
        if self.kind == CELL:
            self.thing.cell_contents = value
        elif self.kind == GLOBAL:
            vars(self.thing)[key] = value
        elif self.kind != DEFAULT:
            set_value(self.thing, key, value)


def holders_in(instances: Instances) -> Iterator[Holder]:
    """Yield all holders, each once."""
    yield from (Holder(OWN, names[0], thing) for thing, names in instances.found if names)
    for thing, name in instances.others:
        if str(type(thing).__module__).partition(".")[0] not in _THEIR_OWN:
            yield Holder(OTHERS, name, thing)
    for function, name in instances.functions:
        yield Holder(FUNCTIONS, name, function)
        yield Holder(DEFAULT, name, function)
        yield from (Holder(CELL, f"{name}<{key}>", cell) for key, cell in cells_of(function))
    modules: list[Any] = users_modules()
    for module in modules:
        name = str(module.__name__)
        # Not a module under another name, nor one that PyTorch creates without a file, such as torch.ops.
        if sys.modules.get(name) is module and name.partition(".")[0] not in ("torch", *_THEIR_OWN):
            yield Holder(GLOBAL, name, module)


class Drift:
    """The saved description of all of it, to compare with later."""

    def __init__(self, instances: Instances, *, is_late: bool = False) -> None:
        """`is_late`: the loop may have changed values before."""
        self._is_late = is_late
        self._names: dict[tuple[str, int], str] = {}
        self._alive: dict[tuple[str, int], Any] = {}
        self._prints: dict[tuple[str, int], dict[str, Any]] = {}
        self._own_names = {id(thing): names for thing, names in instances.found}
        for holder in holders_in(instances):
            self._names[holder.key] = holder.name
            self._alive[holder.key] = _weak(holder.thing)
            self._prints[holder.key] = {key: print_of(value) for key, value in holder.values()}

    def names_of(self, thing: Any) -> list[str]:
        """Return the former names of an object of the script; none if it was not there."""
        return self._own_names.get(id(thing), []) if self.had(thing) else []

    def had(self, thing: Any) -> bool:
        """Return True if this object of the script was there."""
        return _is_it(self._alive.get((OWN, id(thing))), thing)

    def changed(self, instances: Instances) -> Iterator[tuple[Holder, str, str, Any]]:
        """Yield the places with another value now: holder, its former name, place and value.

        Variables of closures that functions set may have changed before a late record.
        """
        rewritten: set[str] = _rewritten_in(instances) if self._is_late else set()
        for holder in holders_in(instances):
            if not _is_it(self._alive.get(holder.key), holder.thing):
                continue
            before = self._prints[holder.key]
            if holder.kind == CELL and holder.name.rpartition("<")[2][:-1] in rewritten:
                before = {}
            for key, value in holder.values():
                if key not in before or before[key] != print_of(value):
                    yield holder, self._names[holder.key], key, value


def _rewritten_in(instances: Instances) -> set[str]:
    """Return the variables that a function sets and shares with the one that defines it."""
    codes = {function.__code__ for function, _name in instances.functions}
    stored = [(code, found.name) for code in codes for found in changes_of(code).found if found.is_stored]
    return {name for code, name in stored if name in code.co_freevars}


def _weak(thing: Any) -> Any:
    try:
        return weakref.ref(thing)
    except TypeError:  # a cell, or an object with slots: identified by its address alone
        return True


def _is_it(known: Any, thing: Any) -> bool:
    return known is True or (known is not None and known() is thing)


# ---- prints ---------------------------------------------------------------------------------------------------------


def print_of(value: Any, depth: int = 0) -> Any:
    """Return a fingerprint that differs if the value does, in most cases: of large collections only a part is read."""
    kind = class_of(value)
    if kind in _SCALARS:
        return (kind.__name__, hash(value) if value == value else None)  # noqa: PLR0124 - no NaN equals itself
    if is_a(value, bytearray):
        return ("bytearray", len(value), crc32(value))
    if is_a(value, list, tuple, deque):
        return (kind.__name__, len(value), _of_row(value, depth))
    if is_a(value, set, frozenset):
        is_plain = _SCALARS.issuperset(map(class_of, value))
        return (kind.__name__, len(value), hash(frozenset(value)) if is_plain else None)
    if is_a(value, dict):
        return (kind.__name__, len(value), _of_row(list(value), depth), _of_row(list(value.values()), depth))
    return _of_other(value, kind)


def _of_row(row: Any, depth: int) -> int:
    if _SCALARS.issuperset(map(class_of, row)):
        return hash(tuple(row))
    if depth >= _DEEP:
        return 0
    some = [row[index] for index in range(0, len(row), len(row) // _LONGEST + 1)]
    return hash(tuple([print_of(found, depth + 1) for found in some]))


def _of_other(value: Any, kind: Any) -> Any:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and is_a(value, torch.Tensor):
        return ("tensor", id(value), None if value.is_inference() else value._version)
    if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
        some = value.reshape(-1)[:: value.nbytes // _MAX_BYTES + 1]
        return ("array", value.shape, value.dtype.str, crc32(some.tobytes()))
    if numpy is not None and is_a(value, numpy.generic):
        return ("scalar", repr(value))
    return (kind.__qualname__, id(value))
