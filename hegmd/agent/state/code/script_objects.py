"""Objects of the script's own classes, by the names that lead to them, and which of their attributes change.

A name is a path from a running function, or from a module of the script, over attributes, keys and list positions, as
in `agent/state/script/discovery`. Objects are read, never called.
"""

from __future__ import annotations

import sys
from collections import deque

from ..frameworks.accelerate_hf import is_own
from ..values.duck_types import (
    BUILTIN,
    CODE,
    FUNCTION,
    METHOD,
    MODULE,
    NAMESPACE,
    attribute_of,
    class_of,
    is_a,
    is_bare,
    kinds_without_form,
    members_of,
    named_items,
)
from .position import is_users, is_users_module, named_frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType
    from typing import Any

_MAX_OBJECTS = 20_000
_MAX_OF_FUNCTIONS = 60_000
_MAX_DEEP = 8
_LONGEST = 1_000
_NAMES_EACH = 6
_SCALARS: Any = (type(None), bool, int, float, complex, str, bytes, bytearray, range)
_PASSED: Any = (type, MODULE, FUNCTION, BUILTIN, CODE)
_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_OF_OPTIMIZERS = frozenset(("param_groups", "state", "defaults"))
_NUMBERED = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # PyTorch's dictionaries of them
_NEAR = 2
#: PyTorch's states of communication hooks, such as PowerSGD's, and its averagers of models. They have no `state_dict`.
_COUNTING = ("torch.distributed.algorithms.", "torch.distributed.optim.post_localSGD_optimizer")
_PARTIAL: Any = getattr(sys.modules.get("functools"), "partial", ())


#: The loaded modules, and which of them are the user's: a capture asks several times. It has the modules themselves,
#: since another module can get the address of one that is freed.
_judged: tuple[list[Any], list[Any]] = ([], [])


def users_modules() -> list[Any]:
    """Return the user's loaded modules."""
    global _judged  # noqa: PLW0603 - there is one table of modules
    modules: list[Any] = list(sys.modules.values())
    if list(map(id, modules)) != list(map(id, _judged[0])):
        _judged = modules, [module for module in modules if module is not None and is_users_module(module)]
    return _judged[1]


class Instances:
    """All objects of the script that exist now."""

    def __init__(self, frames: Iterable[FrameType]) -> None:
        #: Each with its names, the nearest first.
        self.found: list[tuple[Any, list[str]]] = []
        #: The script's functions, and objects of other people's classes that are near, each by its nearest name.
        self.functions: list[tuple[Any, str]] = []
        self.others: list[tuple[Any, str]] = []
        #: The names of what was not searched.
        self.unseen: list[str] = []
        self._names: dict[int, list[str]] = {}
        self._seen: dict[int, Any] = {}
        self._ours: dict[type, bool] = {}
        self._formless = kinds_without_form()
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        self._module: Any = getattr(getattr(torch, "nn", None), "Module", ())
        self._optimizer: Any = getattr(getattr(torch, "optim", None), "Optimizer", None)
        leaves = [getattr(torch, "Tensor", None), getattr(numpy, "ndarray", None), self._optimizer]
        self._leaves: Any = (*_SCALARS, *_PASSED, *[found for found in leaves if found is not None])
        left: deque[tuple[str, Any, int]] = deque(_beginnings(frames))
        # visited later, because there are many: what only functions refer to
        later: deque[tuple[str, Any, int]] = deque()
        most, is_later = _MAX_OBJECTS, False
        while (left or later) and len(self._seen) < most:
            if not left:
                left, later, is_later = later, left, True
                most = len(self._seen) + _MAX_OF_FUNCTIONS
            name, thing, depth = left.popleft()
            if not is_later and is_a(thing, FUNCTION, type):
                later.append((name, thing, depth))
                continue
            is_optimizer = self._optimizer is not None and is_a(thing, self._optimizer)
            if is_optimizer and not self.is_own(thing) and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self.others.append((thing, name))
            if not is_a(thing, *self._leaves) or _is_scripts_own(thing) or (is_optimizer and self.is_own(thing)):
                self._look(name, thing, depth, left)
        if left:
            self.unseen.append(f"objects of the script's beyond the first {_MAX_OBJECTS:,}")
        self._seen = {}

    def _look(self, name: str, thing: Any, depth: int, left: deque[tuple[str, Any, int]]) -> None:
        if id(thing) in self._seen:
            self._note_name(thing, name)
            return
        self._seen[id(thing)] = thing  # held, so that no other object gets its address meanwhile
        if self.is_own(thing):
            self._names[id(thing)] = []
            self.found.append((thing, self._names[id(thing)]))
            self._note_name(thing, name)
        elif is_a(thing, FUNCTION):
            self.functions.append((thing, name))
        elif depth <= _NEAR and is_a(attribute_of(thing, "__dict__"), dict) and not is_a(thing, *self._formless):
            self.others.append((thing, name))
        if is_a(thing, dict, list, tuple, deque) and len(thing) > _LONGEST:
            self._note_long(name, thing)
        elif depth < _MAX_DEEP:
            left.extend((way, inner, depth + 1) for way, inner in self._ways_on(name, thing))
        elif self.is_own(thing) and any(self.is_own(inner) for _way, inner in self._ways_on(name, thing)):
            self.unseen.append(f"objects within {name}")

    def _note_long(self, name: str, thing: Any) -> None:
        """Note a container that is not searched, if it has objects whose attributes may change."""
        values: Any = thing.values() if is_a(thing, dict) else thing
        if any(self.is_own(found) for found in values):
            self.unseen.append(f"the {len(thing):,} objects of {name}")

    def is_own(self, thing: Any) -> bool:
        """Return True if its class is the script's, counts for the script, or is a plain namespace for attributes."""
        kind: Any = class_of(thing)
        known = self._ours.get(kind)
        if known is None:
            named = sys.modules.get(str(getattr(kind, "__module__", "")))
            passed = (*_PASSED, dict, list, tuple, set, str, int, *self._formless)
            is_ours = is_users_module(named) and not issubclass(kind, passed)
            other: Any = getattr(sys.modules.get("argparse"), "Namespace", None)
            is_counting = str(getattr(kind, "__module__", "")).startswith(_COUNTING)
            known = self._ours[kind] = is_ours or is_counting or kind is NAMESPACE or kind is other
        return known

    def names_of(self, thing: Any) -> list[str]:
        """Return the names of an object of the script; none if it was not found."""
        return self._names.get(id(thing), [])

    def _note_name(self, thing: Any, name: str) -> None:
        names = self._names.get(id(thing))
        if names is not None and len(names) < _NAMES_EACH:
            names.append(name)

    def _ways_on(self, name: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if is_a(thing, dict):
            if name.rpartition(".")[2].endswith(_NUMBERED):  # another number in each process
                yield from ((f"{name}[{index}]", found) for index, found in enumerate(list(thing.values())))
            else:
                yield from ((f"{name}{key}", found) for key, found in named_items(thing))
        elif is_a(thing, list, tuple, deque):
            yield from ((f"{name}[{index}]", found) for index, found in enumerate(list(thing)))
        elif is_a(thing, METHOD):
            yield f"{name}.__self__", thing.__self__
        elif is_a(thing, FUNCTION):
            yield from _ways_of_function(name, thing)
        elif is_a(thing, type):
            yield from ((f"{name}.{key}", found) for key, found in members_of(thing).items() if is_a(found, FUNCTION))
        elif is_a(thing, _PARTIAL):
            yield from (
                (f"{name}.func", thing.func),
                (f"{name}.args", thing.args),
                (f"{name}.keywords", thing.keywords),
            )
        else:
            is_module = is_a(thing, self._module)
            inner = [(key, found) for key, found in values_of(thing) if key not in _OF_MODULES and not is_bare(found)]
            yield from ((f"{name}.{key}", found) for key, found in inner)
            if is_module:
                yield from ((f"{name}.{key}", found) for key, found in thing.__dict__.get("_modules", {}).items())


def _is_scripts_own(thing: Any) -> bool:
    """Return True for a function or a class of the script."""
    if is_a(thing, FUNCTION):
        return is_users(thing.__code__.co_filename)
    return is_a(thing, type) and is_users_module(sys.modules.get(thing.__module__))


def _ways_of_function(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    yield from ((f"{name}<{key}>", cell.cell_contents) for key, cell in cells_of(thing))
    yield from ((f"{name}({index})", found) for index, found in enumerate(thing.__defaults__ or ()))
    by_key: dict[str, Any] = thing.__kwdefaults__ or {}
    yield from ((f"{name}({key})", found) for key, found in by_key.items())
    yield from ((f"{name}.{key}", found) for key, found in thing.__dict__.items())


def cells_of(function: Any) -> list[tuple[str, Any]]:
    """Return the variables with a value that it shares with the function that defines it."""
    found: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            _value = cell.cell_contents
        except ValueError:
            continue
        found.append((name, cell))
    return found


def values_of(thing: Any) -> list[tuple[str, Any]]:
    """Return its attributes, slots included; of an optimizer only those outside its own state."""
    own: Any = attribute_of(thing, "__dict__")
    found = list(own.items()) if is_a(own, dict) else []
    if is_a(thing, getattr(getattr(sys.modules.get("torch"), "optim", None), "Optimizer", ())):
        found = [(key, value) for key, value in found if key not in _OF_OPTIMIZERS]
    for base in type(thing).__mro__:
        slots: Any = vars(base).get("__slots__", ())
        for slot in (slots,) if is_a(slots, str) else tuple(slots):
            try:
                found.append((slot, object.__getattribute__(thing, slot)))
            except AttributeError:
                pass
    return found


def held_by_several(frames: Iterable[FrameType], instances: Instances) -> set[int]:
    """Return the addresses of the containers that two or more variables or attributes hold."""
    once: set[int] = set()
    several: set[int] = set()
    functions = [list(frame.f_locals.values()) for _name, frame in named_frames(frames)]
    modules = [list(members_of(module).values()) for module in users_modules()]
    objects = [[value for _name, value in values_of(thing)] for thing, _names in instances.found]
    for values in (*functions, *modules, *objects):
        for value in values:
            if is_a(value, list, dict, set, deque):
                (several if id(value) in once else once).add(id(value))
    return several


def set_value(thing: Any, name: str, value: Any) -> None:
    """Set one attribute, bypassing its class."""
    own: Any = attribute_of(thing, "__dict__")
    kind = class_of(thing)
    if is_a(own, dict) and (name in own or not hasattr(kind, name)):
        own[name] = value
    else:
        object.__setattr__(thing, name, value)


def _beginnings(frames: Iterable[FrameType]) -> Iterator[tuple[str, Any, int]]:
    for function, frame in named_frames(frames):
        if not is_own(frame):
            for name, value in list(frame.f_locals.items()):
                yield f"{function}.{name}", value, 0
    for module in users_modules():
        for name, value in members_of(module).items():
            if not name.startswith("__"):
                yield f"{module.__name__}.{name}", value, 0
