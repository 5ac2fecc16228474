"""What the pieces of the pool are called, so that whoever finds one knows whose it is.

One name serves for all: the file in memory, the descriptor in a store, the file on disk. It tells the operation, the
worker and the size, has a nonce that is drawn for each piece, and ends in the process that its bytes are of: an
operation of a lost journal and one of its successor may have the same number, a process and another user's later one
the same pid, and the bytes of the one must not be taken for the other's. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hegmd.errors import Bug

PREFIX = "hegm-pool"
NONCE_BYTES = 4

_FORM = re.compile(
    rf"{PREFIX}-(?P<operation>[^-/]+)-(?P<worker>[^/]+)-(?P<size>\d+)(?:\.(?P<nonce>[0-9a-f]+)"
    r"(?:\.(?P<uid>\d+)\.(?P<ticks>\d+))?)?"
)


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

    def __str__(self) -> str:
        ending = f".{self.nonce}" if self.nonce else ""
        if self.source is not None:
            ending += f".{self.source.uid}.{self.source.start_ticks}"
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
    return PieceName(Key(found["operation"], found["worker"]), int(found["size"]), found["nonce"] or "", source)
