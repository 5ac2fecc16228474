"""Encodes values of the script's own variables for a state file, and decodes them into the restarted script.

Containers that the script has are filled and not replaced, so that all their owners see the same. A container with
several owners is encoded once and becomes one again. A value that cannot be encoded is reported by its type. A value
with a state of its own stays in place, and that state restores it.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import MutableMapping, MutableSequence, MutableSet

from ..values.duck_types import BUILTIN, FIRST_ADDRESS, FUNCTION, METHOD, MODULE, class_of, is_a, kinds_without_form
from . import named_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, list, dict, set, str, bytes, tuple, bool)}
#: Kinds of containers that are altered in place.
MUTABLE: Any = (list, dict, set, deque)
_ROWS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_KINDS: dict[Any, str] = {kind: name for name, kind in _ROWS.items()}
_DEFAULTING: Any = defaultdict
_MAPPINGS: Any = (dict, OrderedDict, Counter, defaultdict)
#: Types that a script looks up or creates again, and never counts with.
_FIXED: Any = (*(FUNCTION, METHOD, BUILTIN, MODULE, type), *(type(None), type(...), type(NotImplemented)))
_MAX_PARTS = 200_000
_MAX_DEEP = 40
SAME = "same"
NAMED = "named"
#: A number that is the address of an object with a state, as in `{id(parameter): ...}`.
ADDRESS = "address"
#: A tensor in the memory of one with a state, as in `model.state_dict()`: a copy would not see the later steps.
ALIAS = "alias"
#: Marks a variable that was set, instead of True, if others hold its value too.
SHARED = "shared"
#: Forms of values that can be altered in place, so that all holders have to share one again.
_SHARED = frozenset(("list", "set", "deque", "mapping", "tensor", "array", named_values.MADE))


class NotEncodable(Exception):
    """A value that goes along in no form."""


class UnderWay(NotEncodable):
    """A communication that has not completed."""


class TooLarge(NotEncodable):
    """The value has more content than is searched."""


class ValueEncoder:
    """The form of a value. `refer` gives a reference, in a tuple, to an object that is recreated anyway, and None for
    all others.

    `known` has the forms of one moment by the addresses of their values, each with its value, which keeps the address.
    """

    def __init__(
        self,
        refer: Callable[[Any, ValueEncoder], tuple[Any] | None],
        known: dict[int, tuple[Any, Any]],
        held: dict[int, Any] | None = None,
        memories: dict[int, tuple[Any, Any]] | None = None,
    ) -> None:
        """`held` has a reference for the address of each object with a state, and `memories` one for the memory of each
        tensor among them, with the tensor."""
        self._refer = refer
        self._held = held or {}
        self._memories = memories or {}
        self._known = known
        self._parts = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return a scalar unchanged, and any other value as a tuple that starts with its kind. Raises NotKept."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise TooLarge(f"more than {_MAX_PARTS:,} parts")
        if depth > _MAX_DEEP:
            raise TooLarge(f"parts within more than {_MAX_DEEP} others")
        kind = class_of(value)
        if kind is int and value >= FIRST_ADDRESS and self._held.get(value) is not None:
            return (ADDRESS, self._held[value])
        if kind in _SCALARS:
            return value
        known = self._known.get(id(value))
        if known is None:
            form = self._made(value, kind, depth)
            if not _is_shared(form):
                return form
            known = self._known[id(value)] = (value, form)
        return known[1]

    def _made(self, value: Any, kind: Any, depth: int) -> Any:
        name = _KINDS.get(kind)
        if name is not None:
            return (name, self._row(value, depth))
        if kind is deque:
            return ("deque", self._row(value, depth), value.maxlen)
        if kind in _MAPPINGS:
            return self._mapping(value, depth)
        if is_a(value, tuple) and hasattr(kind, "_make"):
            module, name = kind.__module__, kind.__qualname__
            if depth and named_values.named_tuple(module, name, len(value)) is not kind:
                raise NotEncodable(name)
            return (NAMED, kind.__name__, [self.of(found, depth + 1) for found in value], module, name)
        return self._other(value)

    def _row(self, value: Any, depth: int) -> tuple[str, list[Any]]:
        """Encode scalars in a row at once."""
        kinds = set(map(type, value))
        if _SCALARS.issuperset(kinds) and not (int in kinds and self._held.keys() & set(value)):
            return ("flat", list(value))
        return ("each", [self.of(found, depth + 1) for found in value])

    def _mapping(self, value: Any, depth: int) -> Any:
        pairs = [(self.of(key, depth + 1), self.of(found, depth + 1)) for key, found in value.items()]
        factory: Any = getattr(value, "default_factory", None)
        made_by = None if factory is None else getattr(factory, "__name__", "")
        return ("mapping", type(value).__name__, pairs, made_by)

    def _other(self, value: Any) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        known = named_values.form_of(value)
        if known is not None:
            return known
        reference = self._refer(value, self)
        if reference is not None:
            return (SAME, type(value).__name__, reference[0])
        if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
            alias = None if value.requires_grad else self._alias(value)
            return alias or ("tensor", value.detach(), bool(value.requires_grad and value.is_leaf))
        if numpy is not None and (is_a(value, numpy.generic) or type(value) is numpy.ndarray) and not _odd(value):
            return ("array", value)
        if is_a(value, *_FIXED) or (torch is not None and is_a(value, torch.device)):
            return (SAME, type(value).__name__, named_values.mark_of(value))
        if named_values.is_communication(value):  # without a form: it had not completed
            raise UnderWay(type(value).__qualname__)
        raise NotEncodable(type(value).__qualname__)

    def _alias(self, tensor: Any) -> Any:
        """Return the reference to the tensor whose memory it is in, and its place there; None for one of its own."""
        try:
            reference, whole = self._memories.get(tensor.untyped_storage().data_ptr(), (None, None))
        except (RuntimeError, NotImplementedError):  # sparse, or without memory
            return None
        if whole is None or whole.dtype is not tensor.dtype:
            return None
        return (ALIAS, reference, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())


def is_mutable(value: Any) -> bool:
    """Return True for what is altered in place, and has a form that can be put into it."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds = [getattr(torch, "Tensor", None), getattr(numpy, "ndarray", None)]
    return is_a(value, *MUTABLE, *[kind for kind in kinds if kind is not None])


def is_replaced(value: Any) -> bool:
    """Return True for any other container: it has no form, as an array of objects, or is made anew, as a bytearray."""
    if class_of(value) is _array_kind():
        return _odd(value)
    return is_a(value, MutableMapping, MutableSequence, MutableSet, *kinds_without_form()) and not is_a(value, *MUTABLE)


def _odd(array: Any) -> bool:
    return bool(array.dtype.hasobject) or array.dtype.kind == "V"


class RestoreTarget:
    """A variable or another place to restore: its present value, and how to set it."""

    __slots__ = ("form", "here", "is_shared", "is_stored", "name", "put")

    def __init__(self, form: Any, here: Any, name: str, put: Callable[[Any], object], *, is_stored: bool | str) -> None:
        self.form = form
        self.here = here
        self.name = name
        self.put = put
        self.is_stored = bool(is_stored)
        self.is_shared = is_stored == SHARED


def _is_shared(form: Any) -> bool:
    """Return True for a form whose holders have to share one value."""
    return class_of(form) is tuple and form[0] in _SHARED


class Decoding:
    """Values on their way back. `missing` gathers what should have been there and is not.

    Each form becomes one value, and each container that is here takes one form. All of them are looked through before
    any is filled, by `fill`.
    """

    def __init__(self, find: Callable[[Any, Decoding], Any] | None = None, *, from_cpu: bool = False) -> None:
        """`find` returns the target of a reference, or None if it has none."""
        self._find = find
        self.missing: list[str] = []
        self._from_cpu = from_cpu
        self._values: dict[int, Any] = {}
        self._targets: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}
        self._fills: list[Callable[[], object]] = []

    def claim(self, form: Any, here: Any, *, in_place: bool = False) -> None:
        """Choose `here` as the container to fill with `form`, if possible. The first claim wins; `in_place` is for
        tensors.

        A variable's own container is claimed before containers inside others, whose places are less certain.
        """
        if not _is_shared(form) or id(form) in self._targets or id(here) in self._taken:
            return
        if _takes(here, form, in_place=in_place):
            self._targets[id(form)] = self._taken[id(here)] = here

    def leave(self, here: Any) -> None:
        """Have nothing filled into that, unless it was claimed before."""
        self._taken.setdefault(id(here), here)

    def settle(self, form: Any, here: Any, name: str, *, in_place: bool = False) -> Any:
        """Return the value, in the present container if there is one for it."""
        if class_of(form) is not tuple:
            return form
        kind: str = form[0]
        if kind == SAME:
            return self._same(form, here, name)
        if kind == NAMED:
            return self._named(form, here, name)
        if kind == ADDRESS:
            return self._address(form[1], name)
        if kind == ALIAS:
            return self._alias(form, here, name)
        if not _is_shared(form):
            return named_values.value_of(form) if kind in named_values.KINDS else self._row(form, here, name)
        if id(form) not in self._values:
            self.claim(form, here, in_place=in_place)
            self._values[id(form)] = self._settled(form, self._targets.get(id(form)), here, name)
        return self._values[id(form)]

    def fill(self) -> None:
        """Put everything into the containers that are here."""
        for fill in self._fills:
            fill()
        self._fills.clear()

    def _same(self, form: Any, here: Any, name: str) -> Any:
        _kind, type_name, reference = form
        found = here
        if reference is not None and reference[0] in named_values.MARKS:
            found = named_values.marked(reference, here)
        elif reference is not None:
            found = None if self._find is None else self._find(reference, self)
        if type(found).__name__ == type_name:
            return found
        self.missing.append(f"{name} ({type_name})")
        return here

    def _address(self, reference: Any, name: str) -> Any:
        found = None if self._find is None else self._find(reference, self)
        if found is None:
            self.missing.append(f"{name} (an address)")
        return id(found)

    def _alias(self, form: Any, here: Any, name: str) -> Any:
        _kind, reference, *place = form
        whole: Any = None if self._find is None else self._find(reference, self)
        if not _is_tensor(whole):
            self.missing.append(f"{name} (Tensor)")
            return here
        alias = whole.detach().as_strided(*place)
        return here if _is_tensor(here) and here.is_set_to(alias) else alias

    def _settled(self, form: Any, target: Any, here: Any, name: str) -> Any:
        """Return the value of one form; `target`, if it is not None, is filled later."""
        kind: str = form[0]
        if kind in named_values.KINDS:
            return named_values.value_of(form)
        if kind in ("tensor", "array"):
            if target is None:
                return _tensor(form, here, from_cpu=self._from_cpu) if kind == "tensor" else _array(form[1])
            self._fills.append(lambda: _copy_into(target, form[1]))
            return target
        before = here if target is None else target
        return (self._mapping if kind == "mapping" else self._row)(form, before, name, target)

    def _row(self, form: Any, here: Any, name: str, target: Any = None) -> Any:
        kind: str = form[0]
        how: str = form[1][0]
        parts: Any = form[1][1]
        before: list[Any] = list(here) if is_a(here, list, tuple, deque) else []
        before += [None] * (len(parts) - len(before))
        values = [self.settle(part, was, name) for part, was in zip(parts, before)] if how == "each" else parts
        if target is None:
            return deque(values, form[2]) if kind == "deque" else _ROWS[kind](values)
        self._fills.append(target.clear)
        self._fills.append(lambda: (target.update if kind == "set" else target.extend)(values))
        return target

    def _named(self, form: Any, here: Any, name: str) -> Any:
        """Return a named tuple of the class that is here; no class is looked up."""
        _kind, type_name, parts, module, qualname = form
        kind = named_values.named_tuple(module, qualname, len(parts))
        if kind is None and class_of(here).__name__ == type_name and len(here) == len(parts):
            kind = class_of(here)
        if kind is None:
            self.missing.append(f"{name} ({type_name})")
            return here
        before = here if class_of(here) is kind else [None] * len(parts)
        return kind._make([self.settle(part, was, name) for part, was in zip(parts, before)])

    def _mapping(self, form: Any, here: Any, name: str, target: Any) -> Any:
        _kind, type_name, pairs, made_by = form
        before: Any = dict(here) if is_a(here, dict) else {}
        found: list[tuple[Any, Any]] = []
        for key_form, value_form in pairs:
            key = self.settle(key_form, None, name)
            found.append((key, self.settle(value_form, before.get(key), f"{name}[{key!r}]")))
        mapping = self._new_mapping(type_name, made_by, name) if target is None else target
        self._fills.append(mapping.clear)
        self._fills.append(lambda: _set_items(mapping, found))
        return mapping

    def _new_mapping(self, type_name: str, made_by: Any, name: str) -> Any:
        if type_name == "defaultdict":
            if made_by is not None and made_by not in _FACTORIES:
                self.missing.append(f"{name} (a defaultdict of {made_by})")
            factory = _FACTORIES.get(str(made_by))
            return _DEFAULTING(factory)
        kinds: dict[str, Any] = {"OrderedDict": OrderedDict, "Counter": Counter}
        return kinds.get(type_name, dict)()


def _set_items(mapping: Any, pairs: list[tuple[Any, Any]]) -> None:
    for key, value in pairs:
        mapping[key] = value


def _takes(here: Any, form: Any, *, in_place: bool) -> bool:
    """Return True if the present value can be filled with the form."""
    kind: str = form[0]
    if kind in ("tensor", "array"):
        saved = form[1]
        is_array = class_of(saved) is _array_kind()
        is_like = class_of(here) is class_of(saved) if is_array else _is_tensor(here) and _is_tensor(saved)
        return bool(in_place and is_like and here.shape == saved.shape and here.dtype == saved.dtype)
    if kind == "mapping":
        return class_of(here) in _MAPPINGS and class_of(here).__name__ == form[1]
    if kind == "deque":
        return class_of(here) is deque and here.maxlen == form[2]
    return class_of(here) is _ROWS.get(kind)


def _tensor(form: Any, here: Any, *, from_cpu: bool) -> Any:
    from ..values.devices import device_beside

    _kind, saved, requires = form
    on = device_beside(saved, here, from_cpu=from_cpu)
    return saved.detach().to(on, copy=True).requires_grad_(requires)


def _array(saved: Any) -> Any:
    return saved.copy() if class_of(saved) is _array_kind() else saved


def _copy_into(here: Any, saved: Any) -> None:
    """Copy into a tensor or an array of the same shape and type."""
    if class_of(saved) is _array_kind():
        sys.modules["numpy"].copyto(here, saved)
        return
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        here.copy_(saved)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and is_a(value, torch.Tensor)


def _array_kind() -> Any:
    return getattr(sys.modules.get("numpy"), "ndarray", None)
