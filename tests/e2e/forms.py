"""The form of a state: which keys it has and what kinds of values are under them, as a checksum.

The checksum leaves out the script's own objects: their form belongs to the script and to PyTorch.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

#: Under these names are values of the script's, of frameworks and of PyTorch.
_OPEN = frozenset(
    "content values shared signature attributes stream state workers creation slots orders data whole sums".split()
)


def form_of(states: list[Any]) -> tuple[int, str]:
    """The checksum, and what it is of."""
    message = "\n".join(sorted({line for state in states for line in _lines_of(state, "state")}))
    return crc32(message.encode()), message


def _lines_of(value: Any, name: str) -> list[str]:
    if isinstance(value, dict):
        keys = sorted(map(str, value))
        if all(key.isidentifier() for key in keys):
            lines = [f"{name}: {' '.join(keys)}"]
            for key, found in value.items():
                lines += [] if key in _OPEN else _lines_of(found, f"{name}.{key}")
            return lines
    if isinstance(value, (list, tuple)) and any(isinstance(found, (dict, list, tuple)) for found in value):
        return [line for found in value for line in _lines_of(found, f"{name}[]")]
    return [f"{name}: {type(value).__name__}"]
