"""Finds the objects of a script that have a state: models, optimizers, schedulers, generators, with the names that lead
to them.

A name is a path from a module of the script, or from a running function, over attributes, keys and list positions. The
same script has the same names when it runs again, unlike addresses and orders of collection. Every object has all its
names, because a script may hold one object under several, and rename it.
"""

from __future__ import annotations

import sys
from collections import deque

from ..code.position import is_users_module, named_frames
from ..frameworks import accelerate_hf, lightning
from ..loaders import stateful_loader
from ..values import rng
from ..values.duck_types import (
    BUILTIN,
    FUNCTION,
    METHOD,
    attribute_of,
    class_of,
    is_a,
    is_bare,
    members_of,
    named_items,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

MODULE = "module"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
SCALER = "scaler"
GENERATOR = "generator"
STATEFUL = "stateful"
TENSOR = "tensor"

MAX_OBJECTS = 200_000
_DEEP = 10
_LONGEST = 20_000
_NAMES_EACH = 12
#: Kinds that are reported if the search does not reach them.
_TOLD = frozenset((MODULE, OPTIMIZER, SCHEDULER, SCALER, GENERATOR))
#: Modules of PyTorch whose objects hold views of a model's parameters, and buffers that each step makes and fills.
_REMADE = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp", "torch.distributed.pipelining")
_OF_STAGE = "submod"
_CLASS: Any = type
_LEAVES: Any = (str, bytes, bytearray, int, float, complex, bool, type(None), range, memoryview, _CLASS(sys))
_CHILDREN = "_modules"
_OF_MODULES = frozenset(("_parameters", "_buffers", _CHILDREN, "_non_persistent_buffers_set"))
_OF_OPTIMIZERS = frozenset(("param_groups", "state", "defaults", "_optimizer_step_post_hooks"))
_COLLECTIONS: Any = (dict, list, tuple, set, frozenset, deque)
_ACCESSORS: Any = (property, staticmethod, classmethod)


class FoundObject:
    """An object with a state, and the names that refer to it, the nearest first."""

    __slots__ = ("kind", "names", "thing")

    def __init__(self, kind: str, thing: Any, name: str) -> None:
        self.kind = kind
        self.thing = thing
        self.names = [name]


class ScriptSearch:
    """All objects that the script holds when this is created. Reads only, and calls none of the script's code."""

    def __init__(self, frames: list[FrameType]) -> None:
        self.list: list[FoundObject] = []
        self.is_whole = True
        #: The names of what was not searched: the script may write to models or tensors there.
        self.unseen: list[str] = []
        self._kinds = _Kinds()
        self._seen: dict[int, Any] = {}
        self._held: dict[int, FoundObject] = {}
        self._beyond: list[tuple[str, Any]] = []
        self._left: deque[tuple[str, Any, int]] = deque(_beginnings(frames))
        while self._left:
            self._look(*self._left.popleft())
        beyond = dict.fromkeys(name for name, thing in self._beyond if id(thing) not in self._held)
        self.unseen += [f"what is within {name}" for name in beyond]
        inside = _within(found.thing for found in self._held.values() if found.kind == MODULE)
        self.list = [found for found in self._held.values() if id(found.thing) not in inside]
        del self._left, self._seen, self._beyond

    def tensors_elsewhere(self) -> set[int]:
        """Return the addresses of tensors that a module or an optimizer saves."""
        found: set[int] = set()
        for held in self.list:
            if held.kind == MODULE:
                found.update(id(tensor) for tensor in (*held.thing.parameters(), *held.thing.buffers()))
            elif held.kind == OPTIMIZER:
                found.update(id(tensor) for group in held.thing.param_groups for tensor in group["params"])
        return found

    def addresses(self) -> set[int]:
        """Return the addresses of all objects with a state of their own, and of what is within them."""
        found = {id(held.thing) for held in self._held.values() if held.kind != TENSOR and not is_open(held)}
        for held in self._held.values():
            if held.kind == MODULE:
                parts = (*held.thing.modules(), *held.thing.parameters(), *held.thing.buffers())
                found.update(id(part) for part in parts)
            elif held.kind == OPTIMIZER:
                found.update(id(tensor) for group in held.thing.param_groups for tensor in group["params"])
        return found

    def _look(self, name: str, thing: Any, depth: int) -> None:
        if is_a(thing, *_LEAVES) or (is_a(thing, *_COLLECTIONS) and len(thing) == 0):
            return
        if lightning.is_part(thing) or stateful_loader.is_part(thing):
            return
        known = self._held.get(id(thing))
        if known is not None:
            if len(known.names) < _NAMES_EACH:
                known.names.append(name)
            return
        if id(thing) in self._seen or (is_a(thing, _CLASS) and not _is_scripts(thing)):
            return
        if len(self._seen) > MAX_OBJECTS:
            self.is_whole = False
            return
        self._seen[id(thing)] = thing  # held, so that no other object gets its address meanwhile
        kind = self._kinds.of(thing)
        if kind is not None:
            self._held[id(thing)] = FoundObject(kind, thing, name)
        if is_a(thing, dict, list, tuple, deque) and len(thing) > _LONGEST:
            values: Any = thing.values() if is_a(thing, dict) else thing
            if any(self._kinds.of(found) is not None for found in values):
                self.unseen.append(f"the {len(thing):,} parts of {name}")
            return
        ways = _ways_on(name, thing, kind)
        if depth < _DEEP:
            self._left.extend((way, found, depth + 1) for way, found in ways)
        else:
            self._beyond.extend((name, found) for _way, found in ways if self._kinds.of(found) in _TOLD)
        if kind == MODULE:  # those within it are no deeper, regardless of the number of layers
            children = list(thing.__dict__.get(_CHILDREN, {}).items())
            self._left.extend((f"{name}.{key}", found, depth) for key, found in children)


def is_open(found: FoundObject) -> bool:
    """Return True if its `state_dict` is the script's own, which may be incomplete."""
    return found.kind == STATEFUL and _is_scripts(type(found.thing)) and not is_a(found.thing, *_COLLECTIONS)


def _is_scripts(kind: Any) -> bool:
    return is_users_module(sys.modules.get(str(getattr(kind, "__module__", ""))))


def _within(modules: Any) -> set[int]:
    """Return every module that is within another one of them."""
    return {id(inner) for module in modules for inner in module.modules() if inner is not module}


class _Kinds:
    """The kind of each object, by the loaded classes."""

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        self._torch: Any = torch if hasattr(torch, "nn") and hasattr(torch, "optim") else None

    def of(self, thing: Any) -> str | None:
        torch = self._torch
        if rng.is_generator(thing):
            return GENERATOR
        if torch is None:
            return None
        if is_a(thing, torch.Tensor):
            return TENSOR
        if is_a(thing, torch.nn.Module):
            return MODULE
        if is_a(thing, torch.optim.Optimizer):
            return OPTIMIZER
        schedulers = torch.optim.lr_scheduler
        if is_a(thing, schedulers.LRScheduler, schedulers.ReduceLROnPlateau):
            return SCHEDULER
        if type(thing).__name__ == "GradScaler" or (hasattr(torch, "amp") and is_a(thing, torch.amp.GradScaler)):
            return SCALER
        if is_a(thing, torch.utils.data.Dataset, torch.utils.data.DataLoader):
            return None
        return STATEFUL if _has_state(type(thing)) and not lightning.is_callback(thing) else None


def _has_state(kind: Any) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def _beginnings(frames: list[FrameType]) -> Iterator[tuple[str, Any, int]]:
    """Yield the running functions, outermost first, then the script's modules."""
    for function, frame in named_frames(frames):
        for name, value in list(frame.f_locals.items()):
            yield f"{function}.{name}", value, 0
    for module_name in sorted(sys.modules, key=lambda found: (found != "__main__", found)):
        module = sys.modules.get(module_name)
        if module is not None and is_users_module(module):
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    yield f"{module_name}.{name}", value, 0


def _ways_on(name: str, thing: Any, kind: str | None) -> Iterator[tuple[str, Any]]:
    if kind in (SCHEDULER, SCALER, GENERATOR, TENSOR) or accelerate_hf.reseeds(thing):
        return
    if kind == STATEFUL and not _is_scripts(type(thing)):
        return
    if kind is None and str(class_of(thing).__module__).startswith(_REMADE):
        if hasattr(thing, _OF_STAGE):
            yield f"{name}.{_OF_STAGE}", getattr(thing, _OF_STAGE)
        return
    if is_a(thing, dict):
        yield from ((f"{name}{key}", value) for key, value in named_items(thing))
        return
    if is_a(thing, list, tuple, deque):
        yield from ((f"{name}[{index}]", value) for index, value in enumerate(list(thing)))
        return
    if is_a(thing, _CLASS):
        yield from ((f"{name}.{key}", value) for key, value in members_of(thing).items())
        yield from ((f"{name}.__bases__[{index}]", base) for index, base in enumerate(thing.__bases__))
        return
    if is_a(thing, FUNCTION, METHOD, BUILTIN, *_ACCESSORS):
        yield from _ways_of_function(name, thing)
        return
    if is_a(thing, getattr(sys.modules.get("functools"), "partial", ())):
        yield from ((f"{name}.{part}", getattr(thing, part)) for part in ("func", "args", "keywords"))
    yield f"{name}.__class__", class_of(thing)
    own: Any = attribute_of(thing, "__dict__")
    if is_a(own, dict):
        passed = _OF_MODULES if kind == MODULE else _OF_OPTIMIZERS if kind == OPTIMIZER else ()
        inner = [(key, value) for key, value in list(own.items()) if key not in passed and not is_bare(value)]
        yield from ((f"{name}.{key}", value) for key, value in inner)
    for slot in _slots_of(type(thing)):
        try:
            yield f"{name}.{slot}", object.__getattribute__(thing, slot)
        except AttributeError:
            pass


def _ways_of_function(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    for part in ("__self__", "__defaults__", "__kwdefaults__", "__dict__", "__func__", "fget", "fset"):
        held = getattr(thing, part, None)
        if held is not None:
            yield f"{name}.{part}", held
    function = getattr(thing, "__func__", thing)
    code = getattr(function, "__code__", None)
    for variable, cell in zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or ()):
        try:
            yield f"{name}<{variable}>", cell.cell_contents
        except ValueError:
            pass


def _slots_of(kind: Any) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            if slot not in ("__dict__", "__weakref__"):
                yield slot
