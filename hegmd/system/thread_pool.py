"""Threads that share out a row of items among them; what fails in one of them ends them all.

For work that lets go of the interpreter: system calls, checksums, copies. Blocks until every thread has ended, so that
no buffer or descriptor is used by a straggler afterwards. Knows nothing of what the items are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

MAX_THREADS = 4


def threads_for(count: int) -> int:
    """How many threads so many items are worth on this machine."""
    return max(1, min(MAX_THREADS, count, len(os.sched_getaffinity(0))))


def share_out(items: Iterable[Item], start: Callable[[], Callable[[Item], None]], *, threads: int, name: str) -> None:
    """Have every item worked on, once, by whichever thread is free. Raises what failed first.

    Where the node has not so many threads, fewer do it, and without any the caller's own. `start` is called in each
    thread and returns its worker, so that each may have a buffer of its own.
    """
    left = iter(items)
    guard = threading.Lock()
    failures: list[BaseException] = []

    def live() -> None:
        try:
            work = start()
            while not failures:
                with guard:
                    try:
                        item = next(left)
                    except StopIteration:
                        return
                work(item)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            failures.append(error)

    crew: list[threading.Thread] = []
    for _ in range(threads):
        thread = threading.Thread(target=live, name=name)
        try:
            thread.start()
        except RuntimeError:  # there are no more to be had: fewer do it as well
            break
        crew.append(thread)
    if not crew:
        live()
    for thread in crew:
        thread.join()
    if failures:
        raise failures[0]
