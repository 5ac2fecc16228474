"""A table of cells in one test, for tests that take nothing but a cell.

`@pytest.mark.parametrize` makes a test of each cell. For a pure function that costs more than the cell itself: each is
collected by every worker, set up, reported three times and sent through a pipe, 8 ms of the processor for some
microseconds. `@in_one_test` takes the same arguments, runs all cells in one test, and says which of them failed.

Not for cells that need fixtures, or that leave something behind which the next cell would see.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def in_one_test(
    names: str | Sequence[str],
    cells: Iterable[Any],
    ids: Iterable[str | None] | Callable[[Any], object] | None = None,
) -> Callable[[Test], Test]:
    """Run a test for each cell, all of them, and then fail by the first failure, with the names of all that failed."""
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [_cell(cell, len(columns), ids) for cell in cells]
    if ids is not None and not callable(ids):
        table = [(name, values) for name, (_, values) in zip(ids, table, strict=True)]
    assert table, "no cells: such a test can never fail"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def all_cells(**others: Any) -> None:
            failures: list[tuple[str, BaseException]] = []
            for name, values in table:
                try:
                    test(**others, **dict(zip(columns, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # all that a test may fail with
                    failures.append((name or repr(values), error))
            if failures:
                named = "".join(f"\n  {name}" for name, _ in failures)
                raise AssertionError(f"{len(failures)} of {len(table)} cells failed:{named}") from failures[0][1]

        # What is left are the columns of a second table, and fixtures.
        left = [parameter for parameter in signature.parameters.values() if parameter.name not in columns]
        all_cells.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # inspect reads it
        return all_cells

    return decorate


def _cell(cell: Any, columns: int, ids: object) -> tuple[str | None, Sequence[Any]]:
    name = None
    if hasattr(cell, "marks"):  # pytest.param(...)
        assert not cell.marks, "a mark is of a whole test"
        values, name = cell.values, cell.id
    else:
        values = (cell,) if columns == 1 else tuple(cell)
    if name is None and callable(ids):
        name = ", ".join(str(ids(value)) for value in values)
    return name, values
