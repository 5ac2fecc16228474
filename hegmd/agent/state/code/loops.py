"""The loops around a place in a code object, and the positions of their iterators on its frame's stack. Pure.

A `for` loop keeps its iterator on the value stack from GET_ITER until it ends, so the depth of the stack at its head
gives the slot. The depths are computed as the compiler does, by following every path through the code with
`dis.stack_effect`. A `while` loop keeps nothing; only its presence is known.
"""

from __future__ import annotations

import sys
from functools import cache

from ..values.duck_types import class_of, is_a

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType
    from typing import Any

_VERSION: tuple[int, ...] = tuple(sys.version_info[:2])
_GENERATORS = 0x20 | 0x80 | 0x200  # inspect's CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_ENDS = frozenset(("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"))
_STATEMENTS = ("STORE_", "JUMP_", "POP_", "FOR_ITER", "END_FOR", "RETURN_", "DELETE_", "RESUME", "RERAISE")
_MAX_TARGETS = 32
#: Instructions that add to what a comprehension collects, and how many values each takes off the stack.
_COLLECTING = {"LIST_APPEND": 1, "SET_ADD": 1, "MAP_ADD": 2}
_BEFORE_TARGETS = frozenset(("UNPACK_SEQUENCE", "UNPACK_EX", "EXTENDED_ARG", "NOP", "CACHE"))
_METHODS = frozenset(("LOAD_METHOD", "LOAD_ATTR"))
_TAKING = frozenset(("get", "get_nowait", "recv", "recv_bytes", "recv_into"))
_SETTING = frozenset(("set",))
#: Modules of queues and connections. Threads, tasks and processes that fill them start over.
_QUEUES = frozenset(("queue", "_queue", "asyncio", "multiprocessing", "torch.multiprocessing.queue", "socket"))
_OF_BLOCKS = ("BEFORE_", "SETUP_", "LOAD_SPECIAL", "PUSH_EXC", "LOAD_FAST_AND_CLEAR")
_ALWAYS = frozenset(("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"))


class Head:
    """A `for` loop of a code object: where its FOR_ITER is, the slot of its iterator, the line that says `for`."""

    __slots__ = ("line", "offset", "slot")

    def __init__(self, offset: int, slot: int, line: int) -> None:
        self.offset = offset
        self.slot = slot
        self.line = line


class Loops:
    def __init__(self, code: CodeType) -> None:
        import dis

        self._stack_effect = dis.stack_effect
        self._jumps = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
        self._code = code
        self._list: list[Any] = list(dis.get_instructions(code))
        self._at = {found.offset: index for index, found in enumerate(self._list)}
        self._offsets = [found.offset for found in self._list]
        self._lines = self._found_lines()
        self._handlers = tuple(getattr(dis.Bytecode(code), "exception_entries", ()) or ())
        self._active: dict[int, tuple[Head, ...]] = {}
        self._follow()

    def around(self, offset: int) -> tuple[Head, ...]:
        """Return the `for` loops that the instruction is in, or is the head of, outermost first."""
        found = self._instruction(offset)
        active = self._active.get(found.offset, ())
        if found.opname == "FOR_ITER" and found.offset in self._depths:
            active = (*active, self._head(self._at[found.offset], self._depths[found.offset] - 1))
        return active

    def line_of(self, offset: int) -> int:
        return self._lines[self._instruction(offset).offset]

    def is_head(self, offset: int) -> bool:
        """Return True if the instruction asks an iterator for a loop's next item, or jumps back to one that does."""
        found = self._instruction(offset)
        target = self._target(found)
        if target is not None and target <= found.offset:
            found = self._list[self._skip_prefix(self._at[target])]
        return bool(found.opname == "FOR_ITER")

    def is_delegating(self, offset: int) -> bool:
        """Return True if the instruction delegates to another iterator: `yield from`."""
        return self._instruction(offset).opname in ("SEND", "YIELD_FROM")

    def head_after_call(self, offset: int) -> Head | None:
        """Return the head of the loop over the result of the call at this offset, if it is on the line of a `for`."""
        index = self._at[self._instruction(offset).offset]
        while index + 1 < len(self._list):
            index += 1
            name = self._list[index].opname
            if name == "GET_ITER":
                return self._head_from(index + 1)
            if name.startswith(("STORE_", "JUMP", "POP_", "RETURN", "DELETE_", "FOR_ITER")):
                return None
        return None

    def names_before(self, head: Head) -> set[str]:
        """Return the names between the `for` of that loop and its body, which make up what it iterates over."""
        found: set[str] = set()
        for index in range(self._at[head.offset] - 1, -1, -1):
            name = self._list[index].opname
            if name.startswith(_STATEMENTS):
                break
            if name.startswith("LOAD_"):
                found.update(found_name for found_name in names_of(self._list[index].argval))
        return found

    def targets(self) -> set[str]:
        found: set[str] = set()
        for index, head in enumerate(self._list):
            if head.opname == "FOR_ITER":
                for following in self._list[index + 1 : index + 1 + _MAX_TARGETS]:
                    if following.opname.startswith("STORE_"):
                        found.update(names_of(following.argval))
                    elif following.opname not in _BEFORE_TARGETS:
                        break
        return found

    def whiles_around(self, offset: int) -> tuple[int, ...]:
        """Return the lines of the `while` loops that the instruction is in, outermost first."""
        found: set[int] = set()
        for source in self._list:
            target = self._target(source)
            if target is None or not target <= offset <= source.offset or source.offset not in self._depths:
                continue
            first = self._list[self._skip_prefix(self._at[target])]
            if first.opname not in ("FOR_ITER", "SEND", "YIELD_VALUE") and "NO_INTERRUPT" not in source.opname:
                found.add(self.line_of(target))
        return tuple(sorted(found))

    def collects(self, head: Head) -> bool:
        """Return True if it is a loop of a comprehension: what it collects has no name."""
        found = self._list[self._at[head.offset]]
        for inside in self._list[self._at[head.offset] :]:
            if inside.offset >= found.argval:
                break
            taken, depth = _COLLECTING.get(inside.opname), self._depths.get(inside.offset)
            if taken is not None and depth is not None and depth - taken - inside.arg < head.slot:
                return True
        return False

    def operands(self, offset: int) -> list[tuple[int, list[Any]]]:
        """Return the slots of the values that wait for the call at this offset, each with what put it there.

        Iterators of loops are not among them, nor what a `with` or an `except` keeps.
        """
        found = self._instruction(offset)
        depth, index = self._depths.get(found.offset), self._at[found.offset]
        if depth is None or not found.opname.startswith(("CALL", "SEND", "YIELD_FROM")):
            return []
        count = depth - 2
        if found.opname.startswith("CALL"):
            count = depth + self._stack_effect(found.opcode, found.arg) - 1
        starts = [self._start_of(slot, index) for slot in range(count + 1)]
        slots = {head.slot for head in self.around(offset)}
        operands: list[tuple[int, list[Any]]] = []
        made: list[Any] = []
        for slot in range(count):
            # An instruction that puts several values there is that of each.
            before, made = made, self._list[starts[slot] : max(starts[slot + 1], starts[slot] + 1)]
            if made and made[0].opname in _METHODS:  # it leaves the object there that the slot below came from
                made = [*before, *made[1:]]
            if slot not in slots and not any(one.opname.startswith(_OF_BLOCKS) for one in made):
                operands.append((slot, made))
        return operands

    def _start_of(self, slot: int, index: int) -> int:
        """Return the index of the last instruction before that one which leaves its value in that slot."""
        while index > 0:
            index -= 1
            depth = self._depths.get(self._list[index].offset)
            if depth is not None and depth <= slot:
                return index
        return 0

    def instructions(self) -> list[Any]:
        return self._list

    def depth_at(self, offset: int) -> int | None:
        """Return the stack depth before that instruction; None if it is unreachable."""
        return self._depths.get(offset)

    def ways(self) -> dict[int, tuple[int, ...]]:
        """Return the successors of each reachable instruction, exception handlers included."""
        return {
            offset: tuple([way for way, _depth, _active in self._successors_from(offset, depth, ())])
            for offset, depth in self._depths.items()
        }

    def instruction_start(self, offset: int) -> int:
        """Return the offset of the instruction at that place."""
        return int(self._instruction(offset).offset)

    def _instruction(self, offset: int) -> Any:
        """Return the instruction there. Python 3.11 can report the offset of its cache or its prefix."""
        from bisect import bisect_right

        index = max(bisect_right(self._offsets, offset) - 1, 0)
        while self._list[index].opname == "EXTENDED_ARG":
            index += 1
        return self._list[index]

    # ---- the ways through the code ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._depths: dict[int, int] = {}
        left: list[tuple[int, int, tuple[Head, ...]]] = [(0, self._first_depth(), ())]
        while left:
            offset, depth, active = left.pop()
            if offset in self._depths:
                continue
            kept = tuple(head for head in active if head.slot < depth)
            self._depths[offset] = depth
            self._active[offset] = kept
            left.extend(self._successors_from(offset, depth, kept))

    def _first_depth(self) -> int:
        """Python 3.11 starts a generator with the None that is sent into it, and does not count it as pushed."""
        return int(bool(self._code.co_flags & _GENERATORS) and _VERSION == (3, 11))

    def _successors_from(self, offset: int, depth: int, active: tuple[Head, ...]) -> Iterator[tuple[int, int, Any]]:
        index = self._at[offset]
        found = self._list[index]
        argument = found.arg if found.opcode >= _have_argument() else None
        for entry in self._handlers:
            if entry.start <= offset < entry.end:
                yield entry.target, entry.depth + int(entry.lasti) + 1, active
        target = self._target(found)
        if target is not None:
            yield target, depth + self._stack_effect(found.opcode, argument, jump=True), active
        if found.opname not in _ENDS and found.opname not in _ALWAYS and index + 1 < len(self._list):
            inside = active
            if found.opname == "FOR_ITER":
                inside = (*active, self._head(index, depth - 1))
            yield self._list[index + 1].offset, depth + self._stack_effect(found.opcode, argument, jump=False), inside

    def _target(self, found: Any) -> int | None:
        return int(found.argval) if found.opcode in self._jumps else None

    def _head(self, index: int, slot: int) -> Head:
        found = self._list[index]
        return Head(found.offset, slot, self.line_of(found.offset))

    def _head_from(self, index: int) -> Head | None:
        index = self._skip_prefix(index)
        if index >= len(self._list) or self._list[index].opname != "FOR_ITER":
            return None
        return self._head(index, self._depths.get(self._list[index].offset, 0) - 1)

    def _skip_prefix(self, index: int) -> int:
        while index < len(self._list) and self._list[index].opname in ("EXTENDED_ARG", "NOP"):
            index += 1
        return index

    def _found_lines(self) -> dict[int, int]:
        """Return each instruction's line. Before 3.13 `dis` reports it for the first one of a line only."""
        import dis

        starts = [(offset, line) for offset, line in dis.findlinestarts(self._code) if line]
        lines: dict[int, int] = {}
        line = self._code.co_firstlineno
        following = iter([*starts, (1 << 62, 0)])
        start, next_line = next(following)
        for found in self._list:
            while found.offset >= start:
                line = next_line
                start, next_line = next(following)
            lines[found.offset] = line
        return lines


def names_of(argument: Any) -> tuple[str, ...]:
    """Return one variable, or two if the instruction sets two."""
    return argument if is_a(argument, tuple) else (str(argument),)


def begun_anew_in(code: CodeType, values: dict[str, Any]) -> Iterator[str]:
    """Yield the names of queues that the code takes from, and of context variables that it sets. They start over."""
    yield from (name for name in _receivers_of(code, _TAKING) & values.keys() if is_queue(values[name]))
    context_variable: Any = getattr(sys.modules.get("contextvars"), "ContextVar", ())
    yield from (name for name in _receivers_of(code, _SETTING) & values.keys() if is_a(values[name], context_variable))


def is_queue(value: Any) -> bool:
    return str(class_of(value).__module__).removesuffix(".queues").removesuffix(".connection") in _QUEUES


@cache
def _receivers_of(code: CodeType, methods: frozenset[str]) -> frozenset[str]:
    """Return the names of variables and attributes whose method is called by one of these names."""
    import dis

    found = [instruction for instruction in dis.get_instructions(code) if instruction.opname != "CACHE"]
    return frozenset(
        names_of(before.argval)[-1]
        for before, after in zip(found, found[1:])
        if after.opname in _METHODS and after.argval in methods and "LOAD_" in before.opname
    )


def _have_argument() -> int:
    import dis

    return dis.HAVE_ARGUMENT


@cache
def loops_of(code: CodeType) -> Loops:
    """Return the loops of this code, cached."""
    return Loops(code)
