"""The names of pool segments, which tell a later daemon their owner.

One name serves for the file in memory, the descriptor in a store, and the file on disk. It has the operation, the
worker, the size, a nonce of the segment, and the process of its bytes: an operation of a lost journal may have the same
number as a later one, and a process the pid of another user's later one, and their bytes must not be confused. It ends
with the operations that had the segment before: a daemon may be killed while it adopts one. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hegmd.errors import Bug

PREFIX = "hegm-pool"
NONCE_BYTES = 4

_FORM = re.compile(
    rf"{PREFIX}-(?P<operation>[^-/]+)-(?P<worker>[^/]+)-(?P<size>\d+)(?:\.(?P<nonce>[0-9a-f]+)"
    r"(?:\.(?P<uid>\d+)\.(?P<ticks>\d+))?(?:\.from(?P<before>(?:\.[^-/.]+)+))?)?"
)
# The names of files are bounded.
_MAX_BEFORE = 8


class Key(NamedTuple):
    """The owner of a segment: one worker in one operation. Only a worker's name may contain a dash."""

    operation: str
    worker: str


class Source(NamedTuple):
    """The process of the bytes: its user, and its start in clock ticks since boot. The worker has its pid."""

    uid: int
    start_ticks: int


class PieceName(NamedTuple):
    """The name of one segment. Segments of old releases have no nonce or source."""

    key: Key
    usable_bytes: int
    nonce: str = ""
    source: Source | None = None
    #: The operations that owned the segment before, the latest first. The segment's contents may name them.
    before: tuple[str, ...] = ()

    def claimed_by(self, key: Key) -> PieceName:
        """Return its name after that owner adopts it."""
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
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    source = None if found["uid"] is None else Source(int(found["uid"]), int(found["ticks"]))
    before = () if found["before"] is None else tuple(found["before"].split(".")[1:])
    key = Key(found["operation"], found["worker"])
    return PieceName(key, int(found["size"]), found["nonce"] or "", source, before)
