"""What an earlier run of the daemon left of the pool: files in memory, descriptors in a store, files on disk.

Looks at everything and believes only what is whole: the name says whose it is and how large, and the kernel says
whether that is so. Gives pieces for the pool, and for what cannot be one a line for people. Deletes nothing but what
was still being made when the daemon ended, which nobody has ever had.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.memory.pool_checksums import SumFolder
from hegmd.memory.pool_memory import Memory
from hegmd.memory.pool_names import PREFIX, parse_name
from hegmd.memory.pool_piece import MemoryKeeping, Piece

logger = logging.getLogger(__name__)

STORE = "a store of descriptors"


@dataclass(frozen=True, slots=True)
class Distrusted:
    """Something that looks like a piece and is none: left where it is."""

    name: str
    where: str
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was found."""

    pieces: tuple[Piece, ...]
    distrusted: tuple[Distrusted, ...]


async def find_pieces(keep: MemoryKeeping, adopt: Callable[[str, int], bool] = lambda _name, _fd: False) -> Findings:
    """Look everywhere. Raises nothing: a place that cannot be looked into is told of, and the daemon serves.

    What is in the store and is not the pool's is offered to `adopt`, which tells whether it has taken it.
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
            logger.error("what is held by descriptor cannot be had: %s; %s", error.message, error.hint)
    if keep.sums is not None:
        await anyio.to_thread.run_sync(search.look_at_sums, keep.sums)
    return Findings(tuple(search.pieces.values()), tuple(search.distrusted))


class _Search:
    def __init__(self) -> None:
        self.pieces: dict[str, Piece] = {}
        self.distrusted: list[Distrusted] = []

    def look_at_files(self, keep: MemoryKeeping) -> None:
        for place in keep.places:
            try:
                files = place.find()
            except OSError as error:
                self.distrust(str(place.folder), str(place.folder), 0, f"it cannot be looked into: {error.strerror}")
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
                    why = spilled.why_not or "its name is none of ours"
                    self.distrust(spilled.name, str(keep.spill.folder), spilled.size_bytes, why)
                elif known is not None:
                    known.spilled = known.may_have_file = True
                else:
                    self.pieces[spilled.name] = Piece(name, spilled.size_bytes, spilled=True)

    def look_at_sums(self, sums: SumFolder) -> None:
        """What is known of the pieces that were found; what is known of others is of no use any more."""
        sums.drop_all_but(piece.mark for piece in self.pieces.values() if piece.memory is not None)
        for piece in self.pieces.values():
            if piece.memory is not None and piece.mark:
                piece.sums = sums.load(piece.mark)

    def take(self, text: str, memory: Memory, where: str) -> None:
        """Make a piece of what was found under that name, or close it."""
        name = parse_name(text)
        why = ""
        if name is None:
            why = "its name is none of ours"
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
        """Leave something where it is, and say why."""
        logger.warning("%s in %s is left alone: %s", name, where, why)
        self.distrusted.append(Distrusted(name, where, size_bytes, why))


def _is_huge(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode) and os.fstatvfs(fd).f_bsize > 4096
