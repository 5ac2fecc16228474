"""Describes what a variable refers to so that another process can find it: a model by its place in the state, an object
of the script by a number.

A name is not enough, because a variable may hold another object than at its start: `model = second` would give the
second model the first one's name. So all objects are matched at once, unambiguous ones first. An object that was made
since the script first reached its loop has no counterpart. It is created again from its attributes, if its class is the
script's and does nothing when an object is created.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial

from ..code.encoding import NotEncodable, RestoreTarget
from ..code.position import is_users_module
from ..code.script_objects import set_value, values_of
from ..values.duck_types import class_of, is_a, members_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from ..code.drift import Drift
    from ..code.encoding import Decoding, ValueEncoder
    from ..code.script_objects import Instances

HELD = "held"
OWN = "own"
_DEVICES = frozenset(("cpu", "cuda", "hip"))


class CapturedReferences:
    """References of one capture. `held` maps the address of each object with a state of its own to its reference.

    `on_the_way` names variables that a restarted script sets before it reaches the place. It does not have what they
    held at the first batch, such as the first epoch's meter.
    """

    def __init__(
        self,
        instances: Instances,
        held: dict[int, Any],
        was_there: Callable[[Any], bool],
        drift: Drift | None,
        on_the_way: frozenset[str] = frozenset(),
    ) -> None:
        self._drift = drift
        self._on_the_way = on_the_way
        self._instances = instances
        self._held = held
        self._was_there = was_there
        self._numbers: dict[int, int] = {}
        #: The part of the state for each of the script's objects that is referred to or changed, by number.
        self.entries: list[dict[str, Any]] = []
        self._things: list[Any] = []

    def of(self, value: Any, forms: ValueEncoder) -> tuple[Any] | None:
        """Return the reference in a tuple; None for a plain value. Raises NotKept for what cannot be created again."""
        if id(value) in self._held:
            return (self._held[id(value)],)
        if not self._instances.is_own(value):
            return None
        return ((OWN, self.number(value, forms)),)

    def number(self, thing: Any, forms: ValueEncoder) -> int:
        """Return the number of an object of the script. Raises NotKept."""
        known = self._numbers.get(id(thing))
        if known is not None:
            return known
        kind = class_of(thing)
        before = [] if self._drift is None else self._drift.names_of(thing)
        lasting = [name for name in before if not self._is_set_before_resume(name)]
        is_later = not self._was_there(thing) or bool(before and not lasting)
        entry: dict[str, Any] = {
            # Its first names, since variables may have been set to other objects meanwhile.
            "names": lasting or self._instances.names_of(thing),
            "class": kind.__qualname__,
            "module": kind.__module__,
            "later": is_later,
            "values": {},
            "whole": None,
        }
        if is_later and not entry["names"] and class_named(kind.__module__, kind.__qualname__) is not kind:
            raise NotEncodable(kind.__qualname__)
        number = self._numbers[id(thing)] = len(self.entries)
        self.entries.append(entry)
        self._things.append(thing)
        if is_later:
            try:
                entry["whole"] = self._whole(thing, kind, forms)
            except NotEncodable:
                if not self._may_be_recreated(entry):
                    del self._numbers[id(thing)]
                    raise
        return number

    def _is_set_before_resume(self, name: str) -> bool:
        """Return True if the path of this name starts at such a variable."""
        ends = [at for at, sign in enumerate(name) if sign in ".[<"]
        return name in self._on_the_way or any(name[:end] in self._on_the_way for end in ends)

    def _whole(self, thing: Any, kind: Any, forms: ValueEncoder) -> dict[str, Any]:
        if class_named(kind.__module__, kind.__qualname__) is not kind:
            raise NotEncodable(kind.__qualname__)
        try:
            return {name: forms.of(value) for name, value in values_of(thing)}
        except NotEncodable as error:
            raise NotEncodable(f"{kind.__qualname__}, which holds {error}") from None

    @staticmethod
    def _may_be_recreated(entry: dict[str, Any]) -> bool:
        """Return True if a restarted script may have one of its own: it has a name that is in no container."""
        return any("[" not in name for name in entry["names"])


class RestoredReferences:
    """The targets of references in the restarted script."""

    def __init__(self, entries: list[dict[str, Any]], instances: Instances, held: Callable[[Any], Any]) -> None:
        """`held` finds what has a state of its own."""
        self._entries = entries
        self._held = held
        here = instances.found
        self._found: dict[int, Any] = {}
        self._refilled: set[int] = set()
        for is_later in (False, True):
            numbers = [number for number, entry in enumerate(entries) if entry["later"] is is_later]
            taken = {id(thing) for thing in self._found.values()}
            left = [(thing, names) for thing, names in here if id(thing) not in taken]
            pairs = matched(
                [entries[number]["names"] for number in numbers],
                [names for _thing, names in left],
                lambda mine, yours: (
                    class_of(left[yours][0]).__qualname__ == entries[numbers[mine]]["class"]  # noqa: B023 - at once
                ),
            )
            for mine, yours in pairs.items():
                self._take(numbers[mine], *left[yours])

    def _take(self, number: int, thing: Any, names: list[str]) -> None:
        """Have the object that is here under its names be its counterpart.

        One that replaced another within the loop takes the place of the former one, which is here. If others hold the
        former one too, it is created beside it.
        """
        entry = self._entries[number]
        if entry["whole"] is not None and not entry["values"] and not set(names) <= set(entry["names"]):
            return  # what refers to it has it created
        self._found[number] = thing
        if entry["whole"] is not None:
            self._refilled.add(number)

    def thing(self, reference: Any, settling: Decoding) -> Any:
        """Return the object of the reference; None if there is none."""
        if reference[0] == HELD:
            return self._held(reference)
        number: int = reference[1]
        if number not in self._found:
            self._make(number, settling)
        return self._found.get(number)

    def _make(self, number: int, settling: Decoding) -> None:
        entry = self._entries[number]
        kind = class_named(entry["module"], entry["class"])
        if entry["whole"] is None or kind is None:
            return
        thing = self._found[number] = object.__new__(kind)
        for name, form in entry["whole"].items():
            set_value(thing, name, settling.settle(form, None, f"{entry['class']}.{name}"))

    def places(self, missing: list[str]) -> Iterator[RestoreTarget]:
        """Yield the changes of each object. Objects without a counterpart are added to `missing`."""
        for number, entry in enumerate(self._entries):
            thing = self._found.get(number)
            if thing is None:
                if entry["values"] and not entry["later"]:
                    missing.append(f"{(entry['names'] or ['an object'])[0]} ({entry['class']})")
                continue
            here = dict(values_of(thing))
            for name, (form, is_stored) in entry["values"].items():
                text = f"{entry['class']}.{name}"
                yield RestoreTarget(form, here.get(name), text, partial(set_value, thing, name), is_stored=is_stored)
            for name, form in entry["whole"].items() if number in self._refilled else ():
                # The script has chosen its device again.
                is_device = is_a(form, str) and is_a(here.get(name), str) and form.partition(":")[0] in _DEVICES
                if name not in entry["values"] and not is_device:
                    text = f"{entry['class']}.{name}"
                    yield RestoreTarget(form, here.get(name), text, partial(set_value, thing, name), is_stored=True)


def references_to(addresses: set[int], things: list[Any]) -> dict[int, Any]:
    """Return the objects with a state, and what is within them, by address, each with its place in the state."""
    found: dict[int, Any] = dict.fromkeys(addresses)
    for index, thing in enumerate(things):
        for name, part in _parts_of(thing):
            if found.get(id(part)) is None:
                found[id(part)] = (HELD, index, name)
    return found


def memories_of(things: list[Any]) -> dict[int, tuple[Any, Any]]:
    """Return the tensors of these objects that have memory of their own by its address, each with its reference."""
    found: dict[int, tuple[Any, Any]] = {}
    if "torch" not in sys.modules:
        return found
    torch: Any = sys.modules["torch"]
    for index, thing in enumerate(things):
        for name, part in _parts_of(thing):
            if type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided and part.numel():
                storage = part.untyped_storage()
                if storage.data_ptr() and storage.nbytes() == part.nbytes:
                    found.setdefault(storage.data_ptr(), ((HELD, index, name), part))
    return found


def _parts_of(thing: Any) -> Iterator[tuple[str, Any]]:
    yield "", thing
    if not hasattr(thing, "named_buffers"):
        return
    for ways in ("named_modules", "named_parameters", "named_buffers"):
        yield from ((f"{ways}:{name}", part) for name, part in getattr(thing, ways)() if part is not thing)


def part_of(thing: Any, name: str) -> Any:
    """Return the object itself, or the part of it with that name."""
    if not name:
        return thing
    ways, _, inner = name.partition(":")
    return dict(getattr(thing, ways)()).get(inner)


def class_named(module: str, qualname: str) -> Any:
    """Return a class of the script whose objects can be created without running its code; None if there is none."""
    home: Any = sys.modules.get(module)
    if home is None or not is_users_module(home):
        return None
    found: Any = home
    for part in qualname.split("."):
        found = members_of(found).get(part)
    makes: Any = getattr(found, "__new__", None)
    return found if is_a(found, type) and makes is object.__new__ else None


def matched(saved: list[list[str]], here: list[list[str]], fits: Callable[[int, int], bool]) -> dict[int, int]:
    """Match saved objects to present ones by their names, unambiguous ones first."""
    by_name: dict[str, list[int]] = {}
    for yours, names in enumerate(here):
        for name in names:
            by_name.setdefault(name, []).append(yours)
    shared: list[dict[int, int]] = []
    wanted: dict[int, list[int]] = {}
    for mine, names in enumerate(saved):
        counts: dict[int, int] = {}
        for yours in (found for name in names for found in by_name.get(name, ())):
            counts[yours] = counts.get(yours, 0) + 1
        shared.append({yours: count for yours, count in counts.items() if fits(mine, yours)})
        for yours in shared[-1]:
            wanted.setdefault(yours, []).append(mine)
    pairs: dict[int, int] = {}
    single = deque(mine for mine, counts in enumerate(shared) if len(counts) == 1)
    for first in range(len(saved)):
        for mine in _singles_then(single, first):
            if mine in pairs or not shared[mine]:
                continue
            yours = pairs[mine] = max(shared[mine], key=lambda found: shared[mine][found])
            for other in wanted[yours]:
                if other not in pairs and shared[other].pop(yours, 0) and len(shared[other]) == 1:
                    single.append(other)
    return pairs


def _singles_then(single: deque[int], last: int) -> Iterable[int]:
    while single:
        yield single.popleft()
    yield last
    while single:
        yield single.popleft()
