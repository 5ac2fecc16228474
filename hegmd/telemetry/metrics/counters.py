"""The daemon's counters: additions in memory, made by the event loop alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from hegmd.protocol.messages import REQUESTS

# From the time of a request over a local socket to that of a hanging driver.
BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)

# Replaces unknown ops, so that a peer cannot create series.
OTHER = "other"


class Histogram:
    """Durations in bins."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._bins = [0] * (len(BOUNDS_S) + 1)

    @property
    def count(self) -> int:
        return sum(self._bins)

    def observe(self, duration_s: float) -> None:
        self._bins[bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    def cumulative(self) -> list[tuple[float, int]]:
        """Return, for each bound, how many durations were no longer; the last bound is infinite."""
        total = 0
        found: list[tuple[float, int]] = []
        for bound, inside in zip((*BOUNDS_S, float("inf")), self._bins, strict=True):
            total += inside
            found.append((bound, total))
        return found


class Counters:
    """Totals since the start of the daemon."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.durations: dict[str, Histogram] = {}
        self.connections = 0
        self.connections_total = 0
        self.refusals: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.bad_frames = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        self.refreshes = Histogram()
        self.vendor_failures: Counter[str] = Counter()

    def request(self, op: str, result: str, took_s: float | None) -> None:
        """Count an answered request: `result` is ok or its error code. Time is None if it means nothing."""
        op = op if op in REQUESTS else OTHER
        self.requests[op, result] += 1
        if took_s is not None:
            self.durations.setdefault(op, Histogram()).observe(took_s)

    def connected(self) -> None:
        self.connections += 1
        self.connections_total += 1

    def disconnected(self) -> None:
        self.connections -= 1

    def refused(self, code: str) -> None:
        """Count a refused peer, with the error code that it got."""
        self.refusals[code] += 1

    def dropped(self, code: str) -> None:
        """Count a connection that the daemon ended, with the error code."""
        self.drops[code] += 1

    def bad_frame(self) -> None:
        """Count a frame that is not a valid message."""
        self.bad_frames += 1

    def refreshed(self, took_s: float) -> None:
        self.refreshes.observe(took_s)

    def vendor_failed(self, vendor: str) -> None:
        """Count an error or timeout of a vendor's library."""
        self.vendor_failures[vendor] += 1
