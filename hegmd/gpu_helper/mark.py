"""A record at the end of a pool segment: the segment's bytes are in GPU memory now, and whose memory that is.

Defines the format of the record. The helper writes it through its mapping, because files in huge pages do not support
write(); the daemon reads it. So a daemon finds the bytes without its journal, even if that GPU memory is gone. One byte
makes the record valid: it is written last and cleared first, so a killed helper leaves a complete record or none.
"""

from __future__ import annotations

from typing import NamedTuple

from hegmd.errors import UNAVAILABLE, HegmError

#: The last bytes of the segment, behind all tensor data.
MARK_BYTES = 512
_MAGIC = b"\x01HEGMNEAR"


class Mark(NamedTuple):
    """The owner of the GPU memory that has the bytes, and their number."""

    owner: str
    size_bytes: int


def pack_mark(mark: Mark) -> bytes:
    """Return the record's bytes."""
    return (_MAGIC + f"{mark.size_bytes} {mark.owner}".encode()).ljust(MARK_BYTES, b"\0")


def read_mark(raw: bytes) -> Mark | None:
    """Return the record in those bytes; None if there is none. Raises HegmError if it is not valid."""
    if not raw.startswith(_MAGIC):
        return None
    size_text, _, owner = raw[len(_MAGIC) :].rstrip(b"\0").decode("utf-8", "replace").partition(" ")
    if not size_text.isdigit() or not owner:
        raise HegmError(
            UNAVAILABLE,
            f"a pool segment says that its bytes are elsewhere, but not where: {raw[:80]!r}",
            "report this with the log of hegmd; the segment was not changed",
        )
    return Mark(owner, int(size_text))
