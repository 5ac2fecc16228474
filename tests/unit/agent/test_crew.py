"""Threads that share the work on items."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import pytest

from hegmd.agent.crew import share_out
from hegmd.agent.trap import NoCollection
from tests.patience import HANG_S


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one processor for us")
def test_four_items_are_worth_two_threads() -> None:
    both = threading.Barrier(2)

    def work(take: Callable[[], int | None], _tell: object) -> None:
        while take() is not None:
            both.wait(HANG_S)

    share_out(work, [1, 2, 3, 4], lambda _: None, 2)


def test_a_failed_copy_kept_what_its_caller_held_until_the_garbage_collector_ran() -> None:
    """Such as the tensors of a state that was not written: the training had no memory for its next batch."""

    class Tensor: ...

    known: list[weakref.ref[Tensor]] = []

    def copy() -> None:
        tensor = Tensor()
        known.append(weakref.ref(tensor))

        def work(_take: object, _tell: object) -> None:
            raise OSError(28, "No space left on device")

        share_out(work, [1, 2, 3, 4], lambda _: None, 2)

    with NoCollection():
        with pytest.raises(OSError, match="No space left") as raised:
            copy()
        del raised
        assert known[0]() is None
