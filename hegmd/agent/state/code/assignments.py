"""Finds what a script's code changes, from its bytecode: variables that it sets, and containers that it alters in
place.

The value stack is followed as far as needed to find the target of an `.append`, a subscript or an attribute. The code
that a loop reaches is found by names: what the loop mentions, calls implicitly, or contains. So it can find more than a
run would change. Code outside the loop, such as setup code, is not searched.
"""

from __future__ import annotations

import sys
from functools import cache

from ..values.duck_types import FUNCTION, attribute_of, is_a, members_of
from .liveness import steps_of
from .loops import loops_of
from .position import is_users_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from types import CodeType
    from typing import Any

LOCAL = "local"
GLOBAL = "global"
ATTRIBUTE = "attribute"
_DATA = "data"
_OPTIMIZED = 0x1  # set for a function's code, not for a module's or a class's
#: The most functions of the script that are searched for changes.
MAX_CODES = 600
_MUTATORS = frozenset(
    "append appendleft extend extendleft insert add update pop popleft popitem remove discard clear setdefault sort "
    "reverse rotate subtract fill put difference_update intersection_update symmetric_difference_update".split()
)
#: Functions of the standard library that alter a container that they are given.
_ALTERING = frozenset(
    "heappush heappop heapify heapreplace heappushpop insort insort_left insort_right shuffle".split()
)
#: Instructions that take from the stack and give nothing back, or do not touch it.
_TAKERS = (
    *("POP_", "JUMP", "LIST_", "SET_", "MAP_", "DICT_", "DELETE_", "STORE_", "MAKE_CELL", "COPY_FREE", "SETUP_"),
    *("NOP", "RESUME", "CACHE", "EXTENDED_ARG", "PRECALL", "NOT_TAKEN", "KW_NAMES"),
)
#: Methods that fill an object that is like a file.
_FILLING = frozenset(("write", "writelines", "truncate"))
_SET_UP = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"))


class Change:
    """An instruction that changes something. `of_self` says that an attribute is of a method's own object.

    `is_inside` says that it sets an attribute of the value, or fills a value that is like a file.
    """

    __slots__ = ("is_inside", "is_stored", "kind", "line", "name", "of_self", "offset")

    def __init__(self, offset: int, line: int, origin: tuple[str, str], *, is_stored: bool, of_self: bool) -> None:
        self.offset = offset
        self.line = line
        self.kind, self.name = origin
        self.is_inside = False
        self.is_stored = is_stored
        self.of_self = of_self


class Changes:
    """All of one code object: changes, and the names that are mentioned by offset."""

    def __init__(self, code: CodeType) -> None:
        self.found: list[Change] = []
        self.inside: list[Change] = []
        self.mentioned: list[tuple[int, str]] = []
        self._own = code.co_varnames[0] if code.co_argcount else None
        self._parameters = frozenset(code.co_varnames[1 if self._own == "self" else 0 : code.co_argcount])
        self._loops = loops_of(code)
        self._stack: list[tuple[str, str] | None] = []
        self._with_data: set[tuple[str, str]] = set()  # variables whose `.data` is read: it shares the tensor's memory
        is_function = bool(code.co_flags & _OPTIMIZED)
        self._names_are = LOCAL if is_function else GLOBAL
        for found in self._loops.instructions():
            depth = self._loops.depth_at(found.offset)
            if depth is not None:
                self._set_depth(depth)
                self._follow(found)

    def within(self, offsets: Iterable[int] | None) -> Iterator[Change]:
        """Yield the changes at these offsets; all changes for None."""
        chosen = None if offsets is None else set(offsets)
        return (found for found in self.found if chosen is None or found.offset in chosen)

    def inside_within(self, offsets: Collection[int] | None) -> Iterator[Change]:
        """Yield the changes inside of values at these offsets; all for None."""
        return (found for found in self.inside if offsets is None or found.offset in offsets)

    def mentions(self, offsets: Iterable[int] | None) -> set[str]:
        """Return all names that are mentioned at these offsets."""
        chosen = None if offsets is None else set(offsets)
        return {name for offset, name in self.mentioned if chosen is None or offset in chosen}

    def alters_argument(self) -> bool:
        """Return True if it alters a container that was passed to it, directly or by a call."""
        alters = any(
            found.kind == LOCAL and not found.is_stored and found.name in self._parameters for found in self.found
        )
        return alters or any(name in _ALTERING for _offset, name in self.mentioned)

    def _set_depth(self, depth: int) -> None:
        del self._stack[depth:]
        self._stack.extend([None] * (depth - len(self._stack)))

    def _at(self, below_top: int) -> tuple[str, str] | None:
        return self._stack[-1 - below_top] if below_top < len(self._stack) else None

    def _note(self, found: Any, origin: tuple[str, str] | None, *, is_stored: bool, of_self: bool = False) -> None:
        if origin is not None and origin[0] == ATTRIBUTE and origin[1].rpartition(".")[2] == _DATA:
            for whole in sorted(self._with_data):
                self._note(found, whole, is_stored=False)
        if origin is not None:
            line = self._loops.line_of(found.offset)
            own = of_self or (origin[0] == ATTRIBUTE and origin[1].startswith("self."))
            kind, name = origin
            self.found.append(
                Change(found.offset, line, (kind, name.rpartition(".")[2]), is_stored=is_stored, of_self=own)
            )

    def _note_inside(self, found: Any, origin: tuple[str, str] | None) -> None:
        if origin is not None:
            kind, name = origin
            own = kind == ATTRIBUTE and name.startswith("self.")
            place = found.offset, self._loops.line_of(found.offset)
            change = Change(*place, (kind, name.rpartition(".")[2]), is_stored=False, of_self=own)
            change.is_inside = True
            self.inside.append(change)

    def _follow(self, found: Any) -> None:
        name = found.opname
        if name.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")):
            self._follow_attribute(found)
        elif name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME"):
            self._follow_name(found)
        elif name in ("STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            self._follow_setting(found)
        elif "_FAST" in name or "_DEREF" in name:
            self._follow_variable(found)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and found.argrepr.startswith("[")):
            self._stack = [*self._stack[:-2], self._at(1)]  # an element counts as its container
        elif name in ("COPY", "DUP_TOP", "DUP_TOP_TWO", "SWAP", "ROT_TWO", "ROT_THREE", "ROT_FOUR"):
            self._shuffle(found)
        else:
            self._follow_any(found)

    def _follow_any(self, found: Any) -> None:
        """Follow any other instruction: only its stack effect is known, and a value on top counts as new."""
        import dis

        argument = found.arg if found.opcode >= dis.HAVE_ARGUMENT else None
        effect = dis.stack_effect(found.opcode, argument, jump=False)
        self._set_depth(max(len(self._stack) + effect, 0))
        if self._stack and not found.opname.startswith(_TAKERS):
            self._stack[-1] = None

    def _follow_attribute(self, found: Any) -> None:
        attribute = str(found.argval)
        self.mentioned.append((found.offset, attribute))
        origin = self._stack.pop() if self._stack else None
        in_place = attribute.endswith("_") and not attribute.startswith("_")  # PyTorch's own spelling
        if attribute in _MUTATORS or in_place:
            self._note(found, origin, is_stored=False)
        if attribute in _FILLING:
            self._note_inside(found, origin)
        self._note_data(attribute, origin)
        own = "self." if origin is not None and origin == (LOCAL, self._own) else ""
        self._stack.append((ATTRIBUTE, own + attribute))

    def _note_data(self, attribute: str, origin: tuple[str, str] | None) -> None:
        if attribute == _DATA and origin is not None and origin[1].rpartition(".")[2] != _DATA:
            self._with_data.add(origin)

    def _follow_name(self, found: Any) -> None:
        name = str(found.argval)
        kind = GLOBAL if found.opname.endswith("_GLOBAL") else self._names_are
        if found.opname.startswith("LOAD"):
            self.mentioned.append((found.offset, name))
            self._stack.append((kind, name))
        else:
            self._note(found, (kind, name), is_stored=True)
            del self._stack[-1:]

    def _follow_setting(self, found: Any) -> None:
        if found.opname == "STORE_ATTR":
            self._note_data(str(found.argval), self._at(0))
            self._note_inside(found, self._at(0))
            own = self._at(0) == (LOCAL, self._own)
            self._note(found, (ATTRIBUTE, str(found.argval)), is_stored=True, of_self=own)
        else:
            self._note(found, self._at(2 if found.opname == "STORE_SLICE" else 1), is_stored=False)
        import dis

        argument = found.arg if found.opcode >= dis.HAVE_ARGUMENT else None
        self._set_depth(max(len(self._stack) + dis.stack_effect(found.opcode, argument), 0))

    def _follow_variable(self, found: Any) -> None:
        for verb, name in steps_of(found):
            if verb == "LOAD":
                self.mentioned.append((found.offset, name))
                self._stack.append((LOCAL, name))
            elif not found.opname.startswith("DELETE"):
                self._note(found, (LOCAL, name), is_stored=True)
                del self._stack[-1:]

    def _shuffle(self, found: Any) -> None:
        name, count = found.opname, found.arg or 0
        if name == "COPY":
            self._stack.append(self._at(count - 1))
        elif name == "DUP_TOP":
            self._stack.append(self._at(0))
        elif name == "DUP_TOP_TWO":
            self._stack += [self._at(1), self._at(0)]
        elif name == "SWAP":
            if len(self._stack) >= count:
                self._stack[-1], self._stack[-count] = self._stack[-count], self._stack[-1]
        else:
            depth = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}[name]
            if len(self._stack) >= depth:
                self._stack[-depth:] = [self._stack[-1], *self._stack[-depth:-1]]


@cache
def changes_of(code: CodeType) -> Changes:
    """Return what this code changes, cached."""
    return Changes(code)


def nested_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions that are defined within this code, at any depth; for a module or a class its functions."""
    kind: Any = type(code)
    for found in code.co_consts:
        if is_a(found, kind):
            if found.co_flags & _OPTIMIZED:
                yield found
            yield from nested_in(found)


# ---- what a loop reaches --------------------------------------------------------------------------------------------


class Function:
    """A function of the script's: its code, the class that it is a method of, and the module of its globals."""

    __slots__ = ("code", "module", "name", "owner")

    def __init__(self, name: str, code: CodeType, module: str, owner: Any) -> None:
        self.name = name
        self.code = code
        self.module = module
        self.owner = owner


class Functions:
    """All functions of the script's modules by name."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self._by_name: dict[str, list[Function]] = {}
        self._called: list[Function] = []
        self._seen: set[int] = set()
        #: Whether all were looked through that the last question led to.
        self.is_whole = True
        for module in modules:
            for name, value in members_of(module).items():
                self._add(name, value, None)

    def reached_from(self, names: Iterable[str], codes: Iterable[tuple[CodeType, str]]) -> Iterator[Function]:
        """Yield the functions that code mentioning these names reaches, and the modules' functions given by code."""
        left = [Function(code.co_name, code, module, None) for code, module in codes]
        left += self._called
        left += [found for name in names for found in self._by_name.get(name, ())]
        met: set[tuple[CodeType, Any]] = set()
        while left:
            function = left.pop()
            if (function.code, function.owner) in met:
                continue
            if len(met) >= MAX_CODES:
                self.is_whole = False
                return
            met.add((function.code, function.owner))
            yield function
            left.extend(Function(code.co_name, code, function.module, None) for code in nested_in(function.code))
            for name in changes_of(function.code).mentions(None):
                left.extend(self._by_name.get(name, ()))

    def _add(self, name: str, value: Any, owner: Any) -> None:
        if is_a(value, type):
            if owner is None and self._is_new(value):
                for method, member in members_of(value).items():
                    self._add(method, member, value)
            return
        for found in _functions_of(value):
            module = str(found.__globals__.get("__name__"))
            function = Function(name, found.__code__, module, owner)
            if name in _SET_UP or not (owner is not None or self._is_new(found)):
                continue
            self._by_name.setdefault(name, []).append(function)
            if name != found.__code__.co_name:
                self._by_name.setdefault(found.__code__.co_name, []).append(function)
            if owner is not None and (_is_dunder(name) or _overrides(owner, name)):
                self._called.append(function)

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._seen
        self._seen.add(id(value))
        return is_new


def _functions_of(value: Any) -> Iterator[Any]:
    """Yield the Python functions of this value: itself, a property's, and the one that a decorator wraps."""
    left = [value, *(attribute_of(value, part) for part in ("fget", "fset", "func", "__func__"))]
    for _step in range(8):
        left = [found for found in left if found is not None]
        yield from (found for found in left if is_a(found, FUNCTION))
        left = [attribute_of(found, "__wrapped__") for found in left]


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _overrides(owner: Any, name: str) -> bool:
    """Return True if a base class outside the script has a method of that name: then other code can call it."""
    return any(name in vars(base) and not _is_scripts(base) for base in owner.__mro__[1:])


def _is_scripts(kind: Any) -> bool:
    return is_users_module(sys.modules.get(kind.__module__))
