"""A record at the end of a pool segment: GPU memory of a named owner has its bytes.

Owns the form of the record. The helper writes it through its mapping, because files in huge pages cannot be written
otherwise; the daemon reads it. So a daemon finds the bytes without its journal, also if that GPU memory is gone. One
byte makes the record valid: it is written last and cleared first, so a killed helper leaves a whole record or none.
"""

from __future__ import annotations

from typing import NamedTuple

from hegmd.errors import UNAVAILABLE, HegmError

#: The last bytes of the segment, where no storage is.
MARK_BYTES = 512
_MAGIC = b"\x01HEGMNEAR"


class Mark(NamedTuple):
    """The owner of the GPU memory that has the bytes, and how far they reach in it."""

    owner: str
    size_bytes: int


def packed_mark(mark: Mark) -> bytes:
    """Return the record's bytes."""
    return (_MAGIC + f"{mark.size_bytes} {mark.owner}".encode()).ljust(MARK_BYTES, b"\0")


def read_mark(found: bytes) -> Mark | None:
    """Return the record in those bytes; None if there is none. Raises HegmError if it is not valid."""
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
