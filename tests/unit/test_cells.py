"""Tables of cells in one test: each cell runs, one that fails fails the test, and it is named."""

from __future__ import annotations

import inspect

import pytest

from tests.cells import in_one_test


def test_every_cell_of_both_tables_runs() -> None:
    observed: list[tuple[int, int, str]] = []

    @in_one_test("one", [1, pytest.param(2, id="two")])
    @in_one_test(("left", "right"), [(3, "a"), (4, "b")], ids=["first", "second"])
    def cell(one: int, left: int, right: str) -> None:
        observed.append((one, left, right))

    assert not inspect.signature(cell).parameters
    cell()
    assert observed == [(1, 3, "a"), (1, 4, "b"), (2, 3, "a"), (2, 4, "b")]


def test_the_cells_that_fail_are_named_and_the_others_run() -> None:
    observed: list[int] = []

    @in_one_test("number", range(5), ids=lambda number: f"cell {number}")
    def cell(number: int) -> None:
        observed.append(number)
        if number == 1:
            pytest.fail("the first")
        assert number != 3

    with pytest.raises(AssertionError, match=r"2 of 5 cells failed:\n  cell 1\n  cell 3$") as failed:
        cell()
    assert observed == [0, 1, 2, 3, 4]
    assert str(failed.value.__cause__) == "the first"


async def test_cells_of_a_coroutine_run_one_after_the_other() -> None:
    observed: list[int] = []

    @in_one_test("number", [1, 2])
    async def cell(number: int) -> None:
        observed.append(number)
        assert number != 1

    with pytest.raises(AssertionError, match="1 of 2 cells"):
        await cell()
    assert observed == [1, 2]


def test_a_table_without_cells_is_refused() -> None:
    with pytest.raises(AssertionError, match="can never fail"):
        in_one_test("number", [])


def test_marks_of_one_cell_are_refused() -> None:
    with pytest.raises(AssertionError, match="a mark is of a whole test"):
        in_one_test("number", [pytest.param(1, marks=pytest.mark.thorough)])
