"""Threads that share the work on items."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from hegmd.agent.crew import share_out
from tests.patience import HANG_S


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one processor for us")
def test_four_items_are_worth_two_threads() -> None:
    both = threading.Barrier(2)

    def work(take: Callable[[], int | None], _tell: object) -> None:
        while take() is not None:
            both.wait(HANG_S)

    share_out(work, [1, 2, 3, 4], lambda _: None, 2)
