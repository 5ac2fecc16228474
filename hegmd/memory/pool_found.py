"""The segments that an earlier daemon left in the pool: files in memory, descriptors in a store, files on disk.

Trusts only what is whole: the name gives owner and size, and the kernel has to confirm the size. Returns segments for
the pool, and a message for everything else. Deletes only what was still being created when the daemon ended.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.memory.pool_checksums import SumFolder
from hegmd.memory.pool_memory import Memory
from hegmd.memory.pool_names import PREFIX, parse_name
from hegmd.memory.pool_piece import MemoryKeeping, Piece

logger = logging.getLogger(__name__)

STORE = "a store of descriptors"


class UntrustedFile(NamedTuple):
    """Something that looks like a segment but is not one; it is left alone."""

    name: str
    where: str
    size_bytes: int
    why: str


class PoolScan(NamedTuple):
    """Everything that was found."""

    pieces: tuple[Piece, ...]
    distrusted: tuple[UntrustedFile, ...]


async def find_pieces(keep: MemoryKeeping, adopt: Callable[[str, int], bool] = lambda _name, _fd: False) -> PoolScan:
    """Search everywhere. Raises nothing: an unreadable place is reported, and the daemon serves.

    Descriptors in the store that do not belong to the pool are passed to `adopt`, which returns True if it took them.
    """
    search = _Search()
    await anyio.to_thread.run_sync(search.look_at_files, keep)
    if keep.store is not None:
        try:
            for name, fd in await keep.store.found():
                if name.startswith(PREFIX):
                    search.take(name, Memory(fd, os.fstat(fd).st_size, huge=_is_huge(fd)), STORE)
                elif not adopt(name, fd):  # of a release that holds more than memory: left where it is, for that one
                    os.close(fd)
                    search.distrust(name, STORE, 0, "this release does not know what it is")
        except HegmError as error:
            logger.error("memory held by descriptor cannot be read: %s; %s", error.message, error.hint)
    if keep.sums is not None:
        await anyio.to_thread.run_sync(search.look_at_sums, keep.sums)
    return PoolScan(tuple(search.pieces.values()), tuple(search.distrusted))


class _Search:
    def __init__(self) -> None:
        self.pieces: dict[str, Piece] = {}
        self.distrusted: list[UntrustedFile] = []

    def look_at_files(self, keep: MemoryKeeping) -> None:
        for place in keep.places:
            try:
                files = place.find()
            except OSError as error:
                self.distrust(str(place.folder), str(place.folder), 0, f"it cannot be opened: {error.strerror}")
                continue
            for file in files:
                if file.why_not:
                    self.distrust(file.name, str(place.folder), file.size_bytes, file.why_not)
                else:
                    memory = Memory(file.fd, file.size_bytes, huge=place.huge, place=place)
                    self.take(file.name, memory, str(place.folder))
        if keep.spill is not None:
            for spilled in keep.spill.find():
                name = parse_name(spilled.name)
                known = self.pieces.get(spilled.name)
                if spilled.why_not or name is None:
                    why = spilled.why_not or "its name is not one that hegmd uses"
                    self.distrust(spilled.name, str(keep.spill.folder), spilled.size_bytes, why)
                elif known is not None:
                    known.spilled = known.may_have_file = True
                else:
                    self.pieces[spilled.name] = Piece(name, spilled.size_bytes, spilled=True)

    def look_at_sums(self, sums: SumFolder) -> None:
        """Load the checksums of the found segments; forget those of others."""
        sums.drop_all_but(piece.mark for piece in self.pieces.values() if piece.memory is not None)
        for piece in self.pieces.values():
            if piece.memory is not None and piece.mark:
                piece.sums = sums.load(piece.mark)

    def take(self, text: str, memory: Memory, where: str) -> None:
        """Make a segment of the memory found under that name, or close it."""
        name = parse_name(text)
        why = ""
        if name is None:
            why = "its name is not one that hegmd uses"
        elif memory.size_bytes < name.usable_bytes:
            why = f"it has {memory.size_bytes} bytes and was made for {name.usable_bytes}"
        if why or name is None:
            self.distrust(text, where, memory.size_bytes, why)
            memory.close()
            return
        known = self.pieces.get(text)
        if known is None:
            self.pieces[text] = Piece(name, memory.size_bytes, memory)
        elif known.memory is None:
            known.memory = memory
        else:
            memory.close()

    def distrust(self, name: str, where: str, size_bytes: int, why: str) -> None:
        """Leave something alone, and record why."""
        logger.warning("%s in %s is left alone: %s", name, where, why)
        self.distrusted.append(UntrustedFile(name, where, size_bytes, why))


def _is_huge(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode) and os.fstatvfs(fd).f_bsize > 4096
