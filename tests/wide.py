"""The cells of a table of cases that `make test` runs, and those that `make check` runs.

`make test` runs the cells that are a way of their own. The others go one of these ways once more, by the same code, and
are left to `make test-wide`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def telling(cells: Iterable[tuple[Any, ...]], which: Collection[tuple[Any, ...]]) -> list[Any]:
    """All of the cells for `parametrize`, of which those that are not among `which` are wide ones."""
    table = list(cells)
    assert set(which) <= set(table), "a cell that there is not"
    return [
        pytest.param(*cell, id="-".join(map(_name_of, cell)), marks=() if cell in which else pytest.mark.wide)
        for cell in table
    ]


def quick_first(values: Iterable[Any], count: int, *, most: int | None = None) -> list[Any]:
    """All of the values for `parametrize`, of which those after the first few are not in the quick part.

    Those after `most` are wide ones. A tuple has the values of several arguments.
    """
    table = list(values)
    assert 0 < count <= len(table), "the quick part has some, and not more than there are"
    cells = [value if isinstance(value, tuple) else (value,) for value in table]
    marks: list[tuple[Any, ...]] = [()] * count + [(pytest.mark.thorough,)] * (len(cells) - count)
    if most is not None:
        marks[most:] = [(pytest.mark.thorough, pytest.mark.wide)] * (len(cells) - most)
    return [pytest.param(*cell, marks=mark) for cell, mark in zip(cells, marks, strict=True)]


def _name_of(value: object) -> str:
    name = getattr(value, "name", value)
    return str(name)
