"""The limits of a restart: a Refusal before it, and DoesNotFit in the new process after it."""

from __future__ import annotations


class Refusal:
    """A reason why a restarted script would differ.

    `passes` is True if the reason holds at this moment only, and the training reaches a better one by itself.
    """

    __slots__ = ("hint", "passes", "what")

    def __init__(self, what: str, hint: str, *, passes: bool = False) -> None:
        self.what = what
        self.hint = hint
        self.passes = passes

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}"

    def __repr__(self) -> str:
        return f"Refusal({self.what!r}, {self.hint!r}, passes={self.passes})"


class IncompatibleState(Exception):
    """The state does not belong to this script as it runs here; `reasons` says all that is known. Nothing was set."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons
