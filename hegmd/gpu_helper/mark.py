"""A mark at the end of a piece of the pool, which says that its bytes are elsewhere: in video memory, and whose.

Owns its form. The helper writes it through its mapping, since files in huge pages cannot be written to otherwise; the
daemon reads it. So what a daemon finds tells by itself where the bytes are, also where the journal knows nothing of it,
and the video memory that had them is gone. One byte makes it valid and is the last to be written and the first to go:
a helper that is killed in between leaves a mark or none.
"""

from __future__ import annotations

from typing import NamedTuple

from hegmd.errors import UNAVAILABLE, HegmError

__all__ = ["MARK_BYTES", "Mark", "packed_mark", "read_mark"]

#: At the very end of the piece, where no storage ever is.
MARK_BYTES = 512
_MAGIC = b"\x01HEGMNEAR"


class Mark(NamedTuple):
    """Under whose name video memory has the bytes, and how far they reach in it."""

    owner: str
    size_bytes: int


def packed_mark(mark: Mark) -> bytes:
    """As it lies in the piece."""
    return (_MAGIC + f"{mark.size_bytes} {mark.owner}".encode()).ljust(MARK_BYTES, b"\0")


def read_mark(found: bytes) -> Mark | None:
    """The mark in those bytes; None where there is none. Raises HegmError for one that cannot be made out."""
    if not found.startswith(_MAGIC):
        return None
    size_text, _, owner = found[len(_MAGIC) :].rstrip(b"\0").decode("utf-8", "replace").partition(" ")
    if not size_text.isdigit() or not owner:
        raise HegmError(
            UNAVAILABLE,
            f"a pool segment says that its bytes are elsewhere, but not where: {found[:80]!r}",
            "report this with the log of hegmd; the segment was not changed",
        )
    return Mark(owner, int(size_text))
