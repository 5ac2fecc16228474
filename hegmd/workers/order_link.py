"""One connection over which orders go out and reports come back: numbered, awaited, and ended with the connection.

Owns what is under way on it, and nothing of what orders mean: agents and supervisors each have a link of their own kind
that says when one gives way, or which counts as the last start. An end of the connection ends every wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import anyio

ReportT = TypeVar("ReportT")
GivenT = TypeVar("GivenT", bound="Awaited[Any]")
SaidT = TypeVar("SaidT")


class Awaited(Generic[ReportT]):
    """An order that was given. `over` is set once its report has come, or once it is known that none will."""

    def __init__(self, do: str) -> None:
        self.do = do
        self.over = anyio.Event()
        #: What became of it; None before that, and for good where the connection ended.
        self.reported: ReportT | None = None

    def conclude(self, report: ReportT) -> None:
        """Take its last report."""
        self.reported = report
        self.over.set()

    def end(self) -> None:
        """There will be no report."""
        self.over.set()


class OrderLink(Generic[SaidT, GivenT]):
    """One connection: numbers its orders and knows those that are not answered."""

    def __init__(self, send: Callable[[SaidT, Sequence[int]], Awaitable[None]]) -> None:
        self.send = send
        #: Set once another connection has taken its place.
        self.replaced = anyio.Event()
        self.given: dict[int, GivenT] = {}
        self._last = 0

    def number(self) -> int:
        """The next number, for an order that nobody waits for."""
        self._last += 1
        return self._last

    def enter(self, given: GivenT) -> int:
        """The number of an order that is waited for."""
        number = self.number()
        self.given[number] = given
        return number

    def end(self) -> None:
        """The connection is over, and with it every wait."""
        for given in self.given.values():
            given.end()
        self.given.clear()
