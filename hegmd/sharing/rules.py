"""The settings of sharing, and checks of the priorities that callers request.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hegmd.errors import BAD_REQUEST, DENIED, HegmError
from hegmd.protocol.names import closest
from hegmd.protocol.sharing import MAX_PRIORITY, MIN_PRIORITY, PRODUCTION
from hegmd.sharing import model

# How a job is taken off its GPU: the values of the setting sharing.method.
AUTO, KEEP_CONTEXT, WHOLE = "auto", "keep-context", "whole"


class SharingRules(NamedTuple):
    """The settings. `priorities` maps each name to its number."""

    priorities: Mapping[str, int]
    max_user_priority: int
    max_lease_s: float
    #: Whether jobs of one user may be suspended for a job of another user who is not an administrator.
    suspends_others: bool
    method: str
    policy: model.Rules

    @property
    def preemptible_below(self) -> int:
        """Return the lowest priority whose jobs are never suspended for others."""
        return self.priorities[PRODUCTION]

    def priority(self, priority_text: int | str, *, is_admin: bool) -> int:
        """Return the number of a priority that a caller names.

        Raises BAD_REQUEST, and DENIED above the caller's limit.
        """
        number = self._number(priority_text)
        if not is_admin and number > self.max_user_priority:
            raise HegmError(
                DENIED,
                f"priority {priority_text} is above {self.max_user_priority}, the highest that users may set",
                "choose a lower one, or ask an administrator of hegmd; the limit is sharing.max_user_priority",
                {"priority": number, "limit": self.max_user_priority},
            )
        return number

    def lease_priority(self, priority_text: int | str | None, *, is_admin: bool) -> int:
        """Return the priority of a lease; by default production, or the highest that its user may use."""
        if priority_text is not None:
            return self.priority(priority_text, is_admin=is_admin)
        production = self.priorities[PRODUCTION]
        return production if is_admin else min(production, self.max_user_priority)

    def _number(self, priority_text: int | str) -> int:
        names = ", ".join(f"{name} ({number})" for name, number in self.priorities.items())
        if isinstance(priority_text, str) and priority_text in self.priorities:
            return self.priorities[priority_text]
        if isinstance(priority_text, str) and not (
            priority_text.isascii() and priority_text.isdigit() and len(priority_text) < 10
        ):
            close = closest(priority_text, self.priorities)
            hint = f"did you mean {close}? " if close else ""
            message = f"there is no priority {priority_text[:40]!r}"
            raise HegmError(BAD_REQUEST, message, f"{hint}write 0 to 100, or one of {names}")
        number = int(priority_text)
        if not MIN_PRIORITY <= number <= MAX_PRIORITY:
            raise HegmError(BAD_REQUEST, f"{number} is not a priority", f"write 0 to 100, or one of {names}")
        return number
