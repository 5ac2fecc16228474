"""The host memory that a state's bytes go through: taken ahead of its use, and one piece at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from hegmd.agent.restart import ground


@pytest.fixture(autouse=True)
def _nothing_prepared() -> Iterator[None]:
    ground.drop()
    yield
    ground.drop()


def test_what_is_prepared_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ground.Ground] = []
    real = ground.Ground

    def make() -> ground.Ground:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(ground, "Ground", make)
    ground.prepare()
    ground.prepare()
    first, second = ground.take(), ground.take()
    assert made == [first, second]
    for taken in made:
        ctypes.memset(taken.address, 7, ground.SIZE_BYTES)
        taken.close()


def test_what_nobody_took_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(ground.Ground, "close", lambda self: closed.append(self.address))
    ground.prepare()
    ground.drop()
    ground.drop()
    assert len(closed) == 1


def test_memory_that_could_not_be_had_ahead_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ground.Ground

    def none() -> ground.Ground:
        raise OSError("no memory")

    monkeypatch.setattr(ground, "Ground", none)
    ground.prepare()
    ground.wait()
    monkeypatch.setattr(ground, "Ground", real)
    ground.take().close()


def test_without_threads_it_is_taken_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ground, "start_new_thread", refuse)
    ground.prepare()
    ground.take().close()
