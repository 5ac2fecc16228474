"""Values of the script's own variables in a form that a state file has, and back into what the restarted script holds.

Containers that the script has already are filled and not replaced, so that whoever else holds them sees the same. What
has no form at all is said by its type; what has a state of its own is left in its place, and comes back by that.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque

from . import named_values
from .kinds import BUILTIN, FUNCTION, METHOD, MODULE, class_of, is_a

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
#: What a script looks up or makes anew, and never counts with.
_FIXED: Any = (
    *(FUNCTION, METHOD, BUILTIN, MODULE, type),
    *(type(None), type(...), type(NotImplemented)),
)
_MOST_PARTS = 200_000
_MOST_DEEP = 40
SAME = "same"
NAMED = "named"


class NotKept(Exception):
    """A value that goes along in no form."""


class TooLarge(NotKept):
    """One that has more in it than is looked through."""


class Forms:
    """Forms of values. `refer` gives a reference, in a tuple, to what comes back by itself, and None for all else."""

    def __init__(self, refer: Callable[[Any, Forms], tuple[Any] | None]) -> None:
        self._refer = refer
        self._parts = 0
        #: Tensors whose gradients' history stays behind.
        self.cut = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        """A scalar as it is, and anything else as a tuple that begins with its kind. Raises NotKept."""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise TooLarge(f"more than {_MOST_PARTS:,} parts")
        if depth > _MOST_DEEP:
            raise TooLarge(f"parts within more than {_MOST_DEEP} others")
        kind = class_of(value)
        if kind in _SCALARS:
            return value
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
                raise NotKept(name)
            return (NAMED, kind.__name__, [self.of(found, depth + 1) for found in value], module, name)
        return self._other(value)

    def _row(self, value: Any, depth: int) -> tuple[str, list[Any]]:
        """Scalars side by side are taken at once."""
        if _SCALARS.issuperset(map(type, value)):
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
            self.cut += int(value.grad_fn is not None)
            return ("tensor", value.detach(), bool(value.requires_grad and value.is_leaf))
        if numpy is not None and (is_a(value, numpy.generic) or type(value) is numpy.ndarray) and not _odd(value):
            return ("array", value)
        if is_a(value, *_FIXED) or (torch is not None and is_a(value, torch.device)):
            return (SAME, type(value).__name__, named_values.mark_of(value))
        raise NotKept(type(value).__qualname__)


def _odd(array: Any) -> bool:
    return bool(array.dtype.hasobject) or array.dtype.kind == "V"


class Settling:
    """Values on their way back. `missing` gathers what should have been there and is not."""

    def __init__(self, find: Callable[[Any, Settling], Any] | None = None, *, from_cpu: bool = False) -> None:
        """`find` gives what a reference leads to, None if that is nothing."""
        self._find = find
        self.missing: list[str] = []
        self._from_cpu = from_cpu

    def settle(self, form: Any, here: Any, name: str, *, in_place: bool = False) -> Any:
        """The value, in the container that is here where there is one. `in_place` is for tensors."""
        if class_of(form) is not tuple:
            return form
        kind: str = form[0]
        if kind == SAME:
            return self._same(form, here, name)
        if kind == NAMED:
            return self._named(form, here, name)
        if kind in named_values.KINDS:
            return named_values.value_of(form)
        if kind == "tensor":
            return _tensor(form, here, in_place=in_place, from_cpu=self._from_cpu)
        if kind == "array":
            return _array(form[1], here, in_place=in_place)
        if kind == "mapping":
            return self._mapping(form, here, name)
        return self._row(form, here, name)

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

    def _row(self, form: Any, here: Any, name: str) -> Any:
        kind: str = form[0]
        how: str = form[1][0]
        parts: Any = form[1][1]
        before: list[Any] = list(here) if is_a(here, list, tuple, deque) else []
        before += [None] * (len(parts) - len(before))
        values = [self.settle(part, was, name) for part, was in zip(parts, before)] if how == "each" else parts
        if kind == "deque":
            if class_of(here) is not deque or here.maxlen != form[2]:
                return deque(values, form[2])
            here.clear()
            here.extend(values)
            return here
        if kind == "list" and class_of(here) is list:
            here[:] = values
            return here
        if kind == "set" and class_of(here) is set:
            here.clear()
            here.update(values)
            return here
        return _ROWS[kind](values)

    def _named(self, form: Any, here: Any, name: str) -> Any:
        """A tuple with names, of the class that the one here is of: no class is looked for."""
        _kind, type_name, parts, module, qualname = form
        kind = named_values.named_tuple(module, qualname, len(parts))
        if kind is None and class_of(here).__name__ == type_name and len(here) == len(parts):
            kind = class_of(here)
        if kind is None:
            self.missing.append(f"{name} ({type_name})")
            return here
        before = here if class_of(here) is kind else [None] * len(parts)
        return kind._make([self.settle(part, was, name) for part, was in zip(parts, before)])

    def _mapping(self, form: Any, here: Any, name: str) -> Any:
        _kind, type_name, pairs, made_by = form
        before: Any = dict(here) if is_a(here, dict) else {}
        found: list[tuple[Any, Any]] = []
        for key_form, value_form in pairs:
            key = self.settle(key_form, None, name)
            found.append((key, self.settle(value_form, before.get(key), f"{name}[{key!r}]")))
        if type(here).__name__ != type_name:
            here = self._new_mapping(type_name, made_by, name)
        here.clear()
        for key, value in found:
            here[key] = value
        return here

    def _new_mapping(self, type_name: str, made_by: Any, name: str) -> Any:
        if type_name == "defaultdict":
            if made_by is not None and made_by not in _FACTORIES:
                self.missing.append(f"{name} (a defaultdict of {made_by})")
            factory = _FACTORIES.get(str(made_by))
            return _DEFAULTING(factory)
        kinds: dict[str, Any] = {"OrderedDict": OrderedDict, "Counter": Counter}
        return kinds.get(type_name, dict)()


def _tensor(form: Any, here: Any, *, in_place: bool, from_cpu: bool) -> Any:
    from .whereabouts import device_beside

    torch: Any = sys.modules["torch"]
    _kind, saved, requires = form
    is_like = is_a(here, torch.Tensor) and here.shape == saved.shape and here.dtype == saved.dtype
    if is_like and in_place:
        with torch.no_grad():
            here.copy_(saved)
        return here
    on = device_beside(saved, here, from_cpu=from_cpu)
    return saved.detach().to(on, copy=True).requires_grad_(requires)


def _array(saved: Any, here: Any, *, in_place: bool) -> Any:
    numpy: Any = sys.modules["numpy"]
    if not is_a(saved, numpy.ndarray):
        return saved
    if in_place and type(here) is numpy.ndarray and here.shape == saved.shape and here.dtype == saved.dtype:
        numpy.copyto(here, saved)
        return here
    return saved.copy()
