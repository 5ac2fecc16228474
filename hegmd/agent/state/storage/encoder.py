"""Encodes a plain value as a typed tree of bytes. A value without a form is refused, with its path in the whole.

Each value is a tag and its content. `decoder` is the reverse, and `tags` has the table of both. Only the exact types
are encoded: an instance of a derived class has more to it than a file could say. A container or tensor that occurs
again is written as a reference to the first occurrence, so that sharing is restored. A value that contains itself is
refused. Attributes that were set on a container are not encoded.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque

from . import tags, tensors
from .errors import UnsupportedValue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .tensors import Raw

# Longer byte strings are stored beside the tree, where several threads copy and check them.
MAX_WITHIN_BYTES = 4096
# From this many on, whole numbers in one list are written without tags.
FEW_NUMBERS = 16
_INT64 = 2**63

_HASHED = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)


class Tree:
    """A value taken apart: the bytes of its tree, and the raw bytes that belong to it."""

    def __init__(self, value: Any) -> None:
        """Raises UnsupportedValue."""
        self.out = bytearray()
        self._seen: dict[int, int] = {}
        self._open: set[int] = set()
        self._path: list[str] = []
        self.beside: list[Raw] = []
        self.tensors = tensors.Tensors()
        # Keeps everything alive that is identified by its address.
        self._kept: list[Any] = [value]
        torch = tensors.module("torch")
        if hasattr(torch, "no_grad"):
            with torch.no_grad():
                of_storages, described = self._taken_apart(value)
        else:
            of_storages, described = self._taken_apart(value)
        head = bytearray()
        self.raws: list[Raw] = [*of_storages, *self.beside]
        _number(head, len(of_storages))
        _number(head, len(described))
        for one in described:
            _describe(head, one)
        self.data = bytes(head + self.out)

    def _taken_apart(self, value: Any) -> tuple[list[Raw], list[tuple[Any, ...]]]:
        self._add(value)
        return self.tensors.finish()

    def _add(self, value: Any) -> None:
        kind = _type_of(value)
        add = _BY_TYPE.get(kind)
        if add is not None:
            add(self, value)
        elif kind in _SHARED:
            self._add_shared(value, _SHARED[kind])
        else:
            self._add_foreign(value, kind)

    def _add_foreign(self, value: Any, kind: type[object]) -> None:
        """Add a value of torch or numpy; refuse all others."""
        torch, numpy = tensors.module("torch"), tensors.module("numpy")
        if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
            self._add_shared(value, _add_tensor)
        elif torch is not None and kind in (getattr(torch, "dtype", None), getattr(torch, "device", None)):
            self.out += tags.DTYPE if kind is torch.dtype else tags.DEVICE
            _text(self.out, str(value).rpartition(".")[2] if kind is torch.dtype else str(value))
        elif torch is not None and kind is getattr(torch, "Size", None):
            self._add_shared(value, lambda tree, size: _add_items(tree, tuple(size), tags.TORCH_SIZE))
        elif numpy is not None and kind is getattr(numpy, "ndarray", None):
            self._add_shared(value, _add_array)
        elif numpy is not None and isinstance(value, getattr(numpy, "generic", ())):
            array_of_one, name, _columns = tensors.described_array(numpy.asarray(value), self.path())
            self.out += tags.NUMPY_SCALAR
            _text(self.out, name)
            _data(self.out, array_of_one.tobytes())
        else:
            raise UnsupportedValue(self.path(), _what_it_is(value))

    def _add_shared(self, value: Any, add: Callable[[Tree, Any], None]) -> None:
        """Add a value that others can hold too, and write it once."""
        known = self._seen.get(id(value))
        if known is not None:
            if id(value) in self._open:
                raise UnsupportedValue(self.path(), "contains itself")
            self.out += tags.AGAIN
            _number(self.out, known)
            return
        if len(self._open) >= tags.MAX_DEPTH:
            raise UnsupportedValue(self.path(), f"is inside more than {tags.MAX_DEPTH} containers")
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        self._open.add(id(value))
        add(self, value)
        self._open.discard(id(value))

    def add_at(self, step: str, value: Any) -> None:
        """Add a value inside the current one; `step` is the step to it, for messages."""
        self._path.append(step)
        self._add(value)
        self._path.pop()

    def path(self) -> str:
        return "".join(self._path).lstrip(".")


# ---- one type each --------------------------------------------------------------------------------------------------


def _add_int(tree: Tree, value: int) -> None:
    tree.out += tags.INT
    _data(tree.out, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _add_str(tree: Tree, value: str) -> None:
    tree.out += tags.STR
    _text(tree.out, value)


def _add_octets(tree: Tree, value: bytes, within: bytes, beside: bytes) -> None:
    if len(value) <= MAX_WITHIN_BYTES:
        tree.out += within
        _data(tree.out, value)
        return
    tree.out += beside
    _number(tree.out, len(tree.beside))
    buffer = tensors.Buffer(value)
    tree.beside.append((buffer, buffer.address, len(value), tensors.CPU))


def _add_row(tree: Tree, value: Any, tag: bytes, of_ints: bytes) -> None:
    if len(value) < FEW_NUMBERS or set(map(type, value)) != {int} or min(value) < -_INT64 or max(value) >= _INT64:
        _add_items(tree, value, tag)
        return
    numbers = array("q", value)
    if sys.byteorder == "big":
        numbers.byteswap()
    _add_octets(tree, numbers.tobytes(), of_ints + tags.BYTES, of_ints + tags.BYTES_BESIDE)


def _add_items(tree: Tree, value: Any, tag: bytes) -> None:
    items = list(value)
    tree.out += tag
    _number(tree.out, len(items))
    for index, item in enumerate(items):
        tree.add_at(f"[{index}]", item)


def _add_deque(tree: Tree, value: deque[Any]) -> None:
    tree.out += tags.DEQUE
    _number(tree.out, 0 if value.maxlen is None else value.maxlen + 1)
    _add_items(tree, value, b"")


def _add_default_dict(tree: Tree, value: defaultdict[Any, Any]) -> None:
    if value.default_factory is not None:
        raise UnsupportedValue(tree.path(), "is a defaultdict with a factory, which is code")
    _add_pairs(tree, value, tags.DEFAULT_DICT)


def _add_pairs(tree: Tree, value: dict[Any, Any], tag: bytes) -> None:
    pairs = list(value.items())
    tree.out += tag
    _number(tree.out, len(pairs))
    for key, item in pairs:
        if type(key) not in _HASHED and not _is_torch_or_numpy_key(key):
            raise UnsupportedValue(tree.path(), f"has a key that {_what_it_is(key)}")
        tree.add_at("{key}", key)
        tree.add_at(f".{key}" if type(key) is str and key.isidentifier() else f"[{key!r:.60}]", item)


def _is_torch_or_numpy_key(key: Any) -> bool:
    """Return True for keys that are equal in another process, which tensors are not."""
    torch, numpy = tensors.module("torch"), tensors.module("numpy")
    if torch is not None and type(key) in (getattr(torch, name, None) for name in ("dtype", "device", "Size")):
        return True
    return numpy is not None and isinstance(key, numpy.generic)


def _add_tensor(tree: Tree, value: Any) -> None:
    tree.out += tags.TENSOR
    _number(tree.out, tree.tensors.add(value, tree.path()))


def _add_array(tree: Tree, value: Any) -> None:
    found, name, columns = tensors.described_array(value, tree.path())
    tree.out += tags.ARRAY_OF_COLUMNS if columns else tags.ARRAY
    _text(tree.out, name)
    _number(tree.out, len(found.shape))
    for size in found.shape:
        _number(tree.out, size)
    _number(tree.out, len(tree.beside))
    tree.beside.append((found, int(found.ctypes.data), int(found.nbytes), tensors.CPU))


# ---- small parts ----------------------------------------------------------------------------------------------------


def _number(out: bytearray, number: int) -> None:
    """Append a whole number from 0 on, seven bits to a byte."""
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _data(out: bytearray, data: bytes) -> None:
    _number(out, len(data))
    out += data


def _text(out: bytearray, text: str) -> None:
    _data(out, text.encode("utf-8", "surrogatepass"))


def _describe(out: bytearray, described: tuple[Any, ...]) -> None:
    slot, start, kind, shape, strides, where, requires_grad = described
    _number(out, slot + 1)
    _number(out, start)
    _text(out, kind)
    out.append(len(shape))  # PyTorch has at most 64 dimensions
    for size in shape:
        _number(out, size)
    for stride in strides:
        _number(out, stride)
    _text(out, where)
    out.append(requires_grad)


def _what_it_is(value: Any) -> str:
    kind = _type_of(value)
    if kind.__name__ in ("function", "builtin_function_or_method", "method"):
        return "is a function"
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"is {'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _type_of(value: object) -> type[object]:
    return type(value)


_BY_TYPE: dict[type[object], Callable[[Tree, Any], None]] = {
    type(None): lambda tree, _value: tree.out.extend(tags.NONE),
    bool: lambda tree, value: tree.out.extend(tags.TRUE if value else tags.FALSE),
    int: _add_int,
    float: lambda tree, value: tree.out.extend(tags.FLOAT + struct.pack("<d", value)),
    complex: lambda tree, value: tree.out.extend(tags.COMPLEX + struct.pack("<dd", value.real, value.imag)),
    str: _add_str,
    bytes: lambda tree, value: _add_octets(tree, value, tags.BYTES, tags.BYTES_BESIDE),
}
_SHARED: dict[type[object], Callable[[Tree, Any], None]] = {
    bytearray: lambda tree, value: _add_octets(tree, bytes(value), tags.BYTEARRAY, tags.BYTEARRAY_BESIDE),
    list: lambda tree, value: _add_row(tree, value, tags.LIST, tags.LIST_OF_INTS),
    tuple: lambda tree, value: _add_row(tree, value, tags.TUPLE, tags.TUPLE_OF_INTS),
    set: lambda tree, value: _add_items(tree, value, tags.SET),
    frozenset: lambda tree, value: _add_items(tree, value, tags.FROZENSET),
    deque: _add_deque,
    dict: lambda tree, value: _add_pairs(tree, value, tags.DICT),
    OrderedDict: lambda tree, value: _add_pairs(tree, value, tags.ORDERED_DICT),
    Counter: lambda tree, value: _add_pairs(tree, value, tags.COUNTER),
    defaultdict: _add_default_dict,
}
