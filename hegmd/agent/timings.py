"""How long the parts of an order took while the job was parked, for its report and the daemon's log."""

from __future__ import annotations

from time import monotonic


class Laps:
    """Starts when it is created; each lap starts at the end of the one before."""

    __slots__ = ("_last", "spent_ms")

    def __init__(self) -> None:
        self.spent_ms: dict[str, float] = {}
        self._last = monotonic()

    def end(self, name: str) -> None:
        """End a lap; a repeated name adds to it."""
        now = monotonic()
        self.spent_ms[name] = round(self.spent_ms.get(name, 0.0) + (now - self._last) * 1e3, 3)
        self._last = now
