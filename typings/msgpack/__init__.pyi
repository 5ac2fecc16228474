# The part of msgpack that we use; the package ships no types.
from collections.abc import Callable
from typing import Any

def packb(
    o: object, *, use_bin_type: bool = ..., default: Callable[[object], object] = ..., unicode_errors: str = ...
) -> bytes: ...
def unpackb(
    packed: bytes,
    *,
    raw: bool = ...,
    strict_map_key: bool = ...,
    ext_hook: Callable[[int, bytes], object] = ...,
    max_array_len: int = ...,
    max_map_len: int = ...,
) -> Any: ...
