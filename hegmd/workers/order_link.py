"""One connection that carries orders and their reports: numbered, awaited, and ended with the connection.

Knows what is in flight, not what orders mean: agents and supervisors each have a subclass. The end of the connection
ends every wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import anyio

ReportT = TypeVar("ReportT")
GivenT = TypeVar("GivenT", bound="PendingOrder[Any]")
SaidT = TypeVar("SaidT")


class PendingOrder(Generic[ReportT]):
    """An order that was sent. `over` is set when its report arrived, or when no report can arrive."""

    def __init__(self, do: str) -> None:
        self.do = do
        self.over = anyio.Event()
        #: The result; None before it arrives, and if the connection ended.
        self.reported: ReportT | None = None

    def conclude(self, report: ReportT) -> None:
        """Take its last report."""
        self.reported = report
        self.over.set()

    def end(self) -> None:
        self.over.set()


class OrderLink(Generic[SaidT, GivenT]):
    """A connection: numbers its orders and keeps those without an answer."""

    def __init__(self, send: Callable[[SaidT, Sequence[int]], Awaitable[None]]) -> None:
        self.send = send
        #: Set when another connection replaces it.
        self.replaced = anyio.Event()
        self.order: dict[int, GivenT] = {}
        self._last = 0

    def number(self) -> int:
        """Return the next number, for an order without an answer."""
        self._last += 1
        return self._last

    def enter(self, order: GivenT) -> int:
        """Return the number of an order that is awaited."""
        number = self.number()
        self.order[number] = order
        return number

    def end(self) -> None:
        """End the connection and all waits."""
        for order in self.order.values():
            order.end()
        self.order.clear()
