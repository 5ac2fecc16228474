"""Reads the value stack of a stopped frame: the iterators of the loops that it is in.

Python exposes a frame's variables but not its stack, so the stack is read where CPython keeps it. Only slots below
those of the current instruction are read, each of which holds a reference; nothing is written. The layout differs
between Pythons and is verified: before the first use a frame of our own with known iterators is read. If that fails,
the frames of this Python cannot be read.
"""

from __future__ import annotations

import ctypes
import sys

from .loops import loops_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from .loops import Head

_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_AFTER_BACK = object.__basicsize__ + _POINTER_BYTES  # what follows PyFrameObject's f_back
_STACK_POINTER_39 = 64  # PyFrameObject.f_valuestack of 3.9 and 3.10
_LOCALS_311 = 72  # _PyInterpreterFrame.localsplus of 3.11 to 3.13
_LOCALS_314 = 80
_VERSION: tuple[int, ...] = tuple(sys.version_info[:2])
_TAGS = 3  # 3.14 keeps marks in a reference's lowest bits
_is_readable: bool | None = None


def caller() -> FrameType:
    """Return the frame that called the calling function."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage] - documented all the same


def iterators_of(frame: FrameType) -> list[tuple[Head, Any]] | None:
    """Return the `for` loops that this frame is in with their iterators, outermost first; None if it cannot be read."""
    return _read(frame) if can_read() else None


def operands_of(frame: FrameType) -> list[tuple[Any, list[Any]]]:
    """Return the values that wait for the call that the frame is in, each with the instructions that put it there."""
    if not can_read():
        return []
    base = _stack_address(frame)
    found = loops_of(frame.f_code).operands(frame.f_lasti)
    return [(_object_at(base + slot * _POINTER_BYTES), made) for slot, made in found]


def can_read() -> bool:
    global _is_readable  # noqa: PLW0603 - found out once
    if _is_readable is None:
        _is_readable = _try()
    return _is_readable


def _read(frame: FrameType) -> list[tuple[Head, Any]]:
    base = _stack_address(frame)
    return [
        (head, _object_at(base + head.slot * _POINTER_BYTES)) for head in loops_of(frame.f_code).around(frame.f_lasti)
    ]


def _stack_address(frame: FrameType) -> int:
    if _VERSION < (3, 11):
        return _word(id(frame) + _STACK_POINTER_39)
    inner = _word(id(frame) + _AFTER_BACK)
    code = frame.f_code
    variables = len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)
    first = _LOCALS_311 if _VERSION < (3, 14) else _LOCALS_314
    return inner + first + variables * _POINTER_BYTES


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _object_at(address: int) -> Any:
    pointer = _word(address) & ~_TAGS
    if not pointer:
        return None
    return ctypes.cast(pointer, ctypes.py_object).value


def _try() -> bool:
    if sys.implementation.name != "cpython" or not (3, 9) <= _VERSION <= (3, 14):
        return False
    if "t" in getattr(sys, "abiflags", "") or hasattr(sys, "gettotalrefcount"):
        return False
    outer, inner = iter((1,)), iter((2,))
    return _known_loops(outer, inner) == [id(outer), id(inner)]


def _known_loops(outer: Any, inner: Any) -> list[int]:
    """Return what is on the stack of this frame, as addresses: no object is made of them before they are verified."""
    found: list[int] = []

    def probe() -> None:  # the variable in a cell, since those move what comes after them
        found.extend(_addresses(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage] - documented all the same

    for _first in outer:
        for _second in inner:
            probe()
    return found


def _addresses(frame: FrameType) -> list[int]:
    base = _stack_address(frame)
    heads = loops_of(frame.f_code).around(frame.f_lasti)
    return [_word(base + head.slot * _POINTER_BYTES) & ~_TAGS for head in heads]
