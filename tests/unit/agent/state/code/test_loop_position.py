"""A loop makes an object in an early iteration only: a restarted script continues in a later one without it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from hegmd.agent.state.code import loop_position
from tests.cells import in_one_test


class Loader:
    """Anything that a call makes, and that a variable then refers to."""


def in_first_epoch(begin: Callable[[Any], None]) -> None:
    for epoch in range(3):
        if epoch == 0:
            loader = Loader()
        begin(loader)


def in_head_of_loop(begin: Callable[[Any], None]) -> None:
    loader: Loader
    for epoch in range(3):
        begin(loader if epoch else (loader := Loader()))  # noqa: F821 - the first epoch sets it


def unpacked(begin: Callable[[Any], None]) -> None:
    for epoch in range(3):
        if epoch == 0:
            loader, other = map(type.__call__, (Loader, Loader))
        begin((loader, other))


def its_data(begin: Callable[[Any], None]) -> None:
    for epoch in range(3):
        if not epoch:
            data = Loader()
        loader = (data,)
        begin(loader)


def in_second_run(begin: Callable[[Any], None]) -> None:
    for run in range(2):
        if run == 0:
            loader = Loader()
        for _epoch in range(2):
            begin(loader)


def in_each_epoch(begin: Callable[[Any], None]) -> None:
    for epoch in range(3):
        if epoch >= 0:
            loader = Loader()
        begin(loader)


def above_loop(begin: Callable[[Any], None]) -> None:
    loader = None
    for _epoch in range(3):
        if loader is None:
            loader = Loader()
        begin(loader)


def chosen_from_others(begin: Callable[[Any], None]) -> None:
    small = Loader()
    for epoch in range(3):
        if epoch >= 0:
            loader = small
        begin(loader)


def in_a_with(begin: Callable[[Any], None]) -> None:
    only = [Loader()]
    for _epoch in range(3):
        with contextlib.suppress(KeyError):
            loader = only.__getitem__(0)
        begin(loader)


def given(begin: Callable[[Any], None], loader: Any = None) -> None:
    for epoch in range(3):
        if epoch == 0:
            loader = Loader()
        begin(loader)


@in_one_test(
    ("train", "lacking"),
    [
        (in_first_epoch, [[], ["loader"], ["loader"]]),
        (in_head_of_loop, [[], ["loader"], ["loader"]]),
        (unpacked, [[], ["loader", "other"], ["loader", "other"]]),
        (its_data, [[], ["data"], ["data"]]),
        (in_second_run, [[], [], ["loader"], ["loader"]]),
        (in_each_epoch, [[]] * 3),
        (above_loop, [[]] * 3),
        (chosen_from_others, [[]] * 3),
        (in_a_with, [[]] * 3),
        (given, [[]] * 3),
    ],
)
def test_a_loader_made_in_the_first_epoch_was_looked_for_in_vain_after_a_restart(
    train: Callable[..., None], lacking: list[list[str]]
) -> None:
    found: list[list[str]] = []

    def begin(_loader: Any) -> None:
        loop_position.note_begun(train.__name__, [sys._getframe(1)])
        found.append([refused.what.split()[0] for refused in loop_position.against_made_earlier(train.__name__)])

    train(begin)
    assert found == lacking
