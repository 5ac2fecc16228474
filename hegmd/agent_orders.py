"""Orders to one agent over one connection: numbered, awaited, and ended with the connection.

Owns what is under way on a connection and the two ways in which an order fails: the agent says so, or is not there to
say anything. Which connection counts, and what a report says of the worker, is `workers`' business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from hegmd.errors import DISCONNECTED, REFUSED, HegmError
from hegmd.protocol.messages import AgentReport, Order

DONE, FAILED, PROGRESS = "done", "failed", "progress"

Send = Callable[[Order, Sequence[int]], Awaitable[None]]
Progress = Callable[[int], object]


class AgentAway(HegmError):
    """The agent's connection ended, or there is none: whether an order under way was obeyed is not known."""

    def __init__(self, pid: int, what: str) -> None:
        super().__init__(
            DISCONNECTED,
            f"the agent in process {pid} is not connected: {what}",
            "it connects again by itself; see `hegmctl ps`, and the job's own output if it does not",
            {"pid": pid},
        )


class OrderFailed(HegmError):
    """The agent could not do what it was told, and says why."""

    def __init__(self, pid: int, do: str, report: AgentReport) -> None:
        why = report.message or "the agent gave no reason"
        super().__init__(
            REFUSED, f"{do} in process {pid}: {why}", report.hint or "look at what the job is doing", {"pid": pid}
        )
        #: For how many bytes its GPU has no room; None if it failed for another reason.
        self.lacks_bytes = report.lacks_bytes


class Given:
    """An order that was given. `report` waits for what becomes of it."""

    def __init__(self, pid: int, do: str, on_progress: Progress | None) -> None:
        self.do = do
        self._pid = pid
        self._on_progress = on_progress
        self.over = anyio.Event()
        self._report: AgentReport | None = None

    async def report(self) -> AgentReport:
        """What was reported. Raises OrderFailed, or AgentAway when the connection ended before."""
        await self.over.wait()
        if self._report is None:
            raise AgentAway(self._pid, f"it left while it was told to {self.do}")
        if self._report.result != DONE:
            raise OrderFailed(self._pid, self.do, self._report)
        return self._report

    def take(self, report: AgentReport) -> bool:
        """Take a report; whether it was the last one."""
        if report.result == PROGRESS:
            if self._on_progress is not None and report.size_bytes is not None:
                self._on_progress(report.size_bytes)
            return False
        self._report = report
        self.over.set()
        return True

    def end(self) -> None:
        """There will be no report."""
        self.over.set()


class Link:
    """One connection of an agent: numbers its orders and knows those that are not answered."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.replaced = anyio.Event()
        self.given: dict[int, Given] = {}
        self._last = 0

    def enter(self, given: Given) -> int:
        self._last += 1
        self.given[self._last] = given
        return self._last

    def give_up(self, do: str) -> None:
        """Expect no answer any more to orders of that kind; one that comes all the same changes nothing."""
        for number in [number for number, given in self.given.items() if given.do == do]:
            self.given.pop(number).end()

    def end(self) -> None:
        for given in self.given.values():
            given.end()
        self.given.clear()
