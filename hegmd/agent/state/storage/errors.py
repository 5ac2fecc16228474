"""The two ways in which a state file can fail: what cannot be written, and what cannot be read."""

from __future__ import annotations


class NotPlain(ValueError):
    """A value that a state file has no form for; `path` is where it is in the state."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or 'the state'} {why}")
        self.path = path
        self.why = why


class Damaged(ValueError):
    """What was read is no whole state file, or one that this release cannot read. Nothing was made of it."""
