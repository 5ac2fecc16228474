"""The host memory that a state's bytes go through: taken ahead of its use, and one piece at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hegmd.agent.restart import ground


@pytest.fixture(autouse=True)
def _nothing_prepared() -> Iterator[None]:
    ground.drop()
    yield
    ground.drop()


def _pages_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_prepared_has_its_pages_before_it_is_taken() -> None:
    before = _pages_bytes()
    ground.prepare()
    ground.prepare()
    ground.wait()
    assert ground.SIZE_BYTES * 0.9 < _pages_bytes() - before < ground.SIZE_BYTES * 1.5, "one piece, and all of it"
    taken = ground.take()
    assert _pages_bytes() - before < ground.SIZE_BYTES * 1.5
    taken.close()


def test_another_is_taken_where_none_is_prepared_any_more() -> None:
    ground.prepare()
    taken = [ground.take(), ground.take()]
    assert taken[0].address != taken[1].address
    for one in taken:
        one.close()


def test_what_nobody_took_is_let_go_of() -> None:
    before = _pages_bytes()
    ground.prepare()
    ground.drop()
    ground.drop()
    assert _pages_bytes() - before < ground.SIZE_BYTES * 0.5
