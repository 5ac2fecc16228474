"""Whether a GPU can run jobs: healthy, failing or gone, from the notes about it. For every vendor. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hegmd.protocol.snapshots import FAILING, GONE, Health

# How grave a note is: a job's own mistake is noted only.
OK, NOTED, WARN, FAILED = range(4)
# A GPU with at least this many new corrected errors in this time is failing. The counter is read at this interval.
MANY_CORRECTED, WITHIN_S, EVERY_S = 100, 3600.0, 300.0


class GpuProblem(NamedTuple):
    """A problem of a GPU. With a cause it makes the GPU failing or gone."""

    weight: int
    words: str
    cause: str | None = None
    condition: str = FAILING


def conditioned(notes: Sequence[GpuProblem]) -> Health:
    """Return a record with the notes in this order, and the condition that follows from them."""
    words = tuple(note.words for note in notes)
    grave = [(note.cause, note) for note in notes if note.cause is not None]
    grave.sort(key=lambda one: one[1].condition != GONE)
    if not grave:
        return Health(state="ok", notes=words)
    worst, causes = grave[0][1], tuple(dict.fromkeys(cause for cause, _ in grave))
    return Health(state="ok", notes=words, condition=worst.condition, causes=causes, reason=worst.words)


def corrected_note(risen: int) -> str:
    """Return the note about that many new corrected errors."""
    return f"{risen} corrected memory errors within an hour: the memory is wearing out"


class CorrectedErrors:
    """The counter of corrected errors of one GPU over the last hour."""

    def __init__(self) -> None:
        self._counts: list[tuple[float, int]] = []
        self._newest = 0

    def see(self, count: int | None, now_utc: float) -> int:
        """Take the counter at that moment. Return by how much it has risen within the hour, if that is much, or 0."""
        if count is None:
            return 0
        if count < self._newest:  # the GPU was reset, or its driver loaded again
            self._counts.clear()
        self._newest = count
        self._counts = [(at, before) for at, before in self._counts if 0 <= now_utc - at <= WITHIN_S]
        if not self._counts or now_utc - self._counts[-1][0] >= EVERY_S:
            self._counts.append((now_utc, count))
        risen = count - self._counts[0][1]
        return risen if risen >= MANY_CORRECTED else 0
