"""A table of cells in one test, for tests that leave nothing behind.

`@pytest.mark.parametrize` makes a test of each cell. For a pure function that costs more than the cell itself: each is
collected by every worker, set up, reported three times and sent through a pipe, 8 ms of the processor for some
microseconds. `@in_one_test` takes the same arguments, runs all cells in one test, and says which of them failed.

All cells share the fixtures of the test. Not for cells that leave something behind which the next would see.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

Test = Callable[..., Any]


def in_one_test(
    names: str | Sequence[str], cells: Iterable[Any], ids: Iterable[str | None] | Callable[[Any], object] | None = None
) -> Callable[[Test], Test]:
    """Run a test for each cell, all of them, and then fail by the first failure, with the names of all that failed."""
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [_cell(cell, len(columns), ids) for cell in cells]
    if ids is not None and not callable(ids):
        table = [(name, values) for name, (_, values) in zip(ids, table, strict=True)]
    assert table, "no cells: such a test can never fail"

    def decorate(test: Test) -> Test:
        failed = _Failed(len(table))

        @functools.wraps(test)
        def all_cells(**others: Any) -> None:
            for name, values in table:
                with failed.noted(name or repr(values)):
                    test(**others, **dict(zip(columns, values, strict=True)))
            failed.tell()

        @functools.wraps(test)
        async def all_cells_async(**others: Any) -> None:
            for name, values in table:
                with failed.noted(name or repr(values)):
                    await test(**others, **dict(zip(columns, values, strict=True)))
            failed.tell()

        made: Any = all_cells_async if inspect.iscoroutinefunction(test) else all_cells
        # The other parameters are the columns of a second table, and fixtures.
        signature = inspect.signature(test)
        left = [parameter for parameter in signature.parameters.values() if parameter.name not in columns]
        made.__signature__ = signature.replace(parameters=left)
        return made

    return decorate


class _Failed:
    """The cells of one table that have failed."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._failures: list[tuple[str, BaseException]] = []

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # all that a test may fail with
            self._failures.append((name, error))

    def tell(self) -> None:
        failures, self._failures = self._failures, []
        if failures:
            names = "".join(f"\n  {name}" for name, _ in failures)
            raise AssertionError(f"{len(failures)} of {self._cells} cells failed:{names}") from failures[0][1]


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
