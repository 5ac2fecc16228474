"""The history that the policy uses: since when a job runs or waits, the length of its turn, the cost of a switch.

Also after which failures it is left alone for how long. Lives in memory: a new daemon starts over, so a job gets a
whole turn after it. Owns these figures; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# How long a job or lease is left alone after its first failure, doubled with each further one, up to the last figure.
FIRST_RETRY_S, MAX_RETRY_S = 5.0, 300.0
# The assumed cost of a suspension and a resumption before any was measured.
UNKNOWN_SWITCH_S = 1.0


@dataclass(slots=True, eq=False, repr=False)
class JobPast:
    state: str = ""
    since_s: float = 0.0
    turn_s: float = 0.0
    suspend_s: float | None = None
    resume_s: float | None = None
    failures: int = 0
    retry_at_s: float | None = None
    #: The message of the last failure.
    failure: str = ""
    #: The memory that the job held on each GPU when it ran last.
    held_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    #: The memory that it left on each GPU when it was last suspended with its contexts kept.
    kept_bytes: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def switch_s(self) -> float | None:
        """Return the measured cost of one suspension and one resumption; None before both were measured."""
        return None if self.suspend_s is None or self.resume_s is None else self.suspend_s + self.resume_s


class History:
    """The past of all jobs and leases, by id."""

    def __init__(self) -> None:
        self._pasts: dict[str, JobPast] = {}

    def of(self, subject: str) -> JobPast:
        return self._pasts.setdefault(subject, JobPast())

    def note_state(self, subject: str, state: str, now: float, since_s: float | None = None) -> JobPast:
        """Note what it does now; `since_s` is when it began to do so, if that is known."""
        past = self.of(subject)
        if past.state != state:
            past.state, past.since_s = state, now if since_s is None else min(now, since_s)
        return past

    def note_failure(self, subject: str, message: str, now: float) -> float:
        """Note that an action failed; when it is tried again at the earliest."""
        past = self.of(subject)
        past.failure = message
        past.failures += 1
        past.retry_at_s = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** (past.failures - 1))
        return past.retry_at_s

    def note_success(self, subject: str) -> None:
        """Note that an action succeeded: failures before it no longer count."""
        past = self.of(subject)
        past.failures, past.retry_at_s, past.failure = 0, None, ""

    def keep_only(self, subjects: set[str]) -> None:
        """Forget all others."""
        for subject in self._pasts.keys() - subjects:
            del self._pasts[subject]
