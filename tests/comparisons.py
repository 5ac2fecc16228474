"""The message of a failed comparison of long bytes: it shows where they differ, and not all of them."""

from __future__ import annotations

from collections.abc import Mapping

LONG_BYTES = 256
_AROUND_BYTES = 8


def compared(left: object, right: object) -> str | None:
    """Return the first difference of two values that hold long bytes; None if they hold none, or are equal."""
    if isinstance(left, bytes | bytearray | memoryview) and isinstance(right, bytes | bytearray | memoryview):
        return _difference(bytes(left), bytes(right)) if max(len(left), len(right)) > LONG_BYTES else None
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return None
        places = [(key, left[key], right[key]) for key in left]
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        places = [(place, *pair) for place, pair in enumerate(zip(left, right, strict=True))]
    else:
        return None
    for place, one, other in places:
        if one is not other and one != other:
            found = compared(one, other)
            return found and f"at [{place!r}]: {found}"
    return None


def _difference(left: bytes, right: bytes) -> str | None:
    if left == right:
        return None
    shorter = min(len(left), len(right))
    first = next((at for at in range(shorter) if left[at] != right[at]), shorter)
    sides = [one[first : first + _AROUND_BYTES] for one in (left, right)]
    return f"{len(left)} bytes == {len(right)} bytes; at byte {first} they are {sides[0]!r} and {sides[1]!r}"
