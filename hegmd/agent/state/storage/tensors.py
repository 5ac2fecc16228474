"""Tensors and arrays as raw bytes with a description, and back: what a state file can hold of torch and numpy.

Owns how they are described and checked. Imports neither package. `raw_copy` copies the bytes out. Restored tensors are
in the mapping of the file.

A storage that several tensors share is written once, and is shared again once it is read. The part from the first to
the last byte that a tensor uses is written, with its strides: kernels are chosen by them.
"""

from __future__ import annotations

import ctypes
import sys

from .errors import DamagedStateFile, UnsupportedValue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    #: The owner of the bytes, their address, their size, and their torch device.
    Raw = tuple[Any, int, int, str]

CPU = "cpu"
# A view that spans more than this many times its own bytes is written by itself, if its storage is not shared.
MAX_SPARSE = 2
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**62
_NUMPY_KINDS = frozenset("biufcSUmM")
_NUMPY_ORDERS = frozenset("<>|")
_LAST_CHARACTER = 0x10FFFF
WAS_ON = "_hegm_was_on"


def module(name: str) -> Any:
    """Return a package that the job has imported, or None."""
    return sys.modules.get(name)


# ---- torch, on its way out ------------------------------------------------------------------------------------------


class Tensors:
    """The tensors of one state file, by the storages that they share."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._members: list[list[int]] = []
        self._tensors: list[tuple[Any, int, bool]] = []

    def add(self, tensor: Any, path: str) -> int:
        """Take a tensor in, and return its number. Raises UnsupportedValue."""
        requires_grad = bool(tensor.requires_grad)
        bare = _bare(tensor, path)
        storage = bare.untyped_storage()._cdata if bare.numel() else -1
        slot = -1
        if storage != -1:
            slot = self._storages.setdefault(storage, len(self._members))
            if slot == len(self._members):
                self._members.append([])
            self._members[slot].append(len(self._tensors))
        self._tensors.append((bare, slot, requires_grad))
        return len(self._tensors) - 1

    def finish(self) -> tuple[list[Raw], list[tuple[Any, ...]]]:
        """Return the raw bytes of the storages, and a description of each tensor in them."""
        raws: list[Raw] = []
        firsts: list[int] = []
        for members in self._members:
            raw, first = self._reach(members)
            raws.append(raw)
            firsts.append(first)
        described: list[tuple[Any, ...]] = []
        for tensor, slot, requires_grad in self._tensors:
            start = _first_byte_of(tensor) - firsts[slot] if slot >= 0 else 0
            kind, where = _name_of(tensor.dtype), _name_of(tensor.device)
            described.append((slot, start, kind, tuple(tensor.shape), tensor.stride(), where, requires_grad))
        return raws, described

    def _reach(self, members: list[int]) -> tuple[Raw, int]:
        """Return the part of a storage to write: from the first to the last byte that any of its tensors uses."""
        only = self._tensors[members[0]][0]
        first, end = _first_byte_of(only), _end_of(only)
        for member in members[1:]:
            tensor = self._tensors[member][0]
            first, end = min(first, _first_byte_of(tensor)), max(end, _end_of(tensor))
        if len(members) == 1 and end - first > MAX_SPARSE * only.numel() * only.element_size():
            _bare, slot, requires_grad = self._tensors[members[0]]
            only = only.contiguous().clone()
            self._tensors[members[0]] = (only, slot, requires_grad)
            first, end = 0, only.numel() * only.element_size()
        address = only.untyped_storage().data_ptr() + first
        return (only, address, end - first, _name_of(only.device)), first


#: A state of thousands of tensors has few dtypes and devices.
_names: dict[Any, str] = {}


def _name_of(kind: Any) -> str:
    """Return the name of a dtype or a device."""
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = str(kind).rpartition(".")[2]
    return name


def _first_byte_of(tensor: Any) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _end_of(tensor: Any) -> int:
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def _bare(tensor: Any, path: str) -> Any:
    """Return the tensor as ordinary memory. Raises UnsupportedValue for a tensor without."""
    torch = module("torch")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedValue(path, f"is a {type(tensor).__name__}, a tensor class with data besides its elements")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnsupportedValue(path, f"is a tensor without ordinary memory ({tensor.layout}, on {tensor.device})")
    bare = tensor.detach().resolve_conj().resolve_neg()
    try:
        address = bare.untyped_storage().data_ptr()
    except RuntimeError as error:
        raise UnsupportedValue(path, f"is a tensor whose memory cannot be reached: {error}") from error
    if bare.numel() and not address:
        raise UnsupportedValue(path, "is a tensor without memory of its own")
    return bare


# ---- torch, on its way in -------------------------------------------------------------------------------------------


def tensors_in(mapping: Any, places: list[tuple[int, int]], described: list[tuple[Any, ...]]) -> list[Any]:
    """Return the saved tensors, in the file's memory. Raises DamagedStateFile."""
    if not described:
        return []
    torch = module("torch")
    if torch is None or not hasattr(torch, "frombuffer"):
        raise DamagedStateFile("it holds tensors, and this process has not imported torch")
    storages = [
        torch.frombuffer(mapping, dtype=torch.uint8, offset=place, count=size_bytes).untyped_storage()
        for place, size_bytes in places
    ]
    return [_tensor_in(torch, storages, places, one) for one in described]


def _tensor_in(torch: Any, storages: list[Any], places: list[tuple[int, int]], described: tuple[Any, ...]) -> Any:
    slot, start, kind, shape, strides, where, requires_grad = described
    dtype = dtype_named(kind)
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise DamagedStateFile(f"a tensor of {len(shape)} dimensions has {len(strides)} strides")
    if max((*shape, *strides, 0)) >= MAX_ELEMENTS:
        raise DamagedStateFile(f"a tensor has the shape {shape} and the strides {strides}")
    itemsize = dtype.itemsize if hasattr(dtype, "itemsize") else torch.empty(0, dtype=dtype).element_size()
    elements = 1
    for size in shape:
        elements *= size
    if elements >= MAX_ELEMENTS:
        raise DamagedStateFile(f"a tensor would have {elements} elements")
    with torch.no_grad():
        if not elements:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=CPU)
        else:
            reached = sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1
            if not 0 <= slot < len(places) or start % itemsize or start + reached * itemsize > places[slot][1]:
                raise DamagedStateFile(f"a tensor of the shape {shape} reaches beyond its bytes")
            tensor = torch.empty(0, dtype=dtype, device=CPU)
            tensor.set_(storages[slot], start // itemsize, shape, strides)
    if requires_grad:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise DamagedStateFile(f"a tensor of {kind} wants a gradient")
        tensor.requires_grad_(True)
    setattr(tensor, WAS_ON, device_named(where))
    return tensor


def was_on(tensor: Any) -> Any:
    """Return the torch device that a saved tensor was on; now it is in the file's memory."""
    return getattr(tensor, WAS_ON, tensor.device)


def dtype_named(name: str) -> Any:
    """Return a dtype of torch by its name. Raises DamagedStateFile."""
    torch = module("torch")
    dtype = getattr(torch, name, None) if torch is not None and name.isidentifier() else None
    if torch is None or not isinstance(dtype, torch.dtype):
        raise DamagedStateFile(f"this process's torch has no dtype {name!r}")
    return dtype


def device_named(name: str) -> Any:
    """Return a torch device by its name. Raises DamagedStateFile."""
    torch = module("torch")
    if torch is None:
        raise DamagedStateFile("it names a device, and this process has not imported torch")
    try:
        return torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise DamagedStateFile(f"this process's torch has no device {name!r}") from error


# ---- numpy ----------------------------------------------------------------------------------------------------------


def described_array(value: Any, path: str) -> tuple[Any, str, bool]:
    """Return an array in one piece, its dtype, and whether its columns are contiguous. Raises UnsupportedValue."""
    numpy = module("numpy")
    if value.dtype.kind not in _NUMPY_KINDS:
        raise UnsupportedValue(path, f"is a numpy array of {value.dtype}")
    if value.flags["F_CONTIGUOUS"] and not value.flags["C_CONTIGUOUS"]:
        return value, str(value.dtype.str), True
    return numpy.ascontiguousarray(value).reshape(value.shape), str(value.dtype.str), False


def array_in(mapping: Any, place: int, size_bytes: int, kind: str, shape: tuple[int, ...], *, columns: bool) -> Any:
    """Return the saved array, in the file's memory. Raises DamagedStateFile."""
    dtype = numpy_dtype(kind)
    elements = 1
    for size in shape:
        elements *= size
    if len(shape) > MAX_DIMENSIONS or elements >= MAX_ELEMENTS or elements * dtype.itemsize != size_bytes:
        raise DamagedStateFile(f"an array of {kind} and the shape {shape} has {size_bytes} bytes")
    numpy = module("numpy")
    try:
        flat = numpy.frombuffer(mapping, dtype=dtype, count=elements, offset=place) if size_bytes else None
        found = flat if flat is not None else numpy.empty(elements, dtype=dtype)
        _check_characters(found)
        return found.reshape(shape, order="F" if columns else "C")
    except ValueError as error:
        raise DamagedStateFile(f"an array of {kind} and the shape {shape} cannot be made: {error}") from error


def scalar_in(kind: str, data: bytes) -> Any:
    """Return the saved scalar. Raises DamagedStateFile."""
    dtype = numpy_dtype(kind)
    if len(data) != dtype.itemsize:
        raise DamagedStateFile(f"a value of {dtype} has {len(data)} bytes")
    found = module("numpy").ndarray((1,), dtype, data)
    _check_characters(found)
    return found[0]


def _check_characters(found: Any) -> None:
    """Check a text array: NumPy checks characters only on access, and crashes then."""
    if found.dtype.kind == "U" and found.nbytes:
        numbers = found.view("u4" if found.dtype.isnative else found.dtype.byteorder + "u4")
        if int(numbers.max()) > _LAST_CHARACTER:
            raise DamagedStateFile("a text array of numpy has invalid characters")


def numpy_dtype(kind: str) -> Any:
    """Return a dtype of numpy by its short name. Raises DamagedStateFile."""
    numpy = module("numpy")
    if numpy is None or not hasattr(numpy, "dtype"):
        raise DamagedStateFile("it holds numpy's values, and this process has not imported numpy")
    if kind[:1] not in _NUMPY_ORDERS or kind[1:2] not in _NUMPY_KINDS or not kind[2:3].isdigit():
        raise DamagedStateFile(f"it holds numpy's values of {kind!r}")
    try:
        dtype = numpy.dtype(kind)
    except (TypeError, ValueError) as error:
        raise DamagedStateFile(f"this process's numpy has no dtype {kind!r}") from error
    if dtype.kind not in _NUMPY_KINDS:
        raise DamagedStateFile(f"it holds numpy's values of {kind!r}")
    return dtype


# ---- bytes ----------------------------------------------------------------------------------------------------------


class Buffer:
    """Bytes of Python, by their address."""

    def __init__(self, data: bytes) -> None:
        self._data = ctypes.c_char_p(data)  # keeps them, and points at them: nothing is copied
        self.address = ctypes.cast(self._data, ctypes.c_void_p).value or 0
