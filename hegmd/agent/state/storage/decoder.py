"""Decodes a typed tree of bytes. Runs no code from the file and creates only the known types.

The file is not trusted. Every count is checked against the bytes that are left, every range against the file, and the
depth is limited. Only dtypes and devices are looked up by name.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque

from . import tags
from . import tensors as storage_tensors
from .errors import DamagedStateFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MAX_NUMBER_BYTES = 10
_UNFINISHED = object()


def value_of(data: bytes, mapping: Any, places: list[tuple[int, int]]) -> Any:
    """Return the value. `places` are the ranges of its raw bytes in the mapping. Raises DamagedStateFile."""
    reading = _Reading(data, mapping, places)
    try:
        value = reading.one()
    except (TypeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        if isinstance(error, DamagedStateFile):
            raise
        raise DamagedStateFile(f"its tree cannot be read: {error!r}") from error
    if reading.left():
        raise DamagedStateFile(f"its tree has {reading.left()} bytes after its end")
    return value


class _Reading:
    def __init__(self, data: bytes, mapping: Any, places: list[tuple[int, int]]) -> None:
        self._data = data
        self._at = 0
        self._depth = 0
        self._made: list[Any] = []
        self.mapping = mapping
        storages = self.number()
        tensors = self.number()
        if storages > len(places) or tensors > len(data):
            raise DamagedStateFile(f"its tree has {storages} storages and {tensors} tensors, which is impossible")
        self._beside = places[storages:]
        described = [self._described() for _ in range(tensors)]
        self._tensors = storage_tensors.tensors_in(mapping, places[:storages], described)

    # ---- parts

    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size_bytes: int) -> bytes:
        if size_bytes > self.left():
            raise DamagedStateFile(f"its tree ends {size_bytes - self.left()} bytes too early")
        part = self._data[self._at : self._at + size_bytes]
        self._at += size_bytes
        return part

    def number(self) -> int:
        number = 0
        for index in range(_MAX_NUMBER_BYTES):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return number
        raise DamagedStateFile("its tree has a number that never ends")

    def count(self) -> int:
        """Read the number of values that follow. Each of them takes at least one byte."""
        number = self.number()
        if number > self.left():
            raise DamagedStateFile(f"its tree announces {number} values in its last {self.left()} bytes")
        return number

    def text(self) -> str:
        return self.take(self.number()).decode("utf-8", "surrogatepass")

    def data(self) -> bytes:
        return self.take(self.number())

    def beside(self) -> tuple[int, int]:
        index = self.number()
        if index >= len(self._beside):
            raise DamagedStateFile(f"its tree names piece {index} of {len(self._beside)}")
        return self._beside[index]

    def bytes_beside(self) -> bytes:
        place, size_bytes = self.beside()
        return bytes(self.mapping[place : place + size_bytes])

    def tensor(self) -> Any:
        index = self.number()
        if index >= len(self._tensors):
            raise DamagedStateFile(f"its tree names tensor {index} of {len(self._tensors)}")
        return self._tensors[index]

    def _described(self) -> tuple[Any, ...]:
        slot, start, kind = self.number() - 1, self.number(), self.text()
        dimensions = self.number()
        if dimensions > storage_tensors.MAX_DIMENSIONS:
            raise DamagedStateFile(f"its tree has a tensor of {dimensions} dimensions")
        shape = tuple(self.number() for _ in range(dimensions))
        strides = tuple(self.number() for _ in range(dimensions))
        return slot, start, kind, shape, strides, self.text(), bool(self.number())

    # ---- values

    def one(self) -> Any:
        tag = self.take(1)
        simple = _SIMPLE.get(tag)
        if simple is not None:
            return simple(self)
        if tag == tags.AGAIN:
            return self._again()
        make = _SHARED.get(tag)
        if make is None:
            raise DamagedStateFile(f"its tree has the tag {tag!r}, which means nothing here")
        if self._depth >= tags.MAX_DEPTH:
            raise DamagedStateFile(f"its tree is deeper than {tags.MAX_DEPTH}")
        self._depth += 1
        place = len(self._made)
        self._made.append(_UNFINISHED)
        self._made[place] = made = make(self)
        self._depth -= 1
        return made

    def _again(self) -> Any:
        index = self.number()
        if index >= len(self._made) or self._made[index] is _UNFINISHED:
            raise DamagedStateFile(f"its tree refers to value {index}, which is not there yet")
        return self._made[index]

    def items(self) -> list[Any]:
        return [self.one() for _ in range(self.count())]

    def pairs(self) -> list[tuple[Any, Any]]:
        return [(self._key(), self.one()) for _ in range(self.count())]

    def _key(self) -> Any:
        key = self.one()
        torch = storage_tensors.module("torch")
        if torch is not None and isinstance(key, getattr(torch, "Tensor", ())):
            raise DamagedStateFile("its tree has a tensor for a key")
        return key

    def ints(self) -> list[int]:
        tag = self.take(1)
        if tag not in (tags.BYTES, tags.BYTES_BESIDE):
            raise DamagedStateFile(f"its tree has numbers in {tag!r}")
        numbers = array("q", self.data() if tag == tags.BYTES else self.bytes_beside())
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()


def _deque(reading: _Reading) -> deque[Any]:
    most = reading.number()
    return deque(reading.items(), None if most == 0 else most - 1)


def _default_dict(reading: _Reading) -> defaultdict[Any, Any]:
    made: defaultdict[Any, Any] = defaultdict(None)
    made.update(reading.pairs())
    return made


def _torch_size(reading: _Reading) -> Any:
    torch = storage_tensors.module("torch")
    if torch is None:
        raise DamagedStateFile("it holds a size of torch, and this process has not imported torch")
    return torch.Size(reading.items())


def _array(reading: _Reading, *, columns: bool = False) -> Any:
    kind = reading.text()
    shape = tuple(reading.number() for _ in range(reading.count()))
    place, size_bytes = reading.beside()
    return storage_tensors.array_in(reading.mapping, place, size_bytes, kind, shape, columns=columns)


_SIMPLE: dict[bytes, Callable[[_Reading], Any]] = {
    tags.NONE: lambda _reading: None,
    tags.FALSE: lambda _reading: False,
    tags.TRUE: lambda _reading: True,
    tags.INT: lambda reading: int.from_bytes(reading.data(), "little", signed=True),
    tags.FLOAT: lambda reading: struct.unpack("<d", reading.take(8))[0],
    tags.COMPLEX: lambda reading: complex(*struct.unpack("<dd", reading.take(16))),
    tags.STR: _Reading.text,
    tags.BYTES: _Reading.data,
    tags.BYTES_BESIDE: _Reading.bytes_beside,
    tags.DTYPE: lambda reading: storage_tensors.dtype_named(reading.text()),
    tags.DEVICE: lambda reading: storage_tensors.device_named(reading.text()),
    tags.NUMPY_SCALAR: lambda reading: storage_tensors.scalar_in(reading.text(), reading.data()),
}
# In the order in which they are met, they have the numbers that `AGAIN` refers to.
_SHARED: dict[bytes, Callable[[_Reading], Any]] = {
    tags.BYTEARRAY: lambda reading: bytearray(reading.data()),
    tags.BYTEARRAY_BESIDE: lambda reading: bytearray(reading.bytes_beside()),
    tags.LIST: _Reading.items,
    tags.TUPLE: lambda reading: tuple(reading.items()),
    tags.LIST_OF_INTS: _Reading.ints,
    tags.TUPLE_OF_INTS: lambda reading: tuple(reading.ints()),
    tags.SET: lambda reading: set(reading.items()),
    tags.FROZENSET: lambda reading: frozenset(reading.items()),
    tags.DEQUE: _deque,
    tags.DICT: lambda reading: dict(reading.pairs()),
    tags.ORDERED_DICT: lambda reading: OrderedDict(reading.pairs()),
    tags.COUNTER: lambda reading: Counter(dict(reading.pairs())),
    tags.DEFAULT_DICT: _default_dict,
    tags.TENSOR: _Reading.tensor,
    tags.TORCH_SIZE: _torch_size,
    tags.ARRAY: _array,
    tags.ARRAY_OF_COLUMNS: lambda reading: _array(reading, columns=True),
}
