"""Loops that a frame is in: found in its code, and their iterators on its stack."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from hegmd.agent.state.code import position
from hegmd.agent.state.code.loops import loops_of
from hegmd.agent.state.code.value_stack import can_read, iterators_of


def caller(depth: int = 1) -> FrameType:
    return sys._getframe(depth + 1)


def iterators_here() -> list[Any]:
    found = iterators_of(caller(1))
    assert found is not None
    return [iterator for _head, iterator in found]


class Asker:
    """An iterable that looks at the frame that asks it for an item."""

    def __init__(self) -> None:
        self.positions: list[tuple[str, bool]] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if len(self.positions) == 2:
            raise StopIteration
        place = position.ThreadPosition(caller(1))
        self.positions.append((type(place.loops[-1].iterator).__name__, place.at_head))
        return len(self.positions)


def test_this_python_can_be_read() -> None:
    assert can_read()


def test_the_loops_around_a_call_are_found_from_the_outermost() -> None:
    outer, inner, over = iter([1]), iter((2,)), iter({3: 4})
    for _first in outer:
        for _second in inner:
            for _third in over:
                assert iterators_here() == [outer, inner, over]


def test_finished_or_abandoned_loops_are_not_listed() -> None:
    around = iter([1])
    for _first in around:
        for _second in range(2):
            break
        for _third in range(2):
            pass
        assert iterators_here() == [around]


def test_contexts_handlers_and_cells_between_loops_do_not_shift_the_values() -> None:
    outer, inner = iter([1]), iter([2])
    found: list[Any] = []
    for first in outer:
        with open("/dev/null"):
            try:
                raise ValueError
            except ValueError:
                for _second in inner:
                    found = iterators_here()

        def enclosing() -> int:
            return first  # noqa: B023 - a variable in a cell is what this is about

        assert enclosing() == 1
    assert found == [outer, inner]


def test_a_loop_that_requests_its_next_item_is_at_its_head() -> None:
    asker = Asker()
    for _item in asker:
        pass
    assert asker.positions == [("Asker", True)] * 2


def test_a_generator_between_two_loops_has_its_own_loops() -> None:
    def passing(items: Iterable[int]) -> Iterator[int]:
        yield from (item for item in items if item)

    asker = Asker()
    assert list(passing(asker)) == [1, 2]
    assert {kind for kind, _at_head in asker.positions} == {"Asker"}


def test_while_loops_are_reported_with_their_line() -> None:
    lines: tuple[int, ...] = ()
    count = 0
    while count < 2:
        frame = caller(0)
        lines = loops_of(frame.f_code).whiles_around(frame.f_lasti)
        count += 1
    for _other in range(1):
        frame = caller(0)
        assert loops_of(frame.f_code).whiles_around(frame.f_lasti) == ()
    assert len(lines) == 1


def test_a_call_in_the_head_of_a_loop_leads_to_it() -> None:
    found: list[int | None] = []

    def noted(items: list[int]) -> list[int]:
        frame = caller(1)
        head = loops_of(frame.f_code).head_after_call(frame.f_lasti)
        found.append(None if head is None else head.line)
        return items

    for _item in enumerate(noted([1])):
        pass
    kept = noted([1])
    for _other in kept:
        pass
    assert found[0] is not None
    assert found[1] is None


def test_the_rest_of_a_range_has_its_remaining_items() -> None:
    iterator = iter(range(3, 20, 4))
    assert list(range(*position.look_into(iterator, 0, lambda _it: None)["rest"])) == [3, 7, 11, 15, 19]
    next(iterator)
    next(iterator)
    assert list(range(*position.look_into(iterator, 0, lambda _it: None)["rest"])) == [11, 15, 19]
    assert list(range(*position.look_into(iterator, 1, lambda _it: None)["rest"])) == [7, 11, 15, 19]
    assert list(iterator) == [11, 15, 19]
    assert list(range(*position.look_into(iterator, 1, lambda _it: None)["rest"])) == [19]


def test_the_head_of_a_loop_with_a_long_body_does_not_count_as_body() -> None:
    """The instruction has a prefix, and the thread is seen at the prefix: such a training was never parked."""
    code = compile("for number in range(9):\n" + "    number = number + number\n" * 200, "long.py", "exec")
    instructions = list(dis.get_instructions(code))
    at = next(index for index, found in enumerate(instructions) if found.opname == "FOR_ITER")
    prefix = instructions[at - 1]
    assert prefix.opname == "EXTENDED_ARG"
    loops = loops_of(code)
    assert loops.is_head(prefix.offset)
    assert loops.instruction_start(prefix.offset) == instructions[at].offset
    assert [head.offset for head in loops.around(prefix.offset)] == [instructions[at].offset]
