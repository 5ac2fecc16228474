"""Values of every kind that a state file holds, drawn by a seed; and whether two of them are the same to the bit."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

from tests.needs import need_torch

torch: Any = need_torch()

FLOATS = (0.0, -0.0, math.inf, -math.inf, 5e-324, 1.1, struct.unpack("<d", b"\x01\x02\0\0\0\0\xf8\x7f")[0])
INTS = (0, 1, -1, 127, 128, -128, 2**63 - 1, -(2**63), 2**64, -(2**200), 10**50)
TEXTS = ("", "exp_avg", "\ud800 alone", "Gewöhnlich", "\0", "💡")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "int8", "uint8"),
    *("int64", "bool", "float8_e4m3fn"),
)
NUMPY_DTYPES = ("f4", "f8", "i2", ">i8", "u1", "?", "c16", "U5", "S3", "M8[ns]")


class Drawn:
    """A source of values."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, depth: int = 3) -> Any:
        kinds = [self.scalar, self.scalar, self.tensor, self.array]
        if depth:
            kinds += [lambda: self.container(depth - 1)] * 6
        return self.random.choice(kinds)()

    def scalar(self) -> Any:
        draw = self.random
        return draw.choice(
            [
                *(None, True, False, draw.choice(INTS), draw.choice(FLOATS), draw.choice(TEXTS)),
                *(complex(draw.choice(FLOATS), draw.choice(FLOATS)), draw.randbytes(draw.choice((0, 7, 4096, 4097)))),
                *(bytearray(draw.randbytes(draw.choice((0, 3, 5000)))), torch.Size((2, 3)), torch.device("cuda:1")),
                *(torch.bfloat16, np.float64(draw.random()), np.int32(7), np.bool_(1), np.str_("x")),
            ]
        )

    def key(self) -> Any:
        draw = self.random
        return draw.choice(
            [draw.randrange(10**6), draw.choice(TEXTS), (1, draw.random()), None, frozenset({draw.random()}), b"k"]
        )

    def container(self, depth: int) -> Any:
        draw = self.random
        items = [self.value(depth) for _ in range(draw.randrange(5))]
        if items and draw.random() < 0.3:
            items.append(draw.choice(items))
        keys = [self.key() for _ in items]
        pairs = list(zip(keys, items, strict=True))
        return draw.choice(
            [
                *(items, tuple(items), dict(pairs), OrderedDict(reversed(pairs)), deque(items, 9), deque(items)),
                *(set(keys), frozenset(keys), Counter(keys), defaultdict(None, pairs)),
                *([draw.randrange(-9, 9) for _ in range(draw.randrange(40))], draw.getstate()),
            ]
        )

    def tensor(self) -> Any:
        draw = self.random
        shape = tuple(draw.choice((0, 1, 2, 3, 5)) for _ in range(draw.randrange(4)))
        whole = torch.tensor(list(draw.randbytes(8 * 200)), dtype=torch.uint8).view(torch.float64)
        dtype = getattr(torch, draw.choice(DTYPES))
        count = math.prod(shape)
        if dtype is torch.bool:
            found = (whole.view(torch.uint8)[:count] > 100).reshape(shape)
        else:
            found = whole.view(torch.uint8).view(dtype)[:count].reshape(shape)
        if found.dim() > 1 and draw.random() < 0.5:
            found = found.transpose(0, 1)
        if dtype.is_floating_point and found.is_leaf and draw.random() < 0.3:
            found = found.clone().requires_grad_()
        return found

    def array(self) -> np.ndarray[Any, Any]:
        draw = self.random
        dtype = np.dtype(draw.choice(NUMPY_DTYPES))
        shape = tuple(draw.choice((1, 2, 3)) for _ in range(draw.randrange(3)))
        count = math.prod(shape)
        if dtype.kind in "US":
            return np.array(["ab"] * count, dtype=dtype).reshape(shape)
        found = np.frombuffer(draw.randbytes(count * dtype.itemsize), dtype=np.uint8).copy()
        if dtype.kind == "b":
            found &= 1
        return found.view(dtype).reshape(shape, order=draw.choice("CF"))


def exact(value: Any) -> Any:
    """Return what two equal values share: types, bits, order, and which objects are the same."""
    return _exact(value, {})


def _exact(value: Any, numbers_by_id: dict[int, int]) -> Any:
    kind = type(value).__name__.replace("Parameter", "Tensor")
    if isinstance(value, float) and type(value) is float:
        return kind, struct.pack("<d", value)
    if isinstance(value, complex) and type(value) is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, bool | int | str | bytes | torch.device | torch.dtype) or value is None:
        return kind, value
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if id(value) in numbers_by_id:
        return "again", numbers_by_id[id(value)]
    numbers_by_id[id(value)] = len(numbers_by_id)
    if isinstance(value, torch.Tensor):
        bare = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value.detach()
        bits = bytes(bare.tolist()) if value.numel() else b""
        return kind, str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad, bits
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes(), value.flags["F_CONTIGUOUS"]
    if isinstance(value, bytearray):
        return kind, bytes(value)
    if isinstance(value, dict):
        return kind, [(_exact(key, numbers_by_id), _exact(item, numbers_by_id)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(_exact(item, {})) for item in value)
    return kind, getattr(value, "maxlen", None), [_exact(item, numbers_by_id) for item in value]
