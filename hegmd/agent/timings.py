"""What the parts of an order took, for which a job stands: told in its report, and logged by the daemon; no more."""

from __future__ import annotations

from time import monotonic


class Laps:
    """Counts from when it is made; each lap from the one before."""

    __slots__ = ("_last", "spent_ms")

    def __init__(self) -> None:
        self.spent_ms: dict[str, float] = {}
        self._last = monotonic()

    def end(self, name: str) -> None:
        """That is over; once more under the same name is added to it."""
        now = monotonic()
        self.spent_ms[name] = round(self.spent_ms.get(name, 0.0) + (now - self._last) * 1e3, 3)
        self._last = now
