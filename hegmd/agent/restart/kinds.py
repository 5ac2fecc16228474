"""Of which class a value is, for values of which nothing is known: type checkers are told no more than the answer."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def is_a(value: Any, *kinds: Any) -> bool:
    """Whether it is an instance of one of these classes."""
    return isinstance(value, kinds)
