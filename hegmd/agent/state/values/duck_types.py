"""The class of a value and the attributes of a module, for untyped values: type checkers cannot follow them."""

from __future__ import annotations

import sys
from collections import OrderedDict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_CLASS: Any = type


class _Bound:
    def method(self) -> None: ...


#: Types that the module `types` names; importing it would cost time.
FUNCTION: Any = type(lambda: None)
BUILTIN: Any = type(len)
METHOD: Any = type(_Bound().method)
MODULE: Any = _CLASS(sys)
CODE: Any = type(_Bound.method.__code__)
NAMESPACE: Any = type(sys.implementation)
_BARE = frozenset((type(None), bool, int, float, str))
#: Numbers from here on may be addresses of Python's objects.
FIRST_ADDRESS = 1 << 32
_EMPTIED = frozenset((dict, list, tuple, set, OrderedDict))


def is_a(value: Any, *kinds: Any) -> bool:
    return isinstance(value, kinds)


def is_bare(value: Any) -> bool:
    """Return True for a value that leads to no object. A layer of PyTorch has twenty, such as flags and no hooks."""
    kind = _CLASS(value)
    return kind in _BARE or (kind in _EMPTIED and not value)


def named_items(thing: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a dictionary with their keys; a key is its number there if it differs in another process.

    Such keys are objects, and numbers as large as the addresses of objects.
    """
    for number, (key, value) in enumerate(list(thing.items())):
        is_same = is_a(key, str) or (is_a(key, int) and key < FIRST_ADDRESS)
        yield f"[{key!r}]" if is_same else f"[key {number}]", value


def class_of(value: Any) -> Any:
    return _CLASS(value)


def attribute_of(value: Any, name: str) -> Any:
    """Return an attribute, or None. A `__getattr__` of the script is not called: it may do or raise anything."""
    try:
        return object.__getattribute__(value, name)
    except Exception:  # noqa: BLE001 - a property of the script
        return None


def members_of(value: Any) -> dict[str, Any]:
    """Return the current attributes of a module or a class."""
    members: Any = getattr(value, "__dict__", {})
    return dict(members)


def is_filled(value: Any) -> bool:
    """Return True for what has no form, and holds values in attributes or as a file does."""
    return is_a(value, *_named_in(sys.modules.get("io"), "StringIO", "BytesIO"), *kinds_without_form())


def kinds_without_form() -> list[Any]:
    """Return the types of values of C, of those that several processes share, and of those that each thread has."""
    return [
        *_named_in(sys.modules.get("_thread"), "_local"),
        *_named_in(sys.modules.get("_ctypes"), "_SimpleCData", "Structure", "Union", "Array", "_Pointer"),
        *_named_in(sys.modules.get("multiprocessing.sharedctypes"), "SynchronizedBase"),
    ]


def _named_in(module: Any, *names: str) -> list[Any]:
    return [getattr(module, name) for name in names if hasattr(module, name)]
