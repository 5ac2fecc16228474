"""A step of the communicators: a library call that may hang, in a thread of its own, with a limit.

The agent's thread moves bytes meanwhile. A call that does not return in time is abandoned; no other step may begin
before it has ended.
"""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread
from time import monotonic

from ..errors import HegmError
from .refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..protocol.agents import Communicators

LIMIT_S = 60.0
# How much of a limit the agreements of a step have, and how much longer its report may take: the daemon waits a second.
_OF_LIMIT, _BEYOND_S = 0.9, 0.5
HINT_AGAIN = "nothing was changed; ask again at a later boundary"


def no_news() -> None:
    """Do nothing: the caller waits for the result."""


class Step:
    """A call in a thread of its own; the caller waits no longer than its limit."""

    def __init__(self, limit_s: float | None, on_end: Callable[[], object]) -> None:
        self._limit_s = LIMIT_S if limit_s is None else limit_s
        self._on_end = on_end
        self._running = allocate_lock()
        self._result: Any = None
        self._failures: list[BaseException] = []
        self.deadline = monotonic() + self._limit_s * _OF_LIMIT
        #: When it is abandoned, if it has not ended.
        self.is_due = monotonic() + self._limit_s + _BEYOND_S
        self.is_abandoned = False

    @classmethod
    def ended(cls, result: Communicators | None) -> Step:
        """Return a step with nothing to do."""
        step = cls(None, no_news)
        step._result = result
        return step

    def start(self, call: Callable[[], Communicators | None]) -> Step:
        """Run the call, and `on_end` in the same thread once it has returned."""
        self._running.acquire()

        def live() -> None:
            try:
                self._result = call()
            except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits for this one
                if not self.is_abandoned:
                    self._failures.append(error)
            self._running.release()
            self._on_end()

        try:
            start_new_thread(live, ())
        except RuntimeError as error:
            self._running.release()
            raise refusal(f"no thread can be started for its communicators: {error}", HINT_AGAIN) from error
        return self

    @property
    def has_ended(self) -> bool:
        return not self._running.locked()

    @property
    def is_over(self) -> bool:
        """True once `result` waits for nothing."""
        return self.has_ended or monotonic() >= self.is_due

    def result(self) -> Communicators | None:
        """Wait for the call, until its limit at most. Raises its error, the first time, or HegmError at the limit."""
        if not self._running.acquire(timeout=max(0.0, self.is_due - monotonic())):
            self.is_abandoned = True
            raise refusal(
                f"its communicators still wait in a library call after {self._limit_s:g} s",
                "check that every rank is running: hegmctl ps",
            )
        self._running.release()
        if self._failures and isinstance(self._failures[0], HegmError):
            raise self._failures.pop()
        if self._failures:
            raise refusal(f"its communicators could not be handled: {self._failures.pop()!r}", HINT_AGAIN)
        result: Communicators | None = self._result
        return result

    def require_time(self) -> None:
        """Raise HegmError once the order was answered: the daemon does not expect further changes."""
        if self.is_abandoned:
            raise refusal("the limit passed before its communicators were handled", HINT_AGAIN)
