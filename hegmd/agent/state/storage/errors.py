"""The two ways in which a state file can fail: what cannot be written, and what cannot be read."""

from __future__ import annotations


class UnsupportedValue(ValueError):
    """A value has no form in a state file; `path` is its place in the state."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or 'the state'} {why}")
        self.path = path
        self.why = why


class DamagedStateFile(ValueError):
    """The file is not a complete state file, or this release cannot read it. Nothing was created from it."""
