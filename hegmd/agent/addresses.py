"""Addresses of storages that a script keeps outside of PyTorch, as far as Python objects show them.

A storage that was offloaded may have another address afterwards. A number in a variable, a ctypes array over the
memory, or an array of CuPy or Numba that only remembers its start would not notice. So the driver moves such a storage,
because it keeps addresses. A survey looks for ctypes objects and such arrays everywhere, and for numbers in the
variables of the script, of running functions, and in what these hold. Addresses that C++ keeps, and numbers deeper in
objects, are not found.

Rejected: wrapping `Tensor.data_ptr` to see each address that is read. Triton's launcher calls it for every tensor of
every launch (docs/benchmarks.md), and Dynamo would trace the wrapper.
"""

from __future__ import annotations

import sys

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

# No memory begins below this; smaller numbers are counters.
_LEAST = 1 << 24
_MAX_VALUES, _MAX_ITEMS, _DEEPEST = 20_000, 256, 4
# A parked thread waits some calls deeper, in our own code.
_NEAREST = 8
_CO_OPTIMIZED = 0x01
# The references to a frame's copy of its variables: the frame's, ours, and that of the call which counts them.
_FRAME_S_OWN = 3
_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))
_CTYPES = ("_SimpleCData", "_Pointer", "Array", "Structure", "Union")
# Arrays on a GPU that keep an address and no storage of PyTorch's.
_ARRAYS = (("cupy", "ndarray"), ("numba.cuda.cudadrv.devicearray", "DeviceNDArrayBase"))


def kinds() -> list[type[object]]:
    """Return the classes whose objects may contain an address; pass their instances, and those of subclasses, to
    `kept`."""
    ctypes = _ctypes()
    found = [] if ctypes is None else [getattr(ctypes, name) for name in _CTYPES]
    for module, name in _ARRAYS:
        kind = getattr(sys.modules.get(module), name, None)
        found += [kind] if isinstance(kind, type) else []
    return found


def kept(objects: Iterable[Any]) -> list[int]:
    """Return the memory that these objects cover or point to, in order. Never raises."""
    found: set[int] = set()
    for one in objects:
        try:
            found.update(_addresses_in(one))
        except Exception as error:  # noqa: BLE001 - objects of any library
            note(f"an object of {type(one).__name__} does not say where its memory is: {error!r}")
    return sorted(found)


def numbers() -> list[int]:
    """Return the numbers in the script's variables that may be addresses, in order. Never raises."""
    found: set[int] = set()
    try:
        found.update(_numbers())
    except Exception as error:  # noqa: BLE001 - the script's own variables, of any kind
        note(f"the script's variables cannot be inspected: {error!r}")
    return sorted(found)


def any_within(addresses: list[int], start: int, size_bytes: int) -> bool:
    """Return True if one of these sorted addresses lies in that memory."""
    low, high = 0, len(addresses)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if addresses[middle] < start else (low, middle)
    return low < len(addresses) and addresses[low] < start + size_bytes


def _addresses_in(one: Any) -> Iterator[int]:
    ctypes = _ctypes()
    if ctypes is None or not issubclass(type(one), tuple(getattr(ctypes, name) for name in _CTYPES)):
        yield int(one.__cuda_array_interface__["data"][0])
        return
    if not one._b_needsfree_:  # it covers memory of another owner
        yield ctypes.addressof(one)
    if isinstance(one, ctypes._Pointer):
        yield sys.modules["ctypes"].cast(one, sys.modules["ctypes"].c_void_p).value or 0
    elif isinstance(one, ctypes._SimpleCData):
        yield from _number(one.value)
    elif isinstance(one, ctypes.Array):
        for item in one[:_MAX_ITEMS] if len(one) <= _MAX_ITEMS else ():
            yield from _number(item)


def _ctypes() -> Any:
    """Return the module of ctypes' classes; None if the process does not use ctypes."""
    return sys.modules.get("_ctypes")


def _number(value: object) -> Iterator[int]:
    if type(value) is int and value >= _LEAST:
        yield value


def _numbers() -> Iterator[int]:
    """Return numbers in the variables of the script and of running functions, and in what these hold, nearest first."""
    visited: set[int] = set()
    left = _MAX_VALUES
    held: list[Any] = list(_variables())
    for _ in range(_DEEPEST):
        further: list[Any] = []
        for value in held:
            if id(value) not in visited:
                visited.add(id(value))
                further += _held_by(value)
        for value in further:
            yield from _number(value)
        left -= len(further)
        if left <= 0:
            return
        held = [value for value in further if type(value) not in _PLAIN]


def _variables() -> list[dict[str, Any]]:
    """Return those of the script, and of functions that a thread at a boundary is in."""
    main = sys.modules.get("__main__")
    found = [] if main is None else [dict(list(vars(main).items())[:_MAX_ITEMS])]
    frames: list[Any] = []
    waiting = list(sys._current_frames().values())  # pyright: ignore[reportPrivateUsage] - it is documented
    while waiting:
        frame: Any = waiting.pop()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        if any(_is_ours(one) for one in frames[:_NEAREST]):
            found += [_locals_of(one) for one in frames if not _is_ours(one)]
        frames.clear()  # this very function is among them, and would keep itself and all before it
    return found


def _is_ours(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_OURS)


def empty_copy(frame: Any) -> None:
    """Empty CPython's copy of a function's variables, which keeps objects alive: one remains where they were read.

    Python 3.13 and later make none. The copy stays if the script has read it too and holds it, and while the function
    is traced: when its trace function returns, CPython sets the variables from the copy, and unsets what is not in it.
    """
    if not frame.f_code.co_flags & _CO_OPTIMIZED or frame.f_trace is not None:
        return  # those of a module or a class are no copy
    values = frame.f_locals
    if type(values) is dict and sys.getrefcount(values) <= _FRAME_S_OWN:
        values.clear()


def _locals_of(frame: Any) -> dict[str, Any]:
    """Return a function's variables."""
    if not frame.f_code.co_flags & _CO_OPTIMIZED:
        return {}  # of a module or a class: there are no others
    taken = dict(frame.f_locals)
    empty_copy(frame)
    return taken


def _held_by(value: object) -> Iterable[Any]:
    """Return what an object holds, without running its code; nothing of large ones."""
    kind = type(value)
    if kind in {list, tuple, set, frozenset}:
        return _few(value)
    if kind is dict:
        return _few_of(value)
    if kind is _FUNCTION:
        return _cells_of(value)
    if str(type.__getattribute__(kind, "__module__")).startswith(_OURS):
        return ()  # the agent knows where every storage is
    try:
        held: object = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return ()
    return _few_of(held) if type(held) is dict else ()


def _few(values: Any) -> tuple[Any, ...]:
    return tuple(values) if len(values) <= _MAX_ITEMS else ()


def _few_of(names: Any) -> tuple[Any, ...]:
    return _few(names.values())


def _cells_of(function: Any) -> list[Any]:
    """Return the variables that a function has from the functions around it."""
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            continue
    return found


_FUNCTION = type(kinds)
_OURS = __name__.partition(".")[0] + "."
