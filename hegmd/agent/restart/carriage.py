"""Raw bytes between memory and a state file: each by the quickest way that its device has."""

from __future__ import annotations

from .. import copying
from . import sums
from .arrays import CPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .arrays import Raw


def copy_pieces_out(
    fd: int,
    room_bytes: int,
    raws: list[Raw],
    places: list[int],
    found: dict[int, int],
    progress: Callable[[int], None],
) -> None:
    """Copy them to their places, and put the checksum of each part under its place. Raises OSError."""
    here: list[Raw] = [raw if raw[3] == CPU else _fetched(raw) for raw in raws]
    with copying.Writing(fd, room_bytes) as write:
        spans = [(address, place, size_bytes) for (_owner, address, size_bytes, _where), place in zip(here, places)]
        copying.in_threads(sums.summing(write, found), spans, progress)


def _fetched(raw: Raw) -> Raw:
    """The same bytes in the memory of this process, by torch."""
    tensor, address, size_bytes, _where = raw
    storage = tensor.untyped_storage()
    first = address - storage.data_ptr()
    copy = storage.cpu()
    return copy, copy.data_ptr() + first, size_bytes, CPU
