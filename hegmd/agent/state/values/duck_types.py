"""Of which class a value is and what a module has, for values of which nothing is known: type checkers see no more."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLASS: Any = type


class _Bound:
    def method(self) -> None: ...


#: What the module `types` has names for.
FUNCTION: Any = type(lambda: None)
BUILTIN: Any = type(len)
METHOD: Any = type(_Bound().method)
MODULE: Any = _CLASS(sys)
CODE: Any = type(_Bound.method.__code__)
NAMESPACE: Any = type(sys.implementation)


def is_a(value: Any, *kinds: Any) -> bool:
    """Whether it is an instance of one of these classes."""
    return isinstance(value, kinds)


def class_of(value: Any) -> Any:
    """Its class."""
    return _CLASS(value)


def members_of(value: Any) -> dict[str, Any]:
    """The names of a module, or of a class, as they are now."""
    members: Any = getattr(value, "__dict__", {})
    return dict(members)
