"""Threads that work through a list of items. A failure in one ends all.

For work that releases the interpreter lock, such as calls by ctypes. Uses `_thread` only, because the job decides when
`threading` is imported.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Item = TypeVar("Item")
    Tell = Callable[[int], None]
    #: The work of each thread, done once: it takes items until none are left, and reports how many bytes it has done.
    Work = Callable[[Callable[[], "Item | None"], Tell], None]

_PROGRESS_EVERY_S = 0.2


class EarlyWork:
    """Work that a thread does before its result is needed. The thread holds `lock` until it has finished."""

    def __init__(self, work: Callable[[], Any], failed: str) -> None:
        """`failed` is the note if the work raises: then there is no result."""
        self._work = work
        self._failed = failed
        self.result: Any = None
        self.lock = allocate_lock()
        self.lock.acquire()

    def start(self) -> bool:
        """Start the thread. Returns False if the node has no more threads."""
        try:
            start_new_thread(self.live, ())
        except RuntimeError:
            return False
        return True

    def live(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:  # noqa: BLE001 - the code that needs the result tries again, and reports the reason
            note(f"{self._failed}: {error!r}")
        finally:
            self.lock.release()

    def wait(self) -> None:
        with self.lock:
            pass


class _Crew:
    def __init__(self, work: Work[Any], items: list[Any]) -> None:
        self._work = work
        self._left = iter(items)
        self._lock = allocate_lock()
        self._at_work = 0
        self.done_bytes = 0
        self.ended = allocate_lock()
        self.failures: list[BaseException] = []

    def start(self, threads: int) -> None:
        """Start that many threads, or as many as the node has; without any, do all of the work here."""
        self.ended.acquire()
        self._at_work = 1  # this one, until all are started
        started = 0
        while started < threads and self._start_one():
            started += 1
        if not started:
            self._do()
        self._leave()

    def _start_one(self) -> bool:
        with self._lock:
            self._at_work += 1
        try:
            start_new_thread(self._live, ())
        except RuntimeError:
            self._leave()
            return False
        return True

    def _live(self) -> None:
        self._do()
        self._leave()

    def _do(self) -> None:
        try:
            self._work(self._take, self._tell)
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits for this one
            self.failures.append(error)

    def _take(self) -> Any:
        with self._lock:
            return None if self.failures else next(self._left, None)

    def taken_failure(self) -> BaseException:
        """Return the first failure and forget all: their tracebacks refer to frames that refer to this object."""
        first = self.failures[0]
        self.failures = []
        return first

    def _tell(self, done_bytes: int) -> None:
        with self._lock:
            self.done_bytes += done_bytes

    def _leave(self) -> None:
        with self._lock:
            self._at_work -= 1
            if self._at_work == 0:
                self.ended.release()


def share_out(work: Work[Item], items: list[Item], progress: Tell, most: int) -> None:
    """Process the items in as many threads as are useful. Raises the first error, once all threads have ended."""
    crew = _Crew(work, items)
    crew.start(max(1, min(most, len(os.sched_getaffinity(0)), len(items) // 2)))
    while not crew.ended.acquire(timeout=_PROGRESS_EVERY_S):
        try:
            progress(crew.done_bytes)
        except BaseException as error:  # noqa: BLE001 - raised below
            crew.failures.append(error)
    if crew.failures:
        raise crew.taken_failure()
