"""Encodes and decodes the payload of a frame: one msgpack map with string keys.

Limits what a peer can cost us: no extension types, no keys other than strings, no map or array longer than `MAX_ITEMS`,
no nesting deeper than `MAX_DEPTH`. The caller gets plain Python values, whose meaning `record` checks.
"""

from __future__ import annotations

import os
import sys

from ..errors import BAD_REQUEST, PeerError
from .record import INT_MAX, INT_MIN, Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any

MAX_DEPTH = 16
MAX_ITEMS = 65_536

# A worker's environment may have any version of msgpack or none, and the script would get what the agent imports by
# that name. So the agent loads msgpack's pure-Python module by path, under a private name, from beside hegmd or from
# the directory in HEGM_MSGPACK, which `hegmctl run` sets. Its C module works with one version of Python only.
_PRIVATE = "_hegm_msgpack"
_PURE = "fallback.py"


def load_msgpack(package: str) -> ModuleType:
    """Return the module with `unpackb` and `Packer`, for hegmd under that package name. Raises ImportError."""
    if package != "hegmd":
        if _PRIVATE in sys.modules:  # provided by agent/attached.py, for a process whose environment has none
            return _load_pure("")
        for folder in _own_folders():
            if os.path.exists(os.path.join(folder, _PURE)):
                return _load_pure(folder)
    import msgpack

    return msgpack


def _own_folders() -> list[str]:
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    named = os.environ.get("HEGM_MSGPACK")
    return [os.path.join(os.path.dirname(here), "msgpack"), *([named] if named else [])]


def _load_pure(folder: str) -> ModuleType:
    from importlib import import_module

    if _PRIVATE not in sys.modules:
        package = type(sys)(_PRIVATE)
        package.__path__ = [folder]
        sys.modules[_PRIVATE] = package
    return import_module(_PRIVATE + "." + _PURE[: -len(".py")])


msgpack: Any = load_msgpack(__name__.partition(".")[0])

_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
_HINT = "a payload is one msgpack map with string keys and UTF-8 strings; see docs/protocol.md"


def encode(message: Mapping[str, object], *, escaped: bool = False) -> bytes:
    r"""Return the message as msgpack, with records as maps. Raises TypeError or ValueError for values without a msgpack
    form.

    Records are encoded where they are found: plain copies of all of them would take four times as long, and a reply
    with 2,000 processes has 14,000 records. Paths and names on a node need not be UTF-8; Python holds such bytes as
    surrogates. `escaped` writes each of them as \udcNN, for messages that people read; values that programs act on must
    not be changed.
    """
    try:
        return _packed(message)
    except UnicodeEncodeError:
        if not escaped:
            raise
    return _packed(message, unicode_errors="backslashreplace")


def _packed(message: Mapping[str, object], **options: str) -> bytes:
    packer = msgpack.Packer(use_bin_type=True, default=_packable, **options)
    packed: bytes = packer.pack(message)
    return packed


def decode(payload: bytes) -> dict[str, object]:
    """Return the map in the payload. Raises PeerError for anything else."""
    try:
        message: Any = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
    except PeerError:
        raise
    except RecursionError:
        raise _malformed("nested too deeply") from None
    except Exception as error:  # the C and the Python unpacker raise different classes for the same bytes
        raise _malformed(str(error) or "no msgpack") from error
    if type(message) is not dict:
        raise _malformed(f"a {type(message).__name__} where a map belongs")
    _check_shape(message)
    return message  # pyright: ignore[reportUnknownVariableType] - its shape was checked just now


def _packable(value: object) -> dict[str, object] | int:
    """Return the map of a record, and the nearest number that fits for a larger integer.

    A sum of sizes that peers have named can be larger; an answer with it closed the connection.
    """
    if isinstance(value, Record):
        return value.__dict__
    if isinstance(value, int):
        return INT_MAX if value > 0 else INT_MIN
    raise TypeError(f"msgpack has no form for a {type(value).__name__}")


def _check_shape(message: Any) -> None:
    """Refuse keys that are not strings, values of other types, and nesting over the limit; without recursion."""
    layer: list[Any] = [message]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for value in layer:
            kind = value.__class__
            if kind is dict:
                for key in value:
                    if type(key) is not str:
                        raise _malformed(f"a map key of type {type(key).__name__}")
                deeper.extend(value.values())
            elif kind is list:
                deeper.extend(value)
            elif kind not in _PLAIN:  # a timestamp, the only extension type that msgpack decodes by itself
                raise _malformed(f"a value of type {kind.__name__}")
        if not deeper:
            return
        layer = deeper
    raise _malformed(f"nested deeper than {MAX_DEPTH}")


def _refuse_extension(code: int, data: bytes) -> object:
    raise _malformed(f"extension type {code} of {len(data)} bytes")


def _malformed(why: str) -> PeerError:
    return PeerError(BAD_REQUEST, f"malformed payload: {why}", _HINT)
