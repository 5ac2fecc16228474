"""Finds which variables of a function inside a loop are read again, and which code runs again. Pure.

A variable that is written before it is read on every path need not be saved, such as the batch, its loss, and all that
lives within one pass of the body. A restarted script writes again what is written between the loops' heads and the
place, but not what is written after the place.
"""

from __future__ import annotations

from functools import cache

from ..values.duck_types import is_a
from .loops import loops_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType
    from typing import Any

_FREE = frozenset(("LOAD_CLOSURE", "COPY_FREE_VARS", "MAKE_CELL"))
#: Instructions between a call and the setting of a variable to its result.
_PASSING = ("COPY", "DUP_TOP", "SWAP", "ROT_", "STORE_FAST", "STORE_NAME", "UNPACK_", "EXTENDED_ARG", "NOP", "CACHE")


class Flow:
    """A code object, and the ways through it."""

    def __init__(self, code: CodeType) -> None:
        loops = loops_of(code)
        self._loops = loops
        self._on: dict[int, set[int]] = {offset: set(ways) for offset, ways in loops.ways().items()}
        self._instructions = {found.offset: found for found in loops.instructions()}
        self._add_handlers()
        self._suppressing = frozenset(_after_suppressed(loops.instructions()))
        self._back: dict[int, set[int]] = {offset: set() for offset in self._on}
        for offset, ways in self._on.items():
            for way in ways:
                self._back[way].add(offset)
        #: Variables that functions within this one share with it: who reads those is not followed.
        self.shared = frozenset(code.co_cellvars) | frozenset(code.co_freevars)

    def _add_handlers(self) -> None:
        """Add exception handlers. Up to Python 3.10 only the start of their block is known; all of it leads to them."""
        for offset in list(self._on):
            found = self._instructions[offset]
            if found.opname in ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH"):
                for inside in self._on:
                    if offset < inside < found.argval:
                        self._on[inside].add(found.argval)

    def around(self, place: int) -> frozenset[int]:
        """Return all code that runs again after this instruction: the outermost loop that it is in."""
        place = self._loops.instruction_start(place)
        found = self._reach(self._on.get(place, ()), self._on) & self._reach(self._back.get(place, ()), self._back)
        return frozenset(found) if place in found else frozenset()

    def before(self, place: int) -> frozenset[int]:
        """Return the part of the loop that a script runs on its way to this instruction, when it gets there first."""
        place = self._loops.instruction_start(place)
        back: dict[int, set[int]] = {}
        for offset, ways in self._back.items():
            is_head = any(source >= place >= offset for source in ways)
            back[offset] = {source for source in ways if source != place and not (is_head and source >= place)}
        return frozenset(self._reach(back.get(place, ()), back) - {place})

    def innermost(self, place: int) -> frozenset[int]:
        """Return the code of the innermost loop that this instruction is in."""
        place = self._loops.instruction_start(place)
        around = self.around(place)
        heads = [way for source in around for way in self._on[source] if way <= place <= source and way in around]
        if not heads:
            return frozenset()
        head = max(heads)
        none: set[int] = set()
        back = {offset: none if offset == head else sources for offset, sources in self._back.items()}
        ends = [source for source in self._back[head] if source >= place]
        return frozenset((self._reach(ends, back) | {head}) & around)

    def live(self, place: int, within: frozenset[int] | None = None) -> set[str]:
        """Return the variables that can be read from here on before they are written.

        With `within` only what is read there, and no `with` counts as one that suppresses exceptions.
        """
        place = self._loops.instruction_start(place)
        ways = self._reach(self._on.get(place, ()), self._on)
        reached = sorted(ways if within is None else (ways & within) - self._suppressing, reverse=True)
        names: dict[str, int] = {}
        uses: dict[int, tuple[int, int]] = {}
        for offset in reached:
            read, written = _reads_and_writes(self._instructions[offset])
            uses[offset] = (_bits(read, names), ~_bits(written, names))
        entering: dict[int, int] = dict.fromkeys(reached, 0)
        left = reached[::-1]
        while left:
            offset = left.pop()
            read_bits, kept_bits = uses[offset]
            found = read_bits | (self._leaving(offset, entering) & kept_bits)
            if found != entering[offset]:
                entering[offset] = found
                left.extend(source for source in self._back[offset] if source in entering)
        alive = self._leaving(place, entering)
        return {name for name, bit in names.items() if alive & bit} | set(self.shared)

    def made_for_later(self, place: int) -> dict[str, int]:
        """Return the variables that the loops around the place read on the way to it, and that a call gives their value
        in some iterations only; each with the offset where it is set. Nothing sets them before the loops."""
        heads = self._loops.around(place)
        if not heads:
            return {}
        around, way = self.around(place), self.before(place)
        names = self.live(heads[0].offset, way) - self.shared
        instructions = self._loops.instructions()
        found: dict[str, int] = {}
        for index, instruction in enumerate(instructions):
            for verb, name in steps_of(instruction):
                if verb != "STORE" or name not in names:
                    continue
                if instruction.offset not in around or not _is_of_call(instructions, index):
                    names.discard(name)
                elif instruction.offset in way:
                    found.setdefault(name, instruction.offset)
        return {name: offset for name, offset in found.items() if name in names}

    def _leaving(self, offset: int, entering: dict[int, int]) -> int:
        found = 0
        for way in self._on.get(offset, ()):
            found |= entering.get(way, 0)
        return found

    @staticmethod
    def _reach(start: Iterable[int], ways: dict[int, set[int]]) -> set[int]:
        found: set[int] = set()
        left = list(start)
        while left:
            offset = left.pop()
            if offset not in found:
                found.add(offset)
                left.extend(ways.get(offset, ()))
        return found


def _after_suppressed(instructions: Iterable[Any]) -> Iterator[int]:
    """Yield where the code continues after an exception that a `with` has suppressed."""
    is_asked = False
    for found in instructions:
        is_asked = is_asked or found.opname == "WITH_EXCEPT_START"
        if is_asked and "IF_TRUE" in found.opname:
            yield int(found.argval)
            is_asked = False


def _is_of_call(instructions: list[Any], index: int) -> bool:
    """Return True if the variable that is set there gets the result of a call, or a part of it."""
    while index > 0:
        index -= 1
        name = instructions[index].opname
        if "LOAD" in name or not name.startswith(_PASSING):
            return bool(name.startswith("CALL") and "INTRINSIC" not in name)
    return False


def variables_of(argument: Any) -> tuple[str, ...]:
    """Return the variables of an instruction: one, or two since Python 3.13."""
    several: Any = argument if is_a(argument, tuple) else (argument,)
    return tuple(map(str, several))


def _reads_and_writes(found: Any) -> tuple[list[str], list[str]]:
    """Return what it reads before it writes, and what it writes."""
    read: list[str] = []
    written: list[str] = []
    for verb, name in steps_of(found):
        if verb == "STORE":
            written.append(name)
        elif name not in written:
            read.append(name)
    return read, written


def steps_of(found: Any) -> Iterator[tuple[str, str]]:
    """Yield what an instruction does to local variables in order: LOAD or STORE, and the name."""
    name = found.opname
    if name in _FREE:
        if name == "LOAD_CLOSURE":
            yield "LOAD", str(found.argval)
        return
    if name in ("DELETE_FAST", "DELETE_NAME", "DELETE_DEREF"):
        yield "STORE", str(found.argval)
        return
    if name in ("LOAD_FAST_AND_CLEAR", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
        yield "LOAD", str(found.argval)
        return
    verbs = [part for part in name.split("_") if part in ("LOAD", "STORE")]
    if name.endswith(("_GLOBAL", "_ATTR", "_METHOD", "_SUBSCR", "_SLICE")) or not verbs:
        return
    if "_FAST" in name or "_DEREF" in name or name in ("LOAD_NAME", "STORE_NAME"):
        yield from zip(verbs, variables_of(found.argval))


def _bits(variables: Iterable[str], names: dict[str, int]) -> int:
    found = 0
    for name in variables:
        found |= names.setdefault(name, 1 << len(names))
    return found


@cache
def flow_of(code: CodeType) -> Flow:
    """Return the control flow of this code, cached."""
    return Flow(code)
