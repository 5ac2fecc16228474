"""What the pieces of the pool are called, so that whoever finds one knows whose it is.

One name serves for all: the file in memory, the descriptor in a store, the file on disk. It tells the operation, the
worker and the size, has a nonce that is drawn for each piece, and then the process that its bytes are of: an
operation of a lost journal and one of its successor may have the same number, a process and another user's later one
the same pid, and the bytes of the one must not be taken for the other's. It ends in the operations that had it before:
whoever adopted it may be killed before it has made it its own. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hegmd.errors import Bug

PREFIX = "hegm-pool"
NONCE_BYTES = 4

_FORM = re.compile(
    rf"{PREFIX}-(?P<operation>[^-/]+)-(?P<worker>[^/]+)-(?P<size>\d+)(?:\.(?P<nonce>[0-9a-f]+)"
    r"(?:\.(?P<uid>\d+)\.(?P<ticks>\d+))?(?:\.from(?P<before>(?:\.[^-/.]+)+))?)?"
)
# The names of files are bounded.
_MAX_BEFORE = 8


@dataclass(frozen=True, slots=True)
class Key:
    """Whose a piece is: one worker in one operation. Operations have no dash in their names, workers may."""

    operation: str
    worker: str


@dataclass(frozen=True, slots=True)
class Source:
    """The process that bytes are of: its user, and its start in clock ticks since boot. Its pid is the worker's."""

    uid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class PieceName:
    """The name of one piece. Pieces of releases before there were nonces, or sources, have none."""

    key: Key
    usable_bytes: int
    nonce: str = ""
    source: Source | None = None
    #: The operations that it was claimed from, the last one first: what is in it may name them still.
    before: tuple[str, ...] = ()

    def claimed_by(self, key: Key) -> PieceName:
        """Its name from when that owner has it."""
        before = (self.key.operation, *self.before)[:_MAX_BEFORE] if self.nonce else ()
        return PieceName(key, self.usable_bytes, self.nonce, self.source, before)

    def __str__(self) -> str:
        ending = f".{self.nonce}" if self.nonce else ""
        if self.source is not None:
            ending += f".{self.source.uid}.{self.source.start_ticks}"
        if self.before:
            ending += ".".join((".from", *self.before))
        text = f"{PREFIX}-{self.key.operation}-{self.key.worker}-{self.usable_bytes}{ending}"
        if parse_name(text) != self:
            raise Bug("a piece of the pool cannot be called that", facts={"name": text})
        return text


def parse_name(text: str) -> PieceName | None:
    """The name that this is; None when it is none."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    source = None if found["uid"] is None else Source(int(found["uid"]), int(found["ticks"]))
    before = () if found["before"] is None else tuple(found["before"].split(".")[1:])
    key = Key(found["operation"], found["worker"])
    return PieceName(key, int(found["size"]), found["nonce"] or "", source, before)
