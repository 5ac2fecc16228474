"""Threads that work through a list of items. A failure in one ends all.

For work that releases the interpreter lock: system calls, checksums, copies. Blocks until every thread has ended, so
that none uses a buffer or descriptor later.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

MAX_THREADS = 4


def threads_for(count: int) -> int:
    """Return how many threads are useful for that many items on this machine."""
    return max(1, min(MAX_THREADS, count, len(os.sched_getaffinity(0))))


def share_out(items: Iterable[Item], start: Callable[[], Callable[[Item], None]], *, threads: int, name: str) -> None:
    """Work on every item once, in whichever thread is free. Raises the first error.

    If the node cannot start as many threads, fewer are used, at worst the caller's alone. Each thread calls `start` for
    its worker, so that each may have its own buffer.
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
        except RuntimeError:  # no more threads: fewer are enough
            break
        crew.append(thread)
    if not crew:
        live()
    for thread in crew:
        thread.join()
    if failures:
        raise failures[0]
