"""Events of this node: a bounded memory, and any number of readers.

Owns the numbers of events and the ring that stores them. Belongs to the event loop. `record` never waits, so readers
never delay a reporter.

A reader is a position in the ring, not a queue. So a thousand readers cost one wake-up for each event, and a slow one
builds no backlog: if the ring has overwritten its position, it gets one `events.missed` with the number of lost events,
and continues with the oldest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from hegmd.errors import BAD_REQUEST, Bug, HegmError
from hegmd.protocol.snapshots import EVENT_KINDS, Event

if TYPE_CHECKING:
    from typing_extensions import Self

MISSED = "events.missed"
SEVERITIES = ("info", "warning", "error")
FIRST_SEQ = 1


def require_kinds(kinds: Iterable[str]) -> None:
    """Check that these kinds of events exist. Raises BAD_REQUEST that lists the existing ones."""
    for kind in kinds:
        family, dot, _ = kind.partition(".")
        known = EVENT_KINDS.get(family)
        if known is None or (dot and kind not in known):
            there_are = EVENT_KINDS if known is None else known
            hint = f"there are {', '.join(there_are)}"
            raise HegmError(BAD_REQUEST, f"there is no kind of event {kind[:40]!r}", hint, {"kind": kind[:40]})


class EventLog:
    """The node's events, numbered from 1 in the order of recording."""

    def __init__(self, capacity: int = 1000, *, clock: Callable[[], float] = time.time) -> None:
        # An event's index follows from its number. Not a deque, whose middle is slow to reach.
        self._ring: list[Event] = []
        self._capacity = capacity
        self._clock = clock
        self._more = anyio.Event()
        self._waiting = 0
        self.next_seq = FIRST_SEQ
        #: Identifies the numbers of this start of the daemon.
        self.run = os.urandom(8).hex()
        #: Number of events of each kind since the start, forgotten ones included.
        self.counts: dict[str, int] = {}

    @property
    def oldest_seq(self) -> int:
        """Return the number of the oldest stored event; `next_seq` if there is none."""
        return self.next_seq - len(self._ring)

    def record(
        self,
        kind: str,
        severity: str,
        message: str,
        *,
        gpu: str | None = None,
        pid: int | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> Event:
        """Store an event of this moment and wake the readers. `facts` are plain values."""
        if severity not in SEVERITIES:
            raise Bug("an event was recorded with an unknown severity", facts={"kind": kind, "severity": severity})
        event = Event(
            seq=self.next_seq,
            time_utc=self._clock(),
            kind=kind,
            severity=severity,
            message=message,
            gpu=gpu,
            pid=pid,
            facts=dict(facts or {}),
        )
        if len(self._ring) < self._capacity:
            self._ring.append(event)
        else:
            self._ring[self._place(event.seq)] = event
        self.next_seq += 1
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self._waiting:
            self._more.set()
            self._more = anyio.Event()
        return event

    def remembered(self, since: int = 0, kinds: Sequence[str] = (), run: str | None = None) -> tuple[Event, ...]:
        """Return the stored events from number `since` on, of these kinds (all if empty).

        If earlier events that the caller wants are forgotten, or `run` is another start, an `events.missed` comes
        first.
        """
        reader = Subscription(self, since, kinds, run)
        found: list[Event] = []
        while (event := reader.next_nowait()) is not None:
            found.append(event)
        return tuple(found)

    def subscribe(self, since: int = 0, kinds: Sequence[str] = (), run: str | None = None) -> Subscription:
        """Follow the events from number `since` on: stored ones first, then each new one.

        `since` 0 starts with everything stored; `since=log.next_seq` only with new events.
        """
        return Subscription(self, since, kinds, run)

    async def wait_beyond(self, seq: int) -> None:
        """Wait until the event of that number is recorded."""
        while seq >= self.next_seq:
            self._waiting += 1
            try:
                await self._more.wait()
            finally:
                self._waiting -= 1

    def from_seq(self, seq: int) -> Event | None:
        """Return the event of that number; None if it is not yet recorded or forgotten."""
        return self._ring[self._place(seq)] if self.oldest_seq <= seq < self.next_seq else None

    def _place(self, seq: int) -> int:
        return (seq - FIRST_SEQ) % self._capacity

    def missed(self, count: int | None, message: str) -> Event:
        """Return the event that replaces lost ones. It has the number before the oldest stored event."""
        return Event(
            seq=self.oldest_seq - 1,
            time_utc=self._clock(),
            kind=MISSED,
            severity="warning",
            message=message,
            facts={"count": count, "next_seq": self.oldest_seq},
        )


class Subscription:
    """A reader's position. An asynchronous iterator that ends with its `async with` block.

    Cancelling a wait loses nothing: the position moves only when an event is returned.
    """

    def __init__(self, log: EventLog, since: int, kinds: Sequence[str], run: str | None = None) -> None:
        self._log = log
        self._kinds = frozenset(kinds)
        self._closed = False
        # Numbers start again with the daemon: a number of an earlier start is not valid.
        self._lost_place = since > log.next_seq or (since > 0 and run not in (None, "", log.run))
        self._next = log.oldest_seq if since <= 0 or self._lost_place else since

    @property
    def next_seq(self) -> int:
        """Return the `since` with which a later subscription continues without a gap."""
        return self._next

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._closed:
            event = self.next_nowait()
            if event is not None:
                return event
            await self._log.wait_beyond(self._next)
        raise StopAsyncIteration

    def next_nowait(self) -> Event | None:
        if self._lost_place:
            self._lost_place = False
            text = "hegmd was restarted and numbers its events from 1 again; all events that it has follow"
            return self._log.missed(None, text)
        oldest = self._log.oldest_seq
        if self._next < oldest:
            count = oldest - self._next
            self._next = oldest
            return self._log.missed(count, f"{count} events are no longer remembered")
        while (event := self._log.from_seq(self._next)) is not None:
            self._next += 1
            if self._wanted(event.kind):
                return event
        return None

    def _wanted(self, kind: str) -> bool:
        """Return True if the kind or its family was requested."""
        while self._kinds and kind not in self._kinds:
            kind, dot, _ = kind.rpartition(".")
            if not dot:
                return False
        return True
