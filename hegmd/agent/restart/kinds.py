"""Of which class a value is and what a module has, for values of which nothing is known: type checkers see no more."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLASS: Any = type


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
