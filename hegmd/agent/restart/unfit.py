"""What a restart cannot do: said beforehand as refusals, and afterwards, in the new process, as DoesNotFit."""

from __future__ import annotations


class Refusal:
    """Something that a restarted script would not have as it was.

    Where `stops` is set the training would not go on as it would have, so that there is to be no restart; without it
    the training goes on exactly and something beside it, such as a printed number, begins anew.
    """

    __slots__ = ("hint", "stops", "what")

    def __init__(self, what: str, hint: str, *, stops: bool = True) -> None:
        self.what = what
        self.hint = hint
        self.stops = stops

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}"

    def __repr__(self) -> str:
        return f"Refusal({self.what!r}, {self.hint!r}, stops={self.stops})"


class DoesNotFit(Exception):
    """The state does not belong to this script as it runs here; `reasons` says all that is known. Nothing was set."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons
