"""What the pieces of the pool are called, so that whoever finds one knows whose it is.

One name serves for all: the file in memory, the descriptor in a store, the file on disk. It tells the operation, the
worker and the size, and ends in a nonce that is drawn for each piece: an operation of a lost journal and one of its
successor may have the same number, and the bytes of the one must not be taken for the other's. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hegmd.errors import Bug

PREFIX = "hegm-pool"
NONCE_BYTES = 4

_FORM = re.compile(rf"{PREFIX}-(?P<operation>[^-/]+)-(?P<worker>[^/]+)-(?P<size>\d+)(?:\.(?P<nonce>[0-9a-f]+))?")


@dataclass(frozen=True, slots=True)
class Key:
    """Whose a piece is: one worker in one operation. Operations have no dash in their names, workers may."""

    operation: str
    worker: str


@dataclass(frozen=True, slots=True)
class PieceName:
    """The name of one piece. Pieces of releases before there were nonces have none."""

    key: Key
    usable_bytes: int
    nonce: str = ""

    def __str__(self) -> str:
        ending = f".{self.nonce}" if self.nonce else ""
        text = f"{PREFIX}-{self.key.operation}-{self.key.worker}-{self.usable_bytes}{ending}"
        if parse_name(text) != self:
            raise Bug("a piece of the pool cannot be called that", facts={"name": text})
        return text


def parse_name(text: str) -> PieceName | None:
    """The name that this is; None when it is none."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    return PieceName(Key(found["operation"], found["worker"]), int(found["size"]), found["nonce"] or "")
