"""The random generators from which a dataset or a sampler may draw: inside it, and named by its code.

Calls nothing of the script. The search is limited, and reports whether it was complete. In a worker, where it runs
after each batch, long containers are skipped.
"""

from __future__ import annotations

from collections import deque

from ..code.position import is_of_script
from ..values import rng
from ..values.duck_types import FUNCTION, METHOD, MODULE, attribute_of, class_of, is_a, members_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

_MAX_OBJECTS = 20_000
_LONGEST = 500
_CLASS: Any = type
_PLAIN = frozenset((str, bytes, bytearray, int, float, complex, bool, type(None), range, slice))
_CONTAINERS: Any = (list, tuple, set, frozenset, deque)


def held_within(owners: list[Any], but: Iterable[Any] = (), *, is_brief: bool = False) -> tuple[list[Any], bool]:
    """Return the generators, each once and always in the same order, and whether the search was complete.

    Objects in `but` are not searched; with `is_brief`, long containers are not either.
    """
    found: list[Any] = []
    visited: dict[int, Any] = {id(thing): thing for thing in but}
    left = deque(owners)
    while left:
        thing = left.popleft()
        if class_of(thing) in _PLAIN or id(thing) in visited:
            continue
        if len(visited) >= _MAX_OBJECTS:
            return found, False
        visited[id(thing)] = thing  # held, so that no other object gets its address meanwhile
        if rng.is_generator(thing):
            found.append(thing)
        elif not is_a(thing, MODULE):
            left.extend(_parts_of(thing, is_brief=is_brief))
    return found, True


def _parts_of(thing: Any, *, is_brief: bool) -> Iterator[Any]:
    if is_a(thing, dict):
        yield from _items_of(list(thing.values()), is_brief=is_brief)
    elif is_a(thing, *_CONTAINERS):
        yield from _items_of(thing, is_brief=is_brief)
    elif is_a(thing, METHOD):
        yield from (thing.__self__, thing.__func__)
    elif is_a(thing, FUNCTION):
        yield from _parts_of_function(thing)
    elif is_a(thing, _CLASS):
        yield from _parts_of_class(thing)
    else:
        yield class_of(thing)
        yield from members_of(thing).values()
        yield from _in_slots(thing)
        if is_a(attribute_of(thing, "keywords"), dict):  # functools.partial
            yield from (thing.func, thing.args, thing.keywords)


def _items_of(container: Any, *, is_brief: bool) -> Iterable[Any]:
    """Return the items to search. A long container of plain values, or of pairs of them, has none."""
    if len(container) <= _LONGEST:
        return list(container)
    if is_brief:
        return ()
    kinds = set(map(type, container))
    if kinds <= {tuple, list}:
        kinds = {class_of(part) for row in container for part in row}
    return () if kinds <= _PLAIN else container


def _parts_of_function(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            pass
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if is_of_script(function.__code__):
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        yield from (found for found in named if is_a(found, FUNCTION) or rng.is_generator(found))


def _parts_of_class(kind: Any) -> Iterator[Any]:
    for base in kind.__mro__:
        for found in members_of(base).values():
            if rng.is_generator(found) or (is_a(found, FUNCTION) and is_of_script(found.__code__)):
                yield found


def _in_slots(thing: Any) -> Iterator[Any]:
    for base in class_of(thing).__mro__:
        slots = members_of(base).get("__slots__", ())
        for slot in (slots,) if is_a(slots, str) else tuple(slots):
            try:
                yield object.__getattribute__(thing, slot)
            except AttributeError:
                pass
